"""A network to order between two sockets: delay, jitter, bandwidth, stalls and cuts. Without any, a byte counter."""
