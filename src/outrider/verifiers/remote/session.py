"""The edge's half of a session with the cloud: its stream, its tokens, and its recovery after a lost connection."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import CloudRefused, StateError
from outrider.protocol import schema
from outrider.protocol.media_messages import pack_media
from outrider.protocol.messages import (
    ErrorCode,
    digest,
    pack_ids,
    pack_settings,
    pack_verify,
    parse_answer,
    unpack_verdict,
)
from outrider.sampling.acceptance import Verdict
from outrider.sampling.top_logprobs import ROUNDING_ERROR
from outrider.transport.byte_counts import PREFIX_BYTES, ByteCounts
from outrider.transport.connection import Connection
from outrider.transport.event_loop_thread import CLOSING_TASK_NAME
from outrider.transport.status import CallFailed, Disconnected
from outrider.transport.stream import Stream
from outrider.verifiers.base import SessionParams
from outrider.verifiers.remote.errors import map_call_error, map_error_frame
from outrider.verifiers.remote.kept_sessions import KeptSession, KeptSessions
from outrider.verifiers.retry import MIN_UPLOAD_RATE, Retryable

log = logging.getLogger(__name__)

MEDIA_CHUNK = 256 * 1024  # bytes in one Media frame


@dataclass(frozen=True)
class Peer:
    """The cloud of a session. fingerprint, model: from its description. deadline: seconds per attempt.

    kept: the closed sessions that the next ones may continue.
    """

    name: str
    connection: Connection
    fingerprint: str
    model: bytes
    deadline: float
    kept: KeptSessions


class RemoteSession:
    """The edge's half of one session. Its coroutines run in the connection's event loop.

    tokens: the prompt and the tokens that the cloud has confirmed. `verify` and `generate_next` are single attempts.

    Raises:
        Retryable: the attempt failed and another one may succeed.
        CloudRefused and other OutriderErrors: the cloud refused the request.
    """

    def __init__(self, peer: Peer, prompt: Prompt, params: SessionParams) -> None:
        self._peer, self._prompt, self._params = peer, prompt, params
        self._accounting = peer.connection.endpoint.accounting
        self.tokens = list(prompt.ids)
        self.rounds = 0
        self.byte_counts = ByteCounts()
        self._id: bytes | None = None
        self._just_opened = False  # by the current attempt, so the cloud cannot be out of sync with it
        self._stream: Stream | None = None
        self._detached: Stream | None = None  # the stream of a cancelled attempt, kept to close the session
        self._generating = self._closed = False
        self._pending_frames: list[tuple[str, int]] = []  # kind and cost of the frames sent since the last verdict
        self._media = pack_media(prompt, hides_audio=params.hides_audio)
        self._base: KeptSession | None = None  # that the last opening continued

    async def verify(self, request: Verify) -> Verdict:
        """Make one attempt to verify a block. A stream of `generate_next` ends, and another one resumes the session."""
        if self._generating:
            self._cancel_stream()
        frame = pack_verify(request)
        verdict = await self._exchange(frame, request)
        self.tokens += [*request.new_ids, *request.draft_ids[: verdict.accepted], verdict.next_token]
        self.rounds, self._just_opened = request.round, False
        return verdict

    async def generate_next(self) -> Verdict:
        """Make one attempt to get the next token of cloud-only decoding."""
        round_ = self.rounds + 1
        start = schema.Request(generate=schema.Generate(round=round_, base_length=len(self.tokens)))
        frame = None if self._generating and self._stream else start
        verdict = await self._exchange(frame, Verify(round_, len(self.tokens), (), ()))
        self.tokens.append(verdict.next_token)
        self.rounds = round_
        return verdict

    async def count_bytes(self) -> ByteCounts:
        """Return the byte counts, including all transport bytes that no session has claimed."""
        endpoint = self._peer.connection.endpoint
        self._accounting.assign_transport(self.byte_counts, endpoint.up, endpoint.down)
        return self.byte_counts

    async def close(self) -> None:
        """Close the session in the cloud, if it has a stream."""
        task = asyncio.current_task()
        if task is not None:
            task.set_name(CLOSING_TASK_NAME)
        self._closed = True
        keeps = False
        if self._id is not None and self.rounds:
            keeps = True
            self._peer.kept.add(KeptSession(self._id, self.tokens, self._media, self._prompt.cache_salt))
        stream, self._stream = self._stream or self._detached, None
        if stream is None:
            return
        try:
            async with asyncio.timeout(self._peer.deadline):
                if self._generating:
                    stream = await self._interrupt(stream)
                await stream.send(schema.Request(close=schema.Close(keep=keeps)).SerializeToString(), last=True)
                while await stream.receive() is not None:
                    pass
        except (CallFailed, Disconnected, TimeoutError) as error:
            log.debug("the session could not be closed: %s", error)
        finally:
            stream.cancel()

    async def _interrupt(self, stream: Stream) -> Stream:
        """Stop cloud-only decoding and return a stream on which the session can be closed."""
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
        except BaseException:  # a timeout as well: the caller has no reference to this stream
            fresh.cancel()
            raise
        return fresh

    # One attempt --------------------------------------------------------------------------------------------

    async def _exchange(self, frame: schema.Request | None, request: Verify) -> Verdict:
        """Send a frame, on a new stream if necessary, and wait for the verdict on `request`."""
        before = self._peer.connection.endpoint.down
        try:
            async with asyncio.timeout(self._timeout):
                is_new_stream = await self._ensure_stream()
                if frame is not None:
                    await self._send(frame)
                if is_new_stream:
                    self._id = (await self._receive("opened")).opened.session
                verdict = unpack_verdict((await self._receive("verdict")).verdict)
                self._check(verdict, request)
                return verdict
        except (CallFailed, Disconnected) as error:
            self._cancel_stream()
            raise map_call_error(self._peer.name, error, token=self._peer.connection.has_token) from error
        except TimeoutError as error:
            self._cancel_stream()
            if self._peer.connection.endpoint.down == before:  # the connection is dead rather than slow
                self._peer.connection.reconnect()
            raise Retryable(f"no answer within {self._timeout:g} s") from error
        except asyncio.CancelledError:
            self._release_pending(is_answered=False)
            self._detached, self._stream = self._stream, None  # kept to close the session
            raise
        except BaseException:
            self._cancel_stream()
            raise

    @property
    def _timeout(self) -> float:
        """Return the time limit of an attempt in seconds, which includes the upload of a recording."""
        return self._peer.deadline + (0.0 if self._id is not None else len(self._media[1]) / MIN_UPLOAD_RATE)

    async def _ensure_stream(self) -> bool:
        """Open a stream unless there is one. Return whether the cloud will send an Opened on it."""
        if self._stream is not None:
            return False
        stream = await self._peer.connection.open_stream()
        if self._closed:  # `close` has run and would not see this stream
            stream.cancel()
            raise StateError("the session is closed")
        self._stream = stream
        self._generating = False
        self._just_opened = self._id is None
        for frame in self._open() if self._just_opened else self._resume():
            await self._send(frame)
        return True

    def _resume(self) -> list[schema.Request]:
        token_digest = digest(self.tokens)
        return [schema.Request(resume=schema.Resume(session=self._id, length=len(self.tokens), digest=token_digest))]

    def _open(self) -> list[schema.Request]:
        """Return the Open frame, with the committed tokens, and the Media frames that it announces.

        A kept session with a common prefix is continued: what the cloud has of it is not sent again.
        """
        prompt, params, (kind, media) = self._prompt, self._params, self._media
        base, length = (None, 0) if self._base is not None else self._peer.kept.take(prompt)
        self._base, conditioning = base or self._base, digest(prompt.ids, media)
        if base is not None and media and base.media == self._media:
            kind, media = schema.KEPT, b""
        opening = schema.Open(
            protocol=schema.VERSION,
            fingerprint=self._peer.fingerprint.encode(),
            model=self._peer.model,
            settings=pack_settings(params.settings),
            accept="" if params.accept == "exact" else params.accept,
            vocab_size=params.vocab_size,
            prompt=pack_ids(prompt.ids[length:]),
            committed=pack_ids(self.tokens[len(prompt.ids) :]),
            media=kind,  # type: ignore[arg-type]
            conditioning=conditioning,
            base=None if base is None else base.reference(length),
        )
        parts = [media[i : i + MEDIA_CHUNK] for i in range(0, len(media), MEDIA_CHUNK)]
        frames = [schema.Media(data=part, more=n + 1 < len(parts)) for n, part in enumerate(parts)]
        return [schema.Request(open=opening), *(schema.Request(media=frame) for frame in frames)]

    async def _send(self, frame: schema.Request) -> None:
        data = frame.SerializeToString()
        kind = str(frame.WhichOneof("frame"))
        self._generating = self._generating or kind == "generate"
        self._pending_frames.append((kind, self._accounting.add_pending(len(data))))
        await self._require_stream().send(data)

    async def _receive(self, kind: str) -> schema.Answer:
        data = await self._require_stream().receive()
        if data is None:
            raise Retryable("the cloud ended the stream")
        answer = parse_answer(data)
        got = str(answer.WhichOneof("frame"))
        self._accounting.record(self.byte_counts, got, len(data) + PREFIX_BYTES, up=False)
        if got == "error":
            raise self._map_refusal(answer.error)
        if got != kind:
            raise CloudRefused(f"{self._peer.name} answered with a frame {got}, expected {kind}")
        if got == "verdict":
            self._release_pending(is_answered=True)
        return answer

    def _require_stream(self) -> Stream:
        if self._stream is None:
            raise Disconnected("the session was closed during the request")
        return self._stream

    def _release_pending(self, *, is_answered: bool) -> None:
        """Assign the bytes of the sent frames to their kinds. Unanswered frames count as transport."""
        for kind, cost in self._pending_frames:
            self._accounting.remove_pending(cost)
            if is_answered:
                self._accounting.record(self.byte_counts, kind, cost, up=True)
        self._pending_frames.clear()

    def _cancel_stream(self) -> None:
        """Cancel the stream. The next attempt opens a new one."""
        self._release_pending(is_answered=False)
        if self._stream is not None:
            self._stream.cancel()
        self._stream = None

    def _map_refusal(self, error: schema.Error) -> Exception:
        """Return the exception for an Error frame, and prepare the next attempt."""
        is_out_of_sync = error.code == ErrorCode.BASE_LENGTH and not self._just_opened
        if error.code == ErrorCode.UNKNOWN_SESSION or is_out_of_sync:
            if self._id is None and self._base is not None:
                self._peer.kept.drop_until(self._base)
            self._id = None  # the next attempt opens a new session with all tokens
        if error.code == ErrorCode.DRAINING:
            self._peer.connection.drain()  # the next connection may reach a server that accepts sessions
        return Retryable(error.message) if is_out_of_sync else map_error_frame(self._peer.name, error)

    def _check(self, verdict: Verdict, request: Verify) -> None:
        """Raise CloudRefused if the verdict does not fit the request."""
        fits = verdict.round == request.round and 0 <= verdict.accepted <= len(request.draft_ids)
        fits = fits and 0 <= verdict.next_token < self._params.vocab_size
        fits = fits and all(offset <= verdict.accepted for offset in verdict.near_ties)
        fits = fits and (self._params.settings.logprobs is None or _has_logprobs(verdict, request))
        if not (fits and verdict.disagreed <= verdict.audited <= len(request.new_ids)):
            raise CloudRefused(f"{self._peer.name} sent a verdict that does not answer round {request.round}")


def _has_logprobs(verdict: Verdict, request: Verify) -> bool:
    """Return whether a verdict has valid log-probabilities of its tokens."""
    decided = [*request.draft_ids[: verdict.accepted], verdict.next_token]
    if [each.ids[:1] for each in verdict.logprobs] != [(token,) for token in decided]:
        return False
    values = [value for each in verdict.logprobs for value in each.values]
    is_paired = all(len(each.ids) == len(each.values) for each in verdict.logprobs)
    return is_paired and all(value <= ROUNDING_ERROR for value in values)  # NaN compares as false
