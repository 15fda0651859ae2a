"""Retry with exponential backoff and jitter."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

INITIAL_BACKOFF, MAX_BACKOFF = 0.05, 2.0  # s between attempts
MIN_UPLOAD_RATE = 8_000  # bytes/s; the deadline of an attempt that uploads a recording is extended at this rate


class Retryable(Exception):
    """An attempt failed and another one may succeed.

    retry_after: seconds that the server requested between attempts. is_busy: the server answers but is overloaded.
    """

    def __init__(self, reason: str, retry_after: float = 0.0, *, is_busy: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.is_busy = retry_after, is_busy


async def retry(name: str, timeout: float, attempt: Callable[..., Awaitable[T]], *args: object) -> T:
    """Call `attempt` with backoff until it succeeds or `timeout` seconds have passed since its first failure.

    The timeout counts from the failure because a single attempt may take longer: a silent server always gets a second
    attempt. name: the server, for the log.

    Raises:
        Retryable: the error of the last attempt. Any other exception of an attempt propagates at once.
    """
    number, give_up_at = 0, 0.0
    while True:
        number += 1
        try:
            return await attempt(*args)
        except Retryable as error:
            now = time.monotonic()
            if number == 1:
                give_up_at = now + timeout
            if now >= give_up_at:
                raise
            log.info("%s: attempt %d failed (%s)", name, number, error)
            wait = min(_backoff(number, error.retry_after), give_up_at - now)
        await asyncio.sleep(wait)


def _backoff(number: int, retry_after: float) -> float:
    """Return the seconds to wait after a failed attempt, which double from attempt to attempt.

    The jitter keeps clients of one server from retrying in step.
    """
    exponential = min(MAX_BACKOFF, INITIAL_BACKOFF * 2.0 ** min(number - 1, 30))
    return max(retry_after, exponential) * random.uniform(1.0, 1.25)
