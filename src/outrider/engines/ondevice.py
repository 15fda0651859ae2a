"""Forwards of a fused stack as captured CUDA graphs, and the choosing of tokens beside them.

What is computed stays on the device: a verdict's choices are read back once for the whole batch, a drafted block's once
for the whole block.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from outrider.core.actions import Proposal
from outrider.core.choosing import Places, choose, held_columns, measured, picks, place, signals
from outrider.core.policy import Kind, Policy
from outrider.core.sampling import Pick
from outrider.engines.base import Feed
from outrider.engines.graphs import Graphs, Run
from outrider.engines.slots import SlotCache
from outrider.engines.stack import MOST_TOKENS, Batch, Shape, Stack, described

MOST_ROWS = 64  # constrained or sampled at once: each row takes several copies of itself


@dataclass(frozen=True)
class _Step:
    """A forward that ends with a choice from its only row; sure: with its signals."""

    shape: Shape
    kind: Kind
    sure: bool


class OnDevice:
    """Runs `stack` over a cache whose lengths are the caller's to move."""

    def __init__(self, stack: Stack, device: torch.device, graphs: Graphs | None = None) -> None:
        self._stack, self._device = stack, device
        self._graphs = graphs or Graphs(device)
        self._batches: dict[Shape, Batch] = {}
        self._place = torch.zeros(1, 3, dtype=torch.int64, device=device)  # of the row that a step chooses from
        self._buffers: tuple[object, ...] = ()  # what the graphs point to

    @staticmethod
    def fits(feeds: Seq[Feed]) -> bool:
        """Whether a batch is short enough."""
        return sum(len(feed.ids) for feed in feeds) <= MOST_TOKENS

    def prepare(self, cache: SlotCache) -> None:
        """Follow the cache to its present size."""
        buffers = (cache, cache.slots, cache.capacity)
        if buffers != self._buffers:
            self._stack.prepare(cache)
            self._graphs.clear()
            self._buffers = buffers

    def forget(self) -> None:
        """Let go of a cache that is there no more."""
        self._graphs.clear()
        self._batches.clear()
        self._buffers = ()

    def logits(self, feeds: Seq[Feed], starts: Seq[int], cache: SlotCache, span: int) -> Tensor:
        """[rows ≥ wanted, V] in the model's dtype; valid until the next call."""
        self.prepare(cache)
        shape = Shape.of([len(feed.ids) for feed in feeds], sum(feed.rows for feed in feeds), span)
        batch = self._batch(shape)

        def forward() -> Run:
            self._pad(batch)
            return lambda: self._stack.forward(batch, cache)

        run = self._graphs.find(shape, forward)
        _fill(batch.all, described(shape, feeds, starts))
        return run()

    # Drafting -----------------------------------------------------------------------------------------------

    def draft(
        self, slot: int, ids: Seq[int], count: int, policy: Policy, cache: SlotCache, start: int, *, sure: bool
    ) -> list[Proposal]:
        """Feed `ids` from position `start`, then choose and feed, `count` times, and read back together.

        Returns the tokens up to an EOS. sure: with the signals of each.
        """
        self.prepare(cache)
        first, span = start + len(ids), start + len(ids) + count - 1
        head, step = (_Step(Shape.of([n], 1, span), policy.kind, sure) for n in (len(ids), 1))
        run, run_on = self._find_step(head, cache), self._find_step(step, cache)
        _fill(self._batch(head.shape).all, described(head.shape, [Feed(slot, ids, 1)], [start]))
        _fill(self._place, torch.tensor([place(policy, first)]))
        found = [run().clone()]
        if count > 1:  # prepared while the device is busy
            self._place_next(head, step, slot, first)
        for n in range(1, count):
            if not policy.sampling.greedy:
                _fill(self._place, torch.tensor([place(policy, first + n)]))
            found.append(run_on().clone())
        return _proposals(torch.cat(found).tolist(), first, policy.constraints.eos_ids, sure=sure)

    def _place_next(self, head: _Step, step: _Step, slot: int, first: int) -> None:
        """Have the batch of single tokens continue the head's, which has its own where it is longer."""
        if head.shape != step.shape:
            batch = self._batch(step.shape)
            chosen = self._batch(head.shape).ids[:1].clone()
            _fill(batch.all, described(step.shape, [Feed(slot, [0], 1)], [first]))
            batch.ids[:1].copy_(chosen)

    def _find_step(self, step: _Step, cache: SlotCache) -> Run:
        batch = self._batch(step.shape)

        def forward() -> Run:
            self._pad(batch)
            self._place.fill_(1)
            held = held_columns(step.kind, self._stack.row_count, self._device)
            return lambda: (self._chosen(step, batch, cache), held)[0]

        return self._graphs.find(step, forward)

    def _chosen(self, step: _Step, batch: Batch, cache: SlotCache) -> Tensor:
        """float64 [1, 3 or 7]: a row of `choose`, and of `measured`."""
        rows, kind = self._stack.forward(batch, cache)[:1], step.kind
        history = None
        if kind.reads_history:
            assert cache.tokens is not None
            history = cache.tokens.index_select(0, batch.slots[:1])[:, : step.shape.span]
        places = Places(self._place[:, 0], self._place[:, 1], self._place[:, 2], history)
        chosen = choose(rows, kind, places, self._stack.lead)
        if step.sure:
            cut = rows[:, : kind.vocab_size]
            chosen = torch.cat([chosen, measured(cut, chosen[:, :1].long(), kind.sampling.temperature)], -1)
        self._move_on(batch, chosen)
        return chosen

    def _move_on(self, batch: Batch, chosen: Tensor) -> None:
        """Let the batch be about the token that was chosen, one position further."""
        batch.ids[:1].copy_(chosen[0, :1])
        batch.positions[:1].add_(1)
        batch.starts.add_(1)
        self._place[:, :2].add_(1)

    # Verdicts -----------------------------------------------------------------------------------------------

    def choose(
        self, logits: Tensor, feeds: Seq[Feed], starts: Seq[int], policies: Seq[Policy], cache: SlotCache
    ) -> list[list[Pick]]:
        """The picks of every feed's rows, which stand in `logits` one feed after another. One read-back."""
        members = [_Member(*parts) for parts in zip(feeds, starts, policies, _firsts(feeds), strict=True)]
        order = sorted(range(len(feeds)), key=lambda i: hash(members[i].policy.kind))
        groups = [list(group) for _, group in groupby(order, key=lambda i: members[i].policy.kind)]
        chosen = [self._choose_alike(logits, [members[i] for i in group], cache) for group in groups]
        back = torch.cat(chosen).tolist()
        found: dict[int, list[Pick]] = {}
        for i in (i for group in groups for i in group):
            lengths = members[i].lengths
            found[i] = picks(back[: len(lengths)])
            del back[: len(lengths)]
        return [found[i] for i in range(len(feeds))]

    def _choose_alike(self, logits: Tensor, members: Seq[_Member], cache: SlotCache) -> Tensor:
        """`choose` for members of one kind: float64 [their rows, 3]."""
        kind, rows = members[0].policy.kind, [row for member in members for row in member.rows]
        entries = self._uploaded([place(member.policy, length) for member in members for length in member.lengths])
        history = None
        if kind.reads_history:
            assert cache.tokens is not None
            slots = self._uploaded([member.feed.slot for member in members for _ in member.lengths])
            history = cache.tokens[slots, : max(member.lengths[-1] for member in members)]
        whole = rows == list(range(len(rows)))
        part = logits[: len(rows)] if whole else logits[self._uploaded(rows)]
        most = len(rows) if kind.sampling.greedy and not kind.constrains else MOST_ROWS
        chosen = []
        for cut in (slice(n, n + most) for n in range(0, len(rows), most)):
            at = entries[cut]
            places = Places(at[:, 0], at[:, 1], at[:, 2], None if history is None else history[cut])
            chosen.append(choose(part[cut], kind, places, self._stack.lead))
        return torch.cat(chosen)

    def _uploaded(self, numbers: Seq[Any]) -> Tensor:
        """int64 numbers on the device."""
        return _sendable(torch.tensor(numbers), self._device).to(self._device, non_blocking=True)

    def _batch(self, shape: Shape) -> Batch:
        if shape not in self._batches:
            self._batches[shape] = Batch.on(self._device, shape)
        return self._batches[shape]

    @staticmethod
    def _pad(batch: Batch) -> None:
        """Nothing but padding: a forward over it writes nothing."""
        _fill(batch.all, described(batch.shape, [], []))


@dataclass(frozen=True)
class _Member:
    """One feed among those that are chosen from together. first: of its rows among all."""

    feed: Feed
    start: int
    policy: Policy
    first: int

    @property
    def rows(self) -> range:
        return range(self.first, self.first + self.feed.rows)

    @property
    def lengths(self) -> range:
        """The prefix that each row follows."""
        end = self.start + len(self.feed.ids) + 1
        return range(end - self.feed.rows, end)


def _fill(target: Tensor, numbers: Tensor) -> None:
    target.copy_(_sendable(numbers, target.device), non_blocking=True)


def _sendable(numbers: Tensor, device: torch.device) -> Tensor:
    """In memory from which a GPU copies without first waiting for what it is at."""
    return numbers.pin_memory() if device.type == "cuda" else numbers


def _firsts(feeds: Seq[Feed]) -> list[int]:
    return [end - feed.rows for feed, end in zip(feeds, accumulate(feed.rows for feed in feeds), strict=True)]


def _proposals(found: list[list[float]], first: int, eos_ids: tuple[int, ...], *, sure: bool) -> list[Proposal]:
    """Up to an EOS; what came behind it is nobody's."""
    out: list[Proposal] = []
    for n, (pick, row) in enumerate(zip(picks([row[:3] for row in found]), found, strict=True)):
        out.append(Proposal(pick.checked(first + n).choice, signals(row[3:]) if sure else None))
        if pick.choice in eos_ids:
            break
    return out
