"""gRPC methods of the verification service: authentication, pacing, and errors as frames."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from functools import cached_property

import grpc

from outrider.cloud.authentication import ANONYMOUS, Unauthenticated, authenticate
from outrider.cloud.batcher import Batcher
from outrider.cloud.identity_semaphore import IdentitySemaphore, Pace
from outrider.cloud.limits import BYTES_PER_ID, MIN_MESSAGE_BYTES, Limits
from outrider.cloud.metrics import Metrics
from outrider.cloud.service_state import MAX_SESSION_TOKENS, ServiceState
from outrider.cloud.sessions import RETRY_WHEN_FULL_S
from outrider.cloud.stream_handler import StreamHandler, detached_error
from outrider.engines.base import ServableEngine
from outrider.errors import AudioError, DecodingError, InputError, OutOfSync, OutriderError, PromptError, SettingsError
from outrider.protocol import schema
from outrider.protocol.messages import ErrorCode, FrameError, error_answer, parse_request
from outrider.protocol.tokenizer_files import digest_of, pack_tokenizer
from outrider.serving.tokens import Tokens

log = logging.getLogger(__name__)

FRAME_TIMEOUT_S = 30.0  # s between two frames of a stream without a session
OPENING_TIMEOUT_S = 600.0  # s that a stream may last without a session
TOKENIZER_CHUNK = 2**18  # bytes in one message
VOCABULARY_CHUNK = 4096  # tokens in one message
FREE_PER_S, FREE_BURST = 500, 1000  # frames and calls of one identity that need no engine
ERROR_DELAY_S = 0.02  # s that an identity waits after an invalid request
CLIENT_ERRORS = frozenset({ErrorCode.INVALID, ErrorCode.PROTOCOL, ErrorCode.SETTINGS, ErrorCode.PROMPT})
CLIENT_ERRORS |= {ErrorCode.CONDITIONING, ErrorCode.TOO_LARGE}
_CODES: tuple[tuple[type[OutriderError], int], ...] = (
    (SettingsError, ErrorCode.SETTINGS),
    (PromptError, ErrorCode.PROMPT),
    (AudioError, ErrorCode.PROMPT),
    (InputError, ErrorCode.INVALID),
    (OutOfSync, ErrorCode.BASE_LENGTH),
    (DecodingError, ErrorCode.DECODING),
)


class Service(ServiceState):
    """gRPC methods of one service. tokens: None admits every caller.

    Other parameters are those of `ServiceState`.
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
        super().__init__(engine, batcher, limits=limits, metrics=metrics, max_length=max_length)
        self.streams = 0
        self._packed_tokenizer = pack_tokenizer(engine.tokenizer)
        self._tokens = tokens
        self._streams_by_identity: Counter[str] = Counter()
        self._frame_semaphore = IdentitySemaphore(1)
        self._free_work = Pace(FREE_PER_S, FREE_BURST)
        self._largest_frame = MIN_MESSAGE_BYTES + BYTES_PER_ID * (self.max_length or MAX_SESSION_TOKENS)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the service's methods.

        Frames stay bytes: this class parses them, and answers an invalid one with an error frame. No method is unary,
        because gRPC would receive the whole request before authentication.
        """
        methods = {
            "Describe": grpc.stream_unary_rpc_method_handler(self.describe),
            "Vocabulary": grpc.stream_stream_rpc_method_handler(self.vocabulary),
            "Tokenizer": grpc.stream_stream_rpc_method_handler(self.tokenizer),
            "Session": grpc.stream_stream_rpc_method_handler(self.session),
        }
        return grpc.method_handlers_generic_handler(schema.SERVICE, methods)

    async def describe(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        """Answer `Describe`: the model, its vocabulary size and fingerprint, and the limits."""
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
            tokenizer=digest_of(self._packed_tokenizer) if self._packed_tokenizer else b"",
            captions_only=own.captions_only,
            quantization=own.quantization or "",
        )
        return answer.SerializeToString()

    async def vocabulary(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Answer `Vocabulary`: the tokens in the order of their ids, in parts."""
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

    async def tokenizer(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Answer `Tokenizer`: the packed files of the tokenizer, in parts."""
        identity = await self._authenticate(context)
        await self._pace_free_work(identity)
        packed = self._packed_tokenizer
        for start in range(0, len(packed), TOKENIZER_CHUNK):
            async with self._frame_semaphore.hold(identity):
                pass
            yield schema.TokenizerPart(data=packed[start : start + TOKENIZER_CHUNK]).SerializeToString()

    async def session(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Answer the frames of one stream. An error frame is the last answer."""
        identity = await self._authenticate(context)
        handler = StreamHandler(self, identity)
        self.streams += 1
        self._streams_by_identity[identity] += 1
        try:
            limit = self.limits.max_streams_per_identity
            if self._streams_by_identity[identity] > limit:
                message = f"{identity} has {limit} streams open, the most allowed"
                raise FrameError(ErrorCode.LIMIT, message, RETRY_WHEN_FULL_S)
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
            if identity != ANONYMOUS and refusal.code in CLIENT_ERRORS:
                # Refusing one identity's invalid requests at full speed would slow down the others.
                async with self._frame_semaphore.hold(identity):
                    await asyncio.sleep(ERROR_DELAY_S)
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

    async def _pace_free_work(self, identity: str) -> None:
        """Wait until an identity may have another frame or call served that needs no engine.

        Frames that need the engine are bounded by its shares. While the event loop serves a frame, the engine's thread
        waits for the interpreter. gRPC's flow control holds back the frames behind the one that waits. Without
        identities nothing is paced: one caller's flood would delay the others' frames.
        """
        if identity != ANONYMOUS:
            await self._free_work.wait(identity)

    async def housekeeping(self, every: float = 1.0) -> None:
        """Run until cancelled: expire idle sessions and update the gauges, every `every` seconds."""
        while True:
            self.metrics.count_expired(self.sessions.expire())
            slot_pool = self.batcher.slot_pool
            self.metrics.set_occupancy(len(self.sessions), len(slot_pool), slot_pool.total, self.engine.cache_bytes)
            self.metrics.set_queue_length(self.batcher.queued)
            await asyncio.sleep(every)


async def _read_frames(requests: AsyncIterator[bytes], handler: StreamHandler) -> AsyncIterator[bytes]:
    """Yield the frames of a stream until it ends.

    Raises:
        FrameError: the stream's session was lost, or the stream had no session for too long.
    """
    loop = asyncio.get_running_loop()
    detached, deadline = asyncio.create_task(handler.detached.wait()), loop.time() + OPENING_TIMEOUT_S
    reading: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            timeout = None if handler.has_session else min(FRAME_TIMEOUT_S, deadline - loop.time())
            reading = asyncio.create_task(_next(requests))
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it
            await asyncio.wait({reading, detached}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() and handler.detached.is_set():
                raise detached_error()
            if not reading.done():
                message = "the stream had no session for too long: open one, or close the stream"
                raise FrameError(ErrorCode.INVALID, message)
            data = reading.result()
            if data is None:
                return
            yield data
    finally:
        detached.cancel()
        if reading is not None:
            reading.cancel()


async def _next(requests: AsyncIterator[bytes]) -> bytes | None:
    return await anext(requests, None)


def to_frame_error(raised: Exception) -> FrameError:
    """Return the error frame for an exception. Messages of foreign exceptions stay in the log."""
    if isinstance(raised, FrameError):
        return raised
    for kind, code in _CODES:
        if isinstance(raised, kind):
            return FrameError(code, str(raised))
    log.error("an internal error", exc_info=raised)
    return FrameError(ErrorCode.INTERNAL, "an internal error of this service: see its log")
