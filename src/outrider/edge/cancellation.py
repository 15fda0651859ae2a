"""Ending a generation from another thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from outrider.errors import CloudLost

T = TypeVar("T")
AGAIN_S = 0.1  # s between two attempts of a disconnected generation


class Cancellation:
    """Of one generation: what waits for the cloud stops waiting at once, what computes stops before its next token.

    The generation's own thread then raises `concurrent.futures.CancelledError`, and closes what it had opened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._cut: CloudLost | None = None
        self._awaited: Future[Any] | None = None

    def cancel(self) -> None:
        """From any thread; twice is once."""
        with self._lock:
            self._cancelled.set()
            awaited = self._awaited
        if awaited is not None:
            awaited.cancel()

    def cut(self, reason: str) -> None:
        """Cut this generation off from its verifier, from any thread: every wait now raises CloudLost."""
        with self._lock:
            self._cut = CloudLost(reason)
            awaited = self._awaited
        if awaited is not None:
            awaited.cancel()

    def check(self) -> None:
        """Raise CancelledError if it is cancelled."""
        if self._cancelled.is_set():
            raise CancelledError

    def wait(self, future: Future[T]) -> T:
        """Return the future's result. Cancelling the generation cancels the future.

        Raises:
            CancelledError: it was.
            CloudLost: it was cut off.
        """
        if self._cut is not None:
            self._cancelled.wait(AGAIN_S)  # keep a caller that retries from busy waiting
        with self._lock:
            self.check()
            if self._cut is None:
                self._awaited = future
        if self._cut is not None:
            future.cancel()
            raise self._cut
        try:
            return future.result()
        except CancelledError:
            self.check()
            if self._cut is not None:
                raise self._cut from None
            raise
        finally:
            self._awaited = None


def follow(leader: Future[T]) -> Future[T]:
    """A future that ends as `leader` does, and can be cancelled without it."""
    follower: Future[T] = Future()

    def pass_on(done: Future[T]) -> None:
        if not follower.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            follower.set_result(done.result())
        else:
            follower.set_exception(error)

    leader.add_done_callback(pass_on)
    return follower
