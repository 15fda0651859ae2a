"""Our cloud service as a verifier: sessions that survive the network.

A request is sent until it is answered: over the session's stream; over a new stream that resumes the session, if the
old one broke; in a new session with the same tokens, if the cloud has lost the old one. Whatever happened in between,
the answer is the same, for every request says where it stands.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from itertools import count
from typing import TypeVar

from google.protobuf.message import DecodeError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from outrider.core.acceptance import Verdict
from outrider.core.decoder import Verify
from outrider.engines.base import Prompt
from outrider.errors import CloudLost, CloudRefused, StateError
from outrider.netem.conditions import Conditions as Net
from outrider.verifiers.base import Conditions, Description
from outrider.verifiers.refusals import Again, of_call
from outrider.verifiers.remote_session import Peer, RemoteSession
from outrider.wire import schema
from outrider.wire.connection import Connection
from outrider.wire.ledger import Ledger
from outrider.wire.status import CallFailed, Disconnected
from outrider.wire.tls import ClientTls

T = TypeVar("T")
log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0  # s between attempts


class RemoteVerifier:
    """Verdicts from `outrider cloud` at host:port.

    deadline: seconds that one answer may take before the attempt is given up. patience: seconds, from the first failed
    attempt, before `CloudLost`. net: an emulated network in between.

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
        self._model = b""
        self._sessions: dict[int, RemoteSession] = {}
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
        number = next(self._numbers)
        self._sessions[number] = RemoteSession(self._peer(), prompt, conditions)
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

    def _peer(self) -> Peer:
        return Peer(self.name, self.connection, self.describe().fingerprint, self._model, self.deadline)

    def _find(self, session: int) -> RemoteSession:
        if session not in self._sessions:
            raise StateError(f"session {session} is not open")
        return self._sessions[session]

    # In the connection's loop -------------------------------------------------------------------------------

    async def _describe(self) -> Description:
        answer = await self._called(self.connection.describe(self.deadline))
        if answer.protocol != schema.VERSION:
            raise CloudRefused(f"{self.name} speaks protocol {answer.protocol}, this edge {schema.VERSION}")
        if answer.max_drafts < schema.MAX_DRAFTS:
            raise CloudRefused(f"{self.name} takes {answer.max_drafts} drafts at once, not {schema.MAX_DRAFTS}")
        self._model = answer.model
        return Description(
            f"{answer.name} at {self.name}",
            answer.vocab_size,
            answer.row_count,
            tuple(answer.eos_ids),
            answer.fingerprint.decode(errors="replace"),
            answer.max_length or None,
            answer.audio_seconds,
            lambda: self.connection.run(self._retrying(self._vocabulary)).result(),
        )

    async def _vocabulary(self) -> list[str]:
        return await self._called(self.connection.vocabulary(self.deadline))

    async def _called(self, call: Awaitable[T]) -> T:
        """One attempt. A connection on which nothing at all came is not used again."""
        before = self.connection.link.down
        try:
            return await call
        except DecodeError as error:
            raise CloudRefused(f"{self.name} is no outrider cloud: its answer cannot be read") from error
        except (CallFailed, Disconnected) as error:
            if isinstance(error, CallFailed) and self.connection.link.down == before:
                self.connection.renew()
            raise of_call(self.name, error) from error

    async def _retrying(self, attempt: Callable[..., Awaitable[T]], *args: object) -> T:
        """Attempts, with growing pauses, until one succeeds or patience, counted from the first failure, ends."""
        failing = _Failing(self.patience)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Again),
            stop=failing.too_long,
            wait=failing.pause,
            before_sleep=self._say,
            reraise=True,
        )
        try:
            return await retrying(attempt, *args)
        except Again as last:
            raise CloudLost(f"{self.name} cannot be reached: {self._why(last)}") from last

    def _why(self, last: Again) -> str:
        """The reason, as far as it is known: the link knows why it could not connect."""
        trouble = self.connection.link.trouble
        if trouble is not None:
            return f"{trouble} (tried for {self.patience:g} s)"
        hints = {"wrong version": "it seems to speak no TLS", "lost at once": "if it speaks TLS, give tls or ca"}
        return "; ".join([str(last), *(hint for sign, hint in hints.items() if sign in str(last))])

    def _say(self, state: RetryCallState) -> None:
        reason = state.outcome.exception() if state.outcome else None
        log.info("%s: attempt %d failed (%s)", self.name, state.attempt_number, reason)


class _Failing:
    """How long attempts have been failing, and when to try again."""

    def __init__(self, patience: float) -> None:
        self._patience, self._since = patience, 0.0

    def too_long(self, state: RetryCallState) -> bool:
        """A single attempt may take longer than patience: a silent cloud is asked again all the same."""
        if state.attempt_number == 1:
            self._since = time.monotonic()
        return time.monotonic() - self._since >= self._patience

    def pause(self, state: RetryCallState) -> float:
        """Seconds before the next attempt: doubling, at least what the cloud asked for, and no longer than patience."""
        failed = state.outcome.exception() if state.outcome else None
        asked = failed.after if isinstance(failed, Again) else 0.0
        growing = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (state.attempt_number - 1))
        spread = max(asked, growing) * random.uniform(1.0, 1.25)  # so that edges do not come back in step
        return min(spread, max(0.0, self._since + self._patience - time.monotonic()))
