"""An HTTP/2 client on a plain socket, which sends whatever it is given: also what no gRPC library would send."""

from __future__ import annotations

import socket
import struct
import zlib
from functools import cache

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

LIMIT = 60.0  # s; only a hang takes that long


class PlainHttp2:
    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection((host, port), timeout=LIMIT)
        self.h2 = H2Connection(H2Configuration(client_side=True))
        self.answers: dict[int, dict[str, str]] = {}
        self.ended: set[int] = set()
        self.terminated: ConnectionTerminated | None = None
        self.h2.initiate_connection()
        self.flush()

    def __enter__(self) -> PlainHttp2:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    @staticmethod
    def silent(port: int) -> socket.socket:
        """A connection on which nothing is said."""
        return socket.create_connection(("127.0.0.1", port), timeout=LIMIT)

    @classmethod
    def greeting(cls, port: int, strangers: int = 0) -> socket.socket:
        """A connection's socket alone, after its first frames and so many calls, whose answers are not read."""
        client = cls(port)
        for _ in range(strangers):
            client.call("/outrider.v1.Verifier/Session")
        return client.socket

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def call(self, path: str, *more: tuple[str, str]) -> int:
        """Open a stream; its number."""
        number = self.h2.get_next_available_stream_id()
        start = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")]
        self.h2.send_headers(number, [*start, ("te", "trailers"), ("content-type", "application/grpc"), *more])
        self.flush()
        return number

    def send(self, number: int, data: bytes, *, last: bool = False) -> bool:
        """Send bytes of a stream as far as the server's windows allow; false where it ended the stream before."""
        rest = memoryview(data)
        while rest:
            room = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            if room:
                self.h2.send_data(number, bytes(rest[:room]), end_stream=last and len(rest) <= room)
                rest = rest[room:]
                self.flush()
            elif number in self.ended:
                return False
            else:
                self.receive()
        return True

    def receive(self) -> list[Event]:
        """What comes next; a ConnectionTerminated at the end of the connection."""
        data = self.socket.recv(65536)
        events = self.h2.receive_data(data) if data else [ConnectionTerminated()]
        if data:
            self.flush()
        for event in events:
            self._note(event)
        return events

    def _note(self, event: Event) -> None:
        match event:
            case ResponseReceived() | TrailersReceived():
                fields = {_text(name): _text(value) for name, value in event.headers or []}
                self.answers.setdefault(event.stream_id or 0, {}).update(fields)
            case StreamEnded() | StreamReset():
                self.ended.add(event.stream_id or 0)
            case ConnectionTerminated():
                self.terminated = event

    def outcome(self, number: int) -> dict[str, str]:
        """The headers and trailers of a call, once it or the connection has ended."""
        while number not in self.ended and self.terminated is None:
            self.receive()
        return self.answers.get(number, {})


def message(data: bytes, *, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(data)) + data


@cache
def gzip_of_zeros(size: int) -> bytes:
    """So many zero bytes, compressed; never all in memory."""
    packer, part = zlib.compressobj(9, zlib.DEFLATED, 31), bytes(2**20)
    return b"".join(packer.compress(part) for _ in range(size // len(part))) + packer.flush()


def _text(data: bytes | str) -> str:
    return data.decode() if isinstance(data, bytes) else data
