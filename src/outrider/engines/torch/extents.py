"""Placement of sequences in one range of positions. Each has an extent, a run of positions of its own.

    |  slot 0   | slot 2 |   gap   |      slot 1      | gap |
    0          192      320       512                896   total

An extent holds some positions more than its sequence. When they are used up, it grows into the gap behind it, or moves
to another gap. If no gap is large enough, all extents are packed, in a range that is larger by a sixteenth if it has no
space left: since everything is copied then, each gets new space to grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import StateError

BLOCK = 64  # granularity of an extent's size, in positions
SPARE_SHARE = 16  # an extent has a 16th of its length to spare, and a range a 16th of its extents
INITIAL_TOTAL = 256
DOUBLING_LIMIT = 2048  # positions up to which a range doubles
MIN_SHRINKABLE = 4096  # positions below which a range does not shrink


def roomy_size(length: int) -> int:
    """Return the size of an extent for `length` positions, and for some more. 0 positions need none."""
    return -(-(length + length // SPARE_SHARE + BLOCK) // BLOCK) * BLOCK if length else 0


@dataclass(frozen=True)
class Extent:
    """Positions base, …, end − 1, one or more."""

    base: int
    size: int

    @property
    def end(self) -> int:
        """Return the first position behind the extent."""
        return self.base + self.size


@dataclass(frozen=True)
class Layout:
    """Extents by slot, in a range of `total` positions."""

    total: int
    extents: Mapping[int, Extent]

    def size(self, slot: int) -> int:
        """Return the size of a slot's extent, 0 without one."""
        return self.extents[slot].size if slot in self.extents else 0

    def without(self, slot: int) -> Layout:
        """Return the layout after a slot gave its extent back."""
        return Layout(self.total, {other: extent for other, extent in self.extents.items() if other != slot})

    def grow(self, slot: int, length: int) -> Layout | None:
        """Return a layout in which a slot's extent has at least `length` positions, the others as they are.

        Returns None if no gap is large enough.
        """
        wanted, own = roomy_size(length), self.extents.get(slot)
        gaps = list(self._gaps())
        if own is not None:
            behind = next((gap for gap in gaps if gap.base == own.end), Extent(own.end, 0))
            if own.size + behind.size >= length:
                return self._placed(slot, Extent(own.base, min(own.size + behind.size, wanted)))
        fitting = [gap for gap in gaps if gap.size >= wanted] or [gap for gap in gaps if gap.size >= length]
        if not fitting:
            return None
        best = min(fitting, key=lambda gap: gap.size)
        return self._placed(slot, Extent(best.base, min(best.size, wanted)))

    def _placed(self, slot: int, extent: Extent) -> Layout:
        return Layout(self.total, {**self.without(slot).extents, slot: extent})  # last, see `Move.between`

    def _gaps(self) -> Iterator[Extent]:
        start = 0
        for extent in sorted(self.extents.values(), key=lambda extent: extent.base):
            if extent.base > start:
                yield Extent(start, extent.base - start)
            start = extent.end
        if self.total > start:
            yield Extent(start, self.total - start)

    def packed(self, lengths: Mapping[int, int], total: int) -> Layout:
        """Return a layout with all extents in their present order, new ones last, and the rest of `total` behind them.

        lengths: positions that each slot needs, `total` or less together. A slot that needs none may lose its extent:
        another would grow over an empty one, whose end would then count as the beginning of a gap.
        """
        spare = total - sum(lengths.values())
        is_roomy = sum(map(roomy_size, lengths.values())) <= total
        extents, base = {}, 0
        for slot in sorted(lengths, key=lambda slot: self.extents[slot].base if slot in self.extents else self.total):
            size = roomy_size(lengths[slot]) if is_roomy else lengths[slot] + spare // len(lengths)
            if size:
                extents[slot] = Extent(base, size)
            base += size
        return Layout(total, extents)


@dataclass(frozen=True)
class Run:
    """`length` entries to copy from position `source` to position `target`."""

    source: int
    target: int
    length: int

    def overwrites(self, other: Run) -> bool:
        """Return whether copying this run in place would change the source of another."""
        return self.target < other.source + other.length and other.source < self.target + self.length


@dataclass(frozen=True)
class Move:
    """Runs to copy from one layout to another. in_place: within the buffer, in this order; else to a new buffer."""

    runs: list[Run]
    in_place: bool

    @classmethod
    def between(cls, old: Layout, new: Layout, length: Callable[[int], int]) -> Move:
        """Return the move that keeps the entries of each slot. length: how many a slot has.

        Extents that were placed one after another are last in `new`, in this order: one may go where another was.
        """
        kept = [
            (old.extents[slot].base, extent.base, length(slot))
            for slot, extent in new.extents.items()
            if slot in old.extents
        ]
        runs = [Run(source, target, count) for source, target, count in kept if count]
        moved = [run for run in runs if run.source != run.target]
        overwrites = any(run.overwrites(later) for n, run in enumerate(moved) for later in moved[n:])
        if old.total == new.total and not overwrites:
            return cls(moved, in_place=True)
        if moved:
            return cls(runs, in_place=False)
        end = max((run.source + run.length for run in runs), default=0)
        return cls([Run(0, 0, end)], in_place=False)

    def sources(self, total: int) -> Tensor:
        """Return the position that each of `total` positions of the new buffer is copied from, int64. Gaps take any."""
        found = torch.zeros(total, dtype=torch.int64)
        for run in self.runs:
            found[run.target : run.target + run.length] = torch.arange(run.source, run.source + run.length)
        return found


def make_room(layout: Layout, lengths: Mapping[int, int], slots: Iterable[int], limit: int | None) -> Layout:
    """Return a layout in which the extents of `slots` have the positions that `lengths` gives.

    lengths: positions that each slot with an extent, and each of `slots`, needs. limit: largest total, None for none.

    Raises:
        StateError: the lengths are more than `limit` together.
    """
    found = _grow_all(layout, lengths, slots)
    if found is not None:
        return found
    needed = sum(lengths.values())
    if limit is not None and needed > limit:
        raise StateError(f"the KV cache holds {limit} positions, and {needed} are needed: close a sequence")
    total = max(_roomy_total(lengths), min(2 * layout.total, DOUBLING_LIMIT))
    total = total if limit is None else min(total, limit)
    return layout.packed(lengths, max(total, layout.total))


def is_sparse(layout: Layout, planned: int) -> bool:
    """Return whether a layout is an eighth larger than its slots need. planned: sum of their roomy sizes."""
    return layout.total > max(MIN_SHRINKABLE, planned + planned // 8)


def shrunk(layout: Layout, lengths: Mapping[int, int]) -> Layout:
    """Return a packed layout for slots of these lengths."""
    return layout.packed(lengths, max(MIN_SHRINKABLE, _roomy_total(lengths)))


def _grow_all(layout: Layout, lengths: Mapping[int, int], slots: Iterable[int]) -> Layout | None:
    found: Layout | None = layout
    for slot in slots:
        if found is not None and found.size(slot) < lengths[slot]:
            found = found.grow(slot, lengths[slot])
    return found


def _roomy_total(lengths: Mapping[int, int]) -> int:
    sizes = sum(map(roomy_size, lengths.values()))
    return -(-(sizes + sizes // SPARE_SHARE) // INITIAL_TOTAL) * INITIAL_TOTAL
