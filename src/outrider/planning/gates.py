"""Candidate thresholds from traces, by the gate's decisions on their blocks, which take their least confident token.

Quantiles over tokens do not serve: most blocks of five hold a token above the median.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from outrider.config import DEFAULT_K
from outrider.core.gate import NAMES, Gate, Name, Threshold
from outrider.planning.blocks import lay_out, replay
from outrider.planning.calibrate import candidates
from outrider.planning.traces import Trace

CLOUD_SHARES = (0.8, 0.6, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.02)  # of the tokens: closer where gates save the most
MOST = 6  # gates of a frontier


@dataclass(frozen=True)
class Tried:
    """Thresholds of one signal for blocks of k, the strictest first, with their outcomes.

    cloud_shares: float64 [thresholds], of all tokens. changed: int64 [thresholds], outputs that would differ.
    """

    thresholds: list[Threshold]
    cloud_shares: np.ndarray
    changed: np.ndarray


def try_signal(traces: Seq[Trace], k: int, signal: Name) -> Tried:
    """Return every threshold between two values of the traces' blocks."""
    board, any_threshold = lay_out(traces, k), Threshold(signal, 0.0)
    unsure = board.unsure(any_threshold, whole=True)
    limits = candidates(unsure, any_threshold)
    found = replay(board, unsure, limits)
    lengths = np.array([len(trace.target) for trace in traces])
    edge_tokens = (found.edge_shares * lengths[:, None]).sum(axis=0)
    thresholds = [Threshold(signal, float(f"{abs(limit):.6g}")) for limit in limits]
    return Tried(thresholds, 1 - edge_tokens / lengths.sum(), (found.losses > 0).sum(axis=0))


def thresholds(
    traces: Seq[Trace], k: int = DEFAULT_K, signal: Name = "entropy", cloud_shares: Seq[float] = CLOUD_SHARES
) -> list[Gate]:
    """Return gates of one signal with about these cloud shares, the strictest first."""
    tried = try_signal(traces, k, signal)
    nearest = sorted({int(np.argmin(abs(tried.cloud_shares - share))) for share in cloud_shares})
    return [tried.thresholds[n] for n in nearest]


def frontier(traces: Seq[Trace], ks: Seq[int], budget: float) -> list[Gate]:
    """Return the gates, of all signals and k, with the smallest cloud share that change no output, at most one, ….

    budget: the largest share of tokens that may change. No gate here changes more outputs than that number of tokens.
    """
    tried = [try_signal(traces, k, signal) for k in ks for signal in NAMES]
    tokens = sum(len(trace.target) for trace in traces)
    found = [_least(tried, most) for most in _counts(min(len(traces), int(budget * tokens)))]
    return list(dict.fromkeys(gate for gate in found if gate is not None))


def _least(tried: Seq[Tried], most: int) -> Gate | None:
    """Return the gate with the smallest cloud share among those that change at most `most` outputs."""
    best: tuple[float, Gate] | None = None
    for some in tried:
        shares = np.where(some.changed <= most, some.cloud_shares, np.inf)
        n = int(np.argmin(shares))
        if np.isfinite(shares[n]) and (best is None or shares[n] < best[0]):
            best = float(shares[n]), some.thresholds[n]
    return None if best is None else best[1]


def _counts(most: int) -> Iterator[int]:
    """Yield 0 and up to MOST − 1 numbers to `most`, in about geometric progression."""
    yield 0
    yield from sorted({round(most ** (n / (MOST - 2))) for n in range(MOST - 1)} if most else ())
