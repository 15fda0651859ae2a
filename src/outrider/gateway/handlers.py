"""Request handlers: one request from its body to its answer, cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outrider.api import StreamEvent
from outrider.decoding.result import Result
from outrider.edge.cancellation import Cancellation
from outrider.errors import (
    AudioError,
    DecodingError,
    OutriderError,
    PromptError,
    SettingsError,
    StateError,
)
from outrider.gateway.access import JSON, Access
from outrider.gateway.choices import ChoiceStarts, merge
from outrider.gateway.defaults import Defaults
from outrider.gateway.error_params import attach_param
from outrider.gateway.errors import JsonObject, RequestError, ShuttingDown, encode_json, to_error_response
from outrider.gateway.metrics import Metrics
from outrider.gateway.request_kind import Output, RequestKind
from outrider.gateway.request_parsing import ParsedRequest
from outrider.gateway.request_scheduler import GenerationTask, RequestScheduler
from outrider.gateway.tokenization import Tokenization
from outrider.gateway.upload_limiter import UploadLimiter

T = TypeVar("T")

log = logging.getLogger("outrider.gateway")
FIRST_CHUNK_TIMEOUT_S = 1.0  # s in which an error of a stream that has a slot still gets its own status
PING_S = 5.0  # s of silence after which a stream gets a comment
PING_COMMENT = b": waiting\n\n"
INLINE_PARSE_BYTES = 2**14  # larger bodies are parsed in a thread
PROMPT_BYTES = 2**21  # bytes of a waiting prompt, on average
MIN_BODIES_PER_CLIENT = 4  # bodies of the largest size that one client may upload at once, at least
CLIENT_CLOSED_REQUEST = 499  # as in proxies' logs, for a client that has disconnected


class ClientDisconnected(Exception):
    """The client has disconnected before its answer's end."""


@dataclass(frozen=True)
class ActiveRequest:
    """A waiting or running request. cancellations: one for each choice."""

    client: str
    cancellations: tuple[Cancellation, ...]


@dataclass(frozen=True)
class Gateway:
    """State that the request handlers share. active_requests: by the answer's id. tokenization: of the edge's model."""

    scheduler: RequestScheduler
    access: Access
    defaults: Defaults
    metrics: Metrics
    tokenization: Tokenization
    uploads: UploadLimiter = field(default_factory=UploadLimiter)
    active_requests: dict[str, ActiveRequest] = field(default_factory=dict)

    def cut(self, client: str, request_id: str) -> None:
        """Disconnect a running request of this client from its cloud.

        Raises:
            RequestError: there is no such request.
        """
        active = self.active_requests.get(request_id)
        if active is None or active.client != client:
            raise RequestError("no running request has this id", param="id", code="not_found", status=404)
        for cancellation in active.cancellations:
            cancellation.mark_cloud_lost("the network is cut")

    @property
    def budget(self) -> int:
        """Return the bytes of bodies and waiting prompts that one client may hold."""
        return max(PROMPT_BYTES * self.scheduler.room, MIN_BODIES_PER_CLIENT * self.access.max_body)


async def handle_generation(http_request: HttpRequest, kind: RequestKind, gateway: Gateway) -> Response:
    """Answer a request that generates text.

    Raises:
        OutriderError: the request failed, before any part of an answer was sent.
    """
    client = gateway.access.authenticate(http_request)
    try:
        with gateway.uploads.upload(client, gateway.scheduler.room):
            request, answer = await _parse(http_request, client, kind, gateway)
        if request.stream:
            return await _respond_streaming(http_request, client, request, answer, gateway)
        return await _until_disconnect(http_request.receive, _respond_whole(client, request, answer, gateway))
    except (ClientDisconnected, ClientDisconnect):
        gateway.metrics.count_disconnect()
        return Response(status_code=CLIENT_CLOSED_REQUEST)


async def handle_document(
    http_request: HttpRequest, answer: Callable[[bytes, Defaults], JsonObject], gateway: Gateway
) -> Response:
    """Answer a request that generates no text. answer: computes the answer from the body, in a thread.

    Raises:
        OutriderError: the request is invalid.
    """
    client = gateway.access.authenticate(http_request)
    try:
        room = gateway.scheduler.room
        with gateway.uploads.upload(client, room), gateway.uploads.reserving(client, gateway.budget) as reserve:
            body = await gateway.access.read_body(http_request, reserve)
            found = await asyncio.to_thread(answer, body, gateway.defaults)
        return Response(encode_json(found), media_type=JSON)
    except ClientDisconnect:
        gateway.metrics.count_disconnect()
        return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _parse(
    http_request: HttpRequest, client: str, kind: RequestKind, gateway: Gateway
) -> tuple[ParsedRequest, Output]:
    """Read and parse a request. Its body, which is large with a recording, is freed on return."""
    with gateway.uploads.reserving(client, gateway.budget) as reserve:
        sent = await gateway.access.read_body(http_request, reserve, kind.media_type)
        given = (sent, http_request.headers.get("content-type", ""), gateway.defaults)
        if len(sent) <= INLINE_PARSE_BYTES:
            return kind.prepare(*given)
        # Decoding a recording takes long. In a thread it does not delay other streams.
        return await _until_disconnect(http_request.receive, asyncio.to_thread(kind.prepare, *given))


async def _respond_whole(client: str, request: ParsedRequest, answer: Output, gateway: Gateway) -> Response:
    results: dict[int, Result] = {}
    async with aclosing(_run_choices(client, request, answer, gateway)) as items:
        async for index, item in items:
            if isinstance(item, Result):
                results[index] = item
            else:
                answer.choices[index].note(item)
    return Response(answer.body([results[index] for index in sorted(results)]), media_type=answer.media_type)


async def _run_choices(
    client: str, request: ParsedRequest, answer: Output, gateway: Gateway, queued: Callable[[], None] = lambda: None
) -> AsyncGenerator[tuple[int, list[StreamEvent] | Result]]:
    """Run the generations of all choices. Yield their events, and at the end their results, each with its index.

    The first error, or a disconnect of the client, ends all of them.
    """
    active = ActiveRequest(client, tuple(Cancellation() for _ in answer.choices))
    gateway.active_requests[answer.id] = active
    starts = ChoiceStarts()
    choices = [_run_choice(index, starts, active, request, gateway, queued) for index, _ in enumerate(answer.choices)]
    try:
        async with aclosing(merge(choices)) as items:
            async for item in items:
                yield item
    finally:
        del gateway.active_requests[answer.id]


async def _run_choice(
    index: int,
    starts: ChoiceStarts,
    active: ActiveRequest,
    request: ParsedRequest,
    gateway: Gateway,
    queued: Callable[[], None],
) -> AsyncGenerator[list[StreamEvent] | Result]:
    """Run the generation of one choice, and yield its events and its result. It is cancelled at the end."""
    number, order = divmod(index, request.candidates)  # index of the prompt, and index among its choices

    async def begin() -> GenerationTask:
        with gateway.uploads.reserving(active.client, gateway.budget) as reserve:
            reserve(0 if order else request.prompt_bytes[number])  # all choices share the prompt
            return await gateway.scheduler.start(
                active.client,
                request.prompts[number],
                request.choice_settings(index),
                request.options,
                cache_salt=request.cache_salt,
                provisional=request.provisional,
                queued=queued,
                cancellation=active.cancellations[index],
            )

    queued_at = time.perf_counter()
    try:
        async with starts.start(begin) as task:
            gateway.metrics.observe_queue_wait(time.perf_counter() - queued_at)
            try:
                async for events in task:
                    yield events
                result = _result(task, gateway)
            finally:
                task.cancel()
        yield result
    except (PromptError, AudioError, SettingsError, DecodingError) as error:
        raise attach_param(error, request, number) from error


def _result(task: GenerationTask, gateway: Gateway) -> Result:
    """Return the result of a task that was iterated to its end, and record its metrics."""
    try:
        result = task.result
    except StateError:  # a task with a consumer is cancelled only at a shutdown
        raise ShuttingDown from None
    gateway.metrics.observe_result(result)
    if result.stats.cloud_lost:
        log.warning("the cloud was lost: an answer continued without it")
    return result


async def _respond_streaming(
    http_request: HttpRequest, client: str, request: ParsedRequest, answer: Output, gateway: Gateway
) -> Response:
    """Stream an answer.

    The stream begins at once if the request has to wait for a slot. Otherwise it begins with the first chunk, or after
    `FIRST_CHUNK_TIMEOUT_S`. An error before that has its own HTTP status.
    """
    queued: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def mark_queued() -> None:
        if not queued.done():
            queued.set_result(None)

    chunks = _chunks(client, request, answer, gateway, mark_queued)
    disconnected = asyncio.create_task(_wait_disconnect(http_request.receive))
    stream = _EventStream(chunks, disconnected, gateway.metrics, answer)
    try:
        events = (stream.first, disconnected, queued)
        await asyncio.wait(events, timeout=FIRST_CHUNK_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if stream.first.done():
            stream.first.result()
        elif disconnected.done():
            raise ClientDisconnected
    except BaseException:
        await stream.close()
        raise
    return stream


async def _chunks(
    client: str, request: ParsedRequest, answer: Output, gateway: Gateway, queued: Callable[[], None]
) -> AsyncGenerator[bytes]:
    """Run the generations, and yield the chunks of their stream."""
    results: dict[int, Result] = {}
    async with aclosing(_run_choices(client, request, answer, gateway, queued)) as items:
        async for index, item in items:
            choice = answer.choices[index]
            if not isinstance(item, Result):
                chunk = choice.chunk(item)
            else:
                results[index] = item
                is_last = len(results) == len(answer.choices)
                chunk = choice.last(item) + (answer.end([results[at] for at in sorted(results)]) if is_last else b"")
            if chunk:
                yield chunk


class _EventStream(Response):
    """A response of server-sent events. A disconnect of the client ends the generation.

    During silence a comment goes out every `PING_S`. Clients ignore it, but it prevents timeouts, also of proxies. An
    error becomes the stream's last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes], disconnected: asyncio.Future[None], metrics: Metrics, answer: Output
    ) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self.first = asyncio.ensure_future(anext(chunks))
        self._chunks, self._disconnected, self._metrics, self._answer = chunks, disconnected, metrics, answer
        self._sent_at = 0.0  # by the loop's clock
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Request-Id": answer.id})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # The first chunk goes out in this turn of the loop: each turn may wait for a generation's thread.
            first_sent = await self._begin(send)
            await _race_disconnect(self._disconnected, self._continue(send, first_sent))
        except ClientDisconnected:
            self._metrics.count_disconnect()
        finally:
            await self.close()

    async def close(self) -> None:
        """End the generation, if it still runs."""
        for each in (self.first, self._disconnected):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each
        await self._chunks.aclose()

    async def _begin(self, send: Send) -> bool:
        """Send the headers, and the first chunk if there is one. Return whether there was."""
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        ready = self.first.done()
        await send(_body_message(self.first.result() if ready else PING_COMMENT))
        self._sent_at = asyncio.get_running_loop().time()
        return ready

    async def _continue(self, send: Send, first_sent: bool) -> None:
        pings = asyncio.create_task(self._ping(send))
        try:
            if not first_sent:
                await self._send_chunk(send, await self.first)
            async for chunk in self._chunks:
                await self._send_chunk(send, chunk)
        except OutriderError as error:
            log.warning("a stream has failed", extra={"kind": type(error).__name__})
            await send(_body_message(self._answer.error(to_error_response(error))))
        finally:
            pings.cancel()
        await send(_body_message(b"", more=False))

    async def _send_chunk(self, send: Send, chunk: bytes) -> None:
        await send(_body_message(chunk))
        self._sent_at = asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(self._sent_at + PING_S - clock(), PING_S / 10))
            if clock() - self._sent_at >= PING_S:
                await send(_body_message(PING_COMMENT))
                self._sent_at = clock()


def _body_message(content: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _until_disconnect(receive: Receive, request: Awaitable[T]) -> T:
    """Return the result of `request`, and cancel it if the client disconnects first.

    Raises:
        ClientDisconnected: the client has disconnected.
    """
    disconnected = asyncio.create_task(_wait_disconnect(receive))
    try:
        return await _race_disconnect(disconnected, request)
    finally:
        disconnected.cancel()
        with suppress(asyncio.CancelledError):
            await disconnected


async def _race_disconnect(disconnected: asyncio.Future[None], request: Awaitable[T]) -> T:
    task = asyncio.ensure_future(request)
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, OutriderError):
            await task


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
