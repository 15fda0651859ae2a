"""The edge's end of a session with the verifier, and what the loss of the cloud leads to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar, runtime_checkable

from outrider.config import OnCloudLoss
from outrider.decoding.actions import Verify
from outrider.edge.cancellation import Cancellation
from outrider.errors import CloudError, CloudLost, SettingsError
from outrider.sampling.acceptance import Verdict
from outrider.transport.byte_counts import ByteCounts
from outrider.verifiers.base import Verifier

log = logging.getLogger(__name__)

T = TypeVar("T")


@runtime_checkable
class PipelinedVerifier(Verifier, Protocol):
    """A verifier that can be asked without waiting for its answer.

    A session has one request in flight at a time. Only where something else failed is it closed before the answer.
    """

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        """The verdict that `verify` would give, later."""
        ...

    def byte_counts(self, session: int) -> ByteCounts:
        """The bytes that the session has cost so far."""
        ...


@runtime_checkable
class StreamingVerifier(PipelinedVerifier, Protocol):
    """One that sends the tokens of cloud-only decoding as a stream."""

    def next_token(self, session: int) -> Future[Verdict]:
        """The stream's next verdict. After a loss a new stream continues behind the last one that came."""
        ...


class PendingVerdict:
    """A verdict in flight. `send` asks for it, again after a loss that `apply_loss_policy` does not give in to."""

    def __init__(
        self,
        send: Callable[[], Future[Verdict]],
        apply_loss_policy: Callable[[Callable[[], Verdict]], Verdict | None],
        cancellation: Cancellation,
    ) -> None:
        self._send, self._apply_loss_policy, self._cancellation = send, apply_loss_policy, cancellation
        self._future: Future[Verdict] | None = send()

    def done(self) -> bool:
        """Whether `result` would answer at once."""
        return self._future is not None and self._future.done()

    def result(self) -> Verdict | None:
        """Wait for the verdict; None where the edge is to go on alone."""
        return self._apply_loss_policy(self._attempt)

    def _attempt(self) -> Verdict:
        future, self._future = self._future or self._send(), None
        return self._cancellation.wait(future)


class VerifierSession:
    """The session with the verifier, opened by the first block that is escalated and not before.

    on_loss: what a `CloudLost` leads to. "fail": it goes through to the caller. "wait": the same is asked again until
    it is answered; requests are idempotent, and the verifier paces itself. "edge-only": the answer is None, and the
    edge is to go on alone; the verifier is not spoken to again. cancellation: ends every wait.
    """

    def __init__(
        self,
        verifier: Verifier,
        open_session: Callable[[Verifier], int],
        on_loss: OnCloudLoss = "fail",
        cancellation: Cancellation | None = None,
    ) -> None:
        self._verifier, self._open, self._on_loss = verifier, open_session, on_loss
        self._remote = verifier if isinstance(verifier, PipelinedVerifier) else None
        self._cancellation = cancellation or Cancellation()
        self._session: int | None = None
        self._in_flight: Future[Verdict] | None = None
        self._is_lost = False
        self.seconds = 0.0  # spent waiting for verdicts
        self.loss_wait_s = 0.0  # s of these, the last ones, if the edge then went on alone

    @property
    def session(self) -> int:
        if self._session is None:
            self._session = self._open(self._verifier)
        return self._session

    def verify(self, request: Verify) -> Verdict | None:
        """The verdict on a block; None where the edge is to go on alone."""
        remote = self._remote
        if remote is not None:
            return self._send_and_wait(lambda: remote.submit(self.session, request))
        return self._apply_loss_policy(lambda: self._verifier.verify(self.session, request))

    def submit(self, request: Verify) -> PendingVerdict:
        """The same, without waiting.

        Raises:
            SettingsError: this verifier answers only while one waits.
        """
        remote = self._remote
        if remote is None:
            raise SettingsError("the pipelined driver needs a verifier that is asked over a network")

        def send() -> Future[Verdict]:
            return self._send(lambda: remote.submit(self.session, request))

        return PendingVerdict(send, self._apply_loss_policy, self._cancellation)

    def generate(self, request: Verify) -> Verdict | None:
        """The next verdict of cloud-only decoding; as one stream for the whole output, where the verifier can."""
        remote = self._remote
        if isinstance(remote, StreamingVerifier):
            return self._send_and_wait(lambda: remote.next_token(self.session))
        return self.verify(request)

    def byte_counts(self) -> ByteCounts:
        """What the session has cost on the network; nothing where there is none, or nothing was asked."""
        if self._session is None or self._remote is None:
            return ByteCounts()
        return self._remote.byte_counts(self._session)

    def close(self) -> None:
        """End the session. The output is complete or has failed: a cloud that does not hear of it changes neither."""
        if self._session is None:
            return
        if self._in_flight is not None:
            self._in_flight.cancel()  # nobody waits for it any more
        try:
            self._verifier.close(self._session)
        except CloudError as error:
            log.debug("session %d was not closed: %s", self._session, error)

    def _apply_loss_policy(self, attempt: Callable[[], T]) -> T | None:
        """What `attempt` answers, as far as `on_loss` goes to get it."""
        while True:
            started = time.perf_counter()
            try:
                answer = attempt()
            except CloudLost as lost:
                self._log_loss(lost)
                if self._on_loss == "fail":
                    raise
                if self._on_loss == "edge-only":
                    self.loss_wait_s = time.perf_counter() - started
                    return None
            else:
                self._is_lost = False
                return answer
            finally:
                self.seconds += time.perf_counter() - started

    def _log_loss(self, lost: CloudLost) -> None:
        """One warning per loss, however often it is asked again; "fail" has its exception."""
        if not self._is_lost and self._on_loss != "fail":
            log.warning("%s; %s", lost, "asking on" if self._on_loss == "wait" else "the edge goes on alone")
        self._is_lost = True

    def _send_and_wait(self, attempt: Callable[[], Future[Verdict]]) -> Verdict | None:
        return self._apply_loss_policy(lambda: self._cancellation.wait(self._send(attempt)))

    def _send(self, attempt: Callable[[], Future[Verdict]]) -> Future[Verdict]:
        """Ask; a loss at once and a loss later look the same to who waits."""
        self._cancellation.check()
        try:
            self._in_flight = attempt()
        except CloudLost as lost:
            self._in_flight = Future()
            self._in_flight.set_exception(lost)
        return self._in_flight
