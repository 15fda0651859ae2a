"""Byte counts per session and message kind, which add up to the bytes counted at the socket."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PREFIX_BYTES = 5  # gRPC's prefix of each message
TRANSPORT = "transport"  # all bytes of HTTP/2 and TLS that are not messages, and unanswered messages


@dataclass
class ByteCounts:
    """The bytes of one session by direction and kind. Kinds are the protocol's frames and `transport`."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return the non-zero counts by direction and kind."""
        return {"up": {k: v for k, v in self.up.items() if v}, "down": {k: v for k, v in self.down.items() if v}}


class ByteAccounting:
    """The assignment of one endpoint's bytes to sessions. Each byte at the socket is a message's, or transport.

    A message is recorded when it is answered. A message written to a dead connection counts as transport, because it
    may not have left the machine. The first session to request its counts claims the unassigned transport bytes. No
    byte is counted twice: the counts of all sessions and the unassigned bytes add up to the socket's count.
    """

    def __init__(self) -> None:
        self._recorded_up = self._recorded_down = 0
        self.pending = 0  # bytes of unanswered messages, which are not transport yet

    def add_pending(self, size: int) -> int:
        """Add a written message of `size` bytes to the pending ones. Return its size with the prefix."""
        self.pending += size + PREFIX_BYTES
        return size + PREFIX_BYTES

    def remove_pending(self, cost: int) -> None:
        """Remove an answered or abandoned message from the pending ones."""
        self.pending -= cost

    def record(self, counts: ByteCounts, kind: str, cost: int, *, up: bool) -> None:
        """Add a transferred message to the session's counts."""
        (counts.up if up else counts.down)[kind] += cost
        if up:
            self._recorded_up += cost
        else:
            self._recorded_down += cost

    def assign_transport(self, counts: ByteCounts, socket_up: int, socket_down: int) -> None:
        """Assign all unassigned bytes of the socket to the session, as transport."""
        up = max(0, socket_up - self._recorded_up - self.pending)
        down = max(0, socket_down - self._recorded_down)
        self.record(counts, TRANSPORT, up, up=True)
        self.record(counts, TRANSPORT, down, up=False)
