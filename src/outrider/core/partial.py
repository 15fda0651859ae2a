"""Rows of logits of which only the best entries are known, and what can be said for certain all the same.

A server that verifies for us sends the best N entries of a row, not the row. None that it kept back is larger than the
smallest of those N. From that follows whether the token that the whole row would give is known:

    greedy      the best entry, after constraints, is above anything that may have been kept back
    top-k       so is the k-th best: what the filters then see is the set that they would have seen
    top-p       the nucleus is the same whether the mass that was kept back is 0 or as large as it can be
    min-p       the threshold is above anything that was kept back

Where it is not known, `Uncovered` asks for more entries: nothing is ever guessed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.core import rows
from outrider.core.sampling import Distribution, Sampling, tempered

if TYPE_CHECKING:
    from outrider.core.policy import Policy

ROUNDING = 1e-5  # how far a sum of float32 probabilities may be off


class Uncovered(Exception):
    """The known entries do not settle which token follows at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(f"position {position} needs more of its row")
        self.position = position


@dataclass(frozen=True)
class PartialRow:
    """Some entries of a row.

    ids: int64 [n]; values: float32 [n], raw logits or log-probabilities. floor: no entry that is missing exceeds it
    (−inf: none is missing). normalised: the values are log-probabilities, so that the mass that is missing is known.
    """

    ids: np.ndarray
    values: np.ndarray
    floor: float
    normalised: bool = False

    def under(self, policy: Policy, ids: list[int], length: int) -> Distribution:
        """What follows ids[:length].

        Raises:
            Uncovered: this row does not say.
        """
        row = torch.full((policy.vocab_size,), -torch.inf, dtype=torch.float32)
        known = (self.ids >= 0) & (self.ids < policy.vocab_size)  # beyond is padding, which nothing may emit
        rows.put(row, self.ids[known], self.values[known])
        distribution = _Known(policy.distribution(row, ids, length), self._ceiling(policy, int(known.sum())))
        if not self._settled(distribution, policy):
            raise Uncovered(length)
        return distribution

    def _ceiling(self, policy: Policy, known: int) -> float:
        """What a missing entry may be at most once constraints have been applied: a penalty below 1 raises them."""
        if self.floor == -math.inf:  # said to be whole: where it is not, anything may be missing
            return self.floor if known >= policy.vocab_size else math.inf
        floor, penalty = np.float32(self.floor), np.float32(min(policy.constraints.repetition_penalty, 1.0))
        return float(floor / penalty if floor > 0 else floor * penalty)  # rounded as the entries themselves are

    def _settled(self, distribution: _Known, policy: Policy) -> bool:
        sampling, ceiling = distribution.sampling, distribution.ceiling
        if ceiling == -math.inf:
            return True
        if not float(distribution.row.max()) > ceiling:
            return False
        if sampling.greedy:
            return True
        scores = tempered(distribution.row, sampling.temperature)
        limit = float(
            tempered(torch.tensor(ceiling, dtype=torch.float32), sampling.temperature)
        )  # rounded as the scores are
        if 0 < sampling.top_k < policy.vocab_size:
            return float(torch.topk(scores, sampling.top_k).values[-1]) > limit
        best = scores[scores > limit].sort(descending=True).values  # all of them are known to be the best there are
        if sampling.top_p < 1.0:
            return self._nucleus_settled(best, scores, limit, policy, sampling)
        return sampling.min_p > 0 and float(best[0]) + math.log(sampling.min_p) > limit

    def _nucleus_settled(self, best: Tensor, scores: Tensor, limit: float, policy: Policy, sampling: Sampling) -> bool:
        """Whether the same entries make up the nucleus, however much mass is missing.

        best: float32 [m], descending; the m entries known to be the largest. scores: float32 [V].
        """
        least = float(torch.logsumexp(scores, -1))
        most = float(np.logaddexp(least, self._missing_mass(limit, policy, sampling)))
        smallest = _nucleus_size(best, least, sampling.top_p - ROUNDING)
        size = _nucleus_size(best, most, sampling.top_p + ROUNDING)
        return smallest == size != 0 and not (size < len(best) and best[size] == best[size - 1])

    def _missing_mass(self, limit: float, policy: Policy, sampling: Sampling) -> float:
        """The logarithm of what exp(score) of the missing entries can sum up to.

        Of log-probabilities l with Σ exp(l) = m missing, none above f, at a temperature T ≤ 1:
        Σ exp(l/T) = Σ exp(l)·exp(l·(1/T − 1)) ≤ m·exp(f·(1/T − 1)).
        """
        known = ((self.ids >= 0) & (self.ids < policy.vocab_size)).sum()
        bound = limit + math.log(max(policy.vocab_size - int(known), 1))
        if self.normalised and sampling.temperature <= 1.0:
            missing = max(0.0, 1.0 - float(np.exp(self.values.astype(np.float64)).sum())) + ROUNDING
            bound = min(bound, math.log(missing) + self.floor * (1.0 / sampling.temperature - 1.0))
        return bound


class _Known(Distribution):
    """A distribution with missing entries, none of them above `ceiling`, that do not matter for what is asked of it."""

    def __init__(self, known: Distribution, ceiling: float) -> None:
        super().__init__(known.row, known.sampling, known.position)
        self.ceiling = ceiling

    def _lead(self) -> float:
        """As for a whole row; the runner-up may be missing."""
        lead = super()._lead()
        return min(lead, float(self.row.max()) - self.ceiling) if self.sampling.greedy else lead


def _nucleus_size(best: Tensor, total: float, top_p: float) -> int:
    """How many of the best scores it takes to reach the mass top_p of exp(total); 0 where they do not."""
    mass = torch.exp(best.double() - total).cumsum(-1)
    reached = torch.nonzero(mass >= top_p)
    return int(reached[0]) + 1 if len(reached) else 0
