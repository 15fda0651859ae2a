"""One engine for many threads: a lock around every call.

An engine serves one thread. A model per thread would cost a load per thread, and a scripted drafter would know neither
audio nor how sure it is; behind a lock all threads draft with the real small model, each in slots of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from outrider.engines.base import Prompt, SequenceInput


class LockedEngine:
    """`engine` behind a lock. Calls on different slots do not depend on their order."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._lock = engine, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open(self, prompt: Prompt) -> int:
        with self._lock:
            return int(self._engine.open(prompt))

    def close(self, slot: int) -> None:
        with self._lock:
            self._engine.close(slot)

    def kv_len(self, slot: int) -> int:
        with self._lock:
            return int(self._engine.kv_len(slot))

    def truncate(self, slot: int, length: int) -> None:
        with self._lock:
            self._engine.truncate(slot, length)

    def forward(self, slot: int, ids: Seq[int], rows: int | None = None) -> Tensor:
        with self._lock:
            return self._engine.forward(slot, ids, rows)

    def forward_many(self, feeds: Seq[SequenceInput]) -> list[Tensor]:
        with self._lock:
            return self._engine.forward_many(feeds)

    @property
    def open_slots(self) -> int:
        """Slots of running generations, without those that are kept for the next prompt."""
        return int(self._engine._cache.in_use) - len(self._engine.prefix_cache)
