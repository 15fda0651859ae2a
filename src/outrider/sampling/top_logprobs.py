"""Partial rows of logits: the N largest entries, as an LLM server sends them, and the tokens that they determine.

A missing entry is at most as large as the smallest known one. This bound decides whether the known entries give the
same token as the complete row:

    greedy      the largest entry, after the logits processors, is above the bound
    top-k       the k-th largest entry is above the bound
    top-p       the nucleus is the same for the least and for the largest possible missing mass
    min-p       the threshold is above the bound

Otherwise `NeedMoreLogprobs` requests more entries. No token is ever guessed. Of a row within a grammar, only entries
that the grammar allows can be missing. A single allowed token needs no entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outrider.sampling.logits import scatter_logits
from outrider.sampling.sampler import Distribution, SamplingParams, apply_temperature

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
    entries, −inf if none is missing. normalised: the values are log-probabilities, so the missing mass is known.
    allowed: bool [≤ vocab_size], the entries that matter, or None for all.
    """

    ids: np.ndarray
    values: np.ndarray
    missing_max: float
    normalised: bool = False
    allowed: np.ndarray | None = None

    def within(self, allowed: np.ndarray) -> TopLogprobs:
        """Return the row for a grammar that allows these tokens, bool [≤ vocab_size]."""
        ids = np.flatnonzero(allowed)
        if len(ids) == 1:  # its score does not matter
            return TopLogprobs(ids, np.zeros(1, dtype=np.float32), -math.inf, False, allowed)
        return replace(self, allowed=allowed)

    def to_logits(self, vocab_size: int) -> Tensor:
        """Return float32 [vocab_size], −inf where an entry is missing. Ids beyond the vocabulary are padding."""
        logits = torch.full((vocab_size,), -torch.inf, dtype=torch.float32)
        in_vocabulary = self._in_vocabulary(vocab_size)
        scatter_logits(logits, self.ids[in_vocabulary], self.values[in_vocabulary])
        return logits

    def to_distribution(self, known: Distribution, repetition_penalty: float) -> Distribution:
        """Return the distribution, given that of `to_logits` after the logits processors.

        Raises:
            NeedMoreLogprobs: the known entries do not determine the token.
        """
        bound = self._missing_logit_max(len(known.logits), repetition_penalty)
        distribution = _BoundedDistribution(known, bound)
        if not self._is_determined(distribution):
            raise NeedMoreLogprobs(known.position)
        return distribution

    def _in_vocabulary(self, vocab_size: int) -> np.ndarray:
        return (self.ids >= 0) & (self.ids < vocab_size)

    def _missing_logit_max(self, vocab_size: int, repetition_penalty: float) -> float:
        """Return the upper bound of missing entries after the logits processors: a penalty below 1 raises them."""
        if not self._missing_count(vocab_size):
            return -math.inf
        if self.missing_max == -math.inf:  # a row that claims to be complete, and is not
            return math.inf
        missing_max = np.float32(self.missing_max)
        penalty = np.float32(min(repetition_penalty, 1.0))  # float32, to round as the entries themselves are
        return float(missing_max / penalty if missing_max > 0 else missing_max * penalty)

    def _missing_count(self, vocab_size: int) -> int:
        """Return how many entries are missing."""
        ids = self.ids[self._in_vocabulary(vocab_size)]
        if self.allowed is None:
            return max(0, vocab_size - len(ids))
        return int(self.allowed.sum()) - int(self.allowed[ids[ids < len(self.allowed)]].sum())

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
            return self._is_nucleus_determined(best, scores, missing_score_max, sampling)
        return sampling.min_p > 0 and float(best[0]) + math.log(sampling.min_p) > missing_score_max

    def _is_nucleus_determined(
        self, best: Tensor, scores: Tensor, missing_score_max: float, sampling: SamplingParams
    ) -> bool:
        """Return whether the nucleus has the same entries for every possible missing mass.

        best: float32 [m], descending, the m largest entries of the complete row. scores: float32 [V].
        """
        known = float(torch.logsumexp(scores, -1))
        largest = float(np.logaddexp(known, self._missing_mass(missing_score_max, len(scores), sampling)))
        smallest_size = _nucleus_size(best, known, sampling.top_p - ROUNDING_ERROR)
        size = _nucleus_size(best, largest, sampling.top_p + ROUNDING_ERROR)
        return smallest_size == size != 0 and not (size < len(best) and best[size] == best[size - 1])

    def _missing_mass(self, missing_score_max: float, vocab_size: int, sampling: SamplingParams) -> float:
        """Return the logarithm of the upper bound of Σ exp(score) over the missing entries.

        For log-probabilities l with Σ exp(l) = m missing, none above f, at a temperature T ≤ 1:
        Σ exp(l/T) = Σ exp(l)·exp(l·(1/T − 1)) ≤ m·exp(f·(1/T − 1)).
        """
        bound = missing_score_max + math.log(max(self._missing_count(vocab_size), 1))
        if self.normalised and sampling.temperature <= 1.0:
            missing = max(0.0, 1.0 - float(np.exp(self.values.astype(np.float64)).sum())) + ROUNDING_ERROR
            bound = min(bound, math.log(missing) + self.missing_max * (1.0 / sampling.temperature - 1.0))
        return bound


class _BoundedDistribution(Distribution):
    """A distribution with missing entries, none of them above `missing_logit_max`."""

    def __init__(self, known: Distribution, missing_logit_max: float) -> None:
        super().__init__(known.logits, known.sampling, known.position)
        self.missing_logit_max = missing_logit_max

    @cached_property
    def top2_margin(self) -> float:
        """The margin of a complete row, or its lower bound if the runner-up may be missing."""
        margin = super().top2_margin
        return min(margin, float(self.logits.max()) - self.missing_logit_max) if self.sampling.greedy else margin


def _nucleus_size(best: Tensor, total: float, top_p: float) -> int:
    """Return how many of the largest scores reach the mass top_p of exp(total), or 0 if all of them do not."""
    mass = torch.exp(best.double() - total).cumsum(-1)
    reached = torch.nonzero(mass >= top_p)
    return int(reached[0]) + 1 if len(reached) else 0
