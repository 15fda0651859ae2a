"""Assignment of KV slots to sessions. Belongs to the batcher's thread, the only one that calls the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.engines.base import CachedSequence, Engine


class SlotPool:
    """`total` slots of an engine for any number of sessions.

    Evicts the least recently used session of the identity that has the most slots.
    """

    def __init__(self, engine: Engine, total: int, metrics: Metrics) -> None:
        self._engine, self.total, self._metrics = engine, total, metrics
        self._sequences: dict[SessionEntry, CachedSequence] = {}
        self._evicted_ids: set[bytes] = set()  # sessions that had a slot before, for the count of rebuilt caches

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, entry: SessionEntry) -> bool:
        return entry in self._sequences

    def sequence(self, entry: SessionEntry) -> CachedSequence:
        """Return the cached sequence of a session that has a slot."""
        return self._sequences[entry]

    def acquire(self, entry: SessionEntry, busy: Set[SessionEntry]) -> bool:
        """Give a session a slot if it has none. Return False if all slots belong to `busy` sessions."""
        if entry in self._sequences:
            return True
        if len(self) >= self.total and not self._evict_idle(busy):
            return False
        self._sequences[entry] = CachedSequence(self._engine, entry.load_prompt(), "verifier")
        if entry.id in self._evicted_ids:
            self._evicted_ids.discard(entry.id)
            self._metrics.count_rebuilt()
        return True

    def release(self, entry: SessionEntry) -> None:
        """Free the slot of a session that has ended."""
        self.evict(entry)
        self._evicted_ids.discard(entry.id)

    def evict(self, entry: SessionEntry) -> None:
        """Free a session's slot. The session may acquire another."""
        sequence = self._sequences.pop(entry, None)
        if sequence is not None:
            self._evicted_ids.add(entry.id)
            sequence.close()

    def clear(self) -> None:
        """Free all slots."""
        for entry in list(self._sequences):
            self.release(entry)

    def _evict_idle(self, busy: Set[SessionEntry]) -> bool:
        idle = [entry for entry in self._sequences if entry not in busy]
        if not idle:
            return False
        slots = Counter(entry.identity for entry in self._sequences)
        oldest = min(idle, key=lambda entry: (-slots[entry.identity], entry.last_used))
        self.evict(oldest)
        self._metrics.count_evicted()
        return True
