"""The decoding loop as a state machine, its gate and its results. Imports neither models nor sockets."""
