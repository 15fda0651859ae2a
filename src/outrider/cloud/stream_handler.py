"""The frames of one stream: their order, and their effect on the session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from outrider.cloud.jobs import Generation
from outrider.cloud.service_state import ServiceState
from outrider.cloud.sessions import Base, SessionEntry, SessionMedia
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.engines.prefix_cache import length_before_media
from outrider.protocol import schema
from outrider.protocol.media_messages import unpack_media
from outrider.protocol.messages import (
    ErrorCode,
    FrameError,
    check_ids,
    digest,
    pack_verdict,
    unpack_accept,
    unpack_ids,
    unpack_settings,
    unpack_verify,
)
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import open_session

log = logging.getLogger(__name__)

READ_AHEAD = 16  # tokens that a generation may be ahead of its client
READ_AHEAD_PACED = 2  # the same under a rate limit
MEDIA_KINDS = (schema.AUDIO, schema.FEATURES)  # kinds that are uploaded in Media frames


@dataclass
class _PendingOpen:
    """An Open frame that waits for its media. base: the session that it continues."""

    frame: schema.Open
    base: SessionEntry | None
    parts: list[bytes] = field(default_factory=list)  # a single growing buffer would be copied at each part
    size: int = 0


class StreamHandler:
    """State of one stream.

    Errors that `handle` raises become error frames (`to_frame_error` in service.py).
    """

    def __init__(self, service: ServiceState, identity: str) -> None:
        self._service, self._identity = service, identity
        self._opening: _PendingOpen | None = None
        self._entry: SessionEntry | None = None
        self._generation: Generation | None = None  # the last one
        self.detached = asyncio.Event()  # the session has ended, or another stream uses it

    def handle(self, request: schema.Request) -> AsyncIterator[schema.Answer]:
        """Handle one frame, and yield its answers."""
        kind = request.WhichOneof("frame")
        if self._opening is not None and kind != "media":
            raise FrameError(ErrorCode.INVALID, f"{kind}: expected the media that the opening announced")
        match kind:
            case "open":
                return self._open(request.open)
            case "media":
                return self._media(request.media)
            case "resume":
                return self._resume(request.resume)
            case "verify":
                return self._verify(request.verify)
            case "generate":
                return self._generate(request.generate)
            case _:
                return self._close(request.close)

    def needs_engine(self, request: schema.Request) -> bool:
        """Return whether a frame asks for a new verdict. A repeat is answered from memory."""
        kind = request.WhichOneof("frame")
        if self._entry is None or kind not in ("verify", "generate"):
            return False
        rounds: int = getattr(request, kind).round
        return rounds != self._entry.session.rounds

    def on_detached(self) -> None:
        """Note that the session has ended, or that another stream uses it."""
        self.detached.set()
        if self._generation is not None:
            self._service.batcher.cancel(self._generation)

    @property
    def has_session(self) -> bool:
        """Return whether the stream has opened or resumed a session."""
        return self._entry is not None

    def on_end(self) -> None:
        """Detach the stream, which is over, from its session. Another stream may resume the session."""
        self._discard_opening()
        if self._entry is not None and self._entry.stream is self:
            self._entry.attach(None)

    # Opening ------------------------------------------------------------------------------------------------

    async def _open(self, frame: schema.Open) -> AsyncIterator[schema.Answer]:
        self._check_no_session()
        self._service.check_rate(self._identity)
        self._service.check_opening(frame)
        base = await self._find_base(frame)
        if base is None:  # else the session takes its base's place
            self._service.sessions.check_capacity(self._identity)  # before the edge uploads media
        if frame.media in MEDIA_KINDS:
            self._service.check_audio_support()
            self._opening = _PendingOpen(frame, base)
            return
        yield await self._start_session(frame, b"", base)

    async def _media(self, frame: schema.Media) -> AsyncIterator[schema.Answer]:
        if self._opening is None:
            raise FrameError(ErrorCode.INVALID, "unexpected media: no opening announced it")
        if frame.more and not frame.data:
            raise FrameError(ErrorCode.INVALID, "an empty part of media, although more follows")
        opening, limit = self._opening, self._service.limits.max_media_bytes
        data = frame.data
        if opening.size + len(data) > limit:
            raise FrameError(ErrorCode.TOO_LARGE, f"media: this service takes at most {limit} bytes")
        self._service.reserve_media(self._identity, len(data))
        opening.parts.append(data)
        opening.size += len(data)
        if not frame.more:
            yield await self._start_session(opening.frame, b"".join(opening.parts), opening.base)
            self._discard_opening()

    def _discard_opening(self) -> None:
        """Release the media of the pending opening. The session counts its own."""
        opening, self._opening = self._opening, None
        if opening is not None:
            self._service.reserve_media(self._identity, -opening.size)

    async def _find_base(self, frame: schema.Open) -> SessionEntry | None:
        """Return the session that the new one continues, once it is not busy, or None for a new sequence."""
        if not frame.HasField("base"):
            return None
        sessions = self._service.sessions
        entry = sessions.find_base(frame.base, self._identity)
        entry.attach(None)
        if entry.pending is None or entry.pending.done():
            return entry
        await _wait_pending(entry.pending)
        return sessions.find_base(frame.base, self._identity)

    async def _start_session(self, frame: schema.Open, data: bytes, base: SessionEntry | None) -> schema.Answer:
        async with self._service.opening_semaphore.hold(self._identity):
            entry = await asyncio.to_thread(self._build_session, frame, data, base)
        self._service.check_serving()
        if base is not None:
            await self._find_base(frame)  # another stream may have continued it meanwhile
        self._service.sessions.add(entry)
        entry.attach(self)
        self._entry = entry
        self._service.metrics.count_opened()
        log.info("session opened", extra=self.log_fields(tokens=len(entry.session.ids), bytes=len(data)))
        return schema.Answer(opened=schema.Opened(session=entry.id))

    def _build_session(self, frame: schema.Open, data: bytes, base: SessionEntry | None) -> SessionEntry:
        """Build a session from its opening. Called in a worker thread, because unpacking media takes time."""
        service, engine = self._service, self._service.engine
        shared = () if base is None else tuple(base.session.ids[: frame.base.length])
        media = _session_media(frame, data, base)
        ids = (*shared, *unpack_ids(frame.prompt, service.prompt_limit - len(shared), "a prompt"))
        committed = unpack_ids(frame.committed, service.length_limit - len(ids), "the output")
        if not ids:
            raise FrameError(ErrorCode.PROMPT, "the prompt is empty")
        check_ids((*ids, *committed), engine.row_count, "the prompt")
        if frame.conditioning != digest(ids, media.data):
            raise FrameError(ErrorCode.CONDITIONING, "prompt and media are not those that the opening announced")
        settings = unpack_settings(frame.settings, engine.vocab_size)
        params = SessionParams(settings, unpack_accept(frame.accept), frame.vocab_size)

        prompt = unpack_media(engine, ids, media.kind, media.data)
        session = open_session(engine, prompt, params, committed)
        cached = [prompt]
        service.cache_prompt(cached)

        def load_prompt() -> Prompt:
            try:
                return cached.pop()
            except IndexError:
                return unpack_media(engine, ids, media.kind, media.data)

        entry = SessionEntry(self._identity, session, settings, load_prompt, media)
        if base is not None:
            length = len(shared) if media == base.media else length_before_media(engine, shared)
            entry.base = Base(base, length)
        return entry

    async def _resume(self, frame: schema.Resume) -> AsyncIterator[schema.Answer]:
        self._check_no_session()
        entry = self._service.sessions.find(frame.session, self._identity)
        entry.attach(self)
        if entry.pending is not None:
            await _wait_pending(entry.pending)
        self._check_attached(entry)  # another stream may have resumed it meanwhile
        session = entry.session
        prefix = session.ids[: frame.length]
        if not session.prompt_length <= frame.length <= len(session.ids) or digest(prefix) != frame.digest:
            self._service.sessions.drop(entry)
            raise FrameError(ErrorCode.UNKNOWN_SESSION, "this session's tokens differ from the edge's: open a new one")
        session.rewind(frame.length)
        self._entry = entry
        self._service.sessions.touch(entry)
        log.info("session resumed", extra=self.log_fields(tokens=frame.length))
        yield schema.Answer(opened=schema.Opened(session=entry.id))

    def _check_no_session(self) -> None:
        self._service.check_serving()
        if self._entry is not None:
            raise FrameError(ErrorCode.INVALID, "this stream has a session already: open another stream")

    # Verdicts -----------------------------------------------------------------------------------------------

    async def _verify(self, frame: schema.Verify) -> AsyncIterator[schema.Answer]:
        entry, engine = self._require_session(), self._service.engine
        self._service.check_rate(self._identity)
        self._service.check_id_count(len(frame.new_ids))
        request = unpack_verify(frame, entry.session.vocab_size, engine.row_count)
        yield pack_verdict(await self._request_verdict(entry, request), len(request.draft_ids))

    async def _generate(self, frame: schema.Generate) -> AsyncIterator[schema.Answer]:
        """Yield the target's own tokens until an end-of-sequence token or the length limit.

        At least one is requested, so that a wrong base length is an error even without room for a token.
        """
        entry, service = self._require_session(), self._service
        request, limit = self._check_generate(entry, frame)
        verdicts: asyncio.Queue[Verdict | None] = asyncio.Queue()
        ends = service.end_ids(entry)
        self._generation = generation = service.batcher.generate(entry, request, limit, ends, verdicts.put_nowait)
        entry.pending = generation.future
        generation.future.add_done_callback(lambda _: verdicts.put_nowait(None))
        service.batcher.grant(generation, READ_AHEAD if service.limits.max_rate is None else READ_AHEAD_PACED)
        try:
            while (verdict := await verdicts.get()) is not None:
                await service.wait_for_rate(self._identity)
                self._check_attached(entry)
                service.sessions.touch(entry)
                service.metrics.count_generated()
                yield pack_verdict(verdict, 0)
                service.batcher.grant(generation, 1)
        finally:
            service.batcher.cancel(generation)
        self._check_attached(entry)
        generation.future.result()

    def _check_generate(self, entry: SessionEntry, frame: schema.Generate) -> tuple[Verify, int]:
        """Return the request of the first token, and the number of tokens."""
        service = self._service
        service.check_id_count(len(frame.new_ids))
        first = schema.Verify(round=frame.round, base_length=frame.base_length, new_ids=frame.new_ids)
        request = unpack_verify(first, entry.session.vocab_size, service.engine.row_count)
        room = service.remaining_tokens(entry, request.base_length)
        if room < 1 and request.base_length == len(entry.session.ids) + len(request.new_ids):
            message = f"the sequence of {request.base_length} tokens has reached its limit: no token may follow"
            raise FrameError(ErrorCode.INVALID, message)
        self._check_attached(entry)
        service.check_length(request)
        return request, max(1, room)

    async def _request_verdict(self, entry: SessionEntry, request: Verify) -> Verdict:
        service = self._service
        self._check_attached(entry)
        service.check_length(request)
        entry.pending = service.batcher.submit(entry, request)
        verdict = await _outcome(entry.pending)
        service.sessions.touch(entry)
        return verdict

    async def _close(self, frame: schema.Close) -> AsyncIterator[schema.Answer]:
        entry = self._require_session()
        self._check_attached(entry)
        log.info("session closed", extra=self.log_fields(tokens=len(entry.session.ids)))
        entry.stream = self._entry = None  # before `drop`, which would mark this stream as detached
        if not frame.keep:
            self._service.sessions.drop(entry)
        return
        yield

    def _require_session(self) -> SessionEntry:
        if self._entry is None:
            raise FrameError(ErrorCode.INVALID, "this stream has no session: send Open or Resume first")
        return self._entry

    def _check_attached(self, entry: SessionEntry) -> None:
        if entry.stream is not self:
            raise detached_error()

    def log_fields(self, **more: object) -> dict[str, object]:
        """Return the fields of a log event: session, identity, and `more`."""
        name = self._entry.name if self._entry is not None else "-"
        return {"session": name, "identity": self._identity, **more}


def detached_error() -> FrameError:
    """Return the error for a stream that has lost its session."""
    return FrameError(ErrorCode.UNKNOWN_SESSION, "this session has ended, or was resumed on another stream")


def _session_media(frame: schema.Open, data: bytes, base: SessionEntry | None) -> SessionMedia:
    """Return the media that an opening uploads, or those of the session that it continues."""
    if frame.media != schema.KEPT:
        return SessionMedia(frame.media, data)
    if base is None:
        raise FrameError(ErrorCode.INVALID, "media kept from an earlier session, but none is continued")
    return base.media


async def _outcome(pending: Future[Verdict]) -> Verdict:
    """Wait for a verdict of the batcher, which resolves it in this thread. Cancelling the wait cancels the verdict."""
    done = asyncio.Event()
    pending.add_done_callback(lambda _: done.set())
    try:
        await done.wait()
    except asyncio.CancelledError:
        pending.cancel()
        raise
    return pending.result()


async def _wait_pending(pending: Future[Any]) -> None:
    """Wait for the end of a verdict's computation, or of a generation. Its error is for the stream that requested it.

    Cancelling the wait does not cancel the verdict.
    """
    waiting = asyncio.wrap_future(pending)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([waiting])
