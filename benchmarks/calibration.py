"""Does a calibrated gate keep its budget on requests that it has not seen, and what does it save?

Traces are split at random into halves: one calibrates, the other is what comes at run time. Beside the calibrated gate
run an uncalibrated `entropy:1.5`, and, knowing the evaluation half, the entropy threshold that leaves as many tokens to
the edge. Where calibration refuses, every block is verified. Prints means over splits, and the differences in risk with
bootstrap intervals over traces; ends with one JSON line.

    python benchmarks/calibration.py TRACES.jsonl [--epsilon 0.02] [--loss outputs] [--splits 20] [--k 5] [--audit 0.05]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from outrider.config import GenerationSettings, Loss, ModelId
from outrider.core.gate import Threshold, gate
from outrider.errors import DataError
from outrider.planning.calibrate import Replay, calibrate, candidates, counted, lay_out, needed, replay, replay_gate
from outrider.planning.traces import Trace, read_traces

NAMES = ("calibrated", "entropy:1.5", "entropy, equal share")
UNCALIBRATED = Threshold("entropy", 1.5)
RESAMPLES = 2000


@dataclass(frozen=True)
class Split:
    """One split. losses, edge_shares: float64 [gates, traces], NaN for traces of the calibration half."""

    spec: str
    losses: np.ndarray
    edge_shares: np.ndarray
    escalation: tuple[float, ...]


def calibrated(traces: Seq[Trace], options: argparse.Namespace, seed: int) -> Threshold | None:
    """The gate of some traces; None where nothing may be skipped."""
    someone = ModelId("any", "any")
    try:
        found = calibrate(
            traces,
            epsilon=options.epsilon,
            k=options.k,
            edge=someone,
            cloud=someone,
            settings=GenerationSettings(),
            loss=options.loss,
            audit=options.audit,
            seed=seed,
        )
    except DataError:
        return None
    return cast(Threshold, gate(found.gate))


def verified(count: int) -> Replay:
    """Where every block is verified."""
    return Replay(np.zeros((count, 1)), np.zeros((count, 1)), np.ones(1))


def at_equal_share(traces: Seq[Trace], k: int, edge_share: float) -> Replay:
    """The entropy threshold that leaves as near to `edge_share` to the edge as can be."""
    board, entropy = lay_out(traces, k), Threshold("entropy", 0.0)
    unsure = board.unsure(entropy)
    limits = np.array([-1.0, *candidates(unsure, entropy)])
    found = replay(board, unsure, limits)
    n = int(np.argmin(abs(found.edge_shares.mean(axis=0) - edge_share)))
    return Replay(found.losses[:, n : n + 1], found.edge_shares[:, n : n + 1], found.escalation[n : n + 1])


def run_split(traces: Seq[Trace], options: argparse.Namespace, seed: int) -> Split:
    order = np.random.default_rng(1000 + seed).permutation(len(traces))
    half = len(traces) // 2
    fresh = [traces[n] for n in order[half:]]
    found = calibrated([traces[n] for n in order[:half]], options, seed)
    ours = verified(len(fresh)) if found is None else replay_gate(fresh, found, options.k, options.audit, seed)
    plain = replay_gate(fresh, UNCALIBRATED, options.k)
    equal = at_equal_share(fresh, options.k, float(ours.edge_shares.mean()))
    runs = (ours, plain, equal)
    losses, shares = np.full((2, len(runs), len(traces)), np.nan)
    for n, run in enumerate(runs):
        losses[n, order[half:]] = counted(run.losses[:, 0], options.loss)
        shares[n, order[half:]] = run.edge_shares[:, 0]
    return Split("always" if found is None else str(found), losses, shares, tuple(float(r.escalation[0]) for r in runs))


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """A mean over traces, and the ends of its 95 % bootstrap interval. values: float64 [traces], NaN where unknown."""
    known = values[~np.isnan(values)]
    rng = np.random.default_rng(0)
    means = [known[rng.integers(len(known), size=len(known))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(known.mean()), float(low), float(high)


def summarise(splits: Seq[Split]) -> dict[str, Any]:
    """Per gate: risk (mean and worst of splits), share of tokens on the edge's word, of blocks never escalated."""
    losses = np.stack([split.losses for split in splits])
    risks, shares = np.nanmean(losses, axis=2), np.nanmean([split.edge_shares for split in splits], axis=2)
    escalation = np.array([split.escalation for split in splits])
    rows: dict[str, Any] = {}
    for n, name in enumerate(NAMES):
        rows[name] = {
            "risk_mean": float(risks[:, n].mean()),
            "risk_worst": float(risks[:, n].max()),
            "edge_share": float(shares[:, n].mean()),
            "never_escalated": float(1 - escalation[:, n].mean()),
        }
        if n:
            seen = ~np.isnan(losses[:, 0]).all(axis=0)
            per_trace = np.nanmean(losses[:, 0, seen] - losses[:, n, seen], axis=0)
            rows[name]["calibrated_minus_this"] = interval(per_trace)
    return rows


def show(rows: dict[str, Any], splits: Seq[Split], options: argparse.Namespace, count: int) -> None:
    budget = f"budget {options.epsilon:g} of {options.loss}, k {options.k}"
    print(f"{count} traces, {len(splits)} splits into halves, {budget}\n")
    print(f"{'gate':22s} {'risk':>8s} {'worst':>8s} {'edge tokens':>12s} {'never escalated':>16s}   difference in risk")
    for name, row in rows.items():
        cells = [f"{row['risk_mean']:8.4f}", f"{row['risk_worst']:8.4f}", f"{row['edge_share']:12.3f}"]
        difference = row.get("calibrated_minus_this")
        tail = "" if difference is None else "{:+.4f} [{:+.4f}, {:+.4f}]".format(*difference)
        print(f"{name:22s} {' '.join(cells)} {row['never_escalated']:16.3f}   {tail}")
    print(f"\nthe calibrated gates: {', '.join(sorted({split.spec for split in splits}))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--epsilon", type=float, default=0.02)
    parser.add_argument("--loss", choices=get_args(Loss), default="outputs")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--audit", type=float, default=0.05)
    options = parser.parse_args()
    traces = read_traces(options.traces)
    if len(traces) // 2 < needed(options.epsilon):
        parser.error(f"{len(traces)} traces: half of them must be {needed(options.epsilon)} or more")
    splits = [run_split(traces, options, seed) for seed in range(options.splits)]
    rows = summarise(splits)
    show(rows, splits, options, len(traces))
    refused = sum(split.spec == "always" for split in splits)
    figures = {
        "traces": len(traces),
        "epsilon": options.epsilon,
        "loss": options.loss,
        "k": options.k,
        "splits": options.splits,
    }
    print(json.dumps({"benchmark": "calibration", **figures, "refused": refused, "gates": rows}))


if __name__ == "__main__":
    main()
