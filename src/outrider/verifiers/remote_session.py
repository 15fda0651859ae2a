"""One session with the cloud: its stream, its tokens, and what it takes to go on after a loss."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from outrider.core.acceptance import Verdict
from outrider.core.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import CloudRefused, StateError
from outrider.verifiers.base import Conditions
from outrider.verifiers.refusals import Again, of_call, of_frame
from outrider.verifiers.retrying import SLOWEST
from outrider.wire import schema
from outrider.wire.connection import Connection
from outrider.wire.ledger import PREFIX_BYTES, Ledger
from outrider.wire.media import pack_media
from outrider.wire.messages import Code, digest, pack_ids, pack_settings, pack_verify, parse_answer, unpack_verdict
from outrider.wire.status import CallFailed, Disconnected
from outrider.wire.stream import Stream
from outrider.wire.worker import GOODBYE_NAME

log = logging.getLogger(__name__)

MEDIA_PART = 256 * 1024  # bytes in one Media frame


@dataclass(frozen=True)
class Peer:
    """The cloud that a session is with. fingerprint, model: as it described itself. deadline: seconds per attempt."""

    name: str
    connection: Connection
    fingerprint: str
    model: bytes
    deadline: float


class RemoteSession:
    """One session as the edge keeps it. `known`: the tokens that the cloud has, as far as it told us.

    Its coroutines run in the connection's loop. `verify` and `generated` are single attempts:

    Raises:
        Again: this one failed, and another may not.
        CloudRefused and other OutriderErrors: the cloud says no.
    """

    def __init__(self, peer: Peer, prompt: Prompt, conditions: Conditions) -> None:
        self._peer, self._prompt, self._conditions = peer, prompt, conditions
        self._account = peer.connection.endpoint.accounting
        self.known = list(prompt.ids)
        self.rounds = 0
        self.ledger = Ledger()
        self._id: bytes | None = None
        self._fresh = False  # opened by the attempt at hand: the cloud cannot have lost track of it
        self._stream: Stream | None = None
        self._dropped: Stream | None = None  # whose answer nobody waits for any more
        self._generating = self._left = False
        self._unanswered: list[tuple[str, int]] = []  # frames by kind and cost, since the last answer
        self._media = pack_media(prompt, withheld=conditions.withheld)

    async def verify(self, request: Verify) -> Verdict:
        """One attempt."""
        frame = pack_verify(request)
        verdict = await self._exchange(frame, request)
        self.known += [*request.new_ids, *request.draft_ids[: verdict.accepted], verdict.next_token]
        self.rounds, self._fresh = request.round, False
        return verdict

    async def generated(self) -> Verdict:
        """One attempt at the next token of cloud-only decoding."""
        round_ = self.rounds + 1
        start = schema.Request(generate=schema.Generate(round=round_, base_length=len(self.known)))
        frame = None if self._generating and self._stream else start
        verdict = await self._exchange(frame, Verify(round_, len(self.known), (), ()))
        self.known.append(verdict.next_token)
        self.rounds = round_
        return verdict

    async def claim(self) -> Ledger:
        endpoint = self._peer.connection.endpoint
        self._account.claim_transport(self.ledger, endpoint.up, endpoint.down)
        return self.ledger

    async def leave(self) -> None:
        """Say goodbye, if there is somebody to say it to."""
        task = asyncio.current_task()
        if task is not None:
            task.set_name(GOODBYE_NAME)
        self._left = True
        stream, self._stream = self._stream or self._dropped, None
        if stream is None:
            return
        try:
            async with asyncio.timeout(self._peer.deadline):
                if self._generating:
                    stream = await self._interrupt(stream)
                await stream.send(schema.Request(close=schema.Close()).SerializeToString(), last=True)
                while await stream.receive() is not None:
                    pass
        except (CallFailed, Disconnected, TimeoutError) as error:
            log.debug("the session could not be closed: %s", error)
        finally:
            stream.cancel()

    async def _interrupt(self, stream: Stream) -> Stream:
        """Stop the tokens that are still coming; a stream on which the session can be closed."""
        if self._id is None:  # cancelled before it was opened
            opened = await stream.receive()
            self._id = None if opened is None else parse_answer(opened).opened.session or None
        if self._id is None:
            return stream
        stream.cancel()
        fresh = await self._peer.connection.open_stream()
        try:
            for frame in self._resume():
                await fresh.send(frame.SerializeToString())
        except BaseException:  # a time limit too: nobody else knows of this stream
            fresh.cancel()
            raise
        return fresh

    # One attempt --------------------------------------------------------------------------------------------

    async def _exchange(self, frame: schema.Request | None, request: Verify) -> Verdict:
        """Send a frame, on a new stream if need be, and wait for the verdict that answers `request`."""
        before = self._peer.connection.endpoint.down
        try:
            async with asyncio.timeout(self._limit):
                greeted = await self._greet()
                if frame is not None:
                    await self._send(frame)
                if greeted:
                    self._id = (await self._receive("opened")).opened.session
                verdict = unpack_verdict((await self._receive("verdict")).verdict)
                self._check(verdict, request)
                return verdict
        except (CallFailed, Disconnected) as error:
            self._hang_up()
            raise of_call(self._peer.name, error, token=self._peer.connection.has_token) from error
        except TimeoutError as error:
            self._hang_up()
            if self._peer.connection.endpoint.down == before:  # not slow: silent
                self._peer.connection.renew()
            raise Again(f"no answer within {self._limit:g} s") from error
        except asyncio.CancelledError:
            self._drop()
            raise
        except BaseException:
            self._hang_up()
            raise

    @property
    def _limit(self) -> float:
        """Seconds that an attempt may take: the deadline, and time for the recording where it has to be sent."""
        return self._peer.deadline + (0.0 if self._id is not None else len(self._media[1]) / SLOWEST)

    async def _greet(self) -> bool:
        """Make sure that there is a stream; true if an Opened is to be expected on it."""
        if self._stream is not None:
            return False
        stream = await self._peer.connection.open_stream()
        if self._left:  # nobody waits for the answer any more, nor would anybody close this stream
            stream.cancel()
            raise StateError("the session is closed")
        self._stream = stream
        self._generating = False
        self._fresh = self._id is None
        for frame in self._open() if self._fresh else self._resume():
            await self._send(frame)
        return True

    def _resume(self) -> list[schema.Request]:
        known = digest(self.known)
        return [schema.Request(resume=schema.Resume(session=self._id, length=len(self.known), digest=known))]

    def _open(self) -> list[schema.Request]:
        """The opening, and the media that it announces. Tokens that are settled already come along."""
        prompt, conditions, (kind, media) = self._prompt, self._conditions, self._media
        opening = schema.Open(
            protocol=schema.VERSION,
            fingerprint=self._peer.fingerprint.encode(),
            model=self._peer.model,
            settings=pack_settings(conditions.settings),
            accept="" if conditions.accept == "exact" else conditions.accept,
            vocab_size=conditions.vocab_size,
            prompt=pack_ids(prompt.ids),
            committed=pack_ids(self.known[len(prompt.ids) :]),
            media=kind,  # type: ignore[arg-type]
            conditioning=digest(prompt.ids, media),
        )
        parts = [media[i : i + MEDIA_PART] for i in range(0, len(media), MEDIA_PART)]
        frames = [schema.Media(data=part, more=n + 1 < len(parts)) for n, part in enumerate(parts)]
        return [schema.Request(open=opening), *(schema.Request(media=frame) for frame in frames)]

    async def _send(self, frame: schema.Request) -> None:
        data = frame.SerializeToString()
        kind = str(frame.WhichOneof("frame"))
        self._generating = self._generating or kind == "generate"
        self._unanswered.append((kind, self._account.sent(len(data))))
        await self._present().send(data)

    async def _receive(self, kind: str) -> schema.Answer:
        data = await self._present().receive()
        if data is None:
            raise Again("the cloud ended the stream")
        answer = parse_answer(data)
        got = str(answer.WhichOneof("frame"))
        self._account.book(self.ledger, got, len(data) + PREFIX_BYTES, up=False)
        if got == "error":
            raise self._refused(answer.error)
        if got != kind:
            raise CloudRefused(f"{self._peer.name} answered {got} where {kind} was due")
        if got == "verdict":
            self._settle(answered=True)
        return answer

    def _present(self) -> Stream:
        if self._stream is None:
            raise Disconnected("the session was closed meanwhile")
        return self._stream

    def _settle(self, *, answered: bool) -> None:
        """Close the books on what was sent. What nobody answered counts as transport."""
        for kind, cost in self._unanswered:
            self._account.settled(cost)
            if answered:
                self._account.book(self.ledger, kind, cost, up=True)
        self._unanswered.clear()

    def _hang_up(self) -> None:
        """Give the stream up."""
        self._settle(answered=False)
        if self._stream is not None:
            self._stream.cancel()
        self._stream = None

    def _drop(self) -> None:
        """Wait no longer. The session can still be closed over this stream."""
        self._settle(answered=False)
        self._dropped, self._stream = self._stream, None

    def _refused(self, error: schema.Error) -> Exception:
        """What an Error frame means for this attempt."""
        lost_track = error.code == Code.BASE_LENGTH and not self._fresh
        if error.code == Code.UNKNOWN_SESSION or lost_track:
            self._id = None  # begin again with all tokens
        if error.code == Code.DRAINING:
            self._peer.connection.retire()  # whoever serves the next connection may take the session
        return Again(error.message) if lost_track else of_frame(self._peer.name, error)

    def _check(self, verdict: Verdict, request: Verify) -> None:
        """Raise where the cloud's answer cannot be one to what was asked."""
        fits = verdict.round == request.round and 0 <= verdict.accepted <= len(request.draft_ids)
        fits = fits and 0 <= verdict.next_token < self._conditions.vocab_size
        fits = fits and all(offset <= verdict.accepted for offset in verdict.near_ties)
        if not (fits and verdict.disagreed <= verdict.audited <= len(request.new_ids)):
            raise CloudRefused(f"{self._peer.name} sent a verdict that does not answer round {request.round}")
