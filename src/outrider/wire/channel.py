"""A gRPC client of few bytes: calls over one HTTP/2 connection at a time, which is made when it is needed."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from outrider.errors import SettingsError
from outrider.wire.frames import broken_tls
from outrider.wire.http2 import Http2
from outrider.wire.status import CallFailed, Disconnected, Status, Untrusted
from outrider.wire.stream import Stream

SETUP = 20.0  # s for a connection to be made, TLS included
GOODBYE = 1.0  # s that a connection may take to close

T = TypeVar("T")
Opener = Callable[[Callable[[], Http2]], Awaitable[object]]
_Fields = list[tuple[bytes, bytes]]


class Channel:
    """Calls to one server; to be used in one event loop.

    open_transport: makes a connection for the protocol that the given factory makes, as
    `loop.create_connection(factory, host, port)` does. authority: the server as host:port. metadata: headers of every
    call.

    Raises (every call):
        CallFailed: the server answered with another status than OK, or not in time.
        Disconnected: there was no connection, or it broke.
        SettingsError: metadata that no HTTP header can hold.
    """

    def __init__(self, open_transport: Opener, authority: str, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._open_transport = open_transport
        # None is marked as sensitive, a token neither: HPACK would send it in full with every call. What the mark
        # protects from, guessing a secret by the compressed size of one's own headers next to it, nobody here can do.
        self._common = [
            _field(":authority", authority),
            _field("te", "trailers"),
            _field("content-type", "application/grpc"),
            _field("user-agent", "outrider"),
            *(_field(name, value) for name, value in metadata),
        ]
        self._http: Http2 | None = None
        self._made: set[Http2] = set()  # all that are not closed yet
        self._dialling: asyncio.Task[Http2] | None = None
        self._closed = False

    async def unary(self, method: str, data: bytes, timeout: float) -> bytes:
        """One message there, one back. method: "/service/Method". timeout: seconds, for the server too."""
        answers = [answer async for answer in self.unary_stream(method, data, timeout)]
        if len(answers) != 1:
            raise CallFailed(Status.INTERNAL, f"{len(answers)} messages answer {method}, which has one")
        return answers[0]

    async def unary_stream(self, method: str, data: bytes, timeout: float) -> AsyncIterator[bytes]:
        """One message there, any number back, all within `timeout` seconds."""
        until = asyncio.get_running_loop().time() + timeout
        stream = await _before(until, self._open(method, timeout), method)
        try:
            await _before(until, stream.send(data, last=True), method)
            while (answer := await _before(until, stream.receive(), method)) is not None:
                yield answer
        finally:
            stream.cancel()

    async def stream(self, method: str) -> Stream:
        """A call of messages both ways, without a time limit: to be ended, or cancelled."""
        return await self._open(method, None)

    def retire(self) -> None:
        """Calls that are under way finish on the present connection; the next one makes another."""
        if self._http is not None:
            self._http.retire()
            self._http = None

    def drop(self) -> None:
        """Abandon the present connection and its calls; the next call makes a new one."""
        if self._dialling is not None:
            self._dialling.cancel()
        if self._http is not None:
            self._http.abandon("the connection was given up here")
            self._http = None

    async def close(self) -> None:
        """Say goodbye, end all calls and sockets, and wait for that; twice is once."""
        self._closed = True
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        for http in self._made:
            http.leave()
        closing = [http.closed for http in self._made]
        if closing and (await asyncio.wait(closing, timeout=GOODBYE))[1]:
            for http in list(self._made):
                http.abandon("the channel was closed")
            await asyncio.wait(closing)

    # Connections --------------------------------------------------------------------------------------------

    async def _open(self, method: str, timeout: float | None) -> Stream:
        http = await self._connection()
        while http.usable and http.full:
            await http.change()
        if http.reason is not None:
            raise http.failure(http.reason)
        if not http.usable:  # the server is going, and finishes what it has: the next connection is another's
            return await self._open(method, timeout)
        return Stream(http, self._headers(http.scheme, method, timeout))

    def _headers(self, scheme: str, method: str, timeout: float | None) -> _Fields:
        """Pseudo-headers come first."""
        start = [_field(":method", "POST"), _field(":scheme", scheme), _field(":path", method)]
        limit = [] if timeout is None else [_field("grpc-timeout", _milliseconds(timeout))]
        return start + self._common + limit

    async def _connection(self) -> Http2:
        """The present one, or a new one; who comes while it is made waits for the same."""
        if self._closed:
            raise Disconnected("the channel is closed")
        if self._http is not None and self._http.usable:
            return self._http
        if self._dialling is None:
            self._dialling = asyncio.create_task(self._dial())
            self._dialling.add_done_callback(self._dialled)
        task = self._dialling
        await asyncio.wait([task])  # not the task itself: who is cancelled shall not take the others along
        if task.cancelled():
            raise Disconnected("the connection was given up here")
        return task.result()

    def _dialled(self, task: asyncio.Task[Http2]) -> None:
        self._dialling = None
        if not task.cancelled() and task.exception() is None:
            self._http = task.result()

    async def _dial(self) -> Http2:
        http = Http2()
        try:
            async with asyncio.timeout(SETUP):
                await self._open_transport(lambda: http)
        except TimeoutError as error:
            raise Disconnected(f"no connection within {SETUP:g} s") from error
        except ssl.SSLError as error:
            kind = Untrusted if isinstance(error, ssl.SSLCertVerificationError) else Disconnected
            raise kind(broken_tls(error)) from error
        except OSError as error:
            how = error.strerror or str(error) or "it was lost before TLS was agreed on"
            raise Disconnected(f"no connection: {how}") from error
        self._made.add(http)
        http.closed.add_done_callback(lambda _: self._made.discard(http))
        if http.reason is not None:
            raise http.failure(http.reason)
        return http


async def _before(until: float, work: Awaitable[T], method: str) -> T:
    try:
        async with asyncio.timeout_at(until):
            return await work
    except TimeoutError as error:
        raise CallFailed(Status.DEADLINE_EXCEEDED, f"{method} was not answered in time") from error


def _milliseconds(seconds: float) -> str:
    """gRPC's header for a time limit, of at most eight digits."""
    return f"{min(10**8 - 1, math.ceil(seconds * 1000))}m"


def _field(name: str, value: str) -> tuple[bytes, bytes]:
    if not (value.isascii() and value.isprintable()):
        raise SettingsError(f"{name}: only printable ASCII can be sent in a header")
    return name.encode("ascii"), value.encode("ascii")
