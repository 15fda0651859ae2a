"""Replay of gates along traces: the blocks that a gate would form, and its decision on each.

Blocks are formed as `Decoder` forms them, along the target's output: a skipped block moves on by its length, a verified
one to behind its correction or bonus token, a block ends with a drafted end token. Audits and loops verify blocks that
the gate passes, as they do live.

A trace holds the drafter's signals along the *target's* text. After its first disagreement in a block the live drafter
continues from its own token, with signals that no trace holds. So a block has two values:

    prefix    over its tokens up to and including the first disagreement: equal to the live drafter's
    whole     over all its tokens: equal if the drafter is as confident after a wrong token as after the right one

The maximum over the prefix is never above the maximum over the live block. Where the live run skips a block, so does
the replay by prefixes: `planning/calibrate.py` derives its guarantee from that. The value over the whole block predicts
escalations better.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from outrider.core.gate import Signals, Threshold, audited
from outrider.core.loops import DEFAULT
from outrider.planning.traces import Trace

NEVER = np.iinfo(np.int64).max  # the place of a loop where there is none
SIGNAL_GRID = 1e-6  # digits of the signals in traces


@dataclass(frozen=True)
class Board:
    """A block for every place of every trace, with the traces concatenated; the last place is the end.

    first: int64 [traces], where each begins. skipped_to, verified_to: int64 [places], where the next block begins.
    wrong: float64 [places], if the block holds a token other than the target's, the share of the target's output from
    that token on, else 0. taken: float64 [places], the share of the trace that it takes. audits: bool [places].
    loops: int64 [places], where a loop is found by a detector that watches from this place on. prefixes, blocks: the
    drafts' signals, up to the first disagreement and of the whole block.
    """

    first: np.ndarray
    skipped_to: np.ndarray
    verified_to: np.ndarray
    wrong: np.ndarray
    taken: np.ndarray
    audits: np.ndarray
    loops: np.ndarray
    prefixes: list[tuple[Signals, ...]]
    blocks: list[tuple[Signals, ...]]

    def unsure(self, threshold: Threshold, *, whole: bool = False) -> np.ndarray:
        """float64 [places]: the drafter's uncertainty per block, infinite at the end. Above a limit: verified."""
        sign = direction(threshold)
        values = self.blocks if whole else self.prefixes
        return np.array([sign * threshold.value(block) for block in values] + [np.inf])


@dataclass(frozen=True)
class Replay:
    """The outcome of gates on traces. losses, edge_shares: float64 [traces, limits], of each trace's tokens.

    losses: the share of the target's output from the first wrong token on. escalation: float64 [limits], verified
    blocks ÷ blocks.
    """

    losses: np.ndarray
    edge_shares: np.ndarray
    escalation: np.ndarray


def direction(threshold: Threshold) -> float:
    """Return 1 for signals that rise with the drafter's uncertainty, −1 for the margin."""
    return -1.0 if threshold.signal == "margin" else 1.0


def end_tokens(trace: Trace) -> tuple[int, ...]:
    """Return the token that ends an output and occurs nowhere else in it. For a truncated output this is a guess."""
    last = trace.target[-1]
    return () if last in trace.target[:-1] else (last,)


def lay_out(traces: Seq[Trace], k: int, audit: float = 0.0, seed: int = 0) -> Board:
    """Form the blocks of k of some traces. audit, seed: select the audited blocks."""
    first = np.cumsum([0, *(len(trace.target) for trace in traces)])
    last = int(first[-1])
    rows = [row for trace, at in zip(traces, first, strict=False) for row in _blocks(trace, int(at), last, k)]
    skipped, verified, wrong, taken, prefixes, blocks = zip(*rows, strict=True)
    draws = [audited(seed + n, np.arange(len(trace.target)), audit) for n, trace in enumerate(traces)]
    loops = [_loops(trace.target, int(at)) for trace, at in zip(traces, first, strict=False)]
    return Board(
        first[:-1],
        np.array([*skipped, last]),
        np.array([*verified, last]),
        np.array([*wrong, 0.0]),
        np.array([*taken, 0.0]),
        np.array([*np.concatenate(draws), True]),
        np.array([*np.concatenate(loops), NEVER]),
        list(prefixes),
        list(blocks),
    )


def replay(board: Board, unsure: np.ndarray, limits: np.ndarray, *, loops: bool = True) -> Replay:
    """Replay all traces under all limits at once. unsure: from the board. limits: float64 [limits], of its sign.

    loops: a loop sends the next block to the verifier, as `--on-loop escalate` does.
    """
    end = len(board.wrong) - 1
    unsure = np.where(board.audits, np.inf, unsure)
    found = board.loops if loops else np.full_like(board.loops, NEVER)
    at = np.repeat(board.first[:, None], len(limits), axis=1)
    watched = at.copy()  # where loop detection started
    losses, edge_shares = np.zeros(at.shape), np.zeros(at.shape)
    blocks, escalated = np.zeros(len(limits)), np.zeros(len(limits))
    while (live := at < end).any():
        looped = found[watched] <= at
        skip = (unsure[at] <= limits) & ~looped
        losses = np.maximum(losses, np.where(skip, board.wrong[at], 0.0))  # the first one's is the largest
        edge_shares += np.where(skip, board.taken[at], 0.0)
        blocks += live.sum(axis=0)
        escalated += (live & ~skip).sum(axis=0)
        watched = np.where(looped, at, watched)
        at = np.where(skip, board.skipped_to[at], board.verified_to[at])
    return Replay(losses, edge_shares, escalated / blocks)


def replay_gate(traces: Seq[Trace], gate: Threshold, k: int, audit: float = 0.0, seed: int = 0) -> Replay:
    """Replay one gate, by prefixes."""
    board = lay_out(traces, k, audit, seed)
    return replay(board, board.unsure(gate), np.array([direction(gate) * gate.limit]))


def worst_losses(board: Board, unsure: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """float64 [traces, limits]: each loss, the larger of a replay with and one without loop-triggered verification.

    So it bounds that of a run under `--on-loop escalate` and `ignore`, whose blocks begin elsewhere behind a loop.
    """
    losses = replay(board, unsure, limits).losses
    if (board.loops == NEVER).all():
        return losses
    return np.maximum(losses, replay(board, unsure, limits, loops=False).losses)


def _blocks(
    trace: Trace, at: int, last: int, k: int
) -> list[tuple[int, int, float, float, tuple[Signals, ...], tuple[Signals, ...]]]:
    """Return per place the next block's place (skipped, verified), and the block's loss, length and signals."""
    agrees, size, ends = trace.agrees, len(trace.target), end_tokens(trace)
    rows = []
    for start in range(size):
        full = min(start + k, size)
        stop = next((n + 1 for n in range(start, full) if trace.draft[n] in ends), full)
        stands = next((n for n in range(start, stop) if not agrees[n]), stop)
        skipped = size if trace.draft[stop - 1] in ends else stop
        wrong = (size - stands) / size if stands < stop else 0.0
        skipped_to, verified_to = (last if n >= size else at + n for n in (skipped, stands + 1))
        prefix = trace.signals[start : min(stands + 1, stop)]
        taken = (skipped - start) / size
        rows.append((skipped_to, verified_to, wrong, taken, prefix, trace.signals[start:stop]))
    return rows


def _loops(target: Seq[int], at: int) -> np.ndarray:
    """int64 [tokens]: the place at which `Decoder` finds a loop in what follows each token; NEVER if there is none."""
    found = np.full(len(target), NEVER)
    for length in range(len(target), 0, -1):  # in reverse: of several loops, the first one stays
        period = DEFAULT.find(target[:length])
        if period is not None:
            found[: length - DEFAULT.tail_needed(period) + 1] = at + length
    return found
