"""The KV cache: one buffer per layer, one row per slot, one length per slot.

        slot 0  |k k k k k k k . . . .|   lengths[0] = 7
        slot 1  |k k k . . . . . . . .|   lengths[1] = 3
                 0                    capacity

What lies beyond a slot's length is never visible: a query at position i sees key positions ≤ i only, and the next
forward overwrites what it passes over. So a roll-back is one assignment to one integer. Buffers grow by doubling.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.errors import StateError

FIRST_CAPACITY = 256


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: [slots, heads, capacity, dim]."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._grown(self.keys, key_states), self._grown(self.values, value_states)
        self.is_initialized = True

    def _grown(self, old: Tensor | None, like: Tensor) -> Tensor:
        owner = self._owner
        new = like.new_zeros(owner.slots, like.shape[1], owner.capacity, like.shape[3])
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new positions of the rows at work and return all that those rows may see."""
        owner = self._owner
        if self.keys is None or self.keys.shape[0] < owner.slots or self.keys.shape[2] < owner.capacity:
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


class SlotCache(Cache):
    """The cache of one engine. `begin` says which slots and positions the next forward is about."""

    def __init__(self, layers: int) -> None:
        self.slots = 1
        self.capacity = FIRST_CAPACITY
        self.lengths: list[int] = []
        self.span = 0
        self._free: list[int] = []
        self._rows = torch.zeros(1, dtype=torch.long)
        self._positions = torch.zeros(1, 1, dtype=torch.long)
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    def allocate(self) -> int:
        """A slot of length 0."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self.lengths)
            self.lengths.append(0)
            while self.slots < len(self.lengths):
                self.slots *= 2
        self.lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        self.check(slot)
        self._free.append(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot.

        Raises:
            StateError: the slot does not hold that many.
        """
        self.check(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise StateError(f"cannot truncate slot {slot} to {length}: it holds {self.lengths[slot]} positions")
        self.lengths[slot] = length

    def check(self, slot: int) -> None:
        """Raise StateError unless `slot` is open."""
        if not 0 <= slot < len(self.lengths) or slot in self._free:
            raise StateError(f"slot {slot} is not open")

    def begin(self, rows: Seq[int], positions: Tensor) -> None:
        """Announce a forward: row i of the batch is slot rows[i], its tokens at positions[i] (int64 [B, T])."""
        self.span = int(positions.max()) + 1
        while self.capacity < self.span:
            self.capacity *= 2
        self._rows = torch.tensor(rows, device=positions.device)
        self._positions = positions

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Store `new` [B, heads, T, dim] and return [B, heads, span, dim]."""
        if len(new) == 1:
            row, start = int(self._rows[0]), int(self._positions[0, 0])
            buffer[row, :, start : start + new.shape[2]] = new[0]
            return buffer[row : row + 1, :, : self.span]
        buffer[self._rows[:, None], :, self._positions] = new.transpose(1, 2)
        return buffer[self._rows, :, : self.span]
