"""Bytes by kind, both ways: what a result cost on the network, to the byte that the socket counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PREFIX_BYTES = 5  # gRPC's own, before each message
TRANSPORT = "transport"  # HTTP/2 and TLS: frame headers, compressed headers, windows, pings, and what was sent in vain


@dataclass
class ByteCounts:
    """Bytes of one session. Kinds are the protocol's frames, and `transport` for all that carries them."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, dict[str, int]]:
        """Kinds that occurred, by direction."""
        return {"up": {k: v for k, v in self.up.items() if v}, "down": {k: v for k, v in self.down.items() if v}}


class ByteAccounting:
    """One connection's books. What the socket counts is either some session's message, or transport.

    A message is booked when it is answered, so that one that was written into a dead connection, and may or may not
    have left the machine, is transport. Transport is claimed by the session that asks first; nothing is counted twice
    and nothing is lost: the ledgers, and what is left, sum up to the socket's count.
    """

    def __init__(self) -> None:
        self._recorded_up = self._recorded_down = 0
        self.pending = 0  # bytes sent and not yet answered: they will be booked, and are nobody's transport

    def add_pending(self, size: int) -> int:
        """A message of `size` bytes was written; its cost on the wire."""
        self.pending += size + PREFIX_BYTES
        return size + PREFIX_BYTES

    def remove_pending(self, cost: int) -> None:
        """A message is no longer waited for: answered, or given up."""
        self.pending -= cost

    def record(self, counts: ByteCounts, kind: str, cost: int, *, up: bool) -> None:
        """A message that crossed."""
        (counts.up if up else counts.down)[kind] += cost
        if up:
            self._recorded_up += cost
        else:
            self._recorded_down += cost

    def assign_transport(self, counts: ByteCounts, socket_up: int, socket_down: int) -> None:
        """Give the session what the socket counted and nobody has claimed."""
        up = max(0, socket_up - self._recorded_up - self.pending)
        down = max(0, socket_down - self._recorded_down)
        self.record(counts, TRANSPORT, up, up=True)
        self.record(counts, TRANSPORT, down, up=False)
