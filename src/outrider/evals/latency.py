"""Latency metrics of answers, and the division of their time into stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.decoding.result import Stats
from outrider.evals.bootstrap import Array, Resampling, Score, interval

QUANTILES: Final = (50, 95, 99)
SHARES: Final = ("prefill", "draft", "network", "queue", "verify", "rest")


@dataclass(frozen=True)
class Timing:
    """Times of one answer in seconds. arrivals: of each token, since the start, or empty if they were not recorded."""

    stats: Stats
    tokens: int
    arrivals: tuple[float, ...] = ()

    @property
    def gaps(self) -> list[float]:
        """Return the times between tokens. Without arrivals this is their mean alone. A single token has none."""
        if self.arrivals:
            return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]
        if self.tokens < 2:
            return []
        return [(self.stats.total_s - self.stats.ttft_s) / (self.tokens - 1)]


def latency(timings: Sequence[Timing], how: Resampling) -> dict[str, Score]:
    """Return ttft_p50 … total_p99 in seconds, and share_prefill … share_rest of the total time.

    The bootstrap draws answers instead of gaps, because the gaps of one answer are not independent. Quantiles are
    numpy's linear ones. A score without data is absent.
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
    """Return the seconds by stage, as `split_total` does, with both prefills in one."""
    names = ("prefill", "draft", "wait", "verify_prefill", "verify", "queue")
    parts = split_total(stats.total_s, {name: getattr(stats, f"{name}_s") for name in names})
    prefill = parts["edge prefill"] + parts["cloud prefill"]
    return {"prefill": prefill, **{name: parts[name] for name in SHARES[1:]}}


def split_total(total_s: float, seconds: Mapping[str, float]) -> dict[str, float]:
    """Divide a total time into the known stages and the rest.

    edge prefill: until the drafter's first token. cloud prefill: the verifier's first verdict. draft: the drafter's
    other forward passes. verify, queue: as the verifier reports them, but at most the wait of the edge, as work of
    the cloud while the edge drafts costs no time. network: the remainder of the wait. If the stages exceed the total,
    because clocks of two machines differ, later stages are shortened.

    seconds: prefill (a part of draft), draft, wait, verify_prefill (a part of verify), verify and queue. Unknown stages
    are absent from the result.
    """
    spent: dict[str, float] = {}
    left = total_s
    for stage, taken in _within(seconds, "edge prefill", "prefill", "draft"):
        spent[stage] = min(taken, left)
        left -= spent[stage]
    waited = min(seconds.get("wait", 0.0), left)
    left -= waited
    queued = [("queue", seconds["queue"])] if "queue" in seconds else []
    for stage, taken in [*_within(seconds, "cloud prefill", "verify_prefill", "verify"), *queued]:
        spent[stage] = min(taken, waited)
        waited -= spent[stage]
    return {**spent, "network": waited, "rest": left}


def _within(seconds: Mapping[str, float], name: str, part: str, whole: str) -> Iterator[tuple[str, float]]:
    """Yield the named part of a stage, if it was measured, and the remainder of the stage."""
    if part in seconds:
        yield name, seconds[part]
    if whole in seconds:
        yield whole, max(seconds[whole] - seconds.get(part, 0.0), 0.0)


def _quantiles(name: str, values: Sequence[Sequence[float]], how: Resampling) -> dict[str, Score]:
    """Return quantiles over all values. values: a group per answer."""
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
    """Return the summed seconds of each stage ÷ the summed total, so that long answers weigh more."""
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
