"""Calibration of a gate with a risk budget: the loosest threshold whose expected loss is at most ε.

A request has two losses at threshold θ. "outputs" is 1 if the gate commits a token without a verdict where the target
would have chosen another, so that the output differs, and 0 otherwise. "tokens" is the share of the target's output
from the first such token to the end. It never exceeds the first loss.

The loss of the replay bounds the loss of the live run. Up to the first wrong token that a run commits, its text equals
the target's and the trace's. By induction over blocks, run and replay form the same blocks until the replay skips a
block with a disagreement:

- A block in which drafter and target agree has the same signals in both. Both take the same decision and continue at
  the same position. An audit depends on the position alone, verification after a loop on the preceding text.
- In a block with a disagreement the replay sees the signals up to it. Their maximum is at most that of the live block.
  If the replay verifies the block, so does the run, and both continue after the correction. If the replay skips it, its
  loss counts from that token on. The run either skips the block with the same loss or verifies it with a smaller one.

The mean over a block has no such bound, because a live drafter that is confident after its own wrong token lowers it.
Thresholds of the mean are therefore not calibrated. A threshold lies between observed values, and off the grid to which
traces are rounded, so that rounding does not decide.

θ comes from conformal risk control (Angelopoulos, Bates, Fisch, Lei and Schuster 2022; docs/design/maths.md, "Risk
control"). With n traces of mean loss R̂ ≤ 1, the loosest θ with

    (n · R̂(θ) + 1) / (n + 1) ≤ ε

has an expected loss of at most ε on the next request, if that is exchangeable with the traces. The method needs a
loss that never falls as θ gets looser. A looser θ shifts the start of later blocks, so this loss may fall. Its
running maximum towards looser thresholds replaces it. The maximum never falls and lies between the loss and 1. A
bound on its expectation therefore bounds the expected loss.

Choosing a signal on the traces that set its threshold would void the bound. A random quarter of the traces gives the
candidate thresholds and the signal that escalates least. The remaining traces set the threshold of that signal. If no
threshold keeps the budget, `calibrate` raises a DataError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np

from outrider.config import GenerationSettings, Loss, check_choice
from outrider.decoding.calibrated_gate import NO_MEAN_GATE
from outrider.decoding.draft_length import MAX_K
from outrider.decoding.gate import SIGNAL_NAMES, SignalName, Threshold
from outrider.decoding.gate_file import GateFile, ModelId, SignalFit
from outrider.errors import DataError, SettingsError, quote
from outrider.files import write_file
from outrider.numeric import is_integer
from outrider.planning.blocks import SIGNAL_GRID, BlockTable, build_blocks, replay, worst_losses
from outrider.planning.traces import Trace
from outrider.planning.validation import count, share

Calibration = GateFile

AUDIT = 0.05  # share of skipped blocks
MAX_CANDIDATES = 256  # thresholds per signal
SELECTION_FRACTION = 4  # one trace in this many chooses the signal
TOLERANCE = 1e-9


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
    signals: Seq[str] = SIGNAL_NAMES,
) -> Calibration:
    """Return the gate that keeps the expected loss at `epsilon` or below and escalates least.

    loss: the share of "outputs" that differ from the target's, or of "tokens" from the first difference on. edge,
    cloud, settings: the models and settings of the traces. audit: the share of skipped blocks to verify. seed: of the
    split and the audits. signals: the signals to choose from.

    Raises:
        SettingsError: epsilon, k or audit out of range, an unknown loss, or a signal that cannot be calibrated.
        DataError: too few traces for the budget, or no threshold that keeps it.
    """
    _check(epsilon, k, audit, seed)
    check_choice("loss", loss, Loss)
    names = [_calibratable(name) for name in signals]
    selection, calibration = split(len(traces), epsilon, seed)
    first, rest = (build_blocks([traces[n] for n in part], k, audit, seed) for part in (selection, calibration))
    allowed = _allowed_loss(epsilon, len(calibration))
    fits = [_fit_signal(first, first, name, loss, allowed) for name in names]
    best = min(fits, key=lambda row: row.escalation)
    if best.threshold is None:
        raise DataError(f"no threshold of any signal keeps the risk at {epsilon:g} of {loss}: {_ADVICE[loss]}")
    found = _fit_signal(first, rest, _calibratable(best.signal), loss, allowed)
    if found.threshold is None:
        raise DataError(f"no threshold of {found.signal} keeps the risk at {epsilon:g} of {loss}: {_ADVICE[loss]}")
    gate = str(Threshold(_calibratable(found.signal), found.threshold))
    risk, escalation = round(found.risk, 9), round(found.escalation, 9)
    return Calibration(
        gate, epsilon, loss, k, len(calibration), risk, escalation, audit, edge, cloud, settings, tuple(fits)
    )


_VERIFY = "until then verify every block (gate always)"
_ADVICE: dict[Loss, str] = {
    "outputs": f"take more traces, allow more, or count the loss in tokens (--loss tokens); {_VERIFY}",
    "tokens": f"take more traces, or allow more; {_VERIFY}",
}


def write_gate_file(path: str | Path, calibration: Calibration) -> None:
    """Write the gate file for `calibrated:FILE`.

    Raises:
        OutriderError: the file cannot be written.
    """
    write_file(path, json.dumps(calibration.to_json(), indent=2, ensure_ascii=False) + "\n")


def min_traces(epsilon: float) -> int:
    """Return the smallest number of traces that leaves at least 1/ε − 1 of them for the threshold."""
    total = max(int((1 / epsilon - 1) * SELECTION_FRACTION / (SELECTION_FRACTION - 1)) - SELECTION_FRACTION, 2)
    while _allowed_loss(epsilon, total - _selection_size(total)) < 0:
        total += 1
    return total


def split(total: int, epsilon: float, seed: int) -> tuple[list[int], list[int]]:
    """Return the indices of the traces that choose the signal, and of those that set its threshold.

    Raises:
        DataError: too few traces.
    """
    if total < min_traces(epsilon):
        raise DataError(f"{total} traces are too few for a budget of {epsilon:g}: record {min_traces(epsilon)} or more")
    order: list[int] = np.random.default_rng(seed).permutation(total).tolist()
    return order[: _selection_size(total)], order[_selection_size(total) :]


def _selection_size(total: int) -> int:
    return max(total // SELECTION_FRACTION, 1)


def _allowed_loss(epsilon: float, n: int) -> float:
    """Return the largest mean loss R̂ of n traces with (n·R̂ + 1)/(n + 1) ≤ ε. It is below 0 if n is too small."""
    return (epsilon * (n + 1) - 1 + TOLERANCE) / n


# Choice -------------------------------------------------------------------------------------------------------


def _fit_signal(first: BlockTable, table: BlockTable, signal: SignalName, loss: Loss, allowed: float) -> SignalFit:
    """Return the loosest of a signal's thresholds (from `first`) with a mean loss of at most `allowed` on `table`.

    Its escalation rate is an estimate from whole blocks of the traces, not a bound.
    """
    threshold = Threshold(signal, 0.0)
    limits = candidates(first.uncertainty(threshold), threshold)
    losses = worst_losses(table, table.uncertainty(threshold), limits)
    risks = apply_loss(monotone(losses), loss).mean(axis=0)
    num_fitting = int((risks <= allowed).sum())  # the risks never fall, so that fitting limits come first
    if not num_fitting:
        return SignalFit(signal, None, 0.0, 1.0)
    n = num_fitting - 1
    escalation = replay(table, table.uncertainty(threshold, whole=True), limits[n : n + 1]).escalation[0]
    return SignalFit(signal, float(abs(limits[n])), float(risks[n]), float(escalation))


def monotone(losses: np.ndarray) -> np.ndarray:
    """Return the running maximum towards looser limits. losses: float64 [traces, limits], strictest limit first."""
    return np.maximum.accumulate(losses, axis=1)


def apply_loss(losses: np.ndarray, loss: Loss) -> np.ndarray:
    """Convert shares of tokens to the chosen loss."""
    return (losses > 0).astype(np.float64) if loss == "outputs" else losses


def candidates(uncertainty: np.ndarray, threshold: Threshold) -> np.ndarray:
    """Return candidate limits between neighbouring quantiles of the observed values, the strictest first."""
    observed = np.unique(uncertainty[np.isfinite(uncertainty)])
    if len(observed) > MAX_CANDIDATES:
        observed = np.unique(
            np.quantile(uncertainty[np.isfinite(uncertainty)], np.linspace(0, 1, MAX_CANDIDATES), method="inverted_cdf")
        )
    following = np.append(observed[1:], observed[-1])
    between = (np.floor((observed + following) / 2 / SIGNAL_GRID) + 0.5) * SIGNAL_GRID
    limits = np.unique(np.round(between, 7))
    if threshold.signal == "margin":
        return np.unique(np.minimum(limits, 0.0))
    return np.unique(np.maximum([SIGNAL_GRID / 2, *limits], SIGNAL_GRID / 2))


def _calibratable(signal: str) -> SignalName:
    """Return the name of a signal. Raise SettingsError for an unknown signal or a mean."""
    name = next((name for name in SIGNAL_NAMES if name == signal), None)
    if name is None:
        raise SettingsError(
            f"signal {quote(signal)}: {NO_MEAN_GATE if signal.endswith('.mean') else f'expected one of {SIGNAL_NAMES}'}"
        )
    return name


def _check(epsilon: float, k: int | str, audit: float, seed: int) -> None:
    share(epsilon=epsilon, audit=audit)
    count(0, seed=seed)
    if not 0 < epsilon < 1:
        raise SettingsError(f"epsilon is above 0 and below 1, not {quote(epsilon)}")
    if k == "auto":
        raise SettingsError("a gate is calibrated for blocks of a fixed k, not 'auto'")
    if isinstance(k, str) or not (is_integer(k) and 1 <= k <= MAX_K):
        raise SettingsError(f"k is a whole number from 1 to {MAX_K}, not {quote(k)}")
