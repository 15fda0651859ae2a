"""Candidate thresholds of gates, from the blocks of traces.

A gate judges a block by its least confident token. Quantiles over tokens are no candidates, because most blocks of five
contain a token above the median.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from outrider.config import DEFAULT_K
from outrider.decoding.gate import SIGNAL_NAMES, Gate, SignalName, Threshold
from outrider.planning.blocks import build_blocks, replay
from outrider.planning.calibrate import candidates
from outrider.planning.traces import Trace

CLOUD_SHARES = (0.8, 0.6, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.02)  # denser where gates save the most
MAX_GATES = 6  # on a frontier


@dataclass(frozen=True)
class SignalCandidates:
    """Thresholds of one signal for blocks of k, the strictest first, with their results.

    cloud_shares: float64 [thresholds], share of tokens that the cloud decides. changed: int64 [thresholds], number of
    outputs that differ from the target's.
    """

    thresholds: list[Threshold]
    cloud_shares: np.ndarray
    changed: np.ndarray


def evaluate_signal(traces: Seq[Trace], k: int, signal: SignalName) -> SignalCandidates:
    """Return the thresholds between neighbouring values of the traces' blocks, with their results."""
    table, any_threshold = build_blocks(traces, k), Threshold(signal, 0.0)
    uncertainty = table.uncertainty(any_threshold, whole=True)
    limits = candidates(uncertainty, any_threshold)
    found = replay(table, uncertainty, limits)
    lengths = np.array([len(trace.target) for trace in traces])
    edge_tokens = (found.edge_shares * lengths[:, None]).sum(axis=0)
    thresholds = [Threshold(signal, float(f"{abs(limit):.6g}")) for limit in limits]
    return SignalCandidates(thresholds, 1 - edge_tokens / lengths.sum(), (found.losses > 0).sum(axis=0))


def thresholds(
    traces: Seq[Trace], k: int = DEFAULT_K, signal: SignalName = "entropy", cloud_shares: Seq[float] = CLOUD_SHARES
) -> list[Gate]:
    """Return the gates of one signal that come closest to these cloud shares, the strictest first."""
    candidate_sets = evaluate_signal(traces, k, signal)
    nearest = sorted({int(np.argmin(abs(candidate_sets.cloud_shares - share))) for share in cloud_shares})
    return [candidate_sets.thresholds[n] for n in nearest]


def frontier(traces: Seq[Trace], ks: Seq[int], budget: float) -> list[Gate]:
    """Return, for several limits of changed outputs from 0 up, the gate of any signal and k with the least cloud share.

    budget: the largest share of tokens that may change. The limits do not exceed that number of tokens.
    """
    candidate_sets = [evaluate_signal(traces, k, signal) for k in ks for signal in SIGNAL_NAMES]
    tokens = sum(len(trace.target) for trace in traces)
    found = [_smallest_share(candidate_sets, limit) for limit in _counts(min(len(traces), int(budget * tokens)))]
    return list(dict.fromkeys(gate for gate in found if gate is not None))


def _smallest_share(candidate_sets: Seq[SignalCandidates], limit: int) -> Gate | None:
    """Return the gate with the smallest cloud share among those that change at most `limit` outputs."""
    best: tuple[float, Gate] | None = None
    for some in candidate_sets:
        shares = np.where(some.changed <= limit, some.cloud_shares, np.inf)
        n = int(np.argmin(shares))
        if np.isfinite(shares[n]) and (best is None or shares[n] < best[0]):
            best = float(shares[n]), some.thresholds[n]
    return None if best is None else best[1]


def _counts(limit: int) -> Iterator[int]:
    """Yield 0 and up to MAX_GATES − 1 numbers up to `limit`, in approximately geometric progression."""
    yield 0
    yield from sorted({round(limit ** (n / (MAX_GATES - 2))) for n in range(MAX_GATES - 1)} if limit else ())
