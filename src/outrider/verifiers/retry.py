"""Asking again: how often, and how long in between."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

T = TypeVar("T")
log = logging.getLogger(__name__)

INITIAL_BACKOFF, MAX_BACKOFF = 0.05, 2.0  # s between attempts
MIN_UPLOAD_RATE = 8_000  # bytes/s; while a recording is on its way, an attempt may take that much longer


class Retryable(Exception):
    """This attempt failed and another may not.

    retry_after: seconds that the cloud asks us to wait. is_busy: it is there, and has too much to do.
    """

    def __init__(self, reason: str, retry_after: float = 0.0, *, is_busy: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.is_busy = retry_after, is_busy


async def retry(name: str, timeout: float, attempt: Callable[..., Awaitable[T]], *args: object) -> T:
    """Attempts, with exponential pauses, until one succeeds or timeout (s), counted from the first failure, ends.

    name: who is requested, for the log.

    Raises:
        Retryable: the last attempt's; whatever else an attempt raises goes through at once.
    """
    backoff = _Backoff(timeout)

    def log_attempt(state: RetryCallState) -> None:
        reason = state.outcome.exception() if state.outcome else None
        log.info("%s: attempt %d failed (%s)", name, state.attempt_number, reason)

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(Retryable),
        stop=backoff.is_exhausted,
        wait=backoff.next_wait,
        before_sleep=log_attempt,
        reraise=True,
    )
    return await retrying(attempt, *args)


class _Backoff:
    """How long attempts have been backoff, and when to try again."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._failing_since = timeout, 0.0

    def is_exhausted(self, state: RetryCallState) -> bool:
        """A single attempt may take longer than timeout: a silent cloud is requested again all the same."""
        return time.monotonic() - self._failing_since >= self._timeout

    def next_wait(self, state: RetryCallState) -> float:
        """Seconds before the next attempt: doubling, at least what the cloud requested for, and no longer than timeout.

        Asked before `is_exhausted`: the first failure begins here.
        """
        if state.attempt_number == 1:
            self._failing_since = time.monotonic()
        error = state.outcome.exception() if state.outcome else None
        requested = error.retry_after if isinstance(error, Retryable) else 0.0
        exponential = min(MAX_BACKOFF, INITIAL_BACKOFF * 2.0 ** min(state.attempt_number - 1, 30))
        jittered = max(requested, exponential) * random.uniform(1.0, 1.25)  # so that edges do not come back in step
        return min(jittered, max(0.0, self._failing_since + self._timeout - time.monotonic()))
