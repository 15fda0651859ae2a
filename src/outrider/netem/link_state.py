"""State that all connections of one link share: conditions, stalls, and per direction a bottleneck and a byte count."""

from __future__ import annotations

import math
from random import Random
from time import monotonic  # asyncio's clock, so that times made here suit loop.call_at

from outrider.netem.conditions import Conditions

MIN_CHUNK = 1448  # bytes: payload of one Ethernet frame of a TCP stream
CHUNK_TIME = 0.002  # s at the bottleneck: larger chunks arrive in bursts, smaller ones cost a wake-up each
BOTTLENECK_BUFFER = 256 * 1024  # bytes that may wait at the bottleneck, beyond those in flight
MAX_IN_FLIGHT = 16 * 1024 * 1024  # bytes in flight where no bandwidth bounds them: 5 Gbit/s at an RTT of 50 ms


class LinkState:
    """Present conditions and stalls of a link."""

    def __init__(self, conditions: Conditions, seed: int) -> None:
        self.up, self.down = Direction(self, f"{seed}/up"), Direction(self, f"{seed}/down")
        self._stalled_until = -math.inf
        self.set_conditions(conditions)

    def set_conditions(self, conditions: Conditions) -> None:
        """Replace the conditions, and restart the time between stalls."""
        self.conditions = conditions
        self._epoch = monotonic()
        limits = (conditions.up, conditions.down, conditions.stall_every)
        self._is_unlimited = conditions.rtt == 0 and all(limit is None for limit in limits)
        self.up.configure(conditions, conditions.up)
        self.down.configure(conditions, conditions.down)

    def stall(self, seconds: float) -> None:
        """Start a stall, unless a present one lasts longer."""
        self._stalled_until = max(self._stalled_until, monotonic() + seconds)
        self.up.clear()
        self.down.clear()

    def is_passthrough(self) -> bool:
        """Return whether bytes pass without delay."""
        return self._is_unlimited and monotonic() >= self._stalled_until

    def next_active_time(self, at: float) -> float:
        """Return the first moment from `at` on (s, monotonic clock) that is outside every known stall."""
        at = max(at, self._stalled_until)
        every, length = self.conditions.stall_every, self.conditions.stall_for
        if every is None or length is None or at - self._epoch < every:
            return at
        return at + max(0.0, length - (at - self._epoch) % every)


class Direction:
    """One direction of the link, for all its connections: one queue at the bottleneck, first come, first served."""

    def __init__(self, state: LinkState, seed: str) -> None:
        self.byte_count = 0  # handed to outgoing sockets
        self._state = state
        self._random = Random(seed)  # one per direction, so that jitter does not depend on how the two interleave

    def configure(self, conditions: Conditions, bandwidth: float | None) -> None:
        """Set delay, jitter and bandwidth (bit/s), and free the bottleneck."""
        self._one_way, self._jitter, self._bandwidth = conditions.rtt / 2, conditions.jitter, bandwidth
        self.chunk_size = max(MIN_CHUNK, int(bandwidth / 8 * CHUNK_TIME)) if bandwidth else MAX_IN_FLIGHT
        self.max_buffered = BOTTLENECK_BUFFER + bandwidth / 8 * conditions.rtt if bandwidth else float(MAX_IN_FLIGHT)
        self.clear()

    def clear(self) -> None:
        """Free the bottleneck. Bytes that wait there must be scheduled again."""
        self._free_at = -math.inf

    def departure(self, size: int, now: float) -> float:
        """Queue `size` more bytes. Return when they have passed the bottleneck (s, monotonic clock)."""
        start = self._state.next_active_time(max(now, self._free_at))
        self._free_at = start + size * 8 / self._bandwidth if self._bandwidth else start
        return self._free_at

    def delay(self) -> float:
        """Return a chunk's delay behind the bottleneck in seconds, with fresh jitter."""
        return self._one_way + self._random.uniform(-self._jitter, self._jitter) if self._jitter else self._one_way
