"""One stream of one edge, frame by frame: what is allowed when, and what each frame does to the session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.cloud.sessions import SessionEntry
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
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

if TYPE_CHECKING:
    from outrider.cloud.service import Service

log = logging.getLogger(__name__)

MEDIA_KINDS = (schema.AUDIO, schema.FEATURES)  # kinds of media that Media frames bring


@dataclass
class _PendingOpen:
    """An Open whose media is still on its way."""

    frame: schema.Open
    parts: list[bytes] = field(default_factory=list)  # one buffer that grows would be copied, and leave holes
    size: int = 0


class StreamHandler:
    """What a stream has said so far. `handle` raises what `to_frame_error` in service.py turns into an Error frame."""

    def __init__(self, service: Service, identity: str) -> None:
        self._service, self._identity = service, identity
        self._opening: _PendingOpen | None = None
        self._entry: SessionEntry | None = None
        self.detached = asyncio.Event()  # its session has ended, or is another stream's

    def handle(self, request: schema.Request) -> AsyncIterator[schema.Answer]:
        """The answers to one frame."""
        kind = request.WhichOneof("frame")
        if self._opening is not None and kind != "media":
            raise FrameError(ErrorCode.INVALID, f"{kind} where media was announced")
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
                return self._close()

    def needs_engine(self, request: schema.Request) -> bool:
        """Return whether a frame asks for a new verdict. A repeat is answered from memory."""
        kind = request.WhichOneof("frame")
        if self._entry is None or kind not in ("verify", "generate"):
            return False
        rounds: int = getattr(request, kind).round
        return rounds != self._entry.session.rounds

    def on_detached(self) -> None:
        self.detached.set()

    @property
    def has_session(self) -> bool:
        return self._entry is not None

    def on_end(self) -> None:
        """The stream is over. The session stays, for another stream to resume."""
        self._discard_opening()
        if self._entry is not None and self._entry.stream is self:
            self._entry.attach(None)

    # Opening ------------------------------------------------------------------------------------------------

    async def _open(self, frame: schema.Open) -> AsyncIterator[schema.Answer]:
        self._check_no_session()
        self._service.check_rate(self._identity)
        self._service.check_opening(frame)
        self._service.sessions.check_capacity(self._identity)  # before media is sent in vain
        if frame.media in MEDIA_KINDS:
            self._service.check_audio_support()
            self._opening = _PendingOpen(frame)
            return
        yield await self._start_session(frame, b"")

    async def _media(self, frame: schema.Media) -> AsyncIterator[schema.Answer]:
        if self._opening is None:
            raise FrameError(ErrorCode.INVALID, "media that no opening announced")
        if frame.more and not frame.data:
            raise FrameError(ErrorCode.INVALID, "an empty part of media, with more to follow")
        opening, limit = self._opening, self._service.limits.max_media_bytes
        data = frame.data
        if opening.size + len(data) > limit:
            raise FrameError(ErrorCode.TOO_LARGE, f"media: at most {limit} bytes are taken here")
        self._service.reserve_media(self._identity, len(data))
        opening.parts.append(data)
        opening.size += len(data)
        if not frame.more:
            yield await self._start_session(opening.frame, b"".join(opening.parts))
            self._discard_opening()

    def _discard_opening(self) -> None:
        """Its media is a session's now, or nobody's."""
        opening, self._opening = self._opening, None
        if opening is not None:
            self._service.reserve_media(self._identity, -opening.size)

    async def _start_session(self, frame: schema.Open, media: bytes) -> schema.Answer:
        async with self._service.opening_semaphore.hold(self._identity):
            entry = await asyncio.to_thread(self._build_session, frame, media)
        self._service.check_serving()
        entry.attach(self)
        self._service.sessions.add(entry)
        self._entry = entry
        self._service.metrics.count_opened()
        log.info("session opened", extra=self.log_fields(tokens=len(entry.session.ids), bytes=len(media)))
        return schema.Answer(opened=schema.Opened(session=entry.id))

    def _build_session(self, frame: schema.Open, media: bytes) -> SessionEntry:
        """A session out of its opening. In a worker thread: media takes time to unpack."""
        service, engine = self._service, self._service.engine
        ids = unpack_ids(frame.prompt, service.prompt_limit, "a prompt")
        committed = unpack_ids(frame.committed, service.length_limit - len(ids), "the output")
        if not ids:
            raise FrameError(ErrorCode.PROMPT, "the prompt is empty")
        check_ids((*ids, *committed), engine.row_count, "the prompt")
        if frame.conditioning != digest(ids, media):
            raise FrameError(ErrorCode.CONDITIONING, "prompt and media are not those that the opening announced")
        settings = unpack_settings(frame.settings, engine.vocab_size)
        params = SessionParams(settings, unpack_accept(frame.accept), frame.vocab_size)
        kind: int = frame.media

        prompt = unpack_media(engine, ids, kind, media)
        session = open_session(engine, prompt, params, committed)
        cached = [prompt]
        service.cache_prompt(cached)

        def load_prompt() -> Prompt:
            try:
                return cached.pop()
            except IndexError:
                return unpack_media(engine, ids, kind, media)

        return SessionEntry(self._identity, session, settings, load_prompt, len(media))

    async def _resume(self, frame: schema.Resume) -> AsyncIterator[schema.Answer]:
        self._check_no_session()
        entry = self._service.sessions.find(frame.session, self._identity)
        entry.attach(self)
        if entry.pending is not None:
            await _wait_pending(entry.pending)
        self._check_attached(entry)  # another stream may have come since
        session = entry.session
        known = session.ids[: frame.length]
        if not session.prompt_length <= frame.length <= len(session.ids) or digest(known) != frame.digest:
            self._service.sessions.drop(entry)
            raise FrameError(ErrorCode.UNKNOWN_SESSION, "this session holds other tokens than the edge's")
        session.rewind(frame.length)
        self._entry = entry
        self._service.sessions.touch(entry)
        log.info("session resumed", extra=self.log_fields(tokens=frame.length))
        yield schema.Answer(opened=schema.Opened(session=entry.id))

    def _check_no_session(self) -> None:
        self._service.check_serving()
        if self._entry is not None:
            raise FrameError(ErrorCode.INVALID, "this stream has its session already: one stream, one session")

    # Deciding -----------------------------------------------------------------------------------------------

    async def _verify(self, frame: schema.Verify) -> AsyncIterator[schema.Answer]:
        entry, engine = self._require_session(), self._service.engine
        self._service.check_rate(self._identity)
        self._service.check_id_count(len(frame.new_ids))
        request = unpack_verify(frame, entry.session.vocab_size, engine.row_count)
        yield pack_verdict(await self._request_verdict(entry, request), len(request.draft_ids))

    async def _generate(self, frame: schema.Generate) -> AsyncIterator[schema.Answer]:
        """The target's own tokens until one ends the output, as far as this side can tell.

        At least one is asked for: a wrong base length is an error, however little room it leaves.
        """
        entry, engine = self._require_session(), self._service.engine
        self._service.check_id_count(len(frame.new_ids))
        first = schema.Verify(round=frame.round, base_length=frame.base_length, new_ids=frame.new_ids)
        request = unpack_verify(first, entry.session.vocab_size, engine.row_count)
        ends, room = self._service.end_ids(entry), self._service.remaining_tokens(entry, request.base_length)
        if room < 1 and request.base_length == len(entry.session.ids) + len(request.new_ids):
            raise FrameError(
                ErrorCode.INVALID, f"a sequence of {request.base_length} tokens is complete: none may follow"
            )
        for _ in range(max(1, room)):
            await self._service.wait_for_rate(self._identity)
            verdict = await self._request_verdict(entry, request)
            self._service.metrics.count_generated()
            yield pack_verdict(verdict, 0)
            if verdict.next_token in ends:
                return
            request = Verify(request.round + 1, len(entry.session.ids), (), ())

    async def _request_verdict(self, entry: SessionEntry, request: Verify) -> Verdict:
        service = self._service
        self._check_attached(entry)
        service.check_length(request)
        entry.pending = service.batcher.submit(entry, request)
        verdict = await asyncio.wrap_future(entry.pending)
        service.sessions.touch(entry)
        return verdict

    async def _close(self) -> AsyncIterator[schema.Answer]:
        entry = self._require_session()
        self._check_attached(entry)
        log.info("session closed", extra=self.log_fields(tokens=len(entry.session.ids)))
        entry.stream = self._entry = None  # this stream ends it, and does not lose it
        self._service.sessions.drop(entry)
        return
        yield

    def _require_session(self) -> SessionEntry:
        if self._entry is None:
            raise FrameError(ErrorCode.INVALID, "a stream begins with an Open or a Resume")
        return self._entry

    def _check_attached(self, entry: SessionEntry) -> None:
        if entry.stream is not self:
            raise detached_error()

    def log_fields(self, **more: object) -> dict[str, object]:
        name = self._entry.name if self._entry is not None else "-"
        return {"session": name, "identity": self._identity, **more}


def detached_error() -> FrameError:
    """What a stream is told whose session is no longer its own."""
    return FrameError(ErrorCode.UNKNOWN_SESSION, "this session has ended, or was resumed on another stream")


async def _wait_pending(pending: Future[Verdict]) -> None:
    """Wait until a verdict is there, or cannot be: who asked will hear of that. Being cancelled leaves it in peace."""
    waiting = asyncio.wrap_future(pending)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([waiting])
