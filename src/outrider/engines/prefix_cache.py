"""Prefix caching: the KV caches of finished generations, for prompts that begin with the same tokens.

A conversation's next turn begins with the turns before it. Its slot is continued from the longest common prefix of ids
and media, so that only the new tokens are computed. A prompt continues only sequences of its own `cache_salt`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from outrider.engines.base import CachedSequence, Engine, Prompt, SlotReuse, as_slot_reuse
from outrider.errors import StateError

T = TypeVar("T")

MAX_KEPT = 4  # slots, those of running generations included, up to which finished sequences are kept


@dataclass(frozen=True)
class _Finished:
    """A finished sequence. tokens: those in the cache of its slot."""

    slot: int
    tokens: list[int]
    prompt: Prompt


def take_longest(items: list[T], length: Callable[[T], int]) -> tuple[T | None, int]:
    """Remove and return the item with the greatest length above 0, the first of equals, and the length."""
    lengths = [length(item) for item in items]
    best = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    return (None, 0) if best is None or not lengths[best] else (items.pop(best), lengths[best])


class KeptList(Generic[T]):
    """Items that a next prompt may continue, least recently used first. May be used from several threads.

    limit: beyond it the oldest is dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[T] = []
        self._lock = threading.Lock()

    def add(self, item: T) -> None:
        """Keep an item."""
        with self._lock:
            self._items = [*self._items, item][-self._limit :]

    def take(self, length: Callable[[T], int]) -> tuple[T | None, int]:
        """Run `take_longest` on the items."""
        with self._lock:
            return take_longest(self._items, length)

    def retain(self, condition: Callable[[T], bool]) -> None:
        """Drop the items that do not meet the condition."""
        with self._lock:
            self._items = [item for item in self._items if condition(item)]


class PrefixCache:
    """Finished sequences of one engine, least recently used first. May be used from several threads."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._finished: list[_Finished] = []
        self._in_use = 0

    def open(self, engine: SlotReuse, prompt: Prompt, owner: str) -> CachedSequence:
        """Return a sequence for `prompt`, which continues the finished one with the longest common prefix, if any.

        Raises: as `Engine.open`.
        """
        match, shared = self._take(engine, prompt)
        if match is not None:
            try:
                sequence = continue_sequence(engine, match.slot, match.tokens[:shared], prompt, owner)
            except BaseException:
                engine.close(match.slot)
                raise
        else:
            sequence = self._open_new(engine, prompt, owner)
        with self._lock:
            self._in_use += 1
        return sequence

    def close(self, sequence: CachedSequence, *, keep: bool) -> None:
        """Close a sequence of `open`. keep: its cache holds what its tokens say, and may be continued."""
        engine, tokens = sequence.engine, sequence.cached_tokens()
        kept = keep and bool(tokens)
        with self._lock:
            self._in_use -= 1
            if kept:
                self._finished.append(_Finished(sequence.slot, tokens, sequence.prompt))
        if not kept:
            engine.close(sequence.slot)
        self._evict(engine, self._max_kept)

    def clear(self, engine: Engine) -> None:
        """Free the slots of all finished sequences."""
        self._evict(engine, 0)

    def __len__(self) -> int:
        return len(self._finished)

    def _take(self, engine: Engine, prompt: Prompt) -> tuple[_Finished | None, int]:
        """Remove and return the finished sequence with the longest common prefix, and the length of that."""
        with self._lock:
            return take_longest(self._finished, lambda each: shared_length(engine, each.tokens, each.prompt, prompt))

    def _open_new(self, engine: Engine, prompt: Prompt, owner: str) -> CachedSequence:
        self._evict(engine, self._max_kept - 1)
        try:
            return CachedSequence(engine, prompt, owner)
        except StateError:
            if not self._finished:
                raise
        self.clear(engine)  # the engine has fewer slots
        return CachedSequence(engine, prompt, owner)

    def _evict(self, engine: Engine, slots: int) -> None:
        """Free the least recently used until at most `slots` slots are taken, if the running generations allow it."""
        with self._lock:
            count = max(0, min(len(self._finished), len(self._finished) + self._in_use - slots))
            evicted, self._finished = self._finished[:count], self._finished[count:]
        for finished in evicted:
            engine.close(finished.slot)


def unique_salt() -> str:
    """Return a `cache_salt` that no other prompt has, for measurements: the generation finds no KV cache."""
    return secrets.token_hex(8)


def open_sequence(engine: Engine, prompt: Prompt, owner: str) -> CachedSequence:
    """Return a sequence for `prompt` in a slot of the engine, from its prefix cache if it has one."""
    reuse = as_slot_reuse(engine)
    return CachedSequence(engine, prompt, owner) if reuse is None else reuse.prefix_cache.open(reuse, prompt, owner)


def close_sequence(sequence: CachedSequence, *, keep: bool) -> None:
    """Close a sequence of `open_sequence`. keep: keep its KV cache for prompts that begin like it."""
    reuse = as_slot_reuse(sequence.engine)
    if reuse is None:
        sequence.close()
    else:
        reuse.prefix_cache.close(sequence, keep=keep)


def continue_sequence(engine: SlotReuse, slot: int, tokens: list[int], prompt: Prompt, owner: str) -> CachedSequence:
    """Return a sequence for `prompt` in a slot that holds `tokens`, the first of the prompt, and perhaps others."""
    engine.truncate(slot, len(tokens))
    engine.reopen(slot, prompt)
    return CachedSequence(engine, prompt, owner, slot=slot, tokens=tokens)


def shared_length(engine: Engine, tokens: Seq[int], previous: Prompt, prompt: Prompt) -> int:
    """Return how many of the cached `tokens` a new prompt can use. At least its last token is computed anew.

    previous: the prompt that the cached sequence began with. Behind a placeholder of other media, nothing is shared.
    """
    if previous.cache_salt != prompt.cache_salt:
        return 0
    length = min(common_prefix(tokens, prompt.ids), len(prompt.ids) - 1)
    if same_media(previous, prompt):
        return length
    return length_before_media(engine, prompt.ids[:length])


def length_before_media(engine: Engine, ids: Seq[int]) -> int:
    """Return how many of the ids come before the first placeholder of a recording."""
    audio = getattr(engine, "audio", None)
    return len(ids) if audio is None or audio.placeholder not in ids else ids.index(audio.placeholder)


def same_media(one: Prompt, other: Prompt) -> bool:
    """Return whether two prompts have equal media, or both none."""
    pairs = ((one.audio, other.audio), (one.features, other.features))
    return all(a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs)


def common_prefix(one: Seq[object], other: Seq[object]) -> int:
    """Return the length of the longest common prefix, by bisection: slices are compared in C."""
    one, other = tuple(one), tuple(other)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
