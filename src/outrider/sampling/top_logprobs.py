"""Partial rows of logits: the N largest entries, as an LLM server sends them, and the tokens that they determine.

A missing entry is at most as large as the smallest known one. The logits processors are non-decreasing functions of an
entry. Applied to that value, they give the upper bound of each missing entry, with its own bias, penalty or ban. The
largest of these bounds decides whether the known entries give the same token as the complete row:

    greedy      the largest entry, after the logits processors, is above the bound
    top-k       the k-th largest entry is above the bound
    top-p       the nucleus is the same for the least and for the largest possible missing mass
    min-p       the threshold is above the bound

Otherwise `NeedMoreLogprobs` requests more entries. No token is ever guessed. Under a grammar, only entries that the
grammar allows count as missing. A single allowed token needs no entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outrider.sampling.sampler import Distribution, apply_temperature

ROUNDING_ERROR = 1e-5  # of a sum of float32 probabilities


class NeedMoreLogprobs(Exception):
    """The known entries do not determine the token at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(f"position {position} needs more of its row")
        self.position = position


@dataclass(frozen=True)
class TopLogprobs:
    """The known entries of one row.

    ids: int64 [n]. values: float32 [n], raw logits or log-probabilities. missing_max: the upper bound of missing
    entries, −inf if none is missing. normalised: the values are log-probabilities, so the missing mass is known. The
    policy then has no repetition penalty, which would need logits.
    """

    ids: np.ndarray
    values: np.ndarray
    missing_max: float
    normalised: bool = False

    def within(self, allowed: np.ndarray) -> TopLogprobs:
        """Return the row for a grammar that allows these tokens, bool [≤ vocab_size]. A single one needs no score."""
        ids = np.flatnonzero(allowed)
        return self if len(ids) != 1 else TopLogprobs(ids, np.zeros(1, dtype=np.float32), -math.inf)

    def to_distribution(self, process: Callable[[Tensor], Distribution], vocab_size: int) -> Distribution:
        """Return the distribution of the row. process: the policy's, from logits float32 [vocab_size].

        Ids beyond the vocabulary are padding.

        Raises:
            NeedMoreLogprobs: the known entries do not determine the token.
        """
        in_vocabulary = (self.ids >= 0) & (self.ids < vocab_size)
        ids = self.ids[in_vocabulary]
        claims_all = self.missing_max == -math.inf and len(ids) < vocab_size  # but it is not complete
        logits = np.full(vocab_size, math.inf if claims_all else self.missing_max, dtype=np.float32)
        logits[ids] = self.values[in_vocabulary]
        processed = process(torch.from_numpy(logits))
        bounds, known = processed.logits.numpy(), np.full(vocab_size, -math.inf, dtype=np.float32)
        known[ids] = bounds[ids]
        bounds[ids] = -math.inf
        distribution = _BoundedDistribution(torch.from_numpy(known), processed, torch.from_numpy(bounds))
        if not self._is_determined(distribution):
            raise NeedMoreLogprobs(processed.position)
        return distribution

    def top_logprobs(
        self, token: int, count: int, vocab_size: int, position: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return ids and log-probabilities of a known token and of the `count` best ones, the best first.

        Raises:
            NeedMoreLogprobs: a missing entry may be among the best, or the row has logits and is not complete.
        """
        values = self.values.astype(np.float64)
        if not self.normalised:
            values = values - np.logaddexp.reduce(values)
        known = np.flatnonzero((self.ids >= 0) & (self.ids < vocab_size))
        best = known[np.lexsort((self.ids[known], -values[known]))][:count]
        is_missing = count > 0 and (len(best) < count or self.values[best[-1]] < self.missing_max)
        own = np.flatnonzero(self.ids == token)
        if is_missing or not len(own) or not (self.normalised or self.missing_max == -math.inf):
            raise NeedMoreLogprobs(position)
        chosen = [int(own[0]), *best.tolist()]
        return tuple(self.ids[chosen].tolist()), tuple(values[chosen].tolist())

    def _is_determined(self, distribution: _BoundedDistribution) -> bool:
        logits, sampling = distribution.logits, distribution.sampling
        missing_logit_max = distribution.missing_logit_max
        if missing_logit_max == -math.inf:
            return True
        if not float(logits.max()) > missing_logit_max:
            return False
        if sampling.greedy:
            return True
        scores = apply_temperature(logits, sampling.temperature)
        bound = torch.tensor(missing_logit_max, dtype=torch.float32)  # float32, to round as the scores are
        missing_score_max = float(apply_temperature(bound, sampling.temperature))
        if 0 < sampling.top_k < len(logits):
            return float(torch.topk(scores, sampling.top_k).values[-1]) > missing_score_max
        best = scores[scores > missing_score_max].sort(descending=True).values  # the largest of the complete row
        if sampling.top_p < 1.0:
            known, missing = float(torch.logsumexp(scores, -1)), self._missing_mass(distribution)
            return _is_nucleus_determined(best, known, missing, sampling.top_p)
        return sampling.min_p > 0 and float(best[0]) + math.log(sampling.min_p) > missing_score_max

    def _missing_mass(self, distribution: _BoundedDistribution) -> float:
        """Return the logarithm of the upper bound of Σ exp(score) over the missing entries.

        For log-probabilities l with Σ exp(l) = m missing, none above f and none raised by a processor, at a temperature
        T ≤ 1: Σ exp(l/T) = Σ exp(l)·exp(l·(1/T − 1)) ≤ m·exp(f·(1/T − 1)).
        """
        temperature = distribution.sampling.temperature
        bound = float(torch.logsumexp(apply_temperature(distribution.bounds, temperature), -1))
        if self.normalised and temperature <= 1.0 and distribution.missing_logit_max <= self.missing_max:
            missing = max(0.0, 1.0 - float(np.exp(self.values.astype(np.float64)).sum())) + ROUNDING_ERROR
            bound = min(bound, math.log(missing) + self.missing_max * (1.0 / temperature - 1.0))
        return bound


class _BoundedDistribution(Distribution):
    """A distribution with missing entries, which count as banned.

    known: float32 [V]. processed: of the same position. bounds: float32 [V], the upper bound of each missing entry, and
    −inf for the known ones.
    """

    def __init__(self, known: Tensor, processed: Distribution, bounds: Tensor) -> None:
        super().__init__(known, processed.sampling, processed.position)
        self.bounds = bounds
        self.missing_logit_max = float(bounds.numpy().max())

    @cached_property
    def top2_margin(self) -> float:
        """The margin of a complete row, or its lower bound if the runner-up may be missing."""
        margin = super().top2_margin
        return min(margin, float(self.logits.max()) - self.missing_logit_max) if self.sampling.greedy else margin


def _is_nucleus_determined(best: Tensor, known: float, missing: float, top_p: float) -> bool:
    """Return whether the nucleus has the same entries for every possible missing mass.

    best: float32 [m], descending, the m largest entries of the complete row. known, missing: logarithms of the mass of
    the known entries, and of the largest mass of the missing ones.
    """
    smallest_size = _nucleus_size(best, known, top_p - ROUNDING_ERROR)
    size = _nucleus_size(best, float(np.logaddexp(known, missing)), top_p + ROUNDING_ERROR)
    return smallest_size == size != 0 and not (size < len(best) and best[size] == best[size - 1])


def _nucleus_size(best: Tensor, total: float, top_p: float) -> int:
    """Return how many of the largest scores reach the mass top_p of exp(total), or 0 if all of them do not."""
    mass = torch.exp(best.double() - total).cumsum(-1)
    reached = torch.nonzero(mass >= top_p)
    return int(reached[0]) + 1 if len(reached) else 0
