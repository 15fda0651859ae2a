"""The verification service as gRPC methods: who may call, what is refused, and how errors look to a peer."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator
from functools import cached_property

import grpc

from outrider.cloud.batcher import Batcher
from outrider.cloud.conversation import Conversation, lost
from outrider.cloud.limits import BYTES_PER_ID, LEAST_MESSAGE, Limits, RateLimiter
from outrider.cloud.metrics import Metrics
from outrider.cloud.security import ANONYMOUS, Tokens, Unauthenticated, identity_of
from outrider.cloud.sessions import RETRY_FULL, Record, Sessions
from outrider.cloud.turns import Pace, Turns
from outrider.core.actions import Verify
from outrider.engines.base import Hosted, Prompt
from outrider.errors import AudioError, DecodingError, InputError, OutOfStep, OutriderError, PromptError, SettingsError
from outrider.verifiers.local import describe
from outrider.wire import schema
from outrider.wire.messages import Code, Refusal, error, parse_request

log = logging.getLogger(__name__)

OPENING, LONGEST_OPENING = 30.0, 600.0  # s that a stream without a session may last: between two frames, and in all
VOCABULARY_PART = 4096  # tokens in one message
RETRY_DRAINING = 0.5  # s
OPENINGS = 2  # recordings of one identity unpacked at a time: worker threads are few
READY = 16  # prompts that are kept unpacked until they get their first slot
FREE_PER_S, FREE_BURST = 500, 1000  # frames and calls of one identity that need no engine
PAUSE = 0.02  # s that an identity waits after an invalid request
WRONG = frozenset({Code.INVALID, Code.PROTOCOL, Code.SETTINGS, Code.PROMPT, Code.CONDITIONING, Code.TOO_LARGE})
LONGEST = 2**20  # tokens of a session, where neither the model nor the operator says less

_CODES: tuple[tuple[type[OutriderError], int], ...] = (
    (SettingsError, Code.SETTINGS),
    (PromptError, Code.PROMPT),
    (AudioError, Code.PROMPT),
    (InputError, Code.INVALID),
    (OutOfStep, Code.BASE_LENGTH),
    (DecodingError, Code.DECODING),
)


class Service:
    """State of one service: engine and batcher, sessions, limits.

    max_length: positions that a session may have; None is the model's own limit.
    """

    def __init__(
        self,
        engine: Hosted,
        batcher: Batcher,
        *,
        limits: Limits,
        metrics: Metrics,
        tokens: Tokens | None = None,
        max_length: int | None = None,
    ) -> None:
        self.engine, self.batcher, self.limits, self.metrics = engine, batcher, limits, metrics
        self.sessions = Sessions(limits, self._gone)
        self.draining = False
        self.streams = 0
        self._tokens = tokens
        self._rate = RateLimiter(limits.max_rate, limits.burst)
        self._description = describe(engine)
        self._model = engine.identity.encode()
        self._arriving = 0  # bytes of media whose session is not there yet
        self._arriving_of: Counter[str] = Counter()  # the same by identity
        self._streams_of: Counter[str] = Counter()
        self._frames, self.openings = Turns(1), Turns(OPENINGS)
        self._free_work = Pace(FREE_PER_S, FREE_BURST)
        self._ready: deque[list[Prompt]] = deque()
        self._largest_frame = LEAST_MESSAGE + BYTES_PER_ID * (max_length or engine.max_length or LONGEST)
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
        identity = await self._identity(context)
        await self._pace_free_work(identity)
        async with self._frames.turn(identity):
            return self._described

    @cached_property
    def _described(self) -> bytes:
        own = self._description
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
        identity = await self._identity(context)
        await self._pace_free_work(identity)
        for part in self._vocabulary:
            async with self._frames.turn(identity):
                pass
            yield part

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        names = self._description.vocabulary
        starts = range(0, len(names), VOCABULARY_PART)
        return [schema.VocabularyPart(tokens=names[n : n + VOCABULARY_PART]).SerializeToString() for n in starts]

    async def session(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        identity = await self._identity(context)
        conversation = Conversation(self, identity)
        self.streams += 1
        self._streams_of[identity] += 1
        try:
            self._check_streams(identity)
            async for data in _frames(aiter(requests), conversation):
                self.metrics.received(len(data))
                async with self._frames.turn(identity):
                    request = parse_request(data, self._largest_frame)
                if not conversation.needs_engine(request):
                    await self._pace_free_work(identity)
                async for answer in conversation.take(request):
                    yield self._sent(answer)
        except Exception as raised:  # noqa: BLE001 - the outermost guard: a peer gets a typed error, no traceback
            refusal = as_refusal(raised)
            self.metrics.error(refusal.kind)
            await self._slow_down(identity, refusal)
            log.info("refused", extra=conversation.fields(kind=refusal.kind, reason=type(raised).__name__))
            yield self._sent(error(refusal))
        finally:
            conversation.end()
            self.streams -= 1
            self._streams_of[identity] -= 1
            if not self._streams_of[identity]:
                del self._streams_of[identity]

    async def _identity(self, context: grpc.aio.ServicerContext) -> str:
        try:
            return identity_of(context.auth_context(), context.invocation_metadata() or (), self._tokens)
        except Unauthenticated as refused:
            self.metrics.error("unauthenticated")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(refused))
            raise

    def _sent(self, answer: schema.Answer) -> bytes:
        data: bytes = answer.SerializeToString()
        self.metrics.sent(len(data))
        return data

    # What conversations ask ---------------------------------------------------------------------------------

    def check_serving(self) -> None:
        if self.draining:
            raise Refusal(Code.DRAINING, "this service is going down: connect again", RETRY_DRAINING)

    def check_opening(self, frame: schema.Open) -> None:
        """Protocol, vocabulary and model are those that this side described."""
        if frame.protocol != schema.VERSION:
            raise Refusal(Code.PROTOCOL, f"protocol {frame.protocol}: this service speaks {schema.VERSION}")
        if frame.fingerprint != self._description.fingerprint.encode():
            raise Refusal(Code.VOCABULARY, f"{self.engine.name} has another vocabulary than the edge compared with")
        if frame.model != self._model:
            raise Refusal(Code.MODEL, f"{self.engine.name} is another model than the one that was described")
        if not 0 < frame.vocab_size <= self._description.vocab_size:
            raise Refusal(Code.INVALID, f"vocab_size {frame.vocab_size}: between 1 and {self._description.vocab_size}")

    def check_hearing(self) -> None:
        """Before media is waited for."""
        if not self._description.audio_seconds:
            raise Refusal(Code.PROMPT, f"{self.engine.name} takes no audio, so it cannot verify what was heard")

    def expect_media(self, identity: str, size: int) -> None:
        """Add to the bytes of media held for openings; a negative number releases. They count like those of sessions.

        If there may be other identities, each gets half of the room at most.
        """
        share = self.limits.media_share(named=identity != ANONYMOUS)
        full = self._arriving + size > self.limits.max_media_total or self._arriving_of[identity] + size > share
        if size > 0 and full:
            raise Refusal(Code.LIMIT, "no room for more media: too many recordings are on their way", RETRY_FULL)
        self._arriving += size
        self._arriving_of[identity] += size
        if not self._arriving_of[identity]:
            del self._arriving_of[identity]

    def keep_ready(self, ready: list[Prompt]) -> None:
        """Keep an unpacked prompt for its first slot. Beyond the limit the oldest is dropped, and unpacked again on
        use.

        A minute of silence is a few kilobytes of FLAC and megabytes of samples. Called from worker threads.
        """
        self._ready.append(ready)
        if len(self._ready) > READY:
            self._ready.popleft().clear()

    async def _slow_down(self, identity: str, refusal: Refusal) -> None:
        """Delay an identity after an invalid request: refusing at full speed would slow down the others."""
        if identity != ANONYMOUS and refusal.code in WRONG:
            async with self._frames.turn(identity):
                await asyncio.sleep(PAUSE)

    async def _pace_free_work(self, identity: str) -> None:
        """Wait until an identity may have another frame or call served that needs no engine.

        Frames that need the engine are bounded by its shares. While the event loop serves a frame, the engine's thread
        waits for the interpreter. gRPC's flow control holds back the frames behind the one that waits. Without
        identities nothing is paced: one caller's flood would delay the others' frames.
        """
        if identity != ANONYMOUS:
            await self._free_work.wait(identity)

    def _check_streams(self, identity: str) -> None:
        most = self.limits.max_streams_per_identity
        if self._streams_of[identity] > most:
            raise Refusal(Code.LIMIT, f"{identity} has {most} streams open, the most allowed", RETRY_FULL)

    def check_rate(self, identity: str) -> None:
        wait = self._rate.take(identity)
        if wait > 0:
            raise Refusal(Code.LIMIT, f"{identity} asks more than {self.limits.max_rate:g} times per second", wait)

    async def keep_pace(self, identity: str) -> None:
        """Wait until the rate allows one more: tokens that are streamed come slower, and are not refused."""
        while (wait := self._rate.take(identity)) > 0:
            await asyncio.sleep(wait)

    def check_count(self, ids: int) -> None:
        """Before each of so many ids is looked at."""
        if ids > self.length_limit:
            raise Refusal(Code.PROMPT, f"{ids} ids in one request: this service holds {self.length_limit}")

    def check_length(self, request: Verify) -> None:
        total = request.base_length + len(request.draft_ids)
        if self.max_length is not None and total > self.max_length:
            raise Refusal(Code.PROMPT, f"a sequence of {total} tokens: this service holds {self.max_length}")

    @property
    def length_limit(self) -> int:
        """Tokens of a session, prompt and output."""
        return self.max_length if self.max_length is not None else LONGEST

    @property
    def prompt_limit(self) -> int:
        """Tokens of a prompt."""
        return min(self.length_limit, self.limits.max_prompt_tokens or LONGEST)

    def room(self, record: Record, base_length: int) -> int:
        """How many tokens may follow the first `base_length`."""
        end = record.session.prompt_length + record.settings.max_new_tokens
        return min(end, self.length_limit) - base_length

    def end_ids(self, record: Record) -> tuple[int, ...]:
        return () if record.settings.ignore_eos else self.engine.eos_ids

    def _gone(self, record: Record) -> None:
        self.batcher.leave(record)

    # Upkeep -------------------------------------------------------------------------------------------------

    async def upkeep(self, every: float = 1.0) -> None:
        """Expire what is idle and report what is used, for as long as the service runs."""
        while True:
            self.metrics.expired(self.sessions.expire())
            seats = self.batcher.seats
            self.metrics.occupancy(len(self.sessions), len(seats), seats.total, self.engine.cache_bytes)
            self.metrics.queue_length(self.batcher.queued)
            await asyncio.sleep(every)


async def _frames(requests: AsyncIterator[bytes], conversation: Conversation) -> AsyncIterator[bytes]:
    """What comes on a stream, until its session is lost. One that has no session is not waited for without end."""
    loop = asyncio.get_running_loop()
    losing, until = asyncio.create_task(conversation.lost.wait()), loop.time() + LONGEST_OPENING
    reading: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            left = None if conversation.has_session else min(OPENING, until - loop.time())
            reading = asyncio.create_task(_next(requests))
            reading.add_done_callback(_heard)
            await asyncio.wait({reading, losing}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise _unheard(conversation)
            data = reading.result()
            if data is None:
                return
            yield data
    finally:
        losing.cancel()
        if reading is not None:
            reading.cancel()


def _heard(reading: asyncio.Task[bytes | None]) -> None:
    """Whatever ends a stream is told to its reader; where nobody reads any more, it is no news."""
    if not reading.cancelled():
        reading.exception()


async def _next(requests: AsyncIterator[bytes]) -> bytes | None:
    return await anext(requests, None)


def _unheard(conversation: Conversation) -> Refusal:
    """Why nothing more is waited for."""
    if conversation.lost.is_set():
        return lost()
    return Refusal(Code.INVALID, "a stream that is too long without a session")


def as_refusal(raised: Exception) -> Refusal:
    """What a peer is told. Only our own errors speak for themselves."""
    if isinstance(raised, Refusal):
        return raised
    for kind, code in _CODES:
        if isinstance(raised, kind):
            return Refusal(code, str(raised))
    log.error("an internal error", exc_info=raised)
    return Refusal(Code.INTERNAL, "an internal error of this service; its log says more")
