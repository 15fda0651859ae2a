"""Asking again: how often, and how long in between."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type

from outrider.verifiers.refusals import Again

T = TypeVar("T")
log = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0  # s between attempts
SLOWEST = 8_000  # bytes/s; while a recording is on its way, an attempt may take that much longer


async def persistently(name: str, patience: float, attempt: Callable[..., Awaitable[T]], *args: object) -> T:
    """Attempts, with growing pauses, until one succeeds or patience (s), counted from the first failure, ends.

    name: who is asked, for the log.

    Raises:
        Again: the last attempt's; whatever else an attempt raises goes through at once.
    """
    failing = _Failing(patience)

    def say(state: RetryCallState) -> None:
        reason = state.outcome.exception() if state.outcome else None
        log.info("%s: attempt %d failed (%s)", name, state.attempt_number, reason)

    retrying = AsyncRetrying(
        retry=retry_if_exception_type(Again),
        stop=failing.too_long,
        wait=failing.pause,
        before_sleep=say,
        reraise=True,
    )
    return await retrying(attempt, *args)


class _Failing:
    """How long attempts have been failing, and when to try again."""

    def __init__(self, patience: float) -> None:
        self._patience, self._since = patience, 0.0

    def too_long(self, state: RetryCallState) -> bool:
        """A single attempt may take longer than patience: a silent cloud is asked again all the same."""
        return time.monotonic() - self._since >= self._patience

    def pause(self, state: RetryCallState) -> float:
        """Seconds before the next attempt: doubling, at least what the cloud asked for, and no longer than patience.

        Asked before `too_long`: the first failure begins here.
        """
        if state.attempt_number == 1:
            self._since = time.monotonic()
        failed = state.outcome.exception() if state.outcome else None
        asked = failed.after if isinstance(failed, Again) else 0.0
        growing = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(state.attempt_number - 1, 30))
        spread = max(asked, growing) * random.uniform(1.0, 1.25)  # so that edges do not come back in step
        return min(spread, max(0.0, self._since + self._patience - time.monotonic()))
