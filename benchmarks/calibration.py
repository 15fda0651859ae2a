"""Realised loss and savings of a calibrated gate on held-out requests.

Traces are split at random into halves: one for calibration, one for evaluation. Beside the calibrated gate run an
uncalibrated `entropy:1.5`, and, knowing the evaluation half, the entropy threshold that leaves as many tokens to the
edge. Where calibration refuses, every block is verified. Prints means over splits, and the differences in risk with
bootstrap intervals over traces; ends with one JSON line.

Those are replays, whose risk bounds the live one. With --live the other half is decoded by the bundled pair as well:
`traces` are then those of the set (`outrider eval --data SET --trace`), and what was decoded is kept in a file.

    python -m benchmarks.calibration TRACES.jsonl [--epsilon 0.02] [--loss outputs] [--splits 20] [--k 5] [--audit 0.05]
                                     [--live SET --kept RUNS.jsonl]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.live import LiveRuns, realised, threshold
from outrider.config import GenerationSettings, Loss
from outrider.decoding.gate import Threshold
from outrider.decoding.gate_file import GateFile, ModelId
from outrider.errors import DataError
from outrider.planning.blocks import Replay, build_blocks, replay, replay_gate
from outrider.planning.calibrate import apply_loss, calibrate, candidates, min_traces
from outrider.planning.traces import Trace, read_traces

NAMES = ("calibrated", "entropy:1.5", "entropy, equal share")
UNCALIBRATED = Threshold("entropy", 1.5)
RESAMPLES = 2000


@dataclass(frozen=True)
class Split:
    """One split. losses, edge_shares: float64 [gates, traces], NaN for traces of the calibration half.

    live: the calibrated gate's mean loss and share of escalated blocks where it was decoded.
    """

    spec: str
    losses: np.ndarray
    edge_shares: np.ndarray
    escalation: tuple[float, ...]
    live: tuple[float, float] | None


def calibrated(traces: Seq[Trace], options: argparse.Namespace, seed: int) -> GateFile | None:
    """The gate of some traces; None where nothing may be skipped."""
    someone = ModelId("any", "any")
    try:
        return calibrate(
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


def decoded(fresh: Seq[Trace], found: GateFile | None, runs: LiveRuns | None) -> tuple[float, float] | None:
    """The mean live loss of some requests, and their share of escalated blocks."""
    if runs is None or found is None:
        return None if runs is None else (0.0, 1.0)
    ran = [runs.run(trace.id, found) for trace in fresh]
    losses = [realised(run.ids, trace.target, found.loss) for run, trace in zip(ran, fresh, strict=True)]
    return float(np.mean(losses)), sum(run.escalated for run in ran) / sum(run.blocks for run in ran)


def verified(count: int) -> Replay:
    """Where every block is verified."""
    return Replay(np.zeros((count, 1)), np.zeros((count, 1)), np.ones(1))


def at_equal_share(traces: Seq[Trace], k: int, edge_share: float) -> Replay:
    """The entropy threshold that leaves as near to `edge_share` to the edge as can be."""
    table, entropy = build_blocks(traces, k), Threshold("entropy", 0.0)
    uncertainty = table.uncertainty(entropy)
    limits = np.array([-1.0, *candidates(uncertainty, entropy)])
    found = replay(table, uncertainty, limits)
    n = int(np.argmin(abs(found.edge_shares.mean(axis=0) - edge_share)))
    return Replay(found.losses[:, n : n + 1], found.edge_shares[:, n : n + 1], found.escalation[n : n + 1])


def run_split(traces: Seq[Trace], options: argparse.Namespace, seed: int, runs: LiveRuns | None) -> Split:
    order = np.random.default_rng(1000 + seed).permutation(len(traces))
    half = len(traces) // 2
    fresh = [traces[n] for n in order[half:]]
    found = calibrated([traces[n] for n in order[:half]], options, seed)
    ours = verified(len(fresh))
    if found is not None:
        ours = replay_gate(fresh, threshold(found), options.k, options.audit, seed)
    plain = replay_gate(fresh, UNCALIBRATED, options.k)
    equal = at_equal_share(fresh, options.k, float(ours.edge_shares.mean()))
    replays = (ours, plain, equal)
    losses, shares = np.full((2, len(replays), len(traces)), np.nan)
    for n, run in enumerate(replays):
        losses[n, order[half:]] = apply_loss(run.losses[:, 0], options.loss)
        shares[n, order[half:]] = run.edge_shares[:, 0]
    spec = "always" if found is None else found.gate
    live = decoded(fresh, found, runs)
    return Split(spec, losses, shares, tuple(float(run.escalation[0]) for run in replays), live)


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
    if live := live_figures(splits):
        print("live: risk {risk_mean:.4f}, worst {risk_worst:.4f}, escalated {escalated:.3f}".format(**live))


def live_figures(splits: Seq[Split]) -> dict[str, float]:
    """Of the calibrated gates, over splits; empty where nothing was decoded."""
    known = np.array([split.live for split in splits if split.live is not None])
    if not len(known):
        return {}
    risks, escalated = known.T
    return {
        "risk_mean": float(risks.mean()),
        "risk_worst": float(risks.max()),
        "escalated": float(escalated.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--epsilon", type=float, default=0.02)
    parser.add_argument("--loss", choices=get_args(Loss), default="outputs")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--audit", type=float, default=0.05)
    parser.add_argument("--live", metavar="SET")
    parser.add_argument("--kept", type=Path, default=Path("live-runs.jsonl"))
    options = parser.parse_args()
    traces = read_traces(options.traces)
    if len(traces) // 2 < min_traces(options.epsilon):
        parser.error(f"{len(traces)} traces: half of them must be {min_traces(options.epsilon)} or more")
    runs = LiveRuns(options.live, options.kept) if options.live else None
    splits = [run_split(traces, options, seed, runs) for seed in range(options.splits)]
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
    print(
        json.dumps(
            {"benchmark": "calibration", **figures, "refused": refused, "gates": rows, "live": live_figures(splits)}
        )
    )


if __name__ == "__main__":
    main()
