"""The edge's end of a session with the verifier, and what the loss of the cloud leads to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol, TypeVar, runtime_checkable

from outrider.config import OnCloudLoss
from outrider.core.acceptance import Verdict
from outrider.core.decoder import Verify
from outrider.errors import CloudError, CloudLost, SettingsError, StateError
from outrider.verifiers.base import Verifier
from outrider.wire.ledger import Ledger

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

    def ledger(self, session: int) -> Ledger:
        """The bytes that the session has cost so far."""
        ...


class Pending:
    """A verdict in flight. `send` asks for it, again after a loss that `insist` does not give in to."""

    def __init__(self, send: Callable[[], Future[Verdict]], insist: Callable[[Callable[[], Verdict]], Verdict | None]):
        self._send, self._insist = send, insist
        self._future: Future[Verdict] | None = send()

    def done(self) -> bool:
        """Whether `result` would answer at once."""
        return self._future is not None and self._future.done()

    def result(self) -> Verdict | None:
        """Wait for the verdict; None where the edge is to go on alone."""
        return self._insist(self._attempt)

    def _attempt(self) -> Verdict:
        future, self._future = self._future or self._send(), None
        return future.result()


class Link:
    """The session with the verifier, opened by the first block that is escalated and not before.

    on_loss: what a `CloudLost` leads to. "fail": it goes through to the caller. "wait": the same is asked again until
    it is answered; requests are idempotent, and the verifier paces itself. "edge-only": the answer is None, and the
    edge is to go on alone; the verifier is not spoken to again.
    """

    def __init__(
        self, verifier: Verifier, open_session: Callable[[Verifier], int], on_loss: OnCloudLoss = "fail"
    ) -> None:
        self._verifier, self._open, self._on_loss = verifier, open_session, on_loss
        self._session: int | None = None
        self._stream: Iterator[Verdict] | None = None
        self._lost = False
        self.seconds = 0.0  # spent waiting for verdicts

    @property
    def session(self) -> int:
        if self._session is None:
            self._session = self._open(self._verifier)
        return self._session

    def verify(self, request: Verify) -> Verdict | None:
        """The verdict on a block; None where the edge is to go on alone."""
        return self._insist(lambda: self._verifier.verify(self.session, request))

    def submit(self, request: Verify) -> Pending:
        """The same, without waiting.

        Raises:
            SettingsError: this verifier answers only while one waits.
        """
        return Pending(lambda: self._send(request), self._insist)

    def generate(self, request: Verify) -> Verdict | None:
        """The next verdict of cloud-only decoding, as one stream for the whole output."""
        return self._insist(self._next_of_stream)

    def ledger(self) -> Ledger:
        """What the session has cost on the network; nothing where there is none, or nothing was asked."""
        if self._session is None or not isinstance(self._verifier, PipelinedVerifier):
            return Ledger()
        return self._verifier.ledger(self._session)

    def close(self) -> None:
        """End the session. The output is complete or has failed: a cloud that does not hear of it changes neither."""
        if self._session is None:
            return
        try:
            self._verifier.close(self._session)
        except CloudError as error:
            log.debug("session %d was not closed: %s", self._session, error)

    def _insist(self, ask: Callable[[], T]) -> T | None:
        """What `ask` answers, as far as `on_loss` goes to get it."""
        while True:
            started = time.perf_counter()
            try:
                answer = ask()
            except CloudLost as lost:
                self._note(lost)
                if self._on_loss == "fail":
                    raise
                if self._on_loss == "edge-only":
                    return None
            else:
                self._lost = False
                return answer
            finally:
                self.seconds += time.perf_counter() - started

    def _note(self, lost: CloudLost) -> None:
        """One warning per loss, however often it is asked again; "fail" has its exception."""
        if not self._lost and self._on_loss != "fail":
            log.warning("%s; %s", lost, "asking on" if self._on_loss == "wait" else "the edge goes on alone")
        self._lost = True

    def _send(self, request: Verify) -> Future[Verdict]:
        """Ask; a loss at once and a loss later look the same to who waits."""
        if not isinstance(self._verifier, PipelinedVerifier):
            raise SettingsError("the pipelined driver needs a verifier that is asked over a network")
        try:
            return self._verifier.submit(self.session, request)
        except CloudLost as lost:
            failed: Future[Verdict] = Future()
            failed.set_exception(lost)
            return failed

    def _next_of_stream(self) -> Verdict:
        """The stream's next verdict. After a loss a new stream continues behind the last one that came."""
        if self._stream is None:
            self._stream = self._verifier.generate(self.session)
        try:
            verdict = next(self._stream, None)
        except CloudLost:
            self._stream = None
            raise
        if verdict is None:
            raise StateError("the verifier ended its stream before the output was complete")
        return verdict
