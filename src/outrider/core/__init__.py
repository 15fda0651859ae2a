"""Pure: tokens and rows of logits in, decisions out. Imports neither models nor sockets."""
