"""One stream of one edge, frame by frame: what is allowed when, and what each frame does to the session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.cloud.sessions import Record
from outrider.core.acceptance import Verdict
from outrider.core.actions import Verify
from outrider.engines.base import Prompt
from outrider.verifiers.base import Conditions
from outrider.verifiers.local import open_session
from outrider.wire import schema
from outrider.wire.media import unpack_media
from outrider.wire.messages import (
    Code,
    Refusal,
    check_ids,
    digest,
    pack_verdict,
    unpack_accept,
    unpack_ids,
    unpack_settings,
    unpack_verify,
)

if TYPE_CHECKING:
    from outrider.cloud.service import Service

log = logging.getLogger(__name__)

CARRYING = (schema.AUDIO, schema.FEATURES)  # kinds of media that Media frames bring


@dataclass
class _Opening:
    """An Open whose media is still on its way."""

    frame: schema.Open
    parts: list[bytes] = field(default_factory=list)  # one buffer that grows would be copied, and leave holes
    size: int = 0


class Conversation:
    """What a stream has said so far. `take` raises what `as_refusal` in service.py turns into an Error frame."""

    def __init__(self, service: Service, identity: str) -> None:
        self._service, self._identity = service, identity
        self._opening: _Opening | None = None
        self._record: Record | None = None
        self.lost = asyncio.Event()  # its session has ended, or is another stream's

    def take(self, request: schema.Request) -> AsyncIterator[schema.Answer]:
        """The answers to one frame."""
        kind = request.WhichOneof("frame")
        if self._opening is not None and kind != "media":
            raise Refusal(Code.INVALID, f"{kind} where media was announced")
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
        if self._record is None or kind not in ("verify", "generate"):
            return False
        rounds: int = getattr(request, kind).round
        return rounds != self._record.session.rounds

    def lose(self) -> None:
        self.lost.set()

    @property
    def has_session(self) -> bool:
        return self._record is not None

    def end(self) -> None:
        """The stream is over. The session stays, for another stream to resume."""
        self._forget_opening()
        if self._record is not None and self._record.stream is self:
            self._record.give_to(None)

    # Opening ------------------------------------------------------------------------------------------------

    async def _open(self, frame: schema.Open) -> AsyncIterator[schema.Answer]:
        self._check_unused()
        self._service.check_rate(self._identity)
        self._service.check_opening(frame)
        self._service.sessions.check_room(self._identity)  # before media is sent in vain
        if frame.media in CARRYING:
            self._service.check_hearing()
            self._opening = _Opening(frame)
            return
        yield await self._begin(frame, b"")

    async def _media(self, frame: schema.Media) -> AsyncIterator[schema.Answer]:
        if self._opening is None:
            raise Refusal(Code.INVALID, "media that no opening announced")
        if frame.more and not frame.data:
            raise Refusal(Code.INVALID, "an empty part of media, with more to follow")
        opening, limit = self._opening, self._service.limits.max_media_bytes
        data = frame.data
        if opening.size + len(data) > limit:
            raise Refusal(Code.TOO_LARGE, f"media: at most {limit} bytes are taken here")
        self._service.expect_media(self._identity, len(data))
        opening.parts.append(data)
        opening.size += len(data)
        if not frame.more:
            yield await self._begin(opening.frame, b"".join(opening.parts))
            self._forget_opening()

    def _forget_opening(self) -> None:
        """Its media is a session's now, or nobody's."""
        opening, self._opening = self._opening, None
        if opening is not None:
            self._service.expect_media(self._identity, -opening.size)

    async def _begin(self, frame: schema.Open, media: bytes) -> schema.Answer:
        async with self._service.openings.turn(self._identity):
            record = await asyncio.to_thread(self._build, frame, media)
        self._service.check_serving()
        record.give_to(self)
        self._service.sessions.add(record)
        self._record = record
        self._service.metrics.opened()
        log.info("session opened", extra=self.fields(tokens=len(record.session.ids), bytes=len(media)))
        return schema.Answer(opened=schema.Opened(session=record.id))

    def _build(self, frame: schema.Open, media: bytes) -> Record:
        """A session out of its opening. In a worker thread: media takes time to unpack."""
        service, engine = self._service, self._service.engine
        ids = unpack_ids(frame.prompt, service.prompt_limit, "a prompt")
        committed = unpack_ids(frame.committed, service.length_limit - len(ids), "the output")
        if not ids:
            raise Refusal(Code.PROMPT, "the prompt is empty")
        check_ids((*ids, *committed), engine.row_count, "the prompt")
        if frame.conditioning != digest(ids, media):
            raise Refusal(Code.CONDITIONING, "prompt and media are not those that the opening announced")
        settings = unpack_settings(frame.settings, engine.vocab_size)
        conditions = Conditions(settings, unpack_accept(frame.accept), frame.vocab_size)
        kind: int = frame.media

        prompt = unpack_media(engine, ids, kind, media)
        session = open_session(engine, prompt, conditions, committed)
        ready = [prompt]
        service.keep_ready(ready)

        def load_prompt() -> Prompt:
            try:
                return ready.pop()
            except IndexError:
                return unpack_media(engine, ids, kind, media)

        return Record(self._identity, session, settings, load_prompt, len(media))

    async def _resume(self, frame: schema.Resume) -> AsyncIterator[schema.Answer]:
        self._check_unused()
        record = self._service.sessions.find(frame.session, self._identity)
        record.give_to(self)
        if record.pending is not None:
            await _settled(record.pending)
        self._check_mine(record)  # another stream may have come since
        session = record.session
        known = session.ids[: frame.length]
        if not session.prompt_length <= frame.length <= len(session.ids) or digest(known) != frame.digest:
            self._service.sessions.drop(record)
            raise Refusal(Code.UNKNOWN_SESSION, "this session holds other tokens than the edge's")
        session.rewind(frame.length)
        self._record = record
        self._service.sessions.touch(record)
        log.info("session resumed", extra=self.fields(tokens=frame.length))
        yield schema.Answer(opened=schema.Opened(session=record.id))

    def _check_unused(self) -> None:
        self._service.check_serving()
        if self._record is not None:
            raise Refusal(Code.INVALID, "this stream has its session already: one stream, one session")

    # Deciding -----------------------------------------------------------------------------------------------

    async def _verify(self, frame: schema.Verify) -> AsyncIterator[schema.Answer]:
        record, engine = self._own(), self._service.engine
        self._service.check_rate(self._identity)
        self._service.check_count(len(frame.new_ids))
        request = unpack_verify(frame, record.session.vocab_size, engine.row_count)
        yield pack_verdict(await self._decide(record, request), len(request.draft_ids))

    async def _generate(self, frame: schema.Generate) -> AsyncIterator[schema.Answer]:
        """The target's own tokens until one ends the output, as far as this side can tell.

        At least one is asked for: a wrong base length is an error, however little room it leaves.
        """
        record, engine = self._own(), self._service.engine
        self._service.check_count(len(frame.new_ids))
        first = schema.Verify(round=frame.round, base_length=frame.base_length, new_ids=frame.new_ids)
        request = unpack_verify(first, record.session.vocab_size, engine.row_count)
        ends, room = self._service.end_ids(record), self._service.room(record, request.base_length)
        if room < 1 and request.base_length == len(record.session.ids) + len(request.new_ids):
            raise Refusal(Code.INVALID, f"a sequence of {request.base_length} tokens is complete: none may follow")
        for _ in range(max(1, room)):
            await self._service.keep_pace(self._identity)
            verdict = await self._decide(record, request)
            self._service.metrics.generated()
            yield pack_verdict(verdict, 0)
            if verdict.next_token in ends:
                return
            request = Verify(request.round + 1, len(record.session.ids), (), ())

    async def _decide(self, record: Record, request: Verify) -> Verdict:
        service = self._service
        self._check_mine(record)
        service.check_length(request)
        record.pending = service.batcher.submit(record, request)
        verdict = await asyncio.wrap_future(record.pending)
        service.sessions.touch(record)
        return verdict

    async def _close(self) -> AsyncIterator[schema.Answer]:
        record = self._own()
        self._check_mine(record)
        log.info("session closed", extra=self.fields(tokens=len(record.session.ids)))
        record.stream = self._record = None  # this stream ends it, and does not lose it
        self._service.sessions.drop(record)
        return
        yield

    def _own(self) -> Record:
        if self._record is None:
            raise Refusal(Code.INVALID, "a stream begins with an Open or a Resume")
        return self._record

    def _check_mine(self, record: Record) -> None:
        if record.stream is not self:
            raise lost()

    def fields(self, **more: object) -> dict[str, object]:
        name = self._record.name if self._record is not None else "-"
        return {"session": name, "identity": self._identity, **more}


def lost() -> Refusal:
    """What a stream is told whose session is no longer its own."""
    return Refusal(Code.UNKNOWN_SESSION, "this session has ended, or was resumed on another stream")


async def _settled(pending: Future[Verdict]) -> None:
    """Wait until a verdict is there, or cannot be: who asked will hear of that. Being cancelled leaves it in peace."""
    waiting = asyncio.wrap_future(pending)
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([waiting])
