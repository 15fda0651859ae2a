"""Scores with bootstrap confidence intervals, per language and pooled.

Every metric is a function of sums over items: a mean (sum ÷ n) or a corpus score (BLEU of summed counts). One bootstrap
therefore serves all metrics. Each draw takes n items with replacement, sums and scores them. The interval lies between
percentiles of the draws (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).

A language's score uses its own items only. The pooled score is the mean over languages, weighted by their numbers of
items. Its draws keep these numbers fixed (a stratified bootstrap).
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.evals.word_segmentation import primary_language

Array = npt.NDArray[np.float64]
Finish = Callable[[Array, int], float]  # sums [S] over n items, n -> score

LEVEL = 0.95
CHUNK = 64  # draws in memory at once


@dataclass(frozen=True)
class Resampling:
    """Settings of the bootstrap. The seed makes intervals repeatable."""

    draws: int = 1000
    seed: int = 0


@dataclass(frozen=True)
class Score:
    """A score over n items with its 95 % interval, which is None with fewer than two items."""

    value: float
    n: int
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Measure:
    """A metric: pooled, and per language."""

    pooled: Score
    by_lang: dict[str, Score]

    def to_json(self) -> dict[str, Any]:
        """Return the pooled score as a JSON object, with the scores of each language as `by_lang`."""
        return {**asdict(self.pooled), "by_lang": {lang: asdict(score) for lang, score in self.by_lang.items()}}


def mean(sums: Array, n: int) -> float:
    """Return the score of a per-item metric."""
    return float(sums[0] / n)


def measure(
    rows: Sequence[Sequence[float] | float], langs: Sequence[str], how: Resampling, finish: Finish = mean
) -> Measure | None:
    """Score items from their contributions to the sums. Returns None without items.

    Args:
        rows: per item a number, or S numbers. `finish` takes their sums.
        langs: the language of each item. "zh-CN" counts as "zh".
    """
    grouped: dict[str, list[Sequence[float] | float]] = defaultdict(list)
    for row, lang in zip(rows, langs, strict=True):
        grouped[primary_language(lang)].append(row)
    return pool({lang: _table(grouped[lang]) for lang in sorted(grouped)}, how, dict.fromkeys(grouped, finish))


def pool(tables: dict[str, Array], how: Resampling, finish: dict[str, Finish]) -> Measure | None:
    """Score a table [n, S] per language, each with its own function. Otherwise as `measure`."""
    if not tables:
        return None
    scores, draws = {}, {}
    for lang, table in tables.items():
        value = finish[lang](table.sum(0), len(table))
        draws[lang] = resampled(table, how, finish[lang], lang)
        scores[lang] = Score(value, len(table), *interval(draws[lang], len(table)))
    total = sum(score.n for score in scores.values())
    value = sum(score.value * score.n for score in scores.values()) / total
    drawn = sum((draws[lang] * (scores[lang].n / total) for lang in tables), np.zeros(how.draws))
    return Measure(Score(value, total, *interval(drawn, total)), scores)


def _table(rows: Sequence[Sequence[float] | float]) -> Array:
    table = np.asarray(rows, dtype=np.float64)
    return table[:, None] if table.ndim == 1 else table


def resampled(table: Array, how: Resampling, finish: Finish, name: str = "") -> Array:
    """Return the scores of draws of n items with replacement: float64 [draws]. name: part of the seed."""
    rng = np.random.default_rng([how.seed, zlib.crc32(name.encode())])
    n = len(table)
    scores: list[float] = []
    for start in range(0, how.draws, CHUNK):
        times = rng.multinomial(n, np.full(n, 1 / n), size=min(CHUNK, how.draws - start))
        scores += [finish(sums, n) for sums in times @ table]
    return np.asarray(scores)


def interval(drawn: Array, n: int) -> tuple[float | None, float | None]:
    """Return the ends of the 95 % interval from the draws of a score over n items."""
    if n < 2 or not len(drawn):
        return None, None
    low, high = np.percentile(drawn, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)
