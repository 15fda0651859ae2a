"""Limits on connections: their number, the size and time of a request's head, and unread answers.

All of them apply before authentication. A connection without a complete head takes less than 100 KiB: at most
`HEAD_BYTES` twice, and a few kilobytes of objects.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import weakref
from contextlib import suppress
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_TIMEOUT_S = 20  # s until a request's head is complete, also the first one of a new connection
KEEP_ALIVE_S = 75  # s that an idle connection is kept: longer than in clients, so that none sends into a closed one
LINGER_TIMEOUT_S = 5  # s for which the rest of a refused body is read and dropped, so that its client gets the answer
STALL_TIMEOUT_S = 60  # s that a client may leave an answer unread
HEAD_BYTES: Final = 2**15  # bytes of a request's line and headers, and of other parts outside the body
URL_BYTES: Final = 2**13
MAX_HEADERS: Final = 100
MAX_PIPELINED: Final = 8  # pipelined requests of one connection
READ_BYTES: Final = 2**15  # of one connection at a time
MAX_CONNECTIONS: Final = 1024
ACCEPTS_PER_TICK: Final = 8  # connections accepted in one turn of the loop, fewer than SPARE_FILES
SPARE_FILES: Final = 16  # file descriptors for the cloud's connections, models' files and the like
MIN_CONNECTIONS: Final = 8
ACCEPT_BACKLOG: Final = 1024  # connections that the system may hold until they are accepted


class _UnknownLength(int):
    """The length of a body that ends with its connection (HTTP/1.0). uvicorn counts lengths down to 0."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _UnknownLength:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits that uvicorn does not have: on heads, pipelining, trailers, drained bodies and stalls."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _bytes_without_body = 0  # since the last head or part of a body was complete
    _refusal: tuple[int, str, str] | None = None
    connections: OpenConnections  # the server's, from `http_server`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request's head."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # 256 KiB by default
            transport.max_size = READ_BYTES
        self.connections.mark_idle(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, and drop pipelined requests."""
        for timer in (self._head_timer, self._stall_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.pipeline.clear()

    # Reading ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, at most as many outside of bodies as a head may have."""
        answered = self.cycle is None or self.cycle.response_complete
        if answered and self._head_timer is None and self._linger_timer is None:
            self._expect_head()
        while data and not self.transport.is_closing():
            room = HEAD_BYTES - self._bytes_without_body
            if room <= 0:
                self._refuse(431, f"a request's head is larger than {HEAD_BYTES} bytes", "head_too_large")
                return
            part, data = data[:room], data[room:]
            self._bytes_without_body += len(part)
            super().data_received(part)

    def on_message_begin(self) -> None:
        """Check the number of pipelined requests."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._reject(429, f"over {MAX_PIPELINED} requests are pipelined on this connection", "too_many_pipelined")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Check the length of the URL."""
        super().on_url(url)
        if len(self.url) > URL_BYTES:
            self._reject(414, f"the URL is longer than {URL_BYTES} bytes", "url_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Check the number of headers. Trailers, which follow a body, count as well."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._reject(431, f"a request has more than {MAX_HEADERS} headers", "head_too_large")

    def on_headers_complete(self) -> None:
        """End the head's timer, and begin the request."""
        self._bytes_without_body = 0
        self._cancel_head_timer()
        super().on_headers_complete()
        self.connections.mark_busy(self)
        if self.cycle is not None and self.scope["http_version"] == "1.0":  # which has no chunked encoding
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UnknownLength()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._bytes_without_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request, which may have been answered already."""
        self._bytes_without_body = 0
        self.cycle.more_body = False  # uvicorn leaves it True for a request that was answered before its body's end
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
            self._expect_head()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Drop the unread rest of the body, and begin to wait for the next request."""
        if not self.pipeline:  # else the answered request was read to its end, and `cycle` belongs to a later one
            self.cycle.body = bytearray()
            if self.cycle.more_body:
                self._linger_timer = self.loop.call_later(LINGER_TIMEOUT_S, self.transport.close)
            self.connections.mark_idle(self)
        super().on_response_complete()

    # Timers -------------------------------------------------------------------------------------------------

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read."""
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Stop the timer for a client that does not read."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    # Refusing -----------------------------------------------------------------------------------------------

    def _reject(self, status: int, message: str, code: str) -> None:
        """Refuse inside a callback of the parser, which then calls `send_400_response`."""
        self._refusal = (status, message, code)
        raise ValueError(message)

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._refusal = (status, message, code)
        self.send_400_response(message)

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request, unless another answer has begun, and close the connection."""
        self._cancel_head_timer()
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not begun and not self.pipeline:
            status, message, code = self._refusal or (400, "this is not valid HTTP", "invalid_http")
            self.transport.write(error_response(status, message, code))
        self.transport.close()


def error_response(status: int, message: str, code: str, *headers: bytes) -> bytes:
    """Return an HTTP response with OpenAI's error object, which closes the connection."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    lines = [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close", *headers]
    return STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n" + body


TOO_MANY_CONNECTIONS: Final = error_response(
    503, "the gateway has no room for another connection: try again later", "too_many_connections", b"retry-after: 1"
)


def max_connections() -> int:
    """Return `MAX_CONNECTIONS`, or fewer if this process may open fewer files."""
    try:
        import resource

        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):
        return MAX_CONNECTIONS
    if allowed == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, allowed - used - SPARE_FILES))


class OpenConnections(set[Any]):
    """The open connections of a server, with the idle ones by client address.

    An idle connection runs no request: it is new, its head is incomplete, or its last answer is complete. Operations
    take constant time, except for `pop_idle`, which compares the addresses.
    """

    def __init__(self) -> None:
        super().__init__()
        self._idle: dict[str, dict[LimitedProtocol, None]] = {}  # of an address, the one idle for longest first

    def mark_idle(self, connection: LimitedProtocol) -> None:
        """Mark a connection as idle from now on."""
        if connection in self:
            idle = self._idle.pop(_host(connection), {})
            idle.pop(connection, None)
            idle[connection] = None
            self._idle[_host(connection)] = idle  # at the end: among equals, the address idle for longest is first

    def mark_busy(self, connection: LimitedProtocol) -> None:
        """Mark a connection as running a request."""
        idle = self._idle.get(_host(connection), {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(_host(connection), None)

    def discard(self, connection: Any) -> None:
        """Remove a closed connection."""
        self.mark_busy(connection)
        super().discard(connection)

    def pop_idle(self) -> LimitedProtocol | None:
        """Return the longest idle connection of the address with the most idle ones, and mark it as busy."""
        idle = max(self._idle.values(), key=len, default=None)
        if idle is None:
            return None
        connection = next(iter(idle))
        self.mark_busy(connection)
        return connection


class _Accepted(socket.socket):
    """An accepted connection, which its listener counts until it is closed."""

    def __init__(self, connection: socket.socket, counted: weakref.WeakSet[_Accepted]) -> None:
        super().__init__(connection.family, connection.type, connection.proto, connection.detach())
        self._counted = counted
        counted.add(self)

    def close(self) -> None:
        self._counted.discard(self)
        super().close()


class Listener(socket.socket):
    """A listening socket with a limit on open connections.

    At the limit, the client address with the most idle connections loses the one that has been idle for longest. If
    none is idle, the new connection gets 503. If the process has no file descriptor left, the listener refuses with a
    spare one, because asyncio would log an error for every attempt.

    max_connections: the limit. connections: the server's open connections.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_connections = MAX_CONNECTIONS
        self.connections = OpenConnections()
        self._open: weakref.WeakSet[_Accepted] = weakref.WeakSet()
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def listen(self, backlog: int = 0) -> None:
        """Listen. asyncio's `backlog` is too small here, since it is also the number to accept in one turn."""
        super().listen(max(backlog, ACCEPT_BACKLOG))

    def accept(self) -> tuple[socket.socket, object]:
        """Accept a connection.

        Raises:
            BlockingIOError: none waits, or this turn of the loop has refused enough.
        """
        for _ in range(ACCEPTS_PER_TICK):
            try:
                connection, address = super().accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._refuse_with_spare()
                continue
            if len(self._open) < self.max_connections or self._evict_idle():
                return _Accepted(connection, self._open), address
            _refuse(connection)
        raise BlockingIOError

    def close(self) -> None:
        """Close the socket and the spare descriptor."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        super().close()

    def _evict_idle(self) -> bool:
        """Close an idle connection, and return whether there was one. The descriptor is free in the next turn."""
        while (connection := self.connections.pop_idle()) is not None:
            if not connection.transport.is_closing():
                connection.transport.abort()
                return True
        return False

    def _refuse_with_spare(self) -> None:
        """Refuse one connection with the spare descriptor. Raises BlockingIOError if none waits."""
        self._evict_idle()
        os.close(self._spare)
        try:
            _refuse(super().accept()[0])
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)


def _host(protocol: LimitedProtocol) -> str:
    return protocol.client[0] if protocol.client is not None else ""


def _refuse(connection: socket.socket) -> None:
    with connection, suppress(OSError):  # the client may have disconnected
        connection.setblocking(False)
        connection.send(TOO_MANY_CONNECTIONS)
