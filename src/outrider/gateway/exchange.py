"""One request from its body to its answer, given up at once when the client is gone."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asking
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outrider.core.outcome import Result
from outrider.edge.cancellation import Cancellation
from outrider.errors import AudioError, OutriderError, PromptError, SettingsError, StateError
from outrider.gateway.access import Access
from outrider.gateway.answering import Answer, failed
from outrider.gateway.asking import Asked, Defaults, asked, blamed, read
from outrider.gateway.desk import Busy, Desk, GoingDown, Ticket
from outrider.gateway.metrics import Metrics
from outrider.gateway.refusing import Refused, refusal
from outrider.gateway.schemas import ChatRequest, Request
from outrider.prompts.audio import Audio

T = TypeVar("T")

log = logging.getLogger("outrider.gateway")
STATUS_S = 1.0  # s in which an error of a stream that has a slot still gets its own status
PING_S = 5.0  # s of silence after which a stream gets a comment
WAITING = b": waiting\n\n"
SHORT = 2**14  # bytes of a request that is understood at once
PROMPT_BYTES = 2**21  # of a waiting prompt, on average
BODIES = 4  # of the largest that are taken, at least, from one client
ID_BYTES = 36  # of an int in a list
GONE = 499  # what proxies log for a client that left; nobody reads it


class ClientGone(Exception):
    """Whoever asked is not there any more."""


class Arrivals:
    """Limits on requests before their generation begins: the number of uploads, and the bytes held.

    One client may have as many uploads at once as there are slots and places in the queue, and `budget` bytes of bodies
    and waiting prompts. All clients together may have twice that.
    """

    def __init__(self) -> None:
        self._by_client: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def one(self, client: str, room: int) -> Iterator[None]:
        """Count an upload of this client.

        Raises:
            Busy: there are too many.
        """
        if self._by_client[client] >= room or self._by_client.total() >= 2 * room:
            raise Busy(f"{self._by_client.total()} requests are being read: try again later", 1.0)
        self._by_client[client] += 1
        try:
            yield
        finally:
            _subtract(self._by_client, client, 1)

    @contextmanager
    def holding(self, client: str, budget: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that adds bytes to this client's count, until the end of the block.

        Raises (the function):
            Busy: there are too many.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if self._bytes[client] + size > budget or self._bytes.total() + size > 2 * budget:
                raise Busy(f"requests of {self._bytes.total()} bytes are held already: try again later", 1.0)
            self._bytes[client] += size
            held += size

        try:
            yield hold
        finally:
            _subtract(self._bytes, client, held)


def _subtract(counts: Counter[str], client: str, count: int) -> None:
    counts[client] -= count
    if not counts[client]:
        del counts[client]


@dataclass(frozen=True)
class Run:
    """A waiting or running request."""

    client: str
    cancellation: Cancellation = field(default_factory=Cancellation)


@dataclass(frozen=True)
class Gateway:
    """What the endpoints share."""

    desk: Desk
    access: Access
    defaults: Defaults
    metrics: Metrics
    arrivals: Arrivals = field(default_factory=Arrivals)
    runs: dict[str, Run] = field(default_factory=dict)  # by the answer's id

    def cut(self, client: str, number: str) -> None:
        """Disconnect this client's run from its cloud.

        Raises:
            Refused: there is no such run.
        """
        run = self.runs.get(number)
        if run is None or run.client != client:
            raise Refused("no request with this id is being answered", param="id", code="not_found", status=404)
        run.cancellation.cut("the network is cut")

    @property
    def budget(self) -> int:
        """Return the bytes of bodies and waiting prompts that one client may hold."""
        return max(PROMPT_BYTES * self.desk.room, BODIES * self.access.max_body)


async def exchange(asking: Asking, kind: type[Request], gateway: Gateway) -> Response:
    """The answer to one request for a completion.

    Raises:
        OutriderError: it cannot be answered, and nothing was sent yet.
    """
    client = gateway.access.client(asking)
    try:
        with gateway.arrivals.one(client, gateway.desk.room):
            work = await _understood(asking, client, kind, gateway)
        answer = Answer(work, chat=issubclass(kind, ChatRequest))
        if work.stream:
            return await _streamed(asking, client, work, answer, gateway)
        return await _unless_gone(asking.receive, _whole(client, work, answer, gateway))
    except (ClientGone, ClientDisconnect):
        gateway.metrics.left()
        return Response(status_code=GONE)


async def _understood(asking: Asking, client: str, kind: type[Request], gateway: Gateway) -> Asked:
    """What is asked for. Neither the body nor the request outlives this: with a recording they are large."""
    with gateway.arrivals.holding(client, gateway.budget) as hold:
        sent = await gateway.access.body(asking, hold)
        request = read(kind, sent)
        if len(sent) <= SHORT:
            return asked(request, gateway.defaults)
        # Unpacking a recording takes long. In a thread it does not delay other streams.
        return await _unless_gone(asking.receive, asyncio.to_thread(asked, request, gateway.defaults))


async def _whole(client: str, work: Asked, answer: Answer, gateway: Gateway) -> Response:
    async with _generation(client, work, answer, gateway) as ticket:
        async for events in ticket:
            answer.note(events)
    result = _result(ticket, gateway)
    return Response(answer.body(result), media_type="application/json")


def _result(ticket: Ticket, gateway: Gateway) -> Result:
    """What came of a generation that was read to its end; we were told to stop where that is nothing."""
    try:
        result = ticket.result
    except StateError:
        raise GoingDown from None
    gateway.metrics.generated(result)
    if result.stats.cloud_lost:
        log.warning("an answer went on without the cloud")
    return result


@asynccontextmanager
async def _generation(
    client: str, work: Asked, answer: Answer, gateway: Gateway, queued: Callable[[], None] = lambda: None
) -> AsyncIterator[Ticket]:
    """Yield a generation with a slot, and cancel it at the end of the block."""
    asked_at, run = time.perf_counter(), Run(client)
    how = (work.prompt, work.settings, work.choice)
    options: dict[str, Any] = {"provisional": work.provisional, "queued": queued, "cancellation": run.cancellation}
    gateway.runs[answer.id] = run
    try:
        with gateway.arrivals.holding(client, gateway.budget) as hold:
            hold(_weight(work.prompt))
            ticket = await gateway.desk.start(client, *how, **options)
        gateway.metrics.queued(time.perf_counter() - asked_at)
        try:
            yield ticket
        finally:
            ticket.cancel()
    except (PromptError, AudioError, SettingsError) as error:
        raise blamed(error, work) from error
    finally:
        del gateway.runs[answer.id]


def _weight(prompt: Any) -> int:
    """Return the approximate memory of a waiting prompt, in bytes."""
    if isinstance(prompt, Audio):
        return int(getattr(prompt.source, "nbytes", 0))
    if isinstance(prompt, str):
        return sys.getsizeof(prompt)
    return sum(ID_BYTES if isinstance(each, int) else sys.getsizeof(each.get("content", "")) for each in prompt)


async def _streamed(asking: Asking, client: str, work: Asked, answer: Answer, gateway: Gateway) -> Response:
    """Stream an answer. An error before its first byte has its own status.

    The stream begins at once if the request has to wait for a slot. Otherwise it begins with the first chunk, or after
    `STATUS_S`.
    """
    queued: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    chunks = _chunks(client, work, answer, gateway, lambda: queued.set_result(None))
    gone = asyncio.create_task(_until_gone(asking.receive))
    stream = _Stream(chunks, gone, gateway.metrics, answer.id)
    try:
        events: set[asyncio.Future[Any]] = {stream.first, gone, queued}
        await asyncio.wait(events, timeout=STATUS_S, return_when=asyncio.FIRST_COMPLETED)
        if stream.first.done():
            stream.first.result()
        elif gone.done():
            raise ClientGone
    except BaseException:
        await stream.close()
        raise
    return stream


async def _chunks(
    client: str, work: Asked, answer: Answer, gateway: Gateway, queued: Callable[[], None]
) -> AsyncGenerator[bytes]:
    """Yield the stream's parts."""
    async with _generation(client, work, answer, gateway, queued) as ticket:
        async for events in ticket:
            if chunk := answer.chunk(events):
                yield chunk
        yield answer.last(_result(ticket, gateway))


class _Stream(Response):
    """Yield server-sent events. A disconnect of the client ends the generator, and with it the generation.

    During silence a comment goes out every `PING_S`, which clients skip: it prevents timeouts of proxies and clients.
    An error becomes the stream's last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes], gone: asyncio.Future[None], metrics: Metrics, number: str
    ) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.first = asyncio.ensure_future(anext(chunks))
        self._chunks, self._gone, self._metrics = chunks, gone, metrics
        self._sent_at = 0.0  # by the loop's clock
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Request-Id": number})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Each turn of the loop may wait for a generation's thread: the first chunk goes out in this one.
            first_sent = await self._begin(send)
            await _before(self._gone, self._continue(send, first_sent))
        except ClientGone:
            self._metrics.left()
        finally:
            await self.close()

    async def close(self) -> None:
        """End the generation, if it still runs."""
        for each in (self.first, self._gone):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each
        await self._chunks.aclose()

    async def _begin(self, send: Send) -> bool:
        """Send the headers, and the first chunk if there is one; return whether there was."""
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        there = self.first.done()
        await send(_part(self.first.result() if there else WAITING))
        self._sent_at = asyncio.get_running_loop().time()
        return there

    async def _continue(self, send: Send, first_sent: bool) -> None:
        pings = asyncio.create_task(self._ping(send))
        try:
            if not first_sent:
                await self._part(send, await self.first)
            async for chunk in self._chunks:
                await self._part(send, chunk)
        except OutriderError as error:
            log.warning("a stream has failed", extra={"kind": type(error).__name__})
            await send(_part(failed(refusal(error))))
        finally:
            pings.cancel()
        await send(_part(b"", more=False))

    async def _part(self, send: Send, chunk: bytes) -> None:
        await send(_part(chunk))
        self._sent_at = asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(self._sent_at + PING_S - clock(), PING_S / 10))
            if clock() - self._sent_at >= PING_S:
                await send(_part(WAITING))
                self._sent_at = clock()


def _part(content: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` comes to; it is cancelled where the client goes away first.

    Raises:
        ClientGone: it did.
    """
    gone = asyncio.create_task(_until_gone(receive))
    try:
        return await _before(gone, work)
    finally:
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone


async def _before(gone: asyncio.Future[None], work: Awaitable[T]) -> T:
    task = asyncio.ensure_future(work)
    events: set[asyncio.Future[Any]] = {task, gone}
    try:
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, OutriderError):
            await task


async def _until_gone(receive: Callable[[], Coroutine[Any, Any, Message]] | Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
