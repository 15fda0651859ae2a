"""Replay of gates along traces: the blocks that a gate would form, and its decision on each block.

Blocks follow the rules of `Decoder` along the target's output. After a skipped block the next one starts behind it.
After a verified block the next one starts behind the correction or bonus token. A drafted end token ends a block.
Audits and detected loops verify blocks that the gate would skip, as in live decoding.

A trace holds the drafter's signals along the *target's* text. After its first disagreement in a block the live drafter
continues from its own token, with signals that no trace contains. A block therefore has two values:

    prefix    over the tokens up to and including the first disagreement. It equals the live drafter's value.
    whole     over all tokens. It is right if a wrong token leaves the drafter's confidence unchanged.

The maximum over the prefix is never above the maximum over the live block. If the live run skips a block, the replay by
prefixes skips it too. The guarantee of `planning/calibrate.py` follows from this. The value over the whole block
predicts escalations better.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from outrider.decoding.calibrated_gate import draw_audits
from outrider.decoding.gate import Signals, Threshold
from outrider.decoding.loop_detection import DEFAULT_RULE
from outrider.planning.traces import Trace

NEVER = np.iinfo(np.int64).max  # position of a loop if there is none
SIGNAL_GRID = 1e-6  # resolution of the signals in traces


@dataclass(frozen=True)
class BlockTable:
    """The block that starts at each position of the concatenated traces. The last position is the end.

    first: int64 [traces], start of each trace. skipped_to, verified_to: int64 [positions], start of the next block.
    wrong: float64 [positions], share of the target's output from the block's first wrong token on, 0 without one.
    share: float64 [positions], the block's share of its trace. audits: bool [positions], whether an audit verifies it.
    loops: int64 [positions], where a loop is detected if detection starts here. prefixes, blocks: signals of the drafts
    up to the first disagreement, and of the whole block.
    """

    first: np.ndarray
    skipped_to: np.ndarray
    verified_to: np.ndarray
    wrong: np.ndarray
    share: np.ndarray
    audits: np.ndarray
    loops: np.ndarray
    prefixes: list[tuple[Signals, ...]]
    blocks: list[tuple[Signals, ...]]

    def uncertainty(self, threshold: Threshold, *, whole: bool = False) -> np.ndarray:
        """Return the drafter's uncertainty per block: float64 [positions], infinite at the end.

        A gate verifies the blocks above its limit. whole: use all tokens of a block instead of its prefix.
        """
        sign = direction(threshold)
        values = self.blocks if whole else self.prefixes
        return np.array([sign * threshold.value(block) for block in values] + [np.inf])


@dataclass(frozen=True)
class Replay:
    """Results of replayed gates.

    losses: float64 [traces, limits], share of the target's output from the first wrong token on. edge_shares: float64
    [traces, limits], share of skipped tokens. escalation: float64 [limits], verified blocks ÷ blocks.
    """

    losses: np.ndarray
    edge_shares: np.ndarray
    escalation: np.ndarray


def direction(threshold: Threshold) -> float:
    """Return 1 for a signal that rises with the drafter's uncertainty, −1 for the margin."""
    return -1.0 if threshold.signal == "margin" else 1.0


def end_tokens(trace: Trace) -> tuple[int, ...]:
    """Return the last token of an output if it occurs nowhere else in it. For a truncated output this is a guess."""
    last = trace.target[-1]
    return () if last in trace.target[:-1] else (last,)


def build_blocks(traces: Seq[Trace], k: int, audit: float = 0.0, seed: int = 0) -> BlockTable:
    """Build the blocks of up to k drafts. audit: share of skipped blocks to verify. seed: of their selection."""
    first = np.cumsum([0, *(len(trace.target) for trace in traces)])
    last = int(first[-1])
    rows = [row for trace, at in zip(traces, first, strict=False) for row in _blocks(trace, int(at), last, k)]
    skipped, verified, wrong, share, prefixes, blocks = zip(*rows, strict=True)
    draws = [draw_audits(seed + n, np.arange(len(trace.target)), audit) for n, trace in enumerate(traces)]
    loops = [_loops(trace.target, int(at)) for trace, at in zip(traces, first, strict=False)]
    return BlockTable(
        first[:-1],
        np.array([*skipped, last]),
        np.array([*verified, last]),
        np.array([*wrong, 0.0]),
        np.array([*share, 0.0]),
        np.array([*np.concatenate(draws), True]),
        np.array([*np.concatenate(loops), NEVER]),
        list(prefixes),
        list(blocks),
    )


def replay(table: BlockTable, uncertainty: np.ndarray, limits: np.ndarray, *, loops: bool = True) -> Replay:
    """Replay all traces under all limits at once.

    uncertainty: from `BlockTable.uncertainty`. limits: float64 [limits], with the same sign. loops: verify the block
    after a detected loop, as `--on-loop escalate` does.
    """
    end = len(table.wrong) - 1
    uncertainty = np.where(table.audits, np.inf, uncertainty)
    found = table.loops if loops else np.full_like(table.loops, NEVER)
    at = np.repeat(table.first[:, None], len(limits), axis=1)
    loop_start = at.copy()  # where loop detection started
    losses, edge_shares = np.zeros(at.shape), np.zeros(at.shape)
    blocks, escalated = np.zeros(len(limits)), np.zeros(len(limits))
    while (live := at < end).any():
        in_loop = found[loop_start] <= at
        skip = (uncertainty[at] <= limits) & ~in_loop
        losses = np.maximum(losses, np.where(skip, table.wrong[at], 0.0))  # the first is the largest
        edge_shares += np.where(skip, table.share[at], 0.0)
        blocks += live.sum(axis=0)
        escalated += (live & ~skip).sum(axis=0)
        loop_start = np.where(in_loop, at, loop_start)
        at = np.where(skip, table.skipped_to[at], table.verified_to[at])
    return Replay(losses, edge_shares, escalated / blocks)


def replay_gate(traces: Seq[Trace], gate: Threshold, k: int, audit: float = 0.0, seed: int = 0) -> Replay:
    """Replay one gate by prefixes."""
    table = build_blocks(traces, k, audit, seed)
    return replay(table, table.uncertainty(gate), np.array([direction(gate) * gate.limit]))


def worst_losses(table: BlockTable, uncertainty: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return the larger loss of a replay with and one without verification after loops: float64 [traces, limits].

    It bounds the loss of a run under `--on-loop escalate` and under `ignore`, which form different blocks after a loop.
    """
    losses = replay(table, uncertainty, limits).losses
    if (table.loops == NEVER).all():
        return losses
    return np.maximum(losses, replay(table, uncertainty, limits, loops=False).losses)


def _blocks(
    trace: Trace, at: int, last: int, k: int
) -> list[tuple[int, int, float, float, tuple[Signals, ...], tuple[Signals, ...]]]:
    """Return, per position, the next positions (skipped, verified), and the block's loss, share and signals."""
    agrees, size, ends = trace.agrees, len(trace.target), end_tokens(trace)
    rows = []
    for start in range(size):
        full = min(start + k, size)
        stop = next((n + 1 for n in range(start, full) if trace.draft[n] in ends), full)
        agreed_end = next((n for n in range(start, stop) if not agrees[n]), stop)
        skipped = size if trace.draft[stop - 1] in ends else stop
        wrong = (size - agreed_end) / size if agreed_end < stop else 0.0
        skipped_to, verified_to = (last if n >= size else at + n for n in (skipped, agreed_end + 1))
        prefix = trace.signals[start : min(agreed_end + 1, stop)]
        share = (skipped - start) / size
        rows.append((skipped_to, verified_to, wrong, share, prefix, trace.signals[start:stop]))
    return rows


def _loops(target: Seq[int], at: int) -> np.ndarray:
    """Return the position at which `Decoder` finds a loop after each token, or NEVER: int64 [tokens]."""
    found = np.full(len(target), NEVER)
    for length in range(len(target), 0, -1):  # in reverse, so that the first of several loops stays
        period = DEFAULT_RULE.find_period(target[:length])
        if period is not None:
            found[: length - DEFAULT_RULE.tail_needed(period) + 1] = at + length
    return found
