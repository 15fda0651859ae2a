"""One request from its body to its answer, given up at once when the client is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asking
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outrider.core.outcome import Result
from outrider.errors import AudioError, OutriderError, PromptError, SettingsError, StateError
from outrider.gateway.access import Access
from outrider.gateway.answering import Answer, failed
from outrider.gateway.asking import Asked, Defaults, asked, blamed, read
from outrider.gateway.desk import Busy, Desk, GoingDown, Ticket
from outrider.gateway.metrics import Metrics
from outrider.gateway.refusing import refusal
from outrider.gateway.schemas import ChatRequest, Request

T = TypeVar("T")

log = logging.getLogger("outrider.gateway")
SHORT = 2**14  # bytes of a request that is understood at once
GONE = 499  # what proxies log for a client that left; nobody reads it


class ClientGone(Exception):
    """Whoever asked is not there any more."""


class Arrivals:
    """Requests whose bodies are read: they take memory, and the desk does not know of them yet.

    One client has as many at once as the desk has room for, and all together twice as many.
    """

    def __init__(self) -> None:
        self._by_client: Counter[str] = Counter()

    @contextmanager
    def one(self, client: str, room: int) -> Iterator[None]:
        """Count a request of this client's.

        Raises:
            Busy: there are too many.
        """
        if self._by_client[client] >= room or self._by_client.total() >= 2 * room:
            raise Busy(f"{self._by_client.total()} requests are being read: try again later", 1.0)
        self._by_client[client] += 1
        try:
            yield
        finally:
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]


@dataclass(frozen=True)
class Gateway:
    """What the endpoints share."""

    desk: Desk
    access: Access
    defaults: Defaults
    metrics: Metrics
    arrivals: Arrivals = field(default_factory=Arrivals)


async def exchange(asking: Asking, kind: type[Request], gateway: Gateway) -> Response:
    """The answer to one request for a completion.

    Raises:
        OutriderError: it cannot be answered, and nothing was sent yet.
    """
    client = gateway.access.client(asking)
    try:
        with gateway.arrivals.one(client, gateway.desk.room):
            work = await _understood(asking, kind, gateway)
        answer = Answer(work, chat=issubclass(kind, ChatRequest))
        if work.stream:
            return await _streamed(asking, client, work, answer, gateway)
        return await _unless_gone(asking.receive, _whole(client, work, answer, gateway))
    except (ClientGone, ClientDisconnect):
        gateway.metrics.left()
        return Response(status_code=GONE)


async def _understood(asking: Asking, kind: type[Request], gateway: Gateway) -> Asked:
    """What is asked for. Neither the body nor the request outlives this: with a recording they are large."""
    sent = await gateway.access.body(asking)
    request = read(kind, sent)
    if len(sent) <= SHORT:
        return asked(request, gateway.defaults)
    # A recording takes a while to unpack: in a thread, so that the others' streams go on meanwhile.
    return await _unless_gone(asking.receive, asyncio.to_thread(asked, request, gateway.defaults))


async def _whole(client: str, work: Asked, answer: Answer, gateway: Gateway) -> Response:
    ticket = await _ticket(client, work, gateway)
    try:
        async for events in ticket:
            answer.note(events)
    finally:
        ticket.cancel()
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


async def _ticket(client: str, work: Asked, gateway: Gateway) -> Ticket:
    asked_at = time.perf_counter()
    how = (work.prompt, work.settings, work.choice)
    try:
        ticket = await gateway.desk.start(client, *how, provisional=work.provisional)
    except (PromptError, AudioError, SettingsError) as error:
        raise blamed(error, work) from error
    gateway.metrics.queued(time.perf_counter() - asked_at)
    return ticket


async def _streamed(asking: Asking, client: str, work: Asked, answer: Answer, gateway: Gateway) -> Response:
    """A stream whose first chunk is there: what fails before it has a status of its own."""
    chunks = _chunks(client, work, answer, gateway)
    try:
        first = await _unless_gone(asking.receive, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return _Stream(first, chunks, gateway.metrics)


async def _chunks(client: str, work: Asked, answer: Answer, gateway: Gateway) -> AsyncGenerator[bytes]:
    """The stream's parts as they come; an error once it has begun is its last part."""
    begun = False
    ticket = await _ticket(client, work, gateway)
    try:
        async for events in ticket:
            if chunk := answer.chunk(events):
                begun = True
                yield chunk
        result = _result(ticket, gateway)
        yield answer.last(result)
    except OutriderError as error:
        if not begun:
            raise
        log.warning("a stream has failed", extra={"kind": type(error).__name__})
        yield failed(refusal(error))
    finally:
        ticket.cancel()


class _Stream(Response):
    """Server-sent events; the client's leaving ends the generator, and with it the generation."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, chunks: AsyncGenerator[bytes], metrics: Metrics) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self._first, self._chunks, self._metrics = first, chunks, metrics
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(receive, self._send(send))
        except ClientGone:
            self._metrics.left()
        finally:
            await self._chunks.aclose()

    async def _send(self, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send(_part(self._first))
        async for chunk in self._chunks:
            await send(_part(chunk))
        await send(_part(b"", more=False))


def _part(content: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` comes to; it is cancelled where the client goes away first.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, OutriderError):
                await each


async def _until_gone(receive: Callable[[], Coroutine[Any, Any, Message]] | Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
