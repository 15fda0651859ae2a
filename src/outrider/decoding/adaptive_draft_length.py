"""Adaptive draft length: the draft-length controller continues a draft while the expected gain exceeds the cost.

The throughput is maximal if drafting continues while S ≥ c·λ (renewal reward, Dinkelbach 1967), with

    S   the probability that the block is accepted to its end, the next token included
    c   seconds of one more drafted token: its draft, and its share of the verdict
    λ   throughput in tokens per second, of the past rounds or of plain decoding, and at first of the best fixed block
        length k*

The acceptance probability of a drafted token is the acceptance rate of tokens with a similar −log q, or of tokens
looked up after a match of similar length. That of the next token, m, is the acceptance rate of tokens that follow one
with a similar −log q. After a looked-up token it is that of a match longer by one. With the pipelined driver, a
correct guess of the bonus token saves h drafts of the next round, and a longer block makes it less likely by S·(1 − m).
The rule is then S·(1 − h·c·λ·(1 − m)) ≥ c·λ. See docs/design/maths.md, "Adaptive draft length".

This module reads no clock. Its callers pass the seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.decoding.speculation_switch import MedianClip, SpeculationSwitch

BUCKET_EDGES = (0.01, 0.05, 0.15, 0.4, 1.0, 2.5)  # of −log q
MATCH_BUCKETS = (2, 3, 5, 9)  # the shortest match of each bucket but the first
MATCH_PRIORS = (0.3, 0.4, 0.6, 0.8, 0.9)  # acceptance rate of each bucket before the first observation
PRIOR_ACCEPTANCE = 0.7  # acceptance rate before the first observation
PRIOR_WEIGHT = 4.0  # of the prior acceptance, in observations
CONFIDENCE_WEIGHT = 10.0  # of the drafter's own probability, in observations
NEXT_TOKEN_WEIGHT = 20.0  # of the mean as the prior of a next token, in observations: next tokens are rarely observed
MAX_CONFIDENCE_POWER = 4.0  # largest exponent that corrects the drafter's own probability
MEMORY_TOKENS = 1024.0  # time constant of acceptance rates, in tokens: texts change
MEMORY_ROUNDS = 64  # time constant of times, in rounds: networks change
MAX_BLOCK_LENGTH = 64  # largest candidate for k*
MAX_UNMATCHED = 1024.0  # limit of the tokens without a proposal in λ, so that their weight fades once matches return
PRIOR_SLOPE = 0.05  # time that a drafted token adds to a verdict, as a typical share of the verdict's time


@dataclass(frozen=True)
class MatchLength:
    """The number of tokens before a looked-up token that match those before its source."""

    tokens: int

    @property
    def bucket(self) -> int:
        """The index of the bucket of this length."""
        return bisect_right(MATCH_BUCKETS, self.tokens)


Confidence = float | MatchLength  # −log q of a model's token, or the match length of a looked-up one


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
        self._overall, self._model, self._claimed = DecayedRate(), DecayedRate(), DecayedRate()
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
        self._overall.update(hit, now)
        if isinstance(confidence, MatchLength):
            self._by_match[confidence.bucket].update(hit, now)
            return
        self._model.update(hit, now)
        if confidence is not None:
            self._claimed.update(math.exp(-confidence), now)
            self._by_bucket[bucket_of(confidence)].update(hit, now)
        if previous is not None and not isinstance(previous, MatchLength):
            self._next_by_bucket[bucket_of(previous)].update(hit, now)

    @property
    def mean(self) -> float:
        """The acceptance rate of all tokens."""
        return self._estimate(self._overall)

    def prefers_lookup(self, match_length: int) -> bool:
        """Return whether a token after a match of this length is at least as likely to be accepted as a model's.

        Rates decay towards their priors, so a source that was worse is tried again.
        """
        return self.acceptance_probability(MatchLength(match_length)) >= self._estimate(self._model)

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

    def next_acceptance(self, confidences: Seq[Confidence]) -> float:
        """Return the acceptance probability of the token that follows these drafted tokens, from the same source."""
        if not confidences:
            return self.mean
        last = confidences[-1]
        if isinstance(last, MatchLength):
            return self.acceptance_probability(MatchLength(last.tokens + 1))
        bucket = self._next_by_bucket[bucket_of(last)]
        return bucket.estimate(self._estimate(self._model), NEXT_TOKEN_WEIGHT, self._tokens_seen)

    def survival_probability(self, drafted: int, confidences: Seq[Confidence]) -> float:
        """Return the probability that all `drafted` tokens are accepted. confidences: those that are known."""
        return math.prod(map(self.acceptance_probability, confidences)) * self.mean ** (drafted - len(confidences))

    def _estimate(self, rate: DecayedRate) -> float:
        return rate.estimate(PRIOR_ACCEPTANCE, PRIOR_WEIGHT, self._tokens_seen)


class LinearFit:
    """A least-squares line of y over x, decayed over MEMORY_ROUNDS, with a slope that noise shrinks towards 0."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def update(self, x: float, y: float) -> None:
        """Add one point."""
        fade = 1.0 - 1.0 / MEMORY_ROUNDS
        self._n, self._x, self._y = self._n * fade + 1.0, self._x * fade + x, self._y * fade + y
        self._xx, self._xy = self._xx * fade + x * x, self._xy * fade + x * y
        self._yy = self._yy * fade + y * y

    @property
    def mean_x(self) -> float:
        """The decayed mean of x, 0 without points."""
        return self._x / self._n if self._n else 0.0

    @property
    def mean_y(self) -> float:
        """The decayed mean of y, 0 without points."""
        return self._y / self._n if self._n else 0.0

    @property
    def slope(self) -> float:
        """The slope, 0 or more."""
        sxx = self._xx - self._x * self.mean_x
        sxy = self._xy - self._x * self.mean_y
        if sxx <= 1e-9 * self._xx or self._y <= 0.0:
            return 0.0
        noise = (self._yy - self._y * self.mean_y - sxy * sxy / sxx) / self._n
        return max(sxy / (sxx + max(noise, 0.0) / (PRIOR_SLOPE * self.mean_y) ** 2), 0.0)


class LatencyModel:
    """Seconds of drafting a token, and of a verdict as fixed + slope · block length."""

    def __init__(self) -> None:
        self._drafts, self._verdicts, self._verdict_compute = LinearFit(), LinearFit(), LinearFit()
        self._clip_verdict, self._clip_compute = MedianClip(), MedianClip()
        # By whether the token was looked up: a lookup is a thousand times as fast as a model's draft.
        self._drafts_by_source = {is_lookup: LinearFit() for is_lookup in (True, False)}
        self._clip_draft = {is_lookup: MedianClip() for is_lookup in (True, False)}

    def update_draft(self, seconds: float, *, is_lookup: bool = False) -> None:
        """Count the seconds of one drafted token."""
        seconds = self._clip_draft[is_lookup](seconds)
        self._drafts.update(1.0, seconds)
        self._drafts_by_source[is_lookup].update(1.0, seconds)

    def update_verify(self, drafts: int, seconds: float, compute: float) -> None:
        """Count a verdict on `drafts` tokens. compute: the verifier's own seconds, 0 if unknown."""
        self._verdicts.update(drafts, self._clip_verdict(seconds))
        self._verdict_compute.update(drafts, self._clip_compute(compute or seconds))

    @property
    def is_ready(self) -> bool:
        """True if drafts and verdicts have been timed."""
        return self.draft_seconds > 0.0 and self._verdicts.mean_y > 0.0

    @property
    def draft_seconds(self) -> float:
        """Mean seconds of one drafted token."""
        return self._drafts.mean_y

    def draft_seconds_of(self, *, is_lookup: bool) -> float:
        """Return the mean seconds of one looked-up token, or of a model's. 0 before the first one."""
        return self._drafts_by_source[is_lookup].mean_y

    @property
    def slope(self) -> float:
        """Seconds that one drafted token adds to a verdict."""
        return self._verdict_compute.slope

    @property
    def compute_fixed(self) -> float:
        """Seconds of the verifier for a verdict on an empty block."""
        fit = self._verdict_compute
        return max(fit.mean_y - fit.slope * fit.mean_x, 0.0)

    def fixed(self, slope: float) -> float:
        """Return the seconds of a verdict that do not depend on the block length."""
        return max(self._verdicts.mean_y - slope * self._verdicts.mean_x, 0.0)


class RoundStats:
    """Decayed sums over rounds: their number, their tokens, and the tokens drafted and verified."""

    def __init__(self) -> None:
        self.count = self.tokens = self.drafted = self.verified = 0.0

    def fade(self) -> None:
        """Decay the sums by one round."""
        self.add(self, -1.0 / MEMORY_ROUNDS)

    def add(self, other: RoundStats, weight: float = 1.0) -> None:
        """Add other rounds."""
        self.update(other.tokens, other.drafted, other.verified, other.count, weight)

    def update(self, tokens: float, drafted: float, verified: float, count: float = 1.0, weight: float = 1.0) -> None:
        """Add `count` rounds with these sums, times `weight`."""
        self.count += weight * count
        self.tokens += weight * tokens
        self.drafted += weight * drafted
        self.verified += weight * verified

    def seconds(self, times: LatencyModel) -> float:
        """Return the seconds of these rounds at the present speeds."""
        slope = times.slope
        return self.count * times.fixed(slope) + times.draft_seconds * self.drafted + slope * self.verified


class DraftLengthController:
    """The controller of the draft length, which learns acceptance and times from the rounds of a model pair.

    switch: decides whether to draft at all. token_cost: c·λ, the cost of one more token of a draft model, in tokens.
    None until drafts and verdicts have been timed. lookup_token_cost: the same for a looked-up token.
    """

    def __init__(self) -> None:
        self.acceptance, self.times, self.switch = AcceptanceModel(), LatencyModel(), SpeculationSwitch()
        self.token_cost: float | None = None
        self.lookup_token_cost = 0.0
        self._hit_value = 0.0  # tokens
        self._prior_rounds = PRIOR_WEIGHT
        self._unmatched = 0.0  # tokens for which the drafter had no proposal, with exponential decay per round
        # By whether a correct guess had drafted some of the block ahead.
        self._rounds = {hit: RoundStats() for hit in (True, False)}

    def should_continue(self, drafted: int, confidences: Seq[Confidence]) -> bool:
        """Return whether to draft one more token. confidences: the known ones of the tokens drafted so far."""
        if self.token_cost is None:
            return False
        is_lookup = bool(confidences) and isinstance(confidences[-1], MatchLength)
        cost = self.lookup_token_cost if is_lookup else self.token_cost
        next_acceptance = self.acceptance.next_acceptance(confidences)
        gain = self.acceptance.survival_probability(drafted, confidences) * next_acceptance
        return gain * (1.0 - self._hit_value * (1.0 - next_acceptance)) >= cost

    def drafted(self, count: int, seconds: float, *, is_lookup: bool = False) -> None:
        """Observe that drafting `count` tokens took `seconds`. is_lookup: prompt lookup drafted them."""
        if count:
            self.times.update_draft(seconds / count, is_lookup=is_lookup)

    def decided(
        self,
        confidences: Seq[Confidence | None],
        accepted: int,
        *,
        drafted: int,
        seconds: float | None = None,
        compute: float = 0.0,
        draft_seconds: float = 0.0,
    ) -> None:
        """Observe a verdict that accepted the first `accepted` of drafts with these confidences.

        drafted: tokens drafted since the last verdict and outside a wait for one. seconds: the time until the verdict,
        None if it is not typical. compute: the verifier's own seconds, 0 if unknown. draft_seconds: the time of
        drafting outside a wait.
        """
        self.acceptance.update(confidences, accepted)
        if seconds is not None:
            self.times.update_verify(len(confidences), seconds, compute)
        self.switch.speculated(accepted + 1, None if seconds is None else draft_seconds + seconds)
        for rounds in self._rounds.values():
            rounds.fade()
        self._prior_rounds *= 1.0 - 1.0 / MEMORY_ROUNDS
        self._unmatched *= 1.0 - 1.0 / MEMORY_ROUNDS
        self._rounds[drafted < len(confidences)].update(accepted + 1, drafted, len(confidences))
        if self.times.is_ready:
            self._update_estimates()

    def decoded_plain(self, seconds: float | None, *, is_unmatched: bool = False) -> None:
        """Observe a token of plain decoding.

        seconds: None if they are not typical. is_unmatched: the drafter was called and had no proposal.
        """
        self.switch.decoded_plain(seconds)
        if is_unmatched:
            self._unmatched = min(self._unmatched + 1.0, MAX_UNMATCHED)
        if self.times.is_ready:
            self._update_estimates()

    def _update_estimates(self) -> None:
        """Update the throughput λ, and from it the cost of a token, the value of a correct guess, and the switch.

        Simulated rounds of the best fixed block length are a prior of past rounds. The switch assumes the better of the
        two, since past rounds may have had other lengths. λ includes the tokens for which the drafter had no proposal.
        The switch compares the rounds without them.
        """
        times, rounds, prior_rounds = self.times, RoundStats(), RoundStats()
        slope = times.slope
        k, tokens = best_fixed_length(self.acceptance.mean, times.fixed(slope), times.draft_seconds + slope)
        prior_rounds.update(tokens, k, k)
        rounds.add(prior_rounds, self._prior_rounds)
        for each in self._rounds.values():
            rounds.add(each)
        rate = rounds.tokens / rounds.seconds(times)
        best_rate = max(rate, tokens / prior_rounds.seconds(times))
        self.switch.update_estimate(best_rate, rounds.tokens / rounds.count, times.compute_fixed)
        plain_seconds = self.switch.plain_seconds or times.fixed(slope)
        rate = (rounds.tokens + self._unmatched) / (rounds.seconds(times) + self._unmatched * plain_seconds)
        if self.switch.plain_seconds:
            rate = max(rate, 1.0 / self.switch.plain_seconds)
        self.token_cost = rate * (times.draft_seconds_of(is_lookup=False) + slope)
        self.lookup_token_cost = rate * (times.draft_seconds_of(is_lookup=True) + slope)
        self._hit_value = self._estimate_hit_value(rate)

    def _estimate_hit_value(self, rate: float) -> float:
        """Return h·c·λ: the surplus of a round after a correct guess, in tokens net of the cost of its time."""
        if any(rounds.count < 1.0 for rounds in self._rounds.values()):
            return 0.0
        hit, miss = (
            (self._rounds[hit].tokens - rate * self._rounds[hit].seconds(self.times)) / self._rounds[hit].count
            for hit in (True, False)
        )
        return max(hit - miss, 0.0)


def best_fixed_length(alpha: float, fixed: float, per_token: float) -> tuple[int, float]:
    """Return k* and the tokens of its round, for acceptance `alpha` and fixed + per_token · k seconds a round."""
    k, tokens, survival = 1, 1.0 + alpha, alpha * alpha
    while k < MAX_BLOCK_LENGTH and survival * (fixed + per_token * k) > per_token * tokens:
        k, tokens, survival = k + 1, tokens + survival, survival * alpha
    return k, tokens


def bucket_of(logprob: float) -> int:
    """Return the index of the bucket of a −log q."""
    return bisect_left(BUCKET_EDGES, logprob)
