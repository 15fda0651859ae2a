"""What drafting on is worth: a model pair's acceptance and times, learnt from its own rounds.

Per second the most tokens come of drafting on while the next token is accepted more often than its time would bring
tokens elsewhere: while S ≥ c·λ (renewal reward; Dinkelbach, 1967), with

    S   the chance that the block is accepted to its end, the next token included
    c   seconds of one more drafted token: of drafting it, and of what it adds to the verdict
    λ   tokens per second: of the rounds so far, and at first of the best constant block length k*

A drafted token's chance is how often tokens of like −log q were accepted; the next one's, which is not there yet, how
often the token after one of like −log q was: m. Where drafting goes on while a verdict is in flight, a right guess
saves the next round h drafts, and a longer block makes it less likely by S·(1 − m): then S·(1 − h·c·λ·(1 − m)) ≥ c·λ.

Nothing here reads a clock: seconds are told.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq

BUCKET_EDGES = (0.01, 0.05, 0.15, 0.4, 1.0, 2.5)  # of −log q, between one kind of token and the next
PRIOR_ACCEPTANCE = 0.7  # acceptance before anything was seen
PRIOR_WEIGHT = 4.0  # observations that a guess counts for
CONFIDENCE_WEIGHT = 10.0  # … and what the drafter says of its token
NEXT_TOKEN_WEIGHT = 20.0  # … and the mean for a next token: few are seen behind one after which drafting stops
MAX_CONFIDENCE_POWER = 4.0  # power to which what the drafter says is taken at most
MEMORY_TOKENS = 1024.0  # observations that are remembered: texts change
MEMORY_ROUNDS = 64  # so are networks
MEDIAN_WINDOW = 9  # values that say what is usual
OUTLIER_FACTOR = 3.0  # a time longer than so many usual ones counts as that many: a stall is no pace
MAX_BLOCK_LENGTH = 64  # block length up to which k* is sought
PRIOR_SLOPE = 0.05  # a drafted token adds about so much of a verdict's time, or less


class DecayedRate:
    """How often something happened. `now` counts all observations: what is no longer seen is forgotten as well."""

    def __init__(self) -> None:
        self._weighted_hits = self._weighted_count = 0.0
        self._last_update = 0

    def update(self, hit: float, now: int) -> None:
        fade = self._fade(now)
        self._weighted_hits, self._weighted_count, self._last_update = (
            self._weighted_hits * fade + hit,
            self._weighted_count * fade + 1.0,
            now,
        )

    def estimate(self, prior: float, weight: float, now: int) -> float:
        """With a guess that counts for `weight` observations."""
        fade = self._fade(now)
        return (self._weighted_hits * fade + weight * prior) / (self._weighted_count * fade + weight)

    def _fade(self, now: int) -> float:
        return math.exp((self._last_update - now) / MEMORY_TOKENS)


class AcceptanceModel:
    """The chances that drafted tokens are accepted; −log q of each, where it is known."""

    def __init__(self) -> None:
        self._tokens_seen = 0
        self._overall, self._confidence = DecayedRate(), DecayedRate()
        self._by_bucket = [DecayedRate() for _ in range(len(BUCKET_EDGES) + 1)]
        self._next_by_bucket = [DecayedRate() for _ in range(len(BUCKET_EDGES) + 1)]

    def update(self, logprobs: Seq[float | None], accepted: int) -> None:
        """A verdict accepted that many; what follows the first rejection says nothing."""
        previous: float | None = None
        for n, logprob in enumerate(logprobs[: accepted + 1]):
            self._tokens_seen += 1
            self._overall.update(n < accepted, self._tokens_seen)
            if logprob is not None:
                self._confidence.update(math.exp(-logprob), self._tokens_seen)
                self._by_bucket[bucket_of(logprob)].update(n < accepted, self._tokens_seen)
            if previous is not None:
                self._next_by_bucket[bucket_of(previous)].update(n < accepted, self._tokens_seen)
            previous = logprob

    @property
    def mean(self) -> float:
        return self._overall.estimate(PRIOR_ACCEPTANCE, PRIOR_WEIGHT, self._tokens_seen)

    def acceptance_probability(self, logprob: float) -> float:
        """As sure as the drafter says, corrected by how right it is on the whole, until it is known better."""
        claimed, observed = self._confidence.estimate(PRIOR_ACCEPTANCE, PRIOR_WEIGHT, self._tokens_seen), self.mean
        power = math.log(observed) / math.log(claimed)  # the prior keeps both inside (0, 1)
        calibrated = math.exp(-logprob * min(power, MAX_CONFIDENCE_POWER))
        return self._by_bucket[bucket_of(logprob)].estimate(calibrated, CONFIDENCE_WEIGHT, self._tokens_seen)

    def next_acceptance(self, logprobs: Seq[float]) -> float:
        """The next token's, after one that is there."""
        return (
            self._next_by_bucket[bucket_of(logprobs[-1])].estimate(self.mean, NEXT_TOKEN_WEIGHT, self._tokens_seen)
            if logprobs
            else self.mean
        )

    def survival_probability(self, drafted: int, logprobs: Seq[float]) -> float:
        """Of `drafted` tokens together; logprobs: of those that told it."""
        return math.prod(map(self.acceptance_probability, logprobs)) * self.mean ** (drafted - len(logprobs))


class MedianClip:
    """Values as they come; a stall among them counts as a few usual ones."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MEDIAN_WINDOW)

    def __call__(self, value: float) -> float:
        self._recent.append(value)
        return min(value, OUTLIER_FACTOR * sorted(self._recent)[len(self._recent) // 2])


class LinearFit:
    """y over x by least squares, the last ROUNDS of them or so; a slope below 0, or in doubt, is drawn to 0."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = self._yy = 0.0

    def update(self, x: float, y: float) -> None:
        fade = 1.0 - 1.0 / MEMORY_ROUNDS
        self._n, self._x, self._y = self._n * fade + 1.0, self._x * fade + x, self._y * fade + y
        self._xx, self._xy = self._xx * fade + x * x, self._xy * fade + x * y
        self._yy = self._yy * fade + y * y

    @property
    def mean_x(self) -> float:
        return self._x / self._n if self._n else 0.0

    @property
    def mean_y(self) -> float:
        return self._y / self._n if self._n else 0.0

    @property
    def slope(self) -> float:
        sxx = self._xx - self._x * self.mean_x
        sxy = self._xy - self._x * self.mean_y
        if sxx <= 1e-9 * self._xx or self._y <= 0.0:
            return 0.0
        noise = (self._yy - self._y * self.mean_y - sxy * sxy / sxx) / self._n
        return max(sxy / (sxx + max(noise, 0.0) / (PRIOR_SLOPE * self.mean_y) ** 2), 0.0)


class LatencyModel:
    """Seconds of drafting a token, and of a verdict: fixed + slope · block length."""

    def __init__(self) -> None:
        self._drafts, self._verdicts, self._verdict_compute = LinearFit(), LinearFit(), LinearFit()
        self._clip_draft, self._clip_verdict, self._clip_compute = MedianClip(), MedianClip(), MedianClip()

    def update_draft(self, seconds: float) -> None:
        self._drafts.update(1.0, self._clip_draft(seconds))

    def update_verify(self, drafts: int, seconds: float, compute: float) -> None:
        """compute: the part of it that grows with the block, where the verifier says so."""
        self._verdicts.update(drafts, self._clip_verdict(seconds))
        self._verdict_compute.update(drafts, self._clip_compute(compute or seconds))

    @property
    def is_ready(self) -> bool:
        return self.draft_seconds > 0.0 and self._verdicts.mean_y > 0.0

    @property
    def draft_seconds(self) -> float:
        return self._drafts.mean_y

    @property
    def slope(self) -> float:
        return self._verdict_compute.slope

    def fixed(self, slope: float) -> float:
        return max(self._verdicts.mean_y - slope * self._verdicts.mean_x, 0.0)


class RoundStats:
    """What came of rounds, the last ones most."""

    def __init__(self) -> None:
        self.count = self.tokens = self.drafted = self.verified = 0.0

    def fade(self) -> None:
        self.add(self, -1.0 / MEMORY_ROUNDS)

    def add(self, other: RoundStats, weight: float = 1.0) -> None:
        self.update(other.tokens, other.drafted, other.verified, other.count, weight)

    def update(self, tokens: float, drafted: float, verified: float, count: float = 1.0, weight: float = 1.0) -> None:
        self.count, self.tokens = self.count + weight * count, self.tokens + weight * tokens
        self.drafted, self.verified = self.drafted + weight * drafted, self.verified + weight * verified

    def seconds(self, times: LatencyModel) -> float:
        """What they would take by now."""
        slope = times.slope
        return self.count * times.fixed(slope) + times.draft_seconds * self.drafted + slope * self.verified


class DraftLengthController:
    """`token_cost`: what the time of one more drafted token is worth, in tokens; None until times are known."""

    def __init__(self) -> None:
        self.acceptance, self.times = AcceptanceModel(), LatencyModel()
        self.token_cost: float | None = None
        self._hit_value = 0.0  # tokens
        self._prior_rounds = PRIOR_WEIGHT
        self._rounds = {
            hit: RoundStats() for hit in (True, False)
        }  # by whether drafts were there already, of a right guess

    def should_continue(self, drafted: int, logprobs: Seq[float]) -> bool:
        """Whether to draft one more token; `token_cost` is known. logprobs: −log q of the tokens drafted so far."""
        next_acceptance = self.acceptance.next_acceptance(logprobs)
        gain = self.acceptance.survival_probability(drafted, logprobs) * next_acceptance
        return (
            self.token_cost is not None and gain * (1.0 - self._hit_value * (1.0 - next_acceptance)) >= self.token_cost
        )

    def drafted(self, count: int, seconds: float) -> None:
        """So many seconds went into drafting `count` tokens."""
        if count:
            self.times.update_draft(seconds / count)

    def decided(
        self,
        logprobs: Seq[float | None],
        accepted: int,
        *,
        drafted: int,
        seconds: float | None = None,
        compute: float = 0.0,
    ) -> None:
        """A verdict accepted so many drafts with these −log q.

        drafted: tokens that were drafted while no verdict was awaited, since the last one. seconds: how long it took to
        come, where that says something about the next ones; compute: as far as the verifier says what it took.
        """
        self.acceptance.update(logprobs, accepted)
        if seconds is not None:
            self.times.update_verify(len(logprobs), seconds, compute)
        for rounds in self._rounds.values():
            rounds.fade()
        self._prior_rounds *= 1.0 - 1.0 / MEMORY_ROUNDS
        self._rounds[drafted < len(logprobs)].update(accepted + 1, drafted, len(logprobs))
        if self.times.is_ready:
            rate = self._throughput()
            self.token_cost = rate * (self.times.draft_seconds + self.times.slope)
            self._hit_value = self._estimate_hit_value(rate)

    def _throughput(self) -> float:
        """λ. The first rounds are padded with what k* would bring."""
        times, rounds, prior_rounds = self.times, RoundStats(), self._prior_rounds
        slope = times.slope
        k, tokens = best_fixed_length(self.acceptance.mean, times.fixed(slope), times.draft_seconds + slope)
        rounds.update(tokens, k, k, weight=prior_rounds)
        for each in self._rounds.values():
            rounds.add(each)
        return rounds.tokens / rounds.seconds(times)

    def _estimate_hit_value(self, rate: float) -> float:
        """Tokens that a round after a right guess brings more than another, what its time is worth taken off."""
        if any(rounds.count < 1.0 for rounds in self._rounds.values()):
            return 0.0
        hit, miss = (
            (self._rounds[hit].tokens - rate * self._rounds[hit].seconds(self.times)) / self._rounds[hit].count
            for hit in (True, False)
        )
        return max(hit - miss, 0.0)


def best_fixed_length(alpha: float, fixed: float, per_token: float) -> tuple[int, float]:
    """k*, and the tokens of a round with it, where all are as likely accepted, and seconds are fixed + each · k."""
    k, tokens, survival = 1, 1.0 + alpha, alpha * alpha
    while k < MAX_BLOCK_LENGTH and survival * (fixed + per_token * k) > per_token * tokens:
        k, tokens, survival = k + 1, tokens + survival, survival * alpha
    return k, tokens


def bucket_of(logprob: float) -> int:
    return bisect_left(BUCKET_EDGES, logprob)
