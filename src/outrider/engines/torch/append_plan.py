"""Destination of a forward's keys and values in the KV cache, and the way to read whole sequences there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_COPIED_SIZE = 2**15  # numbers that are copied faster than attention is called for a row of its own


@dataclass(frozen=True)
class AppendPlan:
    """A forward in which row i appends counts[i] tokens, from position starts[i] of the sequence at bases[i].

    positions: int64 [B, T], padded with the row's last real position. targets: int64, places in the buffers of all
    tokens but padding. valid_indices: their indices in the flattened batch, or None if there is no padding. ends:
    lengths of the sequences after the forward.
    """

    bases: Seq[int]
    ends: Seq[int]
    positions: Tensor
    targets: Tensor
    valid_indices: Tensor | None
    _indices: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, bases: Seq[int], starts: Seq[int], counts: Seq[int], device: torch.device) -> AppendPlan:
        """Return the plan of a forward."""
        first, new = torch.tensor(starts)[:, None], torch.tensor(counts)[:, None]
        steps = torch.arange(max(counts))
        positions = first + torch.minimum(steps, new - 1)
        targets = (positions + torch.tensor(bases)[:, None]).flatten()
        valid_indices = None
        if min(counts) < max(counts):
            valid_indices = (steps < new).flatten().nonzero()[:, 0]
            targets, valid_indices = targets[valid_indices], valid_indices.to(device)
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        return cls(bases, ends, positions.to(device), targets.to(device), valid_indices)

    def append(self, buffer: Tensor, new: Tensor, *, by_row: bool = False) -> Tensor | list[Tensor]:
        """Store `new` [B, heads, T, dim]. Return the rows' whole sequences, [B, heads, span, dim].

        by_row: if they would have to be copied, and are long, return a view of each instead, [1, heads, end, dim].
        """
        self.store(buffer, new)
        span = max(self.ends)
        heads, total, dim = buffer.shape
        steps = {b - a for a, b in zip(self.bases, self.bases[1:], strict=False)} or {0}
        if min(self.ends) == span and len(steps) == 1 and min(steps) >= 0:  # a view suffices
            return buffer.as_strided(
                (len(self.bases), heads, span, dim), (min(steps) * dim, total * dim, dim, 1), self.bases[0] * dim
            )
        if by_row and heads * span * dim > MAX_COPIED_SIZE:
            return [buffer[None, :, base : base + end] for base, end in zip(self.bases, self.ends, strict=True)]
        found = buffer.flatten(0, 1).index_select(0, self._row_indices(heads, total))
        return found.view(len(self.bases), heads, span, dim)

    def store(self, buffer: Tensor, new: Tensor) -> None:
        """Write `new` [B, heads, T, dim] into a buffer [heads, total, dim]."""
        if len(self.bases) == 1:
            end = self.bases[0] + self.ends[0]
            buffer[:, end - new.shape[2] : end] = new[0]
            return
        tokens = new.transpose(0, 1).flatten(1, 2)
        buffer[:, self.targets] = tokens if self.valid_indices is None else tokens[:, self.valid_indices]

    def _row_indices(self, heads: int, total: int) -> Tensor:
        """Return the index of each row's entries in a buffer [heads · total, dim]: int64 [B · heads · span].

        Behind a sequence's end its last entry is repeated, which the mask hides.
        """
        if (heads, total) not in self._indices:
            device = self.positions.device
            last = torch.tensor(self.ends, device=device)[:, None] - 1
            columns = torch.minimum(torch.arange(max(self.ends), device=device), last)
            columns += torch.tensor(self.bases, device=device)[:, None]
            starts = total * torch.arange(heads, device=device)
            self._indices[heads, total] = (columns[:, None, :] + starts[:, None]).flatten()
        return self._indices[heads, total]
