"""How a token is chosen from one row of logits, in a way that two machines can agree on.

Filters are those of transformers, in its order: temperature, top-k, top-p, min-p. Draws use the Gumbel-max trick
with noise g_n(v) that depends on (seed, position n, token v) alone: a draw from any distribution π at n is
argmax_v [log π(v) + g_n(v)]. Drafter and verifier share the noise, so equal distributions give equal tokens, and
the verifier's token is the one that it would have drawn alone (MATHS: "Sampled, shared randomness").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from outrider.errors import DecodingError
from outrider.sampling.logits import argmax, top2_margin

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIN_TEMPERATURE = 1e-30  # float32 can still divide by it, and nothing but the best survives
NUCLEUS_SHORTLIST = 1024  # a nucleus is nearly always inside the best 1,024; sorting 150k entries costs 10 ms


class NoiseStream(IntEnum):
    """Independent uses of randomness at one position; their draws never correlate."""

    TOKEN = 0  # the shared noise with which both sides draw
    ACCEPT = 1  # the coin of residual acceptance
    RESIDUAL = 2  # the draw from max(0, p − q)
    LOOP = 3  # the draw that leaves a loop


def uniforms(seed: int, position: int, tokens: np.ndarray, stream: NoiseStream = NoiseStream.TOKEN) -> np.ndarray:
    """Uniforms in (0, 1) for `tokens` (integers), float64, keyed by (seed, stream, position, token) alone.

    A key per (seed, stream, position) comes from Philox4x64 (Salmon et al., 2011); the value of token v is the v-th
    output of SplitMix64 (Steele et al., 2014) from that key, which can be computed for any v by itself: the same on
    every device and machine, and a short list of candidates costs no more than it is long.
    """
    x = position_key(seed, position, stream) + (tokens.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return np.minimum((x >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54, 1.0 - 2.0**-53)


def position_key(seed: int, position: int, stream: NoiseStream = NoiseStream.TOKEN) -> np.uint64:
    """The key from which the uniforms of one position come."""
    philox = np.random.Philox(
        key=np.array([seed, int(stream)], dtype=np.uint64), counter=np.array([0, position, 0, 0], dtype=np.uint64)
    )
    return np.uint64(philox.random_raw())


def gumbel_noise(seed: int, position: int, ids: Tensor, stream: NoiseStream = NoiseStream.TOKEN) -> Tensor:
    """Standard Gumbel noise of the tokens `ids`: float64 [len(ids)] on their device."""
    u = uniforms(seed, position, ids.cpu().numpy(), stream)
    return torch.from_numpy(-np.log(-np.log(u))).to(ids.device)


@dataclass(frozen=True)
class SamplingParams:
    """Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep everything."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Support:
    """The tokens that can be drawn, with their normalised log-probabilities.

    ids: int64 [m]; logp: float32 [m], logsumexp 0.
    """

    ids: Tensor
    logp: Tensor

    def draw(self, seed: int, position: int, stream: NoiseStream = NoiseStream.TOKEN) -> int:
        """The Gumbel-max draw at `position`."""
        return int(self.ids[argmax(self.logp.double() + gumbel_noise(seed, position, self.ids, stream))])

    def probability(self, token: int) -> float:
        """π(token): 0 outside the support."""
        return float(self.logp[self.ids == token].exp().sum())

    def top_k(self, count: int) -> Support:
        """The `count` likeliest tokens, renormalised."""
        if count >= len(self.ids):
            return self
        best = torch.topk(self.logp, count)
        return Support(self.ids[best.indices], torch.log_softmax(best.values, -1))


def filter_logits(logits: Tensor, sampling: SamplingParams) -> Support:
    """Filter a row of logits (float32 [V], −inf where banned) as transformers' warpers do."""
    scores = apply_temperature(logits, sampling.temperature)
    ids = _top_k_ids(scores, sampling.top_k)
    scores = scores[ids]
    for apply_filter, limit in ((_top_p_indices, sampling.top_p), (_min_p_indices, sampling.min_p)):
        keep = apply_filter(scores, limit)
        if keep is not None:
            ids, scores = ids[keep], scores[keep]
    return Support(ids, torch.log_softmax(scores, -1))


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """The row at a temperature (0 counts as 1); shifted so that its best is 0 only where it would overflow."""
    divisor = max(temperature, MIN_TEMPERATURE) if temperature else 1.0
    scores = logits / divisor
    return scores if torch.isfinite(scores.max()) else (logits - logits.max()) / divisor


def _top_k_ids(scores: Tensor, top_k: int) -> Tensor:
    """Ids, ascending, of the scores that are not banned and at least as good as the k-th best.

    Ties with the k-th stay, as in transformers.
    """
    if 0 < top_k < scores.shape[-1]:
        best = torch.topk(scores, top_k)
        kth = best.values[-1]
        if kth > -torch.inf and int((scores >= kth).sum()) == top_k:
            return best.indices.sort().values
        return torch.nonzero((scores >= kth) & (scores > -torch.inf)).flatten()
    if scores.min() > -torch.inf:
        return torch.arange(scores.shape[-1], device=scores.device)
    return torch.nonzero(scores > -torch.inf).flatten()


def _top_p_indices(scores: Tensor, top_p: float) -> Tensor | None:
    """Indices of the smallest set of likeliest entries whose mass reaches top_p; None keeps all."""
    if top_p >= 1.0:
        return None
    total = torch.logsumexp(scores, -1)
    for size in (min(NUCLEUS_SHORTLIST, len(scores)), len(scores)):
        best = torch.topk(scores, size)
        mass = torch.exp(best.values - total).cumsum(-1)
        if mass[-1] >= top_p or size == len(scores):
            break
    mass_before = mass - torch.exp(best.values - total)
    keep = mass_before < top_p
    keep[0] = True
    return best.indices[keep].sort().values


def _min_p_indices(scores: Tensor, min_p: float) -> Tensor | None:
    """Indices of the entries with probability ≥ min_p × the largest; None keeps all."""
    if min_p <= 0.0:
        return None
    probabilities = torch.softmax(scores, -1)
    return torch.nonzero(probabilities >= min_p * probabilities.max()).flatten()


def _no_valid_token(position: int) -> DecodingError:
    return DecodingError(f"no token can be chosen at position {position}: NaN logits, or all are banned")


class Distribution:
    """One position's distribution after constraints, and the token chosen from it. Everything is lazy.

    logits: float32 [V], constrained logits, −inf where banned. position: the absolute index of the token to choose.
    """

    def __init__(self, logits: Tensor, sampling: SamplingParams, position: int) -> None:
        self.logits, self.sampling, self.position = logits, sampling, position

    @cached_property
    def token(self) -> int:
        """The token that this model alone would emit here: its argmax, or its Gumbel draw.

        Raises:
            DecodingError: the row holds NaN, or every token is banned.
        """
        best = argmax(self.logits)  # NaN counts as the largest
        if not math.isfinite(float(self.logits[best])):
            raise _no_valid_token(self.position)
        if self.sampling.greedy:
            return best
        return self.support.draw(self.sampling.seed, self.position)

    @cached_property
    def support(self) -> Support:
        """What can be drawn. Greedy: one token with probability 1."""
        if self.sampling.greedy:
            return Support(torch.tensor([self.token]), torch.zeros(1, dtype=torch.float32))
        return filter_logits(self.logits, self.sampling)

    @cached_property
    def logp(self) -> Tensor:
        """float32 [V]: log-probabilities at the sampling temperature (1 when greedy), before top-k/p."""
        return torch.log_softmax(apply_temperature(self.logits, self.sampling.temperature), -1)

    def allows(self, token: int) -> bool:
        """Whether constraints and filters leave this token a chance."""
        if self.sampling.greedy:
            return math.isfinite(float(self.logits[token]))
        return bool((self.support.ids == token).any())

    def uniform(self, stream: NoiseStream) -> float:
        return float(uniforms(self.sampling.seed, self.position, np.zeros(1, np.int64), stream)[0])

    @cached_property
    def top2_margin(self) -> float:
        """By how much the choice beats the runner-up, in logits: what numeric noise must exceed to change it."""
        return self._top2_margin()

    def _top2_margin(self) -> float:
        if self.sampling.greedy:
            return top2_margin(self.logits)
        noise = gumbel_noise(self.sampling.seed, self.position, self.support.ids)
        return top2_margin((self.support.logp.double() + noise) * self.sampling.temperature)


@dataclass(frozen=True)
class SampledToken:
    """A `Distribution` of which only this is known: its choice, and by how much that led. Enough for exact verdicts.

    score: of the choice, in logits; not finite where none can be made.
    """

    token: int
    top2_margin: float
    score: float = 0.0

    def validated(self, position: int) -> SampledToken:
        """Itself.

        Raises:
            DecodingError: the row holds NaN, or every token is banned.
        """
        if not math.isfinite(self.score):
            raise _no_valid_token(position)
        return self


@dataclass(frozen=True)
class Signals:
    """Confidence signals of one drafted token; `decoding/gate.py` defines them."""

    entropy: float
    margin: float
    maxprob: float
    logprob: float
