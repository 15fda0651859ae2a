"""Rows of logits of which only the best entries are known, and what can be said for certain all the same.

A server that verifies for us sends the best N entries of a row, not the row. None that it kept back is larger than the
smallest of those N. From that follows whether the token that the whole row would give is known:

    greedy      the best entry, after constraints, is above anything that may have been kept back
    top-k       so is the k-th best: what the filters then see is the set that they would have seen
    top-p       the nucleus is the same whether the mass that was kept back is 0 or as large as it can be
    min-p       the threshold is above anything that was kept back

Where it is not known, `NeedMoreLogprobs` asks for more entries: nothing is ever guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.sampling.logits import scatter_logits
from outrider.sampling.sampler import Distribution, SamplingParams, apply_temperature

if TYPE_CHECKING:
    from outrider.sampling.policy import Policy

ROUNDING_ERROR = 1e-5  # how far a sum of float32 probabilities may be off


class NeedMoreLogprobs(Exception):
    """The known entries do not settle which token follows at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(f"position {position} needs more of its row")
        self.position = position


@dataclass(frozen=True)
class TopLogprobs:
    """Some entries of a row.

    ids: int64 [n]; values: float32 [n], raw logits or log-probabilities. missing_max: the bound of missing entries
    (−inf: none is missing). normalised: the values are log-probabilities, so that the mass that is missing is known.
    """

    ids: np.ndarray
    values: np.ndarray
    missing_max: float
    normalised: bool = False

    def to_distribution(self, policy: Policy, ids: list[int], length: int) -> Distribution:
        """What follows ids[:length].

        Raises:
            NeedMoreLogprobs: this row does not say.
        """
        logits = torch.full((policy.vocab_size,), -torch.inf, dtype=torch.float32)
        in_vocabulary = (self.ids >= 0) & (self.ids < policy.vocab_size)  # beyond is padding, which nothing may emit
        scatter_logits(logits, self.ids[in_vocabulary], self.values[in_vocabulary])
        distribution = _BoundedDistribution(
            policy.distribution(logits, ids, length), self._missing_logit_max(policy, int(in_vocabulary.sum()))
        )
        if not self._is_determined(distribution, policy):
            raise NeedMoreLogprobs(length)
        return distribution

    def _missing_logit_max(self, policy: Policy, known: int) -> float:
        """What a missing entry may be at most once constraints have been applied: a penalty below 1 raises them."""
        if self.missing_max == -math.inf:  # said to be whole: where it is not, anything may be missing
            return self.missing_max if known >= policy.vocab_size else math.inf
        missing_max, penalty = np.float32(self.missing_max), np.float32(min(policy.processors.repetition_penalty, 1.0))
        return float(
            missing_max / penalty if missing_max > 0 else missing_max * penalty
        )  # rounded as the entries themselves are

    def _is_determined(self, distribution: _BoundedDistribution, policy: Policy) -> bool:
        sampling, missing_logit_max = distribution.sampling, distribution.missing_logit_max
        if missing_logit_max == -math.inf:
            return True
        if not float(distribution.logits.max()) > missing_logit_max:
            return False
        if sampling.greedy:
            return True
        scores = apply_temperature(distribution.logits, sampling.temperature)
        missing_score_max = float(
            apply_temperature(torch.tensor(missing_logit_max, dtype=torch.float32), sampling.temperature)
        )  # rounded as the scores are
        if 0 < sampling.top_k < policy.vocab_size:
            return float(torch.topk(scores, sampling.top_k).values[-1]) > missing_score_max
        best = (
            scores[scores > missing_score_max].sort(descending=True).values
        )  # all of them are known to be the best there are
        if sampling.top_p < 1.0:
            return self._is_nucleus_determined(best, scores, missing_score_max, policy, sampling)
        return sampling.min_p > 0 and float(best[0]) + math.log(sampling.min_p) > missing_score_max

    def _is_nucleus_determined(
        self, best: Tensor, scores: Tensor, missing_score_max: float, policy: Policy, sampling: SamplingParams
    ) -> bool:
        """Whether the same entries make up the nucleus, however much mass is missing.

        best: float32 [m], descending; the m entries known to be the largest. scores: float32 [V].
        """
        known_logsumexp = float(torch.logsumexp(scores, -1))
        largest_logsumexp = float(
            np.logaddexp(known_logsumexp, self._missing_mass(missing_score_max, policy, sampling))
        )
        smallest = _nucleus_size(best, known_logsumexp, sampling.top_p - ROUNDING_ERROR)
        size = _nucleus_size(best, largest_logsumexp, sampling.top_p + ROUNDING_ERROR)
        return smallest == size != 0 and not (size < len(best) and best[size] == best[size - 1])

    def _missing_mass(self, missing_score_max: float, policy: Policy, sampling: SamplingParams) -> float:
        """The logarithm of what exp(score) of the missing entries can sum up to.

        Of log-probabilities l with Σ exp(l) = m missing, none above f, at a temperature T ≤ 1:
        Σ exp(l/T) = Σ exp(l)·exp(l·(1/T − 1)) ≤ m·exp(f·(1/T − 1)).
        """
        in_vocabulary = ((self.ids >= 0) & (self.ids < policy.vocab_size)).sum()
        bound = missing_score_max + math.log(max(policy.vocab_size - int(in_vocabulary), 1))
        if self.normalised and sampling.temperature <= 1.0:
            missing = max(0.0, 1.0 - float(np.exp(self.values.astype(np.float64)).sum())) + ROUNDING_ERROR
            bound = min(bound, math.log(missing) + self.missing_max * (1.0 / sampling.temperature - 1.0))
        return bound


class _BoundedDistribution(Distribution):
    """A distribution with missing entries, none of them above `missing_logit_max`."""

    def __init__(self, known: Distribution, missing_logit_max: float) -> None:
        super().__init__(known.logits, known.sampling, known.position)
        self.missing_logit_max = missing_logit_max

    def _top2_margin(self) -> float:
        """As for a whole row; the runner-up may be missing."""
        margin = super()._top2_margin()
        return min(margin, float(self.logits.max()) - self.missing_logit_max) if self.sampling.greedy else margin


def _nucleus_size(best: Tensor, total: float, top_p: float) -> int:
    """How many of the best scores it takes to reach the mass top_p of exp(total); 0 where they do not."""
    mass = torch.exp(best.double() - total).cumsum(-1)
    reached = torch.nonzero(mass >= top_p)
    return int(reached[0]) + 1 if len(reached) else 0
