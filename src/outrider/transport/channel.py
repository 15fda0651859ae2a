"""A gRPC client channel: calls over one HTTP/2 connection at a time, opened on demand."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from outrider.errors import SettingsError
from outrider.transport.frames import describe_tls_error
from outrider.transport.http2 import Http2
from outrider.transport.status import CallFailed, Disconnected, Status, UntrustedServer
from outrider.transport.stream import Stream

CONNECT_TIMEOUT = 20.0  # s, TLS handshake included
CLOSE_TIMEOUT = 1.0  # s

T = TypeVar("T")
OpenTransport = Callable[[Callable[[], Http2]], Awaitable[object]]


class Channel:
    """Calls to one server. Use it in one event loop.

    open_transport: connects a protocol from the given factory, as `loop.create_connection(factory, host, port)` does.
    authority: the server as host:port. metadata: headers of every call.

    Raises (every call):
        CallFailed: the call ended with a status other than OK, or exceeded its deadline.
        Disconnected: no connection could be made, or it broke.
        SettingsError: an HTTP header cannot hold the metadata.
    """

    def __init__(self, open_transport: OpenTransport, authority: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._open_transport = open_transport
        # No header is marked as sensitive, not even a token, because HPACK would send it in full with every call. The
        # mark protects against attackers that add headers of their own and observe the compressed size. There are none
        # on this channel.
        self._common_headers = [
            _header(":authority", authority),
            _header("te", "trailers"),
            _header("content-type", "application/grpc"),
            _header("user-agent", "outrider"),
            *(_header(name, value) for name, value in metadata),
        ]
        self._http: Http2 | None = None
        self._open_connections: set[Http2] = set()
        self._connecting: asyncio.Task[Http2] | None = None
        self._closed = False

    async def unary(self, method: str, data: bytes, timeout: float) -> bytes:
        """Send one message and return the answer.

        method: "/service/Method". timeout: seconds, sent to the server as well.
        """
        answers = [answer async for answer in self.unary_stream(method, data, timeout)]
        if len(answers) != 1:
            raise CallFailed(Status.INTERNAL, f"{len(answers)} messages answer {method}, which has one")
        return answers[0]

    async def unary_stream(self, method: str, data: bytes, timeout: float) -> AsyncIterator[bytes]:
        """Send one message and yield the answers, all within `timeout` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout
        stream = await _with_deadline(deadline, self._open(method, timeout), method)
        try:
            await _with_deadline(deadline, stream.send(data, last=True), method)
            while (answer := await _with_deadline(deadline, stream.receive(), method)) is not None:
                yield answer
        finally:
            stream.cancel()

    async def stream(self, method: str) -> Stream:
        """Open a bidirectional call without a deadline. The caller ends or cancels it."""
        return await self._open(method, None)

    def drain(self) -> None:
        """Let present calls finish on the present connection. The next call opens a new one."""
        if self._http is not None:
            self._http.drain()
            self._http = None

    def drop_connection(self) -> None:
        """Abort the present connection and its calls. The next call opens a new one."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._http is not None:
            self._http.abort("the connection was given up here")
            self._http = None

    async def close(self) -> None:
        """Send GOAWAY, end all calls, and wait until the sockets are closed. Further calls have no effect."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        for http in self._open_connections:
            http.goaway()
        closing = [http.closed for http in self._open_connections]
        if closing and (await asyncio.wait(closing, timeout=CLOSE_TIMEOUT))[1]:
            for http in list(self._open_connections):
                http.abort("the channel was closed")
            await asyncio.wait(closing)

    # Connections --------------------------------------------------------------------------------------------

    async def _open(self, method: str, timeout: float | None) -> Stream:
        http = await self._get_connection()
        while http.usable and http.at_stream_limit:
            await http.wait_for_change()
        if http.reason is not None:
            raise http.make_error(http.reason)
        if not http.usable:  # the server is shutting down and takes no new calls
            return await self._open(method, timeout)
        headers = [_header(":method", "POST"), _header(":scheme", http.scheme), _header(":path", method)]
        headers += self._common_headers
        if timeout is not None:  # in at most eight digits
            headers.append(_header("grpc-timeout", f"{min(10**8 - 1, math.ceil(timeout * 1000))}m"))
        return Stream(http, headers)

    async def _get_connection(self) -> Http2:
        """Return the present connection or open one. Concurrent calls wait for the same connection."""
        if self._closed:
            raise Disconnected("the channel is closed")
        if self._http is not None and self._http.usable:
            return self._http
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._on_connected)
        task = self._connecting
        await asyncio.wait([task])  # awaiting the task would cancel it with this call, and other calls wait for it
        if task.cancelled():
            raise Disconnected("the connection was given up here")
        return task.result()

    def _on_connected(self, task: asyncio.Task[Http2]) -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._http = task.result()

    async def _connect(self) -> Http2:
        http = Http2()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await self._open_transport(lambda: http)
        except TimeoutError as error:
            raise Disconnected(f"no connection within {CONNECT_TIMEOUT:g} s") from error
        except ssl.SSLError as error:
            kind = UntrustedServer if isinstance(error, ssl.SSLCertVerificationError) else Disconnected
            raise kind(describe_tls_error(error)) from error
        except OSError as error:
            how = error.strerror or str(error) or "it was lost before TLS was agreed on"
            raise Disconnected(f"no connection: {how}") from error
        self._open_connections.add(http)
        http.closed.add_done_callback(lambda _: self._open_connections.discard(http))
        if http.reason is not None:
            raise http.make_error(http.reason)
        return http


async def _with_deadline(deadline: float, work: Awaitable[T], method: str) -> T:
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError as error:
        raise CallFailed(Status.DEADLINE_EXCEEDED, f"{method} was not answered in time") from error


def _header(name: str, value: str) -> tuple[bytes, bytes]:
    if not (value.isascii() and value.isprintable()):
        raise SettingsError(f"{name}: only printable ASCII can be sent in a header")
    return name.encode("ascii"), value.encode("ascii")
