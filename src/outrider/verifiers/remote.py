"""Our cloud service as a verifier: sessions that survive the network.

A request is sent until it is answered: over the session's stream; over a new stream that resumes the session, if the
old one broke; in a new session with the same tokens, if the cloud has lost the old one. Whatever happened in between,
the answer is the same, for every request says where it stands.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from itertools import count
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_delay

from outrider.core.acceptance import Verdict
from outrider.core.decoder import Verify
from outrider.engines.base import Prompt
from outrider.errors import (
    CloudLost,
    CloudRefused,
    DecodingError,
    OutriderError,
    PromptError,
    SettingsError,
    StateError,
    VocabularyMismatch,
)
from outrider.netem.conditions import Conditions as Net
from outrider.verifiers.base import Conditions, Description
from outrider.wire import schema
from outrider.wire.connection import GOODBYE_NAME, Connection
from outrider.wire.ledger import Ledger
from outrider.wire.media import pack_media
from outrider.wire.messages import Code, digest, pack_ids, pack_settings, pack_verify, unpack_verdict
from outrider.wire.status import CallFailed, Disconnected, Status, Untrusted
from outrider.wire.stream import Stream
from outrider.wire.tls import ClientTls

T = TypeVar("T")
log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0  # s between attempts
MEDIA_PART = 256 * 1024  # bytes in one Media frame

_REFUSED: dict[int, type[OutriderError]] = {
    Code.VOCABULARY: VocabularyMismatch,
    Code.SETTINGS: SettingsError,
    Code.PROMPT: PromptError,
    Code.CONDITIONING: PromptError,
    Code.TOO_LARGE: PromptError,
    Code.DECODING: DecodingError,
    Code.INVALID: CloudRefused,
    Code.PROTOCOL: CloudRefused,
    Code.MODEL: CloudRefused,
}
_NO_RETRY = {
    Status.UNAUTHENTICATED,
    Status.PERMISSION_DENIED,
    Status.UNIMPLEMENTED,
    Status.RESOURCE_EXHAUSTED,
    Status.INVALID_ARGUMENT,
}


class _Again(Exception):
    """This attempt failed and another may not. after: seconds that the cloud asks us to wait."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class RemoteVerifier:
    """Verdicts from `outrider cloud` at host:port.

    deadline: seconds that one answer may take before the attempt is given up. patience: seconds of attempts before
    `CloudLost`. net: an emulated network in between.

    Raises (every method that asks the cloud):
        CloudLost: no answer through all attempts.
        CloudRefused: the cloud knows us not, or says no in a way that trying again does not change.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        net: Net = Net(),
        deadline: float = 30.0,
        patience: float = 10.0,
    ) -> None:
        self.name = f"grpc://{host}:{port}"
        self.deadline, self.patience = deadline, patience
        self.connection = Connection(host, port, tls=tls, token=token, net=net)
        self._description: Description | None = None
        self.model = b""
        self._sessions: dict[int, _RemoteSession] = {}
        self._numbers = count(1)

    def __enter__(self) -> RemoteVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Close what is open, and the connection."""
        for session in list(self._sessions):
            self.close(session)
        self.connection.close()

    def describe(self) -> Description:
        """Asked once; a service that later turns out to be another is refused."""
        if self._description is None:
            self._description = self.connection.run(self._retrying(self._describe)).result()
        return self._description

    def open(self, prompt: Prompt, conditions: Conditions) -> int:
        self.describe()
        number = next(self._numbers)
        self._sessions[number] = _RemoteSession(self, prompt, conditions)
        return number

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        """`verify`, without waiting for the answer."""
        found = self._find(session)
        return self.connection.run(self._retrying(found.verify, request))

    def verify(self, session: int, request: Verify) -> Verdict:
        return self.submit(session, request).result()

    def generate(self, session: int) -> Iterator[Verdict]:
        found = self._find(session)
        while True:
            yield self.connection.run(self._retrying(found.generated)).result()

    def ledger(self, session: int) -> Ledger:
        """What the session has cost so far, transport that nobody else claimed included."""
        return self.connection.run(self._find(session).claim()).result()

    def close(self, session: int) -> None:
        """Tell the cloud, without waiting for it."""
        found = self._sessions.pop(session, None)
        if found is not None:
            self.connection.run(found.leave())

    def _find(self, session: int) -> _RemoteSession:
        if session not in self._sessions:
            raise StateError(f"session {session} is not open")
        return self._sessions[session]

    # In the connection's loop -------------------------------------------------------------------------------

    async def _describe(self) -> Description:
        try:
            answer = await self.connection.describe(self.deadline)
        except (CallFailed, Disconnected) as error:
            raise self.failure(error) from error
        if answer.protocol != schema.VERSION:
            raise CloudRefused(f"{self.name} speaks protocol {answer.protocol}, this edge {schema.VERSION}")
        self.model = answer.model
        return Description(
            f"{answer.name} at {self.name}",
            answer.vocab_size,
            answer.row_count,
            tuple(answer.eos_ids),
            answer.fingerprint.decode(),
            answer.max_length or None,
            answer.audio_seconds,
            lambda: self.connection.run(self._retrying(self._vocabulary)).result(),
        )

    async def _vocabulary(self) -> list[str]:
        try:
            return await self.connection.vocabulary(self.deadline)
        except (CallFailed, Disconnected) as error:
            raise self.failure(error) from error

    async def _retrying(self, attempt: Callable[..., Awaitable[T]], *args: object) -> T:
        """Attempts, with growing pauses, until one succeeds or patience ends."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Again),
            stop=stop_after_delay(self.patience),
            wait=self._pause,
            before_sleep=self._say,
            reraise=True,
        )
        try:
            return await retrying(attempt, *args)
        except _Again as last:
            raise CloudLost(f"{self.name} cannot be reached: {last}") from last

    def _pause(self, state: RetryCallState) -> float:
        """Seconds before the next attempt: doubling, at least what the cloud asked for, and no longer than patience."""
        failed = state.outcome.exception() if state.outcome else None
        asked = failed.after if isinstance(failed, _Again) else 0.0
        growing = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (state.attempt_number - 1))
        spread = max(asked, growing) * random.uniform(1.0, 1.25)  # so that edges do not come back in step
        return min(spread, max(0.0, self.patience - (state.seconds_since_start or 0.0)))

    def _say(self, state: RetryCallState) -> None:
        reason = state.outcome.exception() if state.outcome else None
        log.info("%s: attempt %d failed (%s)", self.name, state.attempt_number, reason)

    def failure(self, error: CallFailed | Disconnected) -> Exception:
        """What a failed call means."""
        if isinstance(error, CallFailed) and error.status in _NO_RETRY:
            return CloudRefused(f"{self.name} refused: {error.details}")
        if isinstance(error, Untrusted):
            return CloudRefused(f"{self.name} is not trusted: {error}")
        return _Again(str(error))


class _RemoteSession:
    """One session as the edge keeps it. `known`: the tokens that the cloud has, as far as it told us."""

    def __init__(self, owner: RemoteVerifier, prompt: Prompt, conditions: Conditions) -> None:
        self._owner, self._prompt, self._conditions = owner, prompt, conditions
        self._account = owner.connection.account
        self.known = list(prompt.ids)
        self.rounds = 0
        self.ledger = Ledger()
        self._id: bytes | None = None
        self._fresh = False  # opened by the attempt at hand: the cloud cannot have lost track of it
        self._stream: Stream | None = None
        self._generating = self._left = False
        self._unanswered: list[tuple[str, int]] = []  # frames by kind and cost, since the last answer

    async def verify(self, request: Verify) -> Verdict:
        """One attempt."""
        frame = pack_verify(request)
        verdict = await self._exchange(frame)
        self._check(verdict, request)
        self.known += [*request.new_ids, *request.draft_ids[: verdict.accepted], verdict.next_token]
        self.rounds, self._fresh = request.round, False
        return verdict

    async def generated(self) -> Verdict:
        """One attempt at the next token of cloud-only decoding."""
        round_ = self.rounds + 1
        start = schema.Request(generate=schema.Generate(round=round_, base_length=len(self.known)))
        verdict = await self._exchange(None if self._generating and self._stream else start)
        self._check(verdict, Verify(round_, len(self.known), (), ()))
        self._generating = True
        self.known.append(verdict.next_token)
        self.rounds = round_
        return verdict

    async def claim(self) -> Ledger:
        link = self._owner.connection.link
        self._account.claim_transport(self.ledger, link.up, link.down)
        return self.ledger

    async def leave(self) -> None:
        """Say goodbye, if there is somebody to say it to."""
        task = asyncio.current_task()
        if task is not None:
            task.set_name(GOODBYE_NAME)
        self._left = True
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            async with asyncio.timeout(self._owner.deadline):
                await stream.send(schema.Request(close=schema.Close()).SerializeToString(), last=True)
                while await stream.receive() is not None:
                    pass
        except (CallFailed, Disconnected, TimeoutError) as error:
            log.debug("the session could not be closed: %s", error)
        finally:
            stream.cancel()

    # One attempt --------------------------------------------------------------------------------------------

    async def _exchange(self, frame: schema.Request | None) -> Verdict:
        """Send a frame, on a new stream if need be, and wait for its verdict."""
        link, before = self._owner.connection.link, self._owner.connection.link.down
        try:
            async with asyncio.timeout(self._owner.deadline):
                greeted = await self._greet()
                if frame is not None:
                    await self._send(frame)
                if greeted:
                    self._id = (await self._receive("opened")).opened.session
                return unpack_verdict((await self._receive("verdict")).verdict)
        except (CallFailed, Disconnected) as error:
            self._hang_up()
            raise self._owner.failure(error) from error
        except TimeoutError as error:
            self._hang_up()
            if link.down == before:  # not slow: silent
                self._owner.connection.renew()
            raise _Again(f"no answer within {self._owner.deadline:g} s") from error
        except BaseException:
            self._hang_up()
            raise

    async def _greet(self) -> bool:
        """Make sure that there is a stream; true if an Opened is to be expected on it."""
        if self._stream is not None:
            return False
        stream = await self._owner.connection.open_stream()
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
        prompt, conditions = self._prompt, self._conditions
        kind, media = pack_media(prompt, withheld=conditions.withheld)
        opening = schema.Open(
            protocol=schema.VERSION,
            fingerprint=self._owner.describe().fingerprint.encode(),
            model=self._owner.model,
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
        self._unanswered.append((str(frame.WhichOneof("frame")), self._account.sent(len(data))))
        await self._present().send(data)

    async def _receive(self, kind: str) -> schema.Answer:
        data = await self._present().receive()
        if data is None:
            raise _Again("the cloud ended the stream")
        answer = schema.Answer.FromString(data)
        got = str(answer.WhichOneof("frame"))
        self._account.book(self.ledger, got, len(data) + 5, up=False)
        if got == "error":
            raise self._refused(answer.error)
        if got != kind:
            raise CloudRefused(f"{self._owner.name} answered {got} where {kind} was due")
        if got == "verdict":
            self._book_answered()
        return answer

    def _present(self) -> Stream:
        if self._stream is None:
            raise Disconnected("the session was closed meanwhile")
        return self._stream

    def _book_answered(self) -> None:
        for kind, cost in self._unanswered:
            self._account.settled(cost)
            self._account.book(self.ledger, kind, cost, up=True)
        self._unanswered.clear()

    def _hang_up(self) -> None:
        """Give the stream up. What it carried and nobody answered counts as transport."""
        for _, cost in self._unanswered:
            self._account.settled(cost)
        self._unanswered.clear()
        if self._stream is not None:
            self._stream.cancel()
        self._stream = None

    def _refused(self, error: schema.Error) -> Exception:
        """What an Error frame means for this attempt."""
        message = f"{self._owner.name}: {error.message}"
        if error.code == Code.UNKNOWN_SESSION or (error.code == Code.BASE_LENGTH and not self._fresh):
            self._id = None  # the cloud lost it, or lost track: begin again with all tokens
            return _Again(message)
        if error.code in (Code.LIMIT, Code.DRAINING, Code.INTERNAL):
            return _Again(message, error.retry_after_ms / 1000)
        if error.code == Code.BASE_LENGTH:
            return StateError(message)
        return _REFUSED.get(error.code, CloudRefused)(message)

    def _check(self, verdict: Verdict, request: Verify) -> None:
        """Raise where the cloud's answer cannot be one to what was asked."""
        fits = verdict.round == request.round and 0 <= verdict.accepted <= len(request.draft_ids)
        if not fits or verdict.next_token >= self._conditions.vocab_size:
            raise CloudRefused(f"{self._owner.name} sent a verdict that does not answer round {request.round}")
