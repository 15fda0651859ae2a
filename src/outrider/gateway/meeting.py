"""Who the cloud is: asked from the start, in a thread of its own, until it has said so."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from contextlib import suppress

from outrider.edge.cancellation import Cancellation
from outrider.edge.pair import Pair
from outrider.engines.base import Engine
from outrider.errors import CloudError, CloudLost, OutriderError
from outrider.verifiers.base import Verifier, disconnect

UNKNOWN = "not there yet"
PAUSE_S = 1.0  # between two attempts, each as patient as the verifier is


class Meeting:
    """The first talk with a cloud. verifier: this one's own, disconnected once it has answered and by `close`."""

    def __init__(self, engine: Engine, verifier: Verifier) -> None:
        self._pair, self._verifier = Pair(engine, verifier, "fail", lazy=True), verifier
        self._cancellation, self._closed = Cancellation(), threading.Event()
        self._tried = threading.Event()  # the first attempt has ended
        self._outcome: Future[str] = Future()
        self._thread = threading.Thread(target=self._meet, name="outrider-meeting", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The cloud's model, as soon as it is known."""
        if not self._outcome.done() or self._outcome.exception() is not None:
            return UNKNOWN
        return self._outcome.result()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the first attempt: whether the cloud is known then.

        Raises:
            OutriderError: it has answered, and cannot be this edge's.
        """
        self._tried.wait(seconds)
        if not self._outcome.done():
            return False
        self._outcome.result()
        return True

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        self._cancellation.cancel()
        self._thread.join()

    def _meet(self) -> None:
        try:
            while (name := self._attempt()) is None:
                self._tried.set()
                if self._closed.wait(PAUSE_S):
                    raise CancelledError
            self._outcome.set_result(name)
        except (OutriderError, CancelledError) as error:
            self._outcome.set_exception(error)
        finally:
            self._tried.set()
            with suppress(CloudError):  # it may be gone already
                disconnect(self._verifier)

    def _attempt(self) -> str | None:
        try:
            return self._pair.meet(self._cancellation).target.name
        except CloudLost:
            return None
