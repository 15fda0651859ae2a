"""The KV cache: one buffer per layer, one extent of it per slot (extents.py), one length per slot.

        |k k k k k k k . . .|k k k . . .|           |   lengths = [7, 3]
        base of slot 0       base of slot 1     total

A forward reads only positions that its own sequences have written: a query at position i attends to key positions ≤ i,
and the next forward overwrites stale entries. A roll-back is therefore one assignment to one integer. If extents move,
or the total changes, each buffer is copied in turn, so that at most one of them is held twice. A buffer knows its own
layout: it stays valid if memory runs out before it is copied. On a GPU, `tokens` holds the ids of the cached tokens for
the logits processors that run there. It shares the lengths, and so every roll-back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.engines.base import check_truncation, grow_to_fit
from outrider.engines.torch.append_plan import AppendPlan
from outrider.engines.torch.extents import (
    INITIAL_TOTAL,
    Layout,
    Move,
    is_sparse,
    make_room,
    roomy_size,
    shrunk,
)
from outrider.engines.torch.fp8 import from_fp8, to_fp8
from outrider.errors import PromptError, StateError

INITIAL_TOKENS = 16_384  # entries of `tokens`, 4 bytes each
log = logging.getLogger(__name__)


class _Buffer:
    """Keys or values of one layer: [heads, total, dim], with the layout of their entries."""

    def __init__(self, like: Tensor, layout: Layout) -> None:
        self.data = like.new_empty(like.shape[1], layout.total, like.shape[3])
        self.layout = layout

    def move(self, layout: Layout, move: Move, sources: Tensor | None) -> None:
        """Move the entries to another layout. sources: of the move, for a copy in one piece."""
        old = self.data
        if sources is not None:
            self.data = old.index_select(1, sources)
        else:
            self.data = old if move.in_place else old.new_empty(old.shape[0], layout.total, old.shape[2])
            for run in move.runs:
                self.data[:, run.target : run.target + run.length] = old[:, run.source : run.source + run.length]
        self.layout = layout


class _Layer(CacheLayerMixin):
    """Keys and values of one layer."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: SlotKVCache) -> None:
        super().__init__()
        self.buffers: list[_Buffer] = []
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, once the shape of their entries is known."""
        self.buffers = [_Buffer(self._owner.encode(like), self._owner.layout) for like in (key_states, value_states)]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor | list[Tensor], Tensor | list[Tensor]]:
        """Write the new positions of the forward's rows. Return the keys and values of their whole sequences."""
        if not self.buffers:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.buffers
        return self._append(keys, key_states), self._append(values, value_states)

    def _append(self, buffer: _Buffer, new: Tensor) -> Tensor | list[Tensor]:
        owner = self._owner
        found = owner.append_plan.append(buffer.data, owner.encode(new), by_row=owner.by_row)
        if not owner.fp8:
            return found
        return [from_fp8(row, new.dtype) for row in found] if isinstance(found, list) else from_fp8(found, new.dtype)

    def get_mask_sizes(self, *args: object) -> tuple[int, int]:
        return self._owner.span, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._owner.capacity


class SlotKVCache(Cache):
    """KV cache of one engine. A forward runs between `prepare_append`, or `reserve`, and `commit_append`.

    max_slots, max_length, max_positions: limits of the slots, of the positions per slot, and of all positions. None is
    no limit. by_row: the model's attention accepts a list of each row's keys (attention.py). fp8: entries are float8,
    those of the forward that writes them included, so that they do not depend on the division into forwards.
    """

    def __init__(
        self,
        layers: int,
        max_slots: int | None = None,
        max_length: int | None = None,
        max_positions: int | None = None,
        *,
        by_row: bool = False,
        fp8: bool = False,
    ) -> None:
        self.by_row, self.fp8 = by_row, fp8
        self.max_slots, self.max_length, self._max_positions = max_slots, max_length, max_positions
        self.layout = Layout(0, {})
        self.capacity = grow_to_fit(INITIAL_TOTAL, 1, max_length)  # positions that a slot may need so far
        self.lengths: list[int] = []
        self.tokens: Tensor | None = None
        self.addresses: Tensor | None = None
        self.span = 0
        self.append_plan = AppendPlan.build([0], [0], [1], torch.device("cpu"))
        self._free: list[int] = []
        self._buffer_layout = self.layout  # of all buffers
        self._planned = 0  # sum of the roomy sizes of all slots
        self._reserved: dict[int, int] = {}  # lengths after the present forward
        self._token_layout = Layout(0, {})
        self._pointers: list[list[int]] = []  # in `addresses`
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    @property
    def in_use(self) -> int:
        """Number of open slots."""
        return len(self.lengths) - len(self._free)

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers of keys and values that are allocated, each [heads, total, dim]."""
        return [buffer.data for buffer in self._buffers]

    @property
    def _buffers(self) -> list[_Buffer]:
        return [buffer for layer in self.layers for buffer in layer.buffers]

    def encode(self, entries: Tensor) -> Tensor:
        """Return entries as they are stored."""
        return to_fp8(entries) if self.fp8 else entries

    def base(self, slot: int) -> int:
        """Return the index of a slot's first position in the buffers, once it was reserved."""
        return self.layout.extents[slot].base

    def allocate(self) -> int:
        """Return a slot of length 0.

        Raises:
            StateError: all of `max_slots` are open.
        """
        if self._free:
            return self._free.pop()
        if len(self.lengths) == self.max_slots:
            raise StateError(f"all {self.max_slots} slots of the cache are in use")
        self.lengths.append(0)
        return len(self.lengths) - 1

    def release(self, slot: int) -> None:
        """Return a slot to the free list, and its extent to the others."""
        self.check(slot)
        self._free.append(slot)
        self._reserved.pop(slot, None)
        self._set_length(slot, 0)
        self.layout = self.layout.without(slot)
        self._shrink()

    def truncate(self, slot: int, length: int) -> None:
        """Roll a slot back to its first `length` positions.

        Raises:
            StateError: the slot does not hold that many.
        """
        self.check(slot)
        check_truncation(slot, length, self.lengths[slot])
        self._set_length(slot, length)
        self._shrink()

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
            StateError: all slots together would pass `max_positions`. Nothing has changed then.
        """
        starts = self.reserve(rows, counts)
        self.append_plan = AppendPlan.build([self.base(row) for row in rows], starts, counts, device)
        return self.append_plan.positions

    def reserve(self, rows: Seq[int], counts: Seq[int]) -> list[int]:
        """Reserve positions for a forward that computes its own. Return the start of each row."""
        starts = [self.lengths[row] for row in rows]
        ends = {row: start + count for row, start, count in zip(rows, starts, counts, strict=True)}
        longest = max(ends.values())
        if self.max_length is not None and longest > self.max_length:
            raise PromptError(f"a sequence of {longest} positions: the cache holds at most {self.max_length} of each")
        layout = self.layout
        if any(layout.size(row) < end for row, end in ends.items()):
            lengths = {slot: self.lengths[slot] for slot in layout.extents} | ends
            layout = make_room(layout, lengths, rows, self._max_positions)
        if layout is not self._buffer_layout:
            self._move_to(layout)
        self.span = longest
        self.capacity = grow_to_fit(self.capacity, longest, self.max_length)
        self._reserved = ends
        return starts

    def commit_append(self) -> None:
        """Set the slots' lengths to the positions that the finished forward wrote."""
        for row, end in self._reserved.items():
            self._set_length(row, end)
        self._reserved = {}

    def _set_length(self, slot: int, length: int) -> None:
        self._planned += roomy_size(length) - roomy_size(self.lengths[slot])
        self.lengths[slot] = length

    # Extents ------------------------------------------------------------------------------------------------

    def _shrink(self) -> None:
        """Give memory back if much of it is free."""
        if not is_sparse(self.layout, self._planned):
            return
        try:
            self._move_to(shrunk(self.layout, {slot: self._written(slot) for slot in self.layout.extents}))
        except torch.OutOfMemoryError as error:  # of the copy of one buffer
            log.warning("the KV cache could not shrink: %s", error)

    def _move_to(self, layout: Layout) -> None:
        """Copy the buffers to another layout. If that fails, the present layout stays."""
        old, self.layout = self.layout, layout
        try:
            self._move_buffers()
        except BaseException:
            self.layout = replace(old)  # another object, as the buffers differ from each other
            raise

    @torch.inference_mode()
    def _move_buffers(self) -> None:
        """Bring all buffers to the present layout."""
        origin, move, sources = self.layout, Move([], in_place=True), None
        for buffer in self._buffers:
            if buffer.layout is not self.layout:
                if buffer.layout is not origin:
                    origin, move = buffer.layout, Move.between(buffer.layout, self.layout, self._written)
                    is_scattered = not move.in_place and len(move.runs) > 1  # a run per session, in every buffer
                    sources = move.sources(self.layout.total).to(buffer.data.device) if is_scattered else None
                buffer.move(self.layout, move, sources)
        self._buffer_layout = self.layout
        if not move.in_place:
            self._release_unused()

    def _release_unused(self) -> None:
        """Return the memory of replaced buffers to the device, if PyTorch keeps much of it for later tensors."""
        device = self.buffers[0].device
        if device.type == "cuda":
            unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if unused > sum(buffer.nbytes for buffer in self.buffers) // 8:
                with torch.cuda.device(device):
                    torch.cuda.empty_cache()

    def _written(self, slot: int) -> int:
        """Return how many positions of a slot hold entries, those of the present forward included."""
        return max(self.lengths[slot], self._reserved.get(slot, 0))

    # For forwards on the device -----------------------------------------------------------------------------

    @torch.inference_mode()
    def ensure_capacity(self, heads: int, dim: int, like: Tensor) -> None:
        """Allocate all buffers, and keep `tokens`, int32 [≥ total], and `addresses`, int64 [layers, 4], from now on.

        addresses: of each layer's keys and values, and the total. The last column is padding. Captured graphs read
        these two tensors. `addresses` is never replaced, and `tokens` only if the total outgrows it.
        """
        if self._token_layout is self.layout:
            return
        nothing = like.new_empty(1, heads, 0, dim)
        for layer in self.layers:
            if not layer.buffers:
                layer.lazy_initialization(nothing, nothing)
        self._move_buffers()
        self._store_addresses(like.device)
        self._move_tokens(like.device)

    def _store_addresses(self, device: torch.device) -> None:
        pointers = [
            [*(buffer.data.data_ptr() for buffer in layer.buffers), self.layout.total, 0] for layer in self.layers
        ]
        if pointers != self._pointers:
            if self.addresses is None:
                self.addresses = torch.zeros(len(pointers), 4, dtype=torch.int64, device=device)
            self.addresses.copy_(torch.tensor(pointers))
            self._pointers = pointers

    def _move_tokens(self, device: torch.device) -> None:
        old = new = self.tokens
        if new is None or len(new) < self.layout.total:
            new = torch.zeros(grow_to_fit(INITIAL_TOKENS, self.layout.total), dtype=torch.int32, device=device)
        if old is not None:
            source = old.clone() if new is old else old
            for run in Move.between(self._token_layout, self.layout, self._written).runs:
                new[run.target : run.target + run.length] = source[run.source : run.source + run.length]
        self.tokens, self._token_layout = new, self.layout

    def token_ids(self, bases: Tensor, span: int) -> Tensor:
        """Return the ids of `span` tokens from each base, int32 [bases, span]. Behind a sequence's end they are any."""
        assert self.tokens is not None
        places = bases[:, None] + torch.arange(span, device=bases.device)
        return self.tokens[places.clamp_(max=len(self.tokens) - 1)]
