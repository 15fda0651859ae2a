"""Sampling of a token from one row of logits, reproducible across machines.

Filters are those of transformers, in its order: temperature, top-k, top-p, min-p. Draws use the Gumbel-max trick: a
draw from a distribution π at position n is argmax_v [log π(v) + g_n(v)], with noise g_n(v) that depends on the seed, n
and the token v alone. Drafter and verifier share the noise. Equal distributions give equal tokens, and the verifier's
token is the one that it draws alone (docs/design/maths.md, "Shared randomness").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

from outrider.errors import DecodingError
from outrider.sampling.logits import argmax, top2_margin

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIN_TEMPERATURE = 1e-30  # float32 can divide by it, and only the best token keeps a probability
NUCLEUS_SHORTLIST = 1024  # entries tried first: sorting all 150,000 costs 10 ms, and a nucleus is nearly always smaller


class NoiseStream(IntEnum):
    """Independent random streams at one position."""

    TOKEN = 0  # the noise that drafter and verifier share
    ACCEPT = 1  # rejection sampling: the uniform of the acceptance test
    RESIDUAL = 2  # rejection sampling: the draw from max(0, p − q)
    LOOP = 3  # the draw that leaves a loop


def uniforms(seed: int, position: int, tokens: np.ndarray, stream: NoiseStream = NoiseStream.TOKEN) -> np.ndarray:
    """Return uniforms in (0, 1) for `tokens` (integers), float64, keyed by (seed, stream, position, token) alone.

    Philox4x64 (Salmon et al., 2011) makes a key per (seed, stream, position). The value of token v is the v-th output
    of SplitMix64 (Steele et al., 2014) from that key. Any v can be computed alone, with the same result on every
    machine, so a short list of candidates is cheap.
    """
    x = position_key(seed, position, stream) + (tokens.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return np.minimum((x >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54, 1.0 - 2.0**-53)


def position_key(seed: int, position: int, stream: NoiseStream = NoiseStream.TOKEN) -> np.uint64:
    """Return the key of one position's uniforms."""
    philox = np.random.Philox(
        key=np.array([seed, int(stream)], dtype=np.uint64), counter=np.array([0, position, 0, 0], dtype=np.uint64)
    )
    return np.uint64(philox.random_raw())


def position_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return `position_key` for many seeds and positions, uint64 [R] each: the first output of Philox4x64-10."""
    x0, x1 = np.ones_like(positions), positions  # numpy counts up before its first output
    x2 = x3 = key1 = np.zeros_like(positions)
    key0 = seeds
    for _ in range(10):
        (high0, low0), (high2, low2) = _multiply(x0, 0xD2E7470EE14C6C93), _multiply(x2, 0xCA5A826395121157)
        x0, x1, x2, x3 = high2 ^ x1 ^ key0, low2, high0 ^ x3 ^ key1, low0
        key0, key1 = key0 + np.uint64(0x9E3779B97F4A7C15), key1 + np.uint64(0xBB67AE8584CAA73B)
    return x0


def _multiply(x: np.ndarray, factor: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the high and the low 64 bits of the products of uint64 [R] with a factor."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    high, low = np.uint64(factor >> 32), np.uint64(factor & 0xFFFFFFFF)
    middle = (x >> half) * low + (((x & mask) * low) >> half)
    carry = (x & mask) * high + (middle & mask)
    return (x >> half) * high + (middle >> half) + (carry >> half), x * np.uint64(factor)


def gumbel_noise(seed: int, position: int, ids: Tensor, stream: NoiseStream = NoiseStream.TOKEN) -> Tensor:
    """Return standard Gumbel noise of the tokens `ids`, float64 [len(ids)] on their device."""
    u = uniforms(seed, position, ids.cpu().numpy(), stream)
    return torch.from_numpy(-np.log(-np.log(u))).to(ids.device)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. Temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True if the largest logit is chosen without noise."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class Support:
    """The tokens that can be drawn. ids: int64 [m]. logp: float32 [m], log-probabilities with logsumexp 0."""

    ids: Tensor
    logp: Tensor

    def draw(self, seed: int, position: int, stream: NoiseStream = NoiseStream.TOKEN) -> int:
        """Return the Gumbel-max draw at `position`."""
        return int(self.ids[argmax(self.logp.double() + gumbel_noise(seed, position, self.ids, stream))])

    def probability(self, token: int) -> float:
        """Return the probability of a token, 0 outside the support."""
        return float(self.logp[self.ids == token].exp().sum())

    def top_k(self, count: int) -> Support:
        """Return the `count` most probable tokens, renormalised."""
        if count >= len(self.ids):
            return self
        best = torch.topk(self.logp, count)
        return Support(self.ids[best.indices], torch.log_softmax(best.values, -1))


def filter_logits(logits: Tensor, sampling: SamplingParams) -> Support:
    """Apply temperature, top-k, top-p and min-p to a row of logits (float32 [V], −inf where banned)."""
    scores = apply_temperature(logits, sampling.temperature)
    ids = _top_k_ids(scores, sampling.top_k)
    scores = scores[ids]
    for apply_filter, limit in ((_top_p_indices, sampling.top_p), (_min_p_indices, sampling.min_p)):
        keep = apply_filter(scores, limit)
        if keep is not None:
            ids, scores = ids[keep], scores[keep]
    return Support(ids, torch.log_softmax(scores, -1))


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide a row by a temperature (0 counts as 1). On overflow, shift the row to maximum 0 first."""
    divisor = max(temperature, MIN_TEMPERATURE) if temperature else 1.0
    scores = logits / divisor
    return scores if torch.isfinite(scores.max()) else (logits - logits.max()) / divisor


def _top_k_ids(scores: Tensor, top_k: int) -> Tensor:
    """Return the ascending ids of the scores that are not banned and at least the k-th best, ties included."""
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
    """Return the indices of the smallest set of largest entries whose mass reaches top_p, or None for all."""
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
    """Return the indices of the entries with probability ≥ min_p × the largest, or None for all."""
    if min_p <= 0.0:
        return None
    probabilities = torch.softmax(scores, -1)
    return torch.nonzero(probabilities >= min_p * probabilities.max()).flatten()


def _no_valid_token(position: int) -> DecodingError:
    return DecodingError(f"no token can be chosen at position {position}: NaN logits, or all are banned")


class Distribution:
    """The distribution of one position after the logits processors, and its token. Both are computed on first use.

    logits: float32 [V], −inf where banned. position: the absolute index of the token.
    """

    def __init__(self, logits: Tensor, sampling: SamplingParams, position: int) -> None:
        self.logits, self.sampling, self.position = logits, sampling, position

    @cached_property
    def token(self) -> int:
        """The token that the model alone emits here: its argmax, or its Gumbel draw.

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
        """The tokens that can be drawn. Greedy: one token with probability 1."""
        if self.sampling.greedy:
            return Support(torch.tensor([self.token]), torch.zeros(1, dtype=torch.float32))
        return filter_logits(self.logits, self.sampling)

    @cached_property
    def logp(self) -> Tensor:
        """Log-probabilities float32 [V] at the sampling temperature (1 if greedy), before top-k and top-p."""
        return torch.log_softmax(apply_temperature(self.logits, self.sampling.temperature), -1)

    def allows(self, token: int) -> bool:
        """Return whether logits processors and filters leave the token a probability."""
        if self.sampling.greedy:
            return math.isfinite(float(self.logits[token]))
        return bool((self.support.ids == token).any())

    def uniform(self, stream: NoiseStream) -> float:
        """Return a uniform in (0, 1) from a stream at this position."""
        return float(uniforms(self.sampling.seed, self.position, np.zeros(1, np.int64), stream)[0])

    @cached_property
    def top2_margin(self) -> float:
        """The lead of the token over the runner-up, in logits. Numeric noise below it cannot change the token."""
        if self.sampling.greedy:
            return top2_margin(self.logits)
        noise = gumbel_noise(self.sampling.seed, self.position, self.support.ids)
        return top2_margin((self.support.logp.double() + noise) * self.sampling.temperature)


@dataclass(frozen=True)
class SampledToken:
    """The token of a `Distribution` and its margin, without the distribution. It is enough for exact verdicts.

    score: the token's, in logits, not finite if no token can be chosen.
    """

    token: int
    top2_margin: float
    score: float = 0.0

    def validated(self, position: int) -> SampledToken:
        """Return the token itself.

        Raises:
            DecodingError: the row holds NaN, or every token is banned.
        """
        if not math.isfinite(self.score):
            raise _no_valid_token(position)
        return self


@dataclass(frozen=True)
class SampledRows(Sequence[SampledToken]):
    """The sampled tokens of consecutive positions, as columns: objects are made only for rows that are indexed."""

    tokens: list[int]
    margins: list[float]
    scores: list[float]

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> SampledToken: ...

    @overload
    def __getitem__(self, index: slice) -> SampledRows: ...

    def __getitem__(self, index: int | slice) -> SampledToken | SampledRows:
        if isinstance(index, slice):
            return SampledRows(self.tokens[index], self.margins[index], self.scores[index])
        return SampledToken(self.tokens[index], self.margins[index], self.scores[index])

    def check_scores(self, count: int, position: int) -> None:
        """Raise DecodingError unless each of the first `count` rows, from `position` on, has a token."""
        for n, score in enumerate(self.scores[:count]):
            if not math.isfinite(score):
                raise _no_valid_token(position + n)


@dataclass(frozen=True)
class Signals:
    """Confidence signals of one drafted token, as `decoding/gate.py` defines them."""

    entropy: float
    margin: float
    maxprob: float
    logprob: float
