"""A gate with a risk budget: from traces, the loosest threshold whose expected loss is at most ε.

The loss of a trace at threshold θ is one of two. "outputs": 1 if the gate would have committed any token on the edge's
word that the target would have said otherwise, so that the output is another, else 0. "tokens": the share of its tokens
of which that is true; it is never more than the first, and may be small where few outputs are the target's.

Blocks are formed as `Decoder` forms them, along the target's output: a skipped block moves on by its length, a verified
one to behind its correction or bonus token, a block ends with a drafted end token; audits are part of it. An end that
is committed too early costs all that was still to come.

θ comes from conformal risk control (Angelopoulos, Bates, Fisch, Lei, Schuster, 2022): with n traces, the loosest θ with

    (n · R̂(θ) + 1) / (n + 1) ≤ ε        R̂: the mean loss; its bound is 1

has an expected loss of at most ε on the next request, if that is exchangeable with the traces. It needs a loss that
never falls as θ gets looser. Ours nearly is: a looser θ shifts where later blocks begin. So the running maximum
towards looser thresholds takes its place: that never falls, is never below the loss, and never above 1; what bounds its
expectation bounds the loss's.

To choose a signal by the traces that set its threshold would void this. So a quarter of the traces, drawn at random,
is for choosing: it gives the candidate thresholds and the signal that escalates least. The rest alone sets the
threshold of that one signal. Where none keeps the budget nothing is skipped (a DataError), which is a loss of 0.

What the loss of tokens does not see: after a wrong token a real output goes on from there, and the trace from the
target's own. Loops, which verify more, are not replayed. The audits at run time measure what really happens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from outrider.config import GateFile, GenerationSettings, Loss, ModelId, SignalFit, check_choice
from outrider.core.gate import NAMES, Signals, Threshold, audited
from outrider.core.lookahead import lookahead
from outrider.errors import DataError, SettingsError
from outrider.files import write_file
from outrider.planning.checks import count, share
from outrider.planning.traces import Trace

Calibration = GateFile  # what is found is what the file says

AUDIT = 0.05  # of the blocks that would be skipped
LEVELS = 256  # candidate thresholds of a signal, at most
CHOOSING = 4  # one trace in so many chooses the signal
ROUNDING = 1e-9
SIGNALS = tuple(product(NAMES, (False, True)))


def calibrate(
    traces: Seq[Trace],
    *,
    epsilon: float,
    k: int,
    edge: ModelId,
    cloud: ModelId,
    settings: GenerationSettings,
    loss: Loss = "outputs",
    audit: float = AUDIT,
    seed: int = 0,
) -> Calibration:
    """The gate that keeps the expected loss at `epsilon` or below, and escalates little.

    loss: the share of "outputs" that are not the target's, or of "tokens". edge, cloud, settings: whose traces these
    are. audit: the share of skipped blocks to verify all the same. seed: of the split and the audits.

    Raises:
        SettingsError: epsilon, k or audit out of range, or another loss.
        DataError: fewer traces than the budget takes, or no threshold that keeps it.
    """
    _check(epsilon, k, audit, seed)
    check_choice("loss", loss, Loss)
    choosing, setting = split(len(traces), epsilon, seed)
    first, rest = (lay_out([traces[n] for n in part], k, audit, seed) for part in (choosing, setting))
    allowed = _allowed(epsilon, len(setting))
    tried = [_try(first, first, Threshold(name, 0.0, mean), loss, allowed) for name, mean in SIGNALS]
    best = min(tried, key=lambda row: row.escalation)
    if best.threshold is None:
        raise DataError(f"no threshold of any signal keeps the risk at {epsilon:g} of {loss}: {_ADVICE[loss]}")
    found = _try(first, rest, _signal(best), loss, allowed)
    if found.threshold is None:
        raise DataError(f"no threshold of {found.signal} keeps the risk at {epsilon:g} of {loss}: {_ADVICE[loss]}")
    gate = str(Threshold(_signal(found).signal, found.threshold, _signal(found).mean))
    risk, escalation = round(found.risk, 9), round(found.escalation, 9)
    return Calibration(
        gate, epsilon, loss, k, len(setting), risk, escalation, audit, edge, cloud, settings, tuple(tried)
    )


_VERIFY = "until then verify every block (gate always)"
_ADVICE: dict[Loss, str] = {
    "outputs": f"take more traces, allow more, or count the loss in tokens (--loss tokens); {_VERIFY}",
    "tokens": f"take more traces, or allow more; {_VERIFY}",
}


def write_gate_file(path: str | Path, calibration: Calibration) -> None:
    """The file that `calibrated:FILE` names.

    Raises:
        OutriderError: it cannot be written.
    """
    write_file(path, json.dumps(calibration.to_json(), indent=2, ensure_ascii=False) + "\n")


def needed(epsilon: float) -> int:
    """The fewest traces, of which those that set the threshold are at least 1/ε − 1."""
    total = max(int((1 / epsilon - 1) * CHOOSING / (CHOOSING - 1)) - CHOOSING, 2)
    while _allowed(epsilon, total - _choosing(total)) < 0:
        total += 1
    return total


def split(total: int, epsilon: float, seed: int) -> tuple[list[int], list[int]]:
    """Which traces choose the signal, and which set its threshold.

    Raises:
        DataError: there are too few.
    """
    if total < needed(epsilon):
        raise DataError(f"{total} traces are too few for a budget of {epsilon:g}: it takes {needed(epsilon)} or more")
    order: list[int] = np.random.default_rng(seed).permutation(total).tolist()
    return order[: _choosing(total)], order[_choosing(total) :]


def _choosing(total: int) -> int:
    return max(total // CHOOSING, 1)


def _allowed(epsilon: float, n: int) -> float:
    """The mean loss of n traces that (n·R̂ + 1)/(n + 1) ≤ ε allows; below 0, none does."""
    return (epsilon * (n + 1) - 1 + ROUNDING) / n


# Replaying ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Board:
    """Every block that may begin at any place of any trace, one trace behind the other; the last place is the end.

    first: int64 [traces], where each begins. skipped_to, verified_to: int64 [places], where the next block begins.
    wrong: float64 [places], the loss if the block is skipped. taken: float64 [places], the share of the trace that it
    takes. audits: bool [places]. blocks: the drafts' signals.
    """

    first: np.ndarray
    skipped_to: np.ndarray
    verified_to: np.ndarray
    wrong: np.ndarray
    taken: np.ndarray
    audits: np.ndarray
    blocks: list[tuple[Signals, ...]]

    def unsure(self, threshold: Threshold) -> np.ndarray:
        """float64 [places]: how unsure the drafter was of each block; above a limit it is verified. The end always."""
        sign = -1.0 if threshold.signal == "margin" else 1.0
        return np.array([sign * threshold.value(block) for block in self.blocks] + [np.inf])


@dataclass(frozen=True)
class Replay:
    """What gates would have done. losses, edge_shares: float64 [traces, limits], of each trace's tokens.

    escalation: float64 [limits], verified blocks ÷ blocks.
    """

    losses: np.ndarray
    edge_shares: np.ndarray
    escalation: np.ndarray


def end_tokens(trace: Trace) -> tuple[int, ...]:
    """The token that ends an output and stands nowhere else in it; of one that its length cut, a guess."""
    last = trace.target[-1]
    return () if last in trace.target[:-1] else (last,)


def lay_out(traces: Seq[Trace], k: int, audit: float = 0.0, seed: int = 0) -> Board:
    """The blocks of k of some traces. audit, seed: which of them are verified all the same."""
    first = np.cumsum([0, *(len(trace.target) for trace in traces)])
    last = int(first[-1])
    rows = [row for trace, at in zip(traces, first, strict=False) for row in _blocks(trace, int(at), last, k)]
    skipped, verified, wrong, taken, blocks = zip(*rows, strict=True)
    draws = [audited(seed + n, np.arange(len(trace.target)), audit) for n, trace in enumerate(traces)]
    return Board(
        first[:-1],
        np.array([*skipped, last]),
        np.array([*verified, last]),
        np.array([*wrong, 0.0]),
        np.array([*taken, 0.0]),
        np.array([*np.concatenate(draws), True]),
        list(blocks),
    )


def replay(board: Board, unsure: np.ndarray, limits: np.ndarray) -> Replay:
    """Go through all traces under all limits at once. unsure: from the board. limits: float64 [limits], of its sign."""
    end = len(board.wrong) - 1
    unsure = np.where(board.audits, np.inf, unsure)
    at = np.repeat(board.first[:, None], len(limits), axis=1)
    losses, edge_shares = np.zeros(at.shape), np.zeros(at.shape)
    blocks, escalated = np.zeros(len(limits)), np.zeros(len(limits))
    while (live := at < end).any():
        skip = unsure[at] <= limits
        losses += np.where(skip, board.wrong[at], 0.0)
        edge_shares += np.where(skip, board.taken[at], 0.0)
        blocks += live.sum(axis=0)
        escalated += (live & ~skip).sum(axis=0)
        at = np.where(skip, board.skipped_to[at], board.verified_to[at])
    return Replay(np.minimum(losses, 1.0), edge_shares, escalated / blocks)


def replay_gate(traces: Seq[Trace], gate: Threshold, k: int, audit: float = 0.0, seed: int = 0) -> Replay:
    """What one gate would have done."""
    board = lay_out(traces, k, audit, seed)
    sign = -1.0 if gate.signal == "margin" else 1.0
    return replay(board, board.unsure(gate), np.array([sign * gate.limit]))


def _blocks(trace: Trace, at: int, last: int, k: int) -> list[tuple[int, int, float, float, tuple[Signals, ...]]]:
    """Of the block that begins at each place: where the next one begins (skipped, verified), its loss and length."""
    agrees, size, ends = trace.agrees, len(trace.target), end_tokens(trace)
    rows = []
    for start in range(size):
        full = min(start + k, size)
        stop = next((n + 1 for n in range(start, full) if trace.draft[n] in ends), full)
        stands = next((n for n in range(start, stop) if not agrees[n]), stop)
        skipped = size if trace.draft[stop - 1] in ends else stop
        wrong = agrees[start:stop].count(False) + skipped - stop
        skipped_to, verified_to = (last if n >= size else at + n for n in (skipped, stands + 1))
        rows.append((skipped_to, verified_to, wrong / size, (skipped - start) / size, trace.signals[start:stop]))
    return rows


# Choosing -------------------------------------------------------------------------------------------------------


def _try(first: Board, board: Board, threshold: Threshold, loss: Loss, allowed: float) -> SignalFit:
    """The loosest of a signal's candidates (from `first`) that keeps the mean loss on `board` at `allowed`."""
    name = f"{threshold.signal}{'.mean' if threshold.mean else ''}"
    limits = candidates(first.unsure(threshold), threshold)
    found = replay(board, board.unsure(threshold), limits)
    risks = counted(monotone(found.losses), loss).mean(axis=0)
    fits = int((risks <= allowed).sum())  # the risks never fall: those that fit come first
    if not fits:
        return SignalFit(name, None, 0.0, 1.0)
    n = fits - 1
    return SignalFit(name, float(abs(limits[n])), float(risks[n]), float(found.escalation[n]))


def monotone(losses: np.ndarray) -> np.ndarray:
    """The running maximum towards looser thresholds. losses: float64 [traces, limits], the strictest limit first."""
    return np.maximum.accumulate(losses, axis=1)


def counted(losses: np.ndarray, loss: Loss) -> np.ndarray:
    """Shares of tokens, as the loss counts them."""
    return (losses > 0).astype(np.float64) if loss == "outputs" else losses


def candidates(unsure: np.ndarray, threshold: Threshold) -> np.ndarray:
    """Limits to choose from, the strictest first: quantiles of what was met, as values that were met."""
    met = np.unique(unsure[np.isfinite(unsure)])
    if len(met) > LEVELS:
        met = np.unique(np.quantile(unsure[np.isfinite(unsure)], np.linspace(0, 1, LEVELS), method="inverted_cdf"))
    return met if threshold.signal == "margin" else np.unique(np.maximum([0.0, *met], 0.0))


def _signal(row: SignalFit) -> Threshold:
    name = next(name for name, mean in SIGNALS if row.signal in (name, f"{name}.mean"))
    return Threshold(name, 0.0, row.signal.endswith(".mean"))


def _check(epsilon: float, k: int | str, audit: float, seed: int) -> None:
    share(epsilon=epsilon, audit=audit)
    count(0, seed=seed)
    if not 0 < epsilon < 1:
        raise SettingsError(f"epsilon is above 0 and below 1, not {epsilon!r}")
    if k == "auto":
        raise SettingsError("a gate is calibrated for blocks of a fixed k, not 'auto'")
    lookahead(k)
