"""The KV cache: one buffer per layer, one row per slot, one length per slot.

        slot 0  |k k k k k k k . . . .|   lengths[0] = 7
        slot 1  |k k k . . . . . . . .|   lengths[1] = 3
                 0                    capacity

Entries beyond a slot's length are never visible: a query at position i attends to key positions ≤ i only, and the next
forward overwrites stale entries. A roll-back is therefore one assignment to one integer. For a new sequence, stale
entries are set to zero. Buffers grow by doubling, up to their limits. While one grows, its old copy is held beside the
new one. On a GPU, `tokens` holds the ids of the cached tokens for the logits processors that run there. It shares the
lengths, and so every roll-back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.engines.base import check_truncation, grow_to_fit
from outrider.errors import PromptError, StateError

INITIAL_CAPACITY = 256


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: [slots, heads, capacity, dim]."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: SlotKVCache) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate or grow the buffers to the owner's size."""
        self.keys = self._grow(self.keys, key_states)  # one at a time, so that only one old copy is held
        self.values = self._grow(self.values, value_states)
        self.is_initialized = True

    @property
    def needs_growth(self) -> bool:
        """Return whether the buffers do not exist yet, or are smaller than the owner's size."""
        keys, owner = self.keys, self._owner
        return keys is None or keys.shape[0] < owner.slots or keys.shape[2] < owner.capacity

    def _grow(self, old: Tensor | None, like: Tensor) -> Tensor:
        owner = self._owner
        new = like.new_zeros(owner.slots, like.shape[1], owner.capacity, like.shape[3])
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new positions of the forward's rows. Return the keys and values of their whole sequences."""
        owner = self._owner
        if self.needs_growth:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return owner.write(self.keys, key_states), owner.write(self.values, value_states)

    def get_mask_sizes(self, *args: object) -> tuple[int, int]:
        return self._owner.span, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._owner.capacity


class SlotKVCache(Cache):
    """KV cache of one engine. A forward runs between `prepare_append`, or `reserve`, and `commit_append`.

    max_slots, max_length: limits of the slots, and of the positions per slot. None is no limit.
    """

    def __init__(self, layers: int, max_slots: int | None = None, max_length: int | None = None) -> None:
        self.max_slots, self.max_length = max_slots, max_length
        self.slots = 1
        self.capacity = grow_to_fit(INITIAL_CAPACITY, 1, max_length)
        self.lengths: list[int] = []
        self._written_lengths: list[int] = []  # the largest length of each slot since it was zeroed
        self.tokens: Tensor | None = None
        self.span = 0
        self._free: list[int] = []
        self._append_plan = _AppendPlan.build([0], [0], [1], torch.device("cpu"))
        self._reserved: tuple[Seq[int], Seq[int]] = ((), ())
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    @property
    def in_use(self) -> int:
        """Number of open slots."""
        return len(self.lengths) - len(self._free)

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers of keys and values that are allocated, each [slots, heads, capacity, dim]."""
        buffers = [buffer for layer in self.layers for buffer in (layer.keys, layer.values)]
        return [buffer for buffer in buffers if buffer is not None]

    def allocate(self) -> int:
        """Return a slot of length 0.

        Raises:
            StateError: all of `max_slots` are open.
        """
        if self._free:
            slot = self._free.pop()
        elif len(self.lengths) == self.max_slots:
            raise StateError(f"all {self.max_slots} slots of the cache are in use")
        else:
            slot = len(self.lengths)
            self.lengths.append(0)
            self._written_lengths.append(0)
            self.slots = grow_to_fit(self.slots, len(self.lengths), self.max_slots)
        self.lengths[slot] = 0
        self._zero_stale(slot)
        return slot

    @torch.inference_mode()
    def _zero_stale(self, slot: int) -> None:
        """Zero the entries of earlier sequences. A NaN there would pass the mask, as 0 × NaN is NaN."""
        if self._written_lengths[slot]:
            for buffer in self.buffers:
                buffer[slot, :, : self._written_lengths[slot]] = 0
            self._written_lengths[slot] = 0

    def release(self, slot: int) -> None:
        """Return a slot to the free list."""
        self.check(slot)
        self._free.append(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Roll a slot back to its first `length` positions.

        Raises:
            StateError: the slot does not hold that many.
        """
        self.check(slot)
        check_truncation(slot, length, self.lengths[slot])
        self.lengths[slot] = length

    def check(self, slot: int) -> None:
        """Raise StateError unless `slot` is open."""
        if not 0 <= slot < len(self.lengths) or slot in self._free:
            raise StateError(f"slot {slot} is not open")

    def prepare_append(self, rows: Seq[int], counts: Seq[int], device: torch.device) -> Tensor:
        """Prepare a forward in which row i of the batch appends counts[i] tokens to slot rows[i].

        Returns their positions, int64 [B, max(counts)]. Padding at a row's end repeats the row's last real position,
        since a model's position table may end there.

        Raises:
            PromptError: a slot would pass `max_length`. Nothing has changed then.
        """
        starts = self.reserve(rows, counts)
        self._append_plan = _AppendPlan.build(rows, starts, counts, device)
        return self._append_plan.positions

    def reserve(self, rows: Seq[int], counts: Seq[int]) -> list[int]:
        """Reserve positions for a forward that computes its own. Return the start of each row."""
        starts = [self.lengths[row] for row in rows]
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        if self.max_length is not None and longest > self.max_length:
            raise PromptError(f"a sequence of {longest} positions: the cache holds at most {self.max_length} of each")
        self.span = longest
        self.capacity = grow_to_fit(self.capacity, longest, self.max_length)
        self._reserved = rows, counts
        for row, start, count in zip(rows, starts, counts, strict=True):
            self._written_lengths[row] = max(self._written_lengths[row], start + count)
        return starts

    def commit_append(self) -> None:
        """Add the positions that the finished forward wrote to the slots' lengths."""
        for row, count in zip(*self._reserved, strict=True):
            self.lengths[row] += count

    # For forwards on the device -----------------------------------------------------------------------------

    @property
    def layer_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, once allocated."""
        return [(layer.keys, layer.values) for layer in self.layers]

    def ensure_capacity(self, heads: int, dim: int, like: Tensor) -> None:
        """Grow all buffers to the present size, and keep `tokens`, int32 [slots, capacity], from now on."""
        nothing = like.new_empty(0, heads, 0, dim)
        for layer in self.layers:
            if layer.needs_growth:
                layer.lazy_initialization(nothing, nothing)
        old = self.tokens
        if old is None or old.shape[0] < self.slots or old.shape[1] < self.capacity:
            self.tokens = torch.zeros(self.slots, self.capacity, dtype=torch.int32, device=like.device)
            if old is not None:
                self.tokens[: old.shape[0], : old.shape[1]] = old

    def store_token_ids(self, ids: Tensor) -> None:
        """Store the ids [B, T] of the prepared forward, if `tokens` is kept."""
        if self.tokens is not None:
            self._append_plan.store(self.tokens[:, None, :, None], ids[:, None, :, None].to(torch.int32))

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Store `new` [B, heads, T, dim]. Return the rows' whole sequences, [B, heads, span, dim]."""
        plan = self._append_plan
        plan.store(buffer, new)
        seen = buffer[:, :, : self.span]
        if plan.is_contiguous:
            return seen[plan.rows[0] : plan.rows[-1] + 1]
        return seen.index_select(0, plan.slots)


@dataclass(frozen=True)
class _AppendPlan:
    """Destination of one forward's keys and values: token t of row i goes to positions[i, t] of slot rows[i].

    positions: int64 [B, T]. slots: int64 [B]. is_contiguous: the rows are consecutive slots, so that a view suffices.
    valid_indices: indices in the flattened batch of all tokens but padding, or None if there is no padding.
    """

    rows: Seq[int]
    counts: Seq[int]
    positions: Tensor
    slots: Tensor
    is_contiguous: bool
    valid_indices: Tensor | None

    @classmethod
    def build(cls, rows: Seq[int], starts: Seq[int], counts: Seq[int], device: torch.device) -> _AppendPlan:
        """Return the plan in which row i appends counts[i] tokens to slot rows[i], from position starts[i]."""
        first, new = torch.tensor(starts)[:, None], torch.tensor(counts)[:, None]
        steps = torch.arange(max(counts))
        positions = (first + torch.minimum(steps, new - 1)).to(device)
        is_ragged = min(counts) < max(counts)
        valid_indices = (steps < new).flatten().nonzero()[:, 0].to(device) if is_ragged else None
        is_contiguous = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        return cls(rows, counts, positions, torch.tensor(rows, device=device), is_contiguous, valid_indices)

    def store(self, buffer: Tensor, new: Tensor) -> None:
        """Write `new` [B, heads, T, dim] into a buffer [slots, heads, capacity, dim]."""
        slots = self.slots[:, None].expand_as(self.positions).flatten()
        positions, tokens = self.positions.flatten(), new.transpose(1, 2).flatten(0, 1)
        if self.valid_indices is not None:
            slots, positions, tokens = (each[self.valid_indices] for each in (slots, positions, tokens))
        buffer[slots, :, positions] = tokens
