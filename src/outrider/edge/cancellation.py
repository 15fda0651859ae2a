"""Cancellation of a generation from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from outrider.errors import CloudLost

T = TypeVar("T")
RETRY_INTERVAL_S = 0.1  # s between two attempts of a disconnected generation


class Cancellation:
    """The cancellation of one generation.

    Cancelling ends a wait for the cloud at once, and a computation before its next token. The generation's own thread
    then raises `concurrent.futures.CancelledError` and closes its drafter and session.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._cloud_lost: CloudLost | None = None
        self._cancel_future: Callable[[], object] | None = None  # set during a wait

    def cancel(self) -> None:
        """Cancel the generation, from any thread. Repetition has no effect."""
        with self._lock:
            self._cancelled.set()
        self._end_wait()

    def mark_cloud_lost(self, reason: str) -> None:
        """Disconnect the generation from its verifier, from any thread: every wait raises CloudLost from now on."""
        with self._lock:
            self._cloud_lost = CloudLost(reason)
        self._end_wait()

    def _end_wait(self) -> None:
        """Cancel the future that is waited for. The next `wait` sees the reason, so no lock is needed."""
        if (cancel := self._cancel_future) is not None:
            cancel()

    def check(self) -> None:
        """Raise CancelledError if the generation is cancelled."""
        if self._cancelled.is_set():
            raise CancelledError

    def wait(self, future: Future[T]) -> T:
        """Return the future's result. Cancelling the generation cancels the future.

        Raises:
            CancelledError: the generation was cancelled.
            CloudLost: the generation was disconnected from its verifier.
        """
        if self._cloud_lost is not None:
            self._cancelled.wait(RETRY_INTERVAL_S)  # keep a caller that retries from busy waiting
        with self._lock:
            self.check()
            if self._cloud_lost is None:
                self._cancel_future = future.cancel
        if self._cloud_lost is not None:
            future.cancel()
            raise self._cloud_lost
        try:
            return future.result()
        except CancelledError:
            self.check()
            if self._cloud_lost is not None:
                raise self._cloud_lost from None
            raise
        finally:
            self._cancel_future = None


def chain_future(source: Future[T]) -> Future[T]:
    """Return a future that ends as `source` does, and can be cancelled without cancelling `source`."""
    chained: Future[T] = Future()

    def copy_result(done: Future[T]) -> None:
        if not chained.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            chained.set_result(done.result())
        else:
            chained.set_exception(error)

    source.add_done_callback(copy_result)
    return chained
