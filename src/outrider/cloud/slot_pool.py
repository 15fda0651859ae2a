"""Assignment of KV slots to sessions. Belongs to the batcher's thread, the only one that calls the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.engines.base import CachedSequence, Engine, as_slot_reuse
from outrider.engines.prefix_cache import continue_sequence


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
        if entry in self._sequences or self._take_over(entry):
            return True
        if len(self) >= self.total and not self._evict_idle(busy):
            return False
        self._sequences[entry] = CachedSequence(self._engine, entry.load_prompt(), "verifier")
        if entry.id in self._evicted_ids:
            self._evicted_ids.discard(entry.id)
            self._metrics.count_rebuilt()
        return True

    def _take_over(self, entry: SessionEntry) -> bool:
        """Give a new session the slot of its base, with the KV cache of the tokens that both begin with.

        Return False if it has no base, or one that has lost its slot.
        """
        base, entry.base = entry.base, None
        if base is None:
            return False
        self._take_over(base.entry)  # which may not have run since it took its own base's place
        sequence, engine = self._sequences.get(base.entry), as_slot_reuse(self._engine)
        if sequence is None or engine is None:
            self.release(base.entry)
            return False
        tokens = base.entry.session.ids[: min(base.length, sequence.cached_len)]
        prompt = entry.load_prompt()
        self._sequences[entry] = continue_sequence(engine, sequence.slot, tokens, prompt, "verifier")
        del self._sequences[base.entry]
        return True

    def release(self, entry: SessionEntry) -> None:
        """Free the slot of a session that has ended, and that of its base if it has not taken it over."""
        if entry.base is not None:
            self.release(entry.base.entry)
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
