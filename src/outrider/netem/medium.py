"""What all connections of one link share: its conditions, its stalls and, each way, its bottleneck and its count."""

from __future__ import annotations

import math
from random import Random
from time import monotonic  # asyncio's clock, so that times made here suit loop.call_at

from outrider.netem.conditions import Conditions

SMALLEST_PIECE = 1448  # bytes: what one Ethernet frame carries of a TCP stream
PIECE_TIME = 0.002  # s at the bottleneck: coarser pieces arrive in bursts, finer ones cost a wake-up each
BUFFER = 256 * 1024  # bytes that may wait at the bottleneck, beyond those that are under way
WINDOW = 16 * 1024 * 1024  # bytes under way where no bandwidth bounds them: 5 Gbit/s at an RTT of 50 ms


class Medium:
    """The conditions in force, and when things move."""

    def __init__(self, conditions: Conditions, seed: int) -> None:
        self.up, self.down = Way(self, f"{seed}/up"), Way(self, f"{seed}/down")
        self._stalled_until = -math.inf
        self.impose(conditions)

    def impose(self, conditions: Conditions) -> None:
        """From now on these conditions; the time between stalls starts anew."""
        self.conditions = conditions
        self._epoch = monotonic()
        limits = (conditions.up, conditions.down, conditions.stall_every)
        self._unconditioned = conditions.rtt == 0 and all(limit is None for limit in limits)
        self.up.limit(conditions, conditions.up)
        self.down.limit(conditions, conditions.down)

    def stall(self, seconds: float) -> None:
        """Nothing moves for so long; a stall inside a longer one changes nothing."""
        self._stalled_until = max(self._stalled_until, monotonic() + seconds)
        self.up.clear()
        self.down.clear()

    def plain(self) -> bool:
        """Whether a byte may go straight through."""
        return self._unconditioned and monotonic() >= self._stalled_until

    def moves_at(self, at: float) -> float:
        """The first moment from `at` on (s, monotonic clock) that is outside every stall known by now."""
        at = max(at, self._stalled_until)
        every, length = self.conditions.stall_every, self.conditions.stall_for
        if every is None or length is None or at - self._epoch < every:
            return at
        return at + max(0.0, length - (at - self._epoch) % every)


class Way:
    """One way through the link, for all its connections: one queue at the bottleneck, first come, first served."""

    def __init__(self, medium: Medium, seed: str) -> None:
        self.bytes = 0  # handed to outgoing sockets
        self._medium = medium
        self._random = Random(seed)  # each way has its own: neither's jitter depends on how the two interleave

    def limit(self, conditions: Conditions, bandwidth: float | None) -> None:
        """Take over delay, jitter and bandwidth (bit/s); the bottleneck is free again."""
        self._half, self._jitter, self._bandwidth = conditions.rtt / 2, conditions.jitter, bandwidth
        self.piece = max(SMALLEST_PIECE, int(bandwidth / 8 * PIECE_TIME)) if bandwidth else WINDOW
        self.room = BUFFER + bandwidth / 8 * conditions.rtt if bandwidth else float(WINDOW)
        self.clear()

    def clear(self) -> None:
        """Forget what waits at the bottleneck: who waits must come again."""
        self._free = -math.inf

    def departure(self, size: int, now: float) -> float:
        """When `size` more bytes have passed the bottleneck (s, monotonic clock)."""
        start = self._medium.moves_at(max(now, self._free))
        self._free = start + size * 8 / self._bandwidth if self._bandwidth else start
        return self._free

    def delay(self) -> float:
        """From the bottleneck to the other side: seconds, drawn anew for every chunk."""
        return self._half + self._random.uniform(-self._jitter, self._jitter) if self._jitter else self._half
