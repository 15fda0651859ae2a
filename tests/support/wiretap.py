"""A wire-tap between edge and cloud: it keeps every byte, and breaks connections at a byte of one's choice.

Made of plain sockets and threads, and of nothing that it is meant to check.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Self

from tests.support.processes import wait_until

RESET = struct.pack("ii", 1, 0)


class Wiretap:
    """Listens on `port` and relays to host:port, from `with` to its end.

    up, down: all that passed, over all connections. cut_up, cut_down: when so many bytes have passed that way, every
    connection is broken, once. `cuts` counts.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self.up, self.down = bytearray(), bytearray()
        self.cut_up: int | None = None
        self.cut_down: int | None = None
        self.cuts = self.connections = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def wait(self) -> None:
        """Wait until all connections are over, and all that was in the sockets is kept."""
        wait_until(lambda: not self._open)

    def cut(self) -> None:
        """Break all connections; new ones are taken."""
        with self._lock:
            self.cuts += 1
            for end in self._open:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            try:
                target = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            ends = (client, target)
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= set(ends)
            pair = [
                threading.Thread(target=self._relay, args=(*ends, self.up, "cut_up"), daemon=True),
                threading.Thread(target=self._relay, args=(*reversed(ends), self.down, "cut_down"), daemon=True),
            ]
            self._threads += [*pair, threading.Thread(target=self._finish, args=(pair, ends), daemon=True)]
            for thread in self._threads[-3:]:
                thread.start()

    def _relay(self, source: socket.socket, sink: socket.socket, kept: bytearray, fuse: str) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                with self._lock:
                    at: int | None = getattr(self, fuse)
                    blown = at is not None and len(kept) + len(data) >= at
                    data = data[: max(0, at - len(kept))] if at is not None and blown else data
                    kept += data
                    if blown:
                        setattr(self, fuse, None)
                sink.sendall(data)
                if blown:
                    self.cut()
                    return
            sink.shutdown(socket.SHUT_WR)

    def _finish(self, pair: list[threading.Thread], ends: tuple[socket.socket, ...]) -> None:
        for thread in pair:
            thread.join()
        with self._lock:
            self._open -= set(ends)
        for end in ends:
            end.close()
