"""A network emulator between two sockets: delay, jitter, bandwidth, stalls and cuts."""
