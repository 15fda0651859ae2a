"""The verification service as gRPC methods: who may call, what is refused, and how errors look to a peer."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator
from functools import cached_property

import grpc

from outrider.cloud.authentication import ANONYMOUS, Unauthenticated, authenticate
from outrider.cloud.batcher import Batcher
from outrider.cloud.identity_semaphore import IdentitySemaphore, Pace
from outrider.cloud.limits import BYTES_PER_ID, MIN_MESSAGE_BYTES, Limits, RateLimiter
from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import RETRY_WHEN_FULL_S, SessionEntry, Sessions
from outrider.cloud.stream_handler import StreamHandler, detached_error
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt, ServableEngine
from outrider.errors import AudioError, DecodingError, InputError, OutOfSync, OutriderError, PromptError, SettingsError
from outrider.protocol import schema
from outrider.protocol.messages import ErrorCode, FrameError, error_answer, parse_request
from outrider.serving.tokens import Tokens
from outrider.verifiers.local import describe

log = logging.getLogger(__name__)

FRAME_TIMEOUT_S, OPENING_TIMEOUT_S = (
    30.0,
    600.0,
)  # s that a stream without a session may last: between two frames, and in all
VOCABULARY_CHUNK = 4096  # tokens in one message
RETRY_WHEN_DRAINING_S = 0.5  # s
MAX_OPENINGS = 2  # recordings of one identity unpacked at a time: worker threads are few
MAX_CACHED_PROMPTS = 16  # prompts that are kept unpacked until they get their first slot
FREE_PER_S, FREE_BURST = 500, 1000  # frames and calls of one identity that need no engine
ERROR_DELAY_S = 0.02  # s that an identity waits after an invalid request
CLIENT_ERRORS = frozenset(
    {
        ErrorCode.INVALID,
        ErrorCode.PROTOCOL,
        ErrorCode.SETTINGS,
        ErrorCode.PROMPT,
        ErrorCode.CONDITIONING,
        ErrorCode.TOO_LARGE,
    }
)
MAX_SESSION_TOKENS = 2**20  # tokens of a session, where neither the model nor the operator says less

_CODES: tuple[tuple[type[OutriderError], int], ...] = (
    (SettingsError, ErrorCode.SETTINGS),
    (PromptError, ErrorCode.PROMPT),
    (AudioError, ErrorCode.PROMPT),
    (InputError, ErrorCode.INVALID),
    (OutOfSync, ErrorCode.BASE_LENGTH),
    (DecodingError, ErrorCode.DECODING),
)


class Service:
    """State of one service: engine and batcher, sessions, limits.

    max_length: positions that a session may have; None is the model's own limit.
    """

    def __init__(
        self,
        engine: ServableEngine,
        batcher: Batcher,
        *,
        limits: Limits,
        metrics: Metrics,
        tokens: Tokens | None = None,
        max_length: int | None = None,
    ) -> None:
        self.engine, self.batcher, self.limits, self.metrics = engine, batcher, limits, metrics
        self.sessions = Sessions(limits, self._on_session_ended)
        self.draining = False
        self.streams = 0
        self._tokens = tokens
        self._rate = RateLimiter(limits.max_rate, limits.burst)
        self._model_info = describe(engine)
        self._model = engine.identity.encode()
        self._pending_media = 0  # bytes of media whose session is not there yet
        self._pending_media_of: Counter[str] = Counter()  # the same by identity
        self._streams_by_identity: Counter[str] = Counter()
        self._frame_semaphore, self.opening_semaphore = IdentitySemaphore(1), IdentitySemaphore(MAX_OPENINGS)
        self._free_work = Pace(FREE_PER_S, FREE_BURST)
        self._cached_prompts: deque[list[Prompt]] = deque()
        self._largest_frame = MIN_MESSAGE_BYTES + BYTES_PER_ID * (max_length or engine.max_length or MAX_SESSION_TOKENS)
        self.max_length = max_length if max_length is not None else engine.max_length

    # gRPC methods -------------------------------------------------------------------------------------------

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's methods. Frames stay bytes, so that this class refuses invalid ones.

        No method is unary: gRPC would receive the whole request before authentication.
        """
        methods = {
            "Describe": grpc.stream_unary_rpc_method_handler(self.describe),
            "Vocabulary": grpc.stream_stream_rpc_method_handler(self.vocabulary),
            "Session": grpc.stream_stream_rpc_method_handler(self.session),
        }
        return grpc.method_handlers_generic_handler(schema.SERVICE, methods)

    async def describe(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        identity = await self._authenticate(context)
        await self._pace_free_work(identity)
        async with self._frame_semaphore.hold(identity):
            return self._description_bytes

    @cached_property
    def _description_bytes(self) -> bytes:
        own = self._model_info
        answer = schema.DescribeAnswer(
            protocol=schema.VERSION,
            name=own.name,
            vocab_size=own.vocab_size,
            row_count=own.row_count,
            eos_ids=own.eos_ids,
            fingerprint=own.fingerprint.encode(),
            model=self._model,
            max_length=self.max_length or 0,
            audio_seconds=own.audio_seconds,
            max_drafts=schema.MAX_DRAFTS,
        )
        return answer.SerializeToString()

    async def vocabulary(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        identity = await self._authenticate(context)
        await self._pace_free_work(identity)
        for part in self._vocabulary:
            async with self._frame_semaphore.hold(identity):
                pass
            yield part

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        names = self._model_info.vocabulary
        starts = range(0, len(names), VOCABULARY_CHUNK)
        return [schema.VocabularyPart(tokens=names[n : n + VOCABULARY_CHUNK]).SerializeToString() for n in starts]

    async def session(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        identity = await self._authenticate(context)
        handler = StreamHandler(self, identity)
        self.streams += 1
        self._streams_by_identity[identity] += 1
        try:
            self._check_streams(identity)
            async for data in _read_frames(aiter(requests), handler):
                self.metrics.count_received(len(data))
                async with self._frame_semaphore.hold(identity):
                    request = parse_request(data, self._largest_frame)
                if not handler.needs_engine(request):
                    await self._pace_free_work(identity)
                async for answer in handler.handle(request):
                    yield self._serialize(answer)
        except Exception as raised:  # noqa: BLE001 - the outermost guard: a peer gets a typed error, no traceback
            refusal = to_frame_error(raised)
            self.metrics.count_error(refusal.kind)
            await self._delay_after_error(identity, refusal)
            log.info("refused", extra=handler.log_fields(kind=refusal.kind, reason=type(raised).__name__))
            yield self._serialize(error_answer(refusal))
        finally:
            handler.on_end()
            self.streams -= 1
            self._streams_by_identity[identity] -= 1
            if not self._streams_by_identity[identity]:
                del self._streams_by_identity[identity]

    async def _authenticate(self, context: grpc.aio.ServicerContext) -> str:
        try:
            return authenticate(context.auth_context(), context.invocation_metadata() or (), self._tokens)
        except Unauthenticated as refused:
            self.metrics.count_error("unauthenticated")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(refused))
            raise

    def _serialize(self, answer: schema.Answer) -> bytes:
        data: bytes = answer.SerializeToString()
        self.metrics.count_sent(len(data))
        return data

    # What conversations ask ---------------------------------------------------------------------------------

    def check_serving(self) -> None:
        if self.draining:
            raise FrameError(ErrorCode.DRAINING, "this service is going down: connect again", RETRY_WHEN_DRAINING_S)

    def check_opening(self, frame: schema.Open) -> None:
        """Protocol, vocabulary and model are those that this side described."""
        if frame.protocol != schema.VERSION:
            raise FrameError(ErrorCode.PROTOCOL, f"protocol {frame.protocol}: this service speaks {schema.VERSION}")
        if frame.fingerprint != self._model_info.fingerprint.encode():
            raise FrameError(
                ErrorCode.VOCABULARY, f"{self.engine.name} has another vocabulary than the edge compared with"
            )
        if frame.model != self._model:
            raise FrameError(ErrorCode.MODEL, f"{self.engine.name} is another model than the one that was described")
        if not 0 < frame.vocab_size <= self._model_info.vocab_size:
            raise FrameError(
                ErrorCode.INVALID, f"vocab_size {frame.vocab_size}: between 1 and {self._model_info.vocab_size}"
            )

    def check_audio_support(self) -> None:
        """Before media is waited for."""
        if not self._model_info.audio_seconds:
            raise FrameError(ErrorCode.PROMPT, f"{self.engine.name} takes no audio, so it cannot verify what was heard")

    def reserve_media(self, identity: str, size: int) -> None:
        """Add to the bytes of media held for openings; a negative number releases. They count like those of sessions.

        If there may be other identities, each gets half of the room at most.
        """
        share = self.limits.media_share(named=identity != ANONYMOUS)
        full = (
            self._pending_media + size > self.limits.max_media_total or self._pending_media_of[identity] + size > share
        )
        if size > 0 and full:
            raise FrameError(
                ErrorCode.LIMIT, "no room for more media: too many recordings are on their way", RETRY_WHEN_FULL_S
            )
        self._pending_media += size
        self._pending_media_of[identity] += size
        if not self._pending_media_of[identity]:
            del self._pending_media_of[identity]

    def cache_prompt(self, prompt: list[Prompt]) -> None:
        """Keep an unpacked prompt for its first slot. Beyond the limit the oldest is dropped, and unpacked again on
        use.

        A minute of silence is a few kilobytes of FLAC and megabytes of samples. Called from worker threads.
        """
        self._cached_prompts.append(prompt)
        if len(self._cached_prompts) > MAX_CACHED_PROMPTS:
            self._cached_prompts.popleft().clear()

    async def _delay_after_error(self, identity: str, refusal: FrameError) -> None:
        """Delay an identity after an invalid request: refusing at full speed would slow down the others."""
        if identity != ANONYMOUS and refusal.code in CLIENT_ERRORS:
            async with self._frame_semaphore.hold(identity):
                await asyncio.sleep(ERROR_DELAY_S)

    async def _pace_free_work(self, identity: str) -> None:
        """Wait until an identity may have another frame or call served that needs no engine.

        Frames that need the engine are bounded by its shares. While the event loop serves a frame, the engine's thread
        waits for the interpreter. gRPC's flow control holds back the frames behind the one that waits. Without
        identities nothing is paced: one caller's flood would delay the others' frames.
        """
        if identity != ANONYMOUS:
            await self._free_work.wait(identity)

    def _check_streams(self, identity: str) -> None:
        limit = self.limits.max_streams_per_identity
        if self._streams_by_identity[identity] > limit:
            raise FrameError(
                ErrorCode.LIMIT, f"{identity} has {limit} streams open, the most allowed", RETRY_WHEN_FULL_S
            )

    def check_rate(self, identity: str) -> None:
        wait = self._rate.acquire(identity)
        if wait > 0:
            raise FrameError(
                ErrorCode.LIMIT, f"{identity} asks more than {self.limits.max_rate:g} times per second", wait
            )

    async def wait_for_rate(self, identity: str) -> None:
        """Wait until the rate allows one more: tokens that are streamed come slower, and are not refused."""
        while (wait := self._rate.acquire(identity)) > 0:
            await asyncio.sleep(wait)

    def check_id_count(self, ids: int) -> None:
        """Before each of so many ids is looked at."""
        if ids > self.length_limit:
            raise FrameError(ErrorCode.PROMPT, f"{ids} ids in one request: this service holds {self.length_limit}")

    def check_length(self, request: Verify) -> None:
        total = request.base_length + len(request.draft_ids)
        if self.max_length is not None and total > self.max_length:
            raise FrameError(ErrorCode.PROMPT, f"a sequence of {total} tokens: this service holds {self.max_length}")

    @property
    def length_limit(self) -> int:
        """Tokens of a session, prompt and output."""
        return self.max_length if self.max_length is not None else MAX_SESSION_TOKENS

    @property
    def prompt_limit(self) -> int:
        """Tokens of a prompt."""
        return min(self.length_limit, self.limits.max_prompt_tokens or MAX_SESSION_TOKENS)

    def remaining_tokens(self, entry: SessionEntry, base_length: int) -> int:
        """How many tokens may follow the first `base_length`."""
        end = entry.session.prompt_length + entry.settings.max_new_tokens
        return min(end, self.length_limit) - base_length

    def end_ids(self, entry: SessionEntry) -> tuple[int, ...]:
        return () if entry.settings.ignore_eos else self.engine.eos_ids

    def _on_session_ended(self, entry: SessionEntry) -> None:
        self.batcher.release(entry)

    # Upkeep -------------------------------------------------------------------------------------------------

    async def housekeeping(self, every: float = 1.0) -> None:
        """Expire what is idle and report what is used, for as long as the service runs."""
        while True:
            self.metrics.count_expired(self.sessions.expire())
            slot_pool = self.batcher.slot_pool
            self.metrics.set_occupancy(len(self.sessions), len(slot_pool), slot_pool.total, self.engine.cache_bytes)
            self.metrics.set_queue_length(self.batcher.queued)
            await asyncio.sleep(every)


async def _read_frames(requests: AsyncIterator[bytes], handler: StreamHandler) -> AsyncIterator[bytes]:
    """What comes on a stream, until its session is lost. One that has no session is not waited for without end."""
    loop = asyncio.get_running_loop()
    detached, deadline = asyncio.create_task(handler.detached.wait()), loop.time() + OPENING_TIMEOUT_S
    reading: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            timeout = None if handler.has_session else min(FRAME_TIMEOUT_S, deadline - loop.time())
            reading = asyncio.create_task(_next(requests))
            reading.add_done_callback(_retrieve_exception)
            await asyncio.wait({reading, detached}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise _detached_or_timeout(handler)
            data = reading.result()
            if data is None:
                return
            yield data
    finally:
        detached.cancel()
        if reading is not None:
            reading.cancel()


def _retrieve_exception(reading: asyncio.Task[bytes | None]) -> None:
    """Whatever ends a stream is told to its reader; where nobody reads any more, it is no news."""
    if not reading.cancelled():
        reading.exception()


async def _next(requests: AsyncIterator[bytes]) -> bytes | None:
    return await anext(requests, None)


def _detached_or_timeout(handler: StreamHandler) -> FrameError:
    """Why nothing more is waited for."""
    if handler.detached.is_set():
        return detached_error()
    return FrameError(ErrorCode.INVALID, "a stream that is too long without a session")


def to_frame_error(raised: Exception) -> FrameError:
    """What a peer is told. Only our own errors speak for themselves."""
    if isinstance(raised, FrameError):
        return raised
    for kind, code in _CODES:
        if isinstance(raised, kind):
            return FrameError(code, str(raised))
    log.error("an internal error", exc_info=raised)
    return FrameError(ErrorCode.INTERNAL, "an internal error of this service; its log says more")
