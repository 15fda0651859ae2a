"""Ports that a test's servers leave and take again."""

from __future__ import annotations

import socket


class ReservedPort:
    """A port of 127.0.0.1 for servers that bind it by number.

    Without a reservation, another connection may have taken a free port as its source port. The reservation is a socket
    that is bound and does not listen: the system gives its port to no other socket, refuses connections to it, and
    lets servers bind it, because they set SO_REUSEADDR as well.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self._socket.close()
