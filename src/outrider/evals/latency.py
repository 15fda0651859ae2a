"""How long answers took, and on what the time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.core.outcome import Result, Stats
from outrider.evals.scores import Array, Resampling, Score, interval

QUANTILES: Final = (50, 95, 99)
SHARES: Final = ("prefill", "draft", "network", "queue", "verify", "rest")


@dataclass(frozen=True)
class Timing:
    """One answer's times in seconds. arrivals: when each token came, from the start; empty if nobody looked."""

    stats: Stats
    tokens: int
    arrivals: tuple[float, ...] = ()

    @classmethod
    def of(cls, result: Result, arrivals: Sequence[float] = ()) -> Timing:
        return cls(result.stats, len(result.token_ids), tuple(arrivals))

    @property
    def gaps(self) -> list[float]:
        """Times between tokens; without arrivals their mean, once; none for a single token."""
        if self.arrivals:
            return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]
        if self.tokens < 2:
            return []
        return [(self.stats.total_s - self.stats.ttft_s) / (self.tokens - 1)]


def latency(timings: Sequence[Timing], how: Resampling) -> dict[str, Score]:
    """ttft_p50 … total_p99 in seconds, and share_prefill … share_rest of the total time.

    Draws are of answers, not of gaps: the gaps of one answer are not independent. A quantile is numpy's linear one.
    What cannot be computed (no token came, no time was spent) is absent.
    """
    series = {
        "ttft": [[t.stats.ttft_s] for t in timings if t.tokens],
        "itl": [t.gaps for t in timings if t.gaps],
        "total": [[t.stats.total_s] for t in timings],
    }
    scores: dict[str, Score] = {}
    for name, values in series.items():
        if values:
            scores |= _quantiles(name, values, how)
    return scores | _shares(timings, how)


def spent(stats: Stats) -> dict[str, float]:
    """Seconds by what they were spent on.

    prefill: until the drafter had its first token, and what the verifier's first verdict took: both read the prompt.
    draft: the drafter's other forward passes. queue, verify: as the verifier reports them. network: what is left of the
    wait for verdicts. rest: everything else. In a pipelined run drafting and waiting overlap, and so the parts can
    exceed the total; rest is then 0.
    """
    network = max(0.0, stats.wait_s - stats.queue_s - stats.verify_s)
    rest = max(0.0, stats.total_s - stats.draft_s - stats.wait_s)
    prefill = stats.prefill_s + stats.verify_prefill_s
    draft, verify = stats.draft_s - stats.prefill_s, stats.verify_s - stats.verify_prefill_s
    parts = (prefill, draft, network, stats.queue_s, verify, rest)
    return dict(zip(SHARES, parts, strict=True))


def _quantiles(name: str, values: Sequence[Sequence[float]], how: Resampling) -> dict[str, Score]:
    """Quantiles of all values, which come in groups, one per answer."""
    rng = np.random.default_rng(how.seed)
    groups = [np.asarray(group, dtype=np.float64) for group in values]
    point = np.percentile(np.concatenate(groups), QUANTILES)
    drawn = np.asarray([_draw(groups, rng) for _ in range(how.draws)]).reshape(-1, len(QUANTILES))
    return {
        f"{name}_p{quantile}": Score(float(point[i]), len(groups), *interval(drawn[:, i], len(groups)))
        for i, quantile in enumerate(QUANTILES)
    }


def _draw(groups: list[Array], rng: np.random.Generator) -> Array:
    picked = rng.integers(len(groups), size=len(groups))
    return np.asarray(np.percentile(np.concatenate([groups[i] for i in picked]), QUANTILES))


def _shares(timings: Sequence[Timing], how: Resampling) -> dict[str, Score]:
    """Summed seconds of each part ÷ summed total seconds: long answers count for more, as they do for a machine."""
    timed = [t.stats for t in timings if t.stats.total_s > 0]
    if not timed:
        return {}
    parts = np.asarray([list(spent(stats).values()) for stats in timed])
    totals = np.asarray([stats.total_s for stats in timed])
    rng = np.random.default_rng(how.seed)
    times = rng.multinomial(len(timed), np.full(len(timed), 1 / len(timed)), size=how.draws)
    drawn = (times @ parts) / (times @ totals)[:, None]
    point = parts.sum(0) / totals.sum()
    return {
        f"share_{name}": Score(float(point[i]), len(timed), *interval(drawn[:, i], len(timed)))
        for i, name in enumerate(SHARES)
    }
