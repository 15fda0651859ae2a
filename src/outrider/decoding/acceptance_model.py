"""Acceptance rates of drafted tokens: exponentially decayed, by the source and the confidence of a token."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence as Seq

from outrider.decoding.draft_source import Confidence, DraftSource, MatchLength, source_of

BUCKET_EDGES = (0.01, 0.05, 0.15, 0.4, 1.0, 2.5)  # of −log q
MATCH_PRIORS = (0.3, 0.4, 0.6, 0.8, 0.9)  # acceptance rate of each bucket before the first observation
PRIOR_ACCEPTANCE = 0.7  # acceptance rate before the first observation
PRIOR_WEIGHT = 4.0  # of the prior acceptance, in observations
CONFIDENCE_WEIGHT = 10.0  # of the drafter's own probability, in observations
NEXT_TOKEN_WEIGHT = 20.0  # of the mean as the prior of a next token, in observations: next tokens are rarely observed
MAX_CONFIDENCE_POWER = 4.0  # largest exponent that corrects the drafter's own probability
MEMORY_TOKENS = 1024.0  # time constant of acceptance rates, in tokens: texts change


class DecayedRate:
    """An exponentially decayed rate. `now` counts all observations, so a rate without new ones decays as well."""

    def __init__(self) -> None:
        self._weighted_hits = self._weighted_count = 0.0
        self._last_update = 0

    def update(self, hit: float, now: int) -> None:
        """Count one observation."""
        fade = self._fade(now)
        self._weighted_hits = self._weighted_hits * fade + hit
        self._weighted_count = self._weighted_count * fade + 1.0
        self._last_update = now

    def estimate(self, prior: float, weight: float, now: int) -> float:
        """Return the rate, with a prior that counts for `weight` observations."""
        fade = self._fade(now)
        return (self._weighted_hits * fade + weight * prior) / (self._weighted_count * fade + weight)

    def _fade(self, now: int) -> float:
        return math.exp((self._last_update - now) / MEMORY_TOKENS)


class AcceptanceModel:
    """Acceptance probabilities of drafted tokens, by their confidence where it is known."""

    def __init__(self) -> None:
        self._tokens_seen = 0
        self._claimed = DecayedRate()
        self._model, self._lookup = DecayedRate(), DecayedRate()
        self._by_bucket = [DecayedRate() for _ in range(len(BUCKET_EDGES) + 1)]
        self._next_by_bucket = [DecayedRate() for _ in range(len(BUCKET_EDGES) + 1)]
        self._by_match = [DecayedRate() for _ in MATCH_PRIORS]

    def update(self, confidences: Seq[Confidence | None], accepted: int) -> None:
        """Count a verdict on tokens of these confidences. Tokens after the first rejection are not observations."""
        previous: Confidence | None = None
        for n, confidence in enumerate(confidences[: accepted + 1]):
            self._tokens_seen += 1
            self._count(confidence, previous, hit=n < accepted)
            previous = confidence

    def _count(self, confidence: Confidence | None, previous: Confidence | None, *, hit: bool) -> None:
        now = self._tokens_seen
        if isinstance(confidence, MatchLength):
            self._lookup.update(hit, now)
            self._by_match[confidence.bucket].update(hit, now)
            return
        self._model.update(hit, now)
        if confidence is not None:
            self._claimed.update(math.exp(-confidence), now)
            self._by_bucket[bucket_of(confidence)].update(hit, now)
        if previous is not None and not isinstance(previous, MatchLength):
            self._next_by_bucket[bucket_of(previous)].update(hit, now)

    def rate_of(self, source: DraftSource) -> float:
        """Return the acceptance rate of all tokens of a source."""
        return self._estimate(self._model if source is DraftSource.MODEL else self._lookup)

    def prefers_lookup(self, match_length: int) -> bool:
        """Return whether a token after a match of this length is at least as likely to be accepted as a model's.

        Rates decay towards their priors, so a source that was worse is tried again.
        """
        return self.acceptance_probability(MatchLength(match_length)) >= self.rate_of(DraftSource.MODEL)

    def acceptance_probability(self, confidence: Confidence) -> float:
        """Return a drafted token's acceptance probability.

        The prior of each bucket of −log q is the drafter's own probability, corrected by its overall calibration.
        """
        if isinstance(confidence, MatchLength):
            bucket = confidence.bucket
            return self._by_match[bucket].estimate(MATCH_PRIORS[bucket], PRIOR_WEIGHT, self._tokens_seen)
        claimed, observed = self._estimate(self._claimed), self._estimate(self._model)
        power = math.log(observed) / math.log(claimed)  # the prior keeps both inside (0, 1)
        calibrated = math.exp(-confidence * min(power, MAX_CONFIDENCE_POWER))
        return self._by_bucket[bucket_of(confidence)].estimate(calibrated, CONFIDENCE_WEIGHT, self._tokens_seen)

    def next_acceptance(self, confidences: Seq[Confidence], source: DraftSource = DraftSource.MODEL) -> float:
        """Return the acceptance probability of the token of `source` that follows these drafted tokens."""
        last = confidences[-1] if confidences else None
        if last is None or source_of(last) is not source:
            return self.rate_of(source)
        if isinstance(last, MatchLength):
            return self.acceptance_probability(MatchLength(last.tokens + 1))
        bucket = self._next_by_bucket[bucket_of(last)]
        return bucket.estimate(self.rate_of(source), NEXT_TOKEN_WEIGHT, self._tokens_seen)

    def survival_probability(self, drafted: int, confidences: Seq[Confidence]) -> float:
        """Return the probability that all `drafted` tokens are accepted. confidences: those that are known."""
        known = math.prod(map(self.acceptance_probability, confidences))
        return known * self.rate_of(DraftSource.MODEL) ** (drafted - len(confidences))

    def _estimate(self, rate: DecayedRate) -> float:
        return rate.estimate(PRIOR_ACCEPTANCE, PRIOR_WEIGHT, self._tokens_seen)


def bucket_of(logprob: float) -> int:
    """Return the index of the bucket of a −log q."""
    return bisect_left(BUCKET_EDGES, logprob)
