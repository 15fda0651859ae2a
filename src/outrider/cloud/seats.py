"""Who sits in which KV slot. Belongs to the batcher's thread, the only one that touches the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import Record
from outrider.engines.base import Engine, Reader


class Seats:
    """`total` slots of an engine for any number of sessions.

    Evicts the least recently used session of the identity that has the most slots.
    """

    def __init__(self, engine: Engine, total: int, metrics: Metrics) -> None:
        self._engine, self.total, self._metrics = engine, total, metrics
        self._readers: dict[Record, Reader] = {}
        self._left: set[bytes] = set()  # sessions that had a seat before: theirs is a cache to be rebuilt

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, record: Record) -> bool:
        return record in self._readers

    def reader(self, record: Record) -> Reader:
        return self._readers[record]

    def take(self, record: Record, busy: Set[Record]) -> bool:
        """Give a session a slot, if it has none; false where all slots are held by the `busy`."""
        if record in self._readers:
            return True
        if len(self) >= self.total and not self._evict(busy):
            return False
        self._readers[record] = Reader(self._engine, record.load_prompt(), "verifier")
        if record.id in self._left:
            self._left.discard(record.id)
            self._metrics.rebuilt()
        return True

    def leave(self, record: Record) -> None:
        """The session is over."""
        self.vacate(record)
        self._left.discard(record.id)

    def vacate(self, record: Record) -> None:
        """Take the slot away; the session may take another."""
        reader = self._readers.pop(record, None)
        if reader is not None:
            self._left.add(record.id)
            reader.close()

    def clear(self) -> None:
        """Give all slots back."""
        for record in list(self._readers):
            self.leave(record)

    def _evict(self, busy: Set[Record]) -> bool:
        idle = [record for record in self._readers if record not in busy]
        if not idle:
            return False
        slots = Counter(record.identity for record in self._readers)
        oldest = min(idle, key=lambda record: (-slots[record.identity], record.touched))
        self.vacate(oldest)
        self._metrics.evicted()
        return True
