"""The edge's end of a session with the verifier, and the policy for the loss of the cloud."""

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
    """A verifier that accepts requests without blocking.

    A session has one request in flight at a time. It is closed before the answer only after another failure.
    """

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        """Send a request and return the future of its verdict."""
        ...

    def byte_counts(self, session: int) -> ByteCounts:
        """Return the session's bytes on the network so far."""
        ...


@runtime_checkable
class StreamingVerifier(PipelinedVerifier, Protocol):
    """A pipelined verifier that streams the tokens of plain decoding."""

    def next_token(self, session: int) -> Future[Verdict]:
        """Return the stream's next verdict. After a loss, a new stream continues behind the last verdict.

        `submit` ends the stream. The next verdict is then that of a new one.
        """
        ...


class PendingVerdict:
    """A verdict in flight. `send` requests it, and again if `apply_loss_policy` retries after a loss."""

    def __init__(
        self,
        send: Callable[[], Future[Verdict]],
        apply_loss_policy: Callable[[Callable[[], Verdict]], Verdict | None],
        cancellation: Cancellation,
    ) -> None:
        self._send, self._apply_loss_policy, self._cancellation = send, apply_loss_policy, cancellation
        self._future: Future[Verdict] | None = send()

    def done(self) -> bool:
        """Return whether `result` returns without waiting."""
        return self._future is not None and self._future.done()

    def result(self) -> Verdict | None:
        """Wait for the verdict. Return None if the edge continues alone."""
        return self._apply_loss_policy(self._attempt)

    def _attempt(self) -> Verdict:
        future, self._future = self._future or self._send(), None
        return self._cancellation.wait(future)


class VerifierSession:
    """The session with the verifier, opened by the first escalated block.

    on_loss: the policy for a `CloudLost`. "fail" raises it. "wait" retries the request, which is idempotent, until it
    is answered. The verifier does the backoff. "edge-only" returns None instead of a verdict, and the edge continues
    alone without the verifier. cancellation: ends every wait.
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
        self.seconds = 0.0  # of waiting for verdicts
        self.loss_wait_s = 0.0  # of these, the last wait if the edge then continued alone

    @property
    def session(self) -> int:
        """The session's id. The first access opens the session."""
        if self._session is None:
            self._session = self._open(self._verifier)
        return self._session

    def verify(self, request: Verify) -> Verdict | None:
        """Return the verdict on a block, or None if the edge continues alone."""
        if self._remote is None:
            return self._apply_loss_policy(lambda: self._verifier.verify(self.session, request))
        return self._apply_loss_policy(lambda: self._cancellation.wait(self._send(request)))

    def submit(self, request: Verify) -> PendingVerdict:
        """Send a request for the verdict on a block without waiting for it.

        Raises:
            SettingsError: the verifier is not across a network.
        """
        if self._remote is None:
            raise SettingsError("the pipelined driver needs a verifier across a network")
        return PendingVerdict(lambda: self._send(request), self._apply_loss_policy, self._cancellation)

    def byte_counts(self) -> ByteCounts:
        """Return the session's bytes on the network, zero for a verifier in this process or an unopened session."""
        if self._session is None or self._remote is None:
            return ByteCounts()
        return self._remote.byte_counts(self._session)

    def close(self) -> None:
        """Close the session. A cloud that cannot be reached is only logged, as the generation has ended already."""
        if self._session is None:
            return
        if self._in_flight is not None:
            self._in_flight.cancel()
        try:
            self._verifier.close(self._session)
        except CloudError as error:
            log.debug("session %d was not closed: %s", self._session, error)

    def _apply_loss_policy(self, attempt: Callable[[], T]) -> T | None:
        """Return the result of `attempt`. After a loss raise, retry or return None, as `on_loss` requires."""
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
        """Log one warning per loss, not per retry. "fail" raises instead."""
        if not self._is_lost and self._on_loss != "fail":
            log.warning("%s; %s", lost, "retrying" if self._on_loss == "wait" else "the edge continues alone")
        self._is_lost = True

    def _send(self, request: Verify) -> Future[Verdict]:
        """Send a request. An immediate loss becomes the future's exception, like a later one."""
        self._cancellation.check()
        try:
            self._in_flight = self._submit(request)
        except CloudLost as lost:
            self._in_flight = Future()
            self._in_flight.set_exception(lost)
        return self._in_flight

    def _submit(self, request: Verify) -> Future[Verdict]:
        """Request a verdict. Plain decoding takes it from a stream if possible, without a round trip per token."""
        remote = self._remote
        assert remote is not None
        if isinstance(remote, StreamingVerifier) and not (request.new_ids or request.draft_ids):
            return remote.next_token(self.session)
        return remote.submit(self.session, request)
