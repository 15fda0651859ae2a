"""Limits of the service, per caller and in total, and a rate limiter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import SettingsError, quote
from outrider.numeric import is_integer, is_number
from outrider.serving.sizes import MIB

MIN_MESSAGE_BYTES = 128 * 2**10  # bytes: a prompt and its settings, with a grammar
MAX_MESSAGE_BYTES = 2**31 - 1  # bytes: gRPC's own limit is an int32
BYTES_PER_ID = 12  # on the wire: a token and a count, and some room
EXTRA_STREAMS = 16
_TIME_TOLERANCE_S = 1e-6  # seconds: shorter waits are rounding errors


@dataclass(frozen=True)
class Limits:
    """Limits of the service, validated.

    Sizes are bytes, times seconds. max_rate: requests per second and identity, of which `burst` may come at once. None
    is unlimited. A session ends after idle_seconds without a request. max_prompt_tokens: None is the model's own limit.
    max_media_bytes: of one session, 0 for none. max_media_total: of all sessions together. max_message_bytes: of one
    frame. A recording may take several frames.

    Raises:
        SettingsError: a value out of range.
    """

    max_sessions: int = 1024
    max_sessions_per_identity: int = 256
    max_prompt_tokens: int | None = None
    max_media_bytes: int = 8 * MIB
    max_media_total: int = 512 * MIB
    max_message_bytes: int = MIB // 2
    max_rate: float | None = None
    burst: int = 50
    idle_seconds: float = 600

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_sessions_per_identity", "max_message_bytes", "burst"):
            _check_int(name, getattr(self, name))
        _check_positive("idle_seconds", self.idle_seconds)
        if self.max_prompt_tokens is not None:
            _check_int("max_prompt_tokens", self.max_prompt_tokens)
        if self.max_rate is not None:
            _check_positive("max_rate", self.max_rate)
        _check_int("max_media_bytes", self.max_media_bytes, minimum=0)
        _check_int("max_media_total", self.max_media_total, minimum=self.max_media_bytes)
        size = self.max_message_bytes
        if size > MAX_MESSAGE_BYTES:
            raise SettingsError(f"max_message_bytes must be at most {MAX_MESSAGE_BYTES}, gRPC's limit")
        if size < MIN_MESSAGE_BYTES:
            raise SettingsError(f"max_message_bytes {size} cannot hold a prompt: give at least {MIN_MESSAGE_BYTES}")

    @property
    def max_streams_per_identity(self) -> int:
        """Return the stream limit of one identity: two for each session (one may replace the other), and a few."""
        return 2 * self.max_sessions_per_identity + EXTRA_STREAMS

    def media_share(self, *, named: bool) -> int:
        """Return the bytes of media that one identity may upload at once. named: there may be other identities."""
        return max(self.max_media_bytes, self.max_media_total // 2) if named else self.max_media_total


class RateLimiter:
    """A token bucket for each identity: `burst` requests at once, `rate` per second from then on. Not thread-safe.

    A bucket is kept as the time at which it is full again. Buckets are in the order of their last request, and full
    ones are dropped from the front. So memory is bounded by the requests of the last burst/rate seconds.
    """

    def __init__(self, rate: float | None, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the limiter. rate: None is unlimited.

        Raises:
            SettingsError: the rate is not above 0, or the burst is below 1.
        """
        _check_int("burst", burst)
        if rate is not None:
            _check_positive("max_rate", rate)
        self._interval = 0.0 if rate is None else 1 / rate
        self._burst, self._clock = burst, clock
        self._full_at: dict[str, float] = {}

    def __len__(self) -> int:
        """Return the number of buckets that are kept."""
        return len(self._full_at)

    def acquire(self, identity: str) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        if not self._interval:
            return 0.0
        now = self._clock()
        while self._full_at and self._full_at[oldest := next(iter(self._full_at))] <= now:
            del self._full_at[oldest]
        full_at = max(self._full_at.get(identity, now), now) + self._interval
        wait = full_at - now - self._burst * self._interval
        if wait > _TIME_TOLERANCE_S:
            return wait
        self._full_at.pop(identity, None)  # the newest goes to the end
        self._full_at[identity] = full_at
        return 0.0


def _check_int(name: str, value: int, minimum: int = 1) -> None:
    if not (is_integer(value) and value >= minimum):
        raise SettingsError(f"{name} must be a whole number, {minimum} or more, not {quote(value)}")


def _check_positive(name: str, value: float) -> None:
    if not (is_number(value) and value > 0):
        raise SettingsError(f"{name} must be a finite number above 0, not {quote(value)}")
