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

With prompt lookup and a draft model, c and m differ between the two sources, and the rule holds for each. At a match,
the source whose block is worth more drafts: Σ (S − c·λ) over the tokens of the best block.

This module reads no clock. Its callers pass the seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import repeat
from typing import NamedTuple

from outrider.decoding.acceptance_model import AcceptanceModel
from outrider.decoding.draft_source import Confidence, DraftSource, MatchLength, source_of
from outrider.decoding.speculation_switch import Estimate, MedianClip, Share, SpeculationSwitch

PRIOR_WEIGHT = 4.0  # of the best fixed block length, in rounds
MIN_PRIOR_WEIGHT = 1e-3  # its lower bound, for a source that drafts no more
MEMORY_ROUNDS = 64  # time constant of times, in rounds: networks change
MAX_BLOCK_LENGTH = 64  # largest candidate for k*
MAX_UNMATCHED = 1024.0  # limit of the tokens without a proposal in λ, so that their weight fades once matches return
MAX_GROWTH = 2  # limit of a looked-up block, in lengths of the longest timed one: a longer verdict may take any time
PRIOR_SLOPE = 0.05  # time that a drafted token adds to a verdict, as a typical share of the verdict's time


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
    """Seconds of drafting a token, and of a verdict as fixed + slope · block length.

    slope: seconds that one drafted token adds to a verdict.
    """

    def __init__(self) -> None:
        self.slope = 0.0
        self._verdicts, self._verdict_compute = LinearFit(), LinearFit()
        self._clip_verdict, self._clip_compute = MedianClip(), MedianClip()
        # By source: a lookup is a thousand times as fast as a model's draft.
        self._drafts = {source: LinearFit() for source in DraftSource}
        self._clip_draft = {source: MedianClip() for source in DraftSource}

    def update_draft(self, seconds: float, source: DraftSource = DraftSource.MODEL) -> None:
        """Count the seconds of one drafted token."""
        self._drafts[source].update(1.0, self._clip_draft[source](seconds))

    def update_verify(self, drafts: int, seconds: float, compute: float) -> None:
        """Count a verdict on `drafts` tokens. compute: the verifier's own seconds, 0 if unknown."""
        self._verdicts.update(drafts, self._clip_verdict(seconds))
        self._verdict_compute.update(drafts, self._clip_compute(compute or seconds))
        self.slope = self._verdict_compute.slope

    @property
    def is_ready(self) -> bool:
        """True if drafts of at least one source, and verdicts, have been timed."""
        return self._verdicts.mean_y > 0.0 and any(map(self.draft_seconds, DraftSource))

    def draft_seconds(self, source: DraftSource = DraftSource.MODEL) -> float:
        """Return the mean seconds of one drafted token of this source, 0 before the first one."""
        return self._drafts[source].mean_y

    @property
    def compute_fixed(self) -> float:
        """Seconds of the verifier for a verdict on an empty block."""
        fit = self._verdict_compute
        return max(fit.mean_y - fit.slope * fit.mean_x, 0.0)

    def fixed(self, slope: float) -> float:
        """Return the seconds of a verdict that do not depend on the block length."""
        return max(self._verdicts.mean_y - slope * self._verdicts.mean_x, 0.0)


class RoundStats:
    """Decayed sums over the rounds of one source: their number, their tokens, and the tokens drafted and verified."""

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

    def seconds(self, times: LatencyModel, source: DraftSource) -> float:
        """Return the seconds of these rounds at the present speeds."""
        slope = times.slope
        return self.count * times.fixed(slope) + times.draft_seconds(source) * self.drafted + slope * self.verified


class Drafted(NamedTuple):
    """The drafts of one source since the last verdict and outside a wait for one: tokens, and their seconds."""

    tokens: int = 0
    seconds: float = 0.0

    def plus(self, tokens: int, seconds: float) -> Drafted:
        """Return these drafts and further ones."""
        return Drafted(self.tokens + tokens, self.seconds + seconds)


NO_DRAFTS = Drafted()


class DraftLengthController:
    """The controller of the draft length, which learns acceptance and times from the rounds of a model pair.

    sources: those of the drafter. switch: decides for each source whether it drafts at all. token_costs: c·λ, the cost
    of one more token of each source, in tokens. It is empty until drafts and verdicts have been timed, and without the
    model until the model's drafts have been.

    A round may have drafts of both sources. Each source then counts with its own tokens and their times, and that of
    the first token also with the bonus token and the rest of the verdict's time.
    """

    def __init__(self, sources: Iterable[DraftSource] = (DraftSource.MODEL,)) -> None:
        given = set(sources)
        self.sources = tuple(source for source in DraftSource if source in given)  # the model first
        self.acceptance, self.times = AcceptanceModel(), LatencyModel()
        self.switch = SpeculationSwitch(self.sources)
        self.token_costs: dict[DraftSource, float] = {}
        self._hit_value = 0.0  # tokens
        self._longest = 1  # block whose verdict was timed
        self._prior_rounds = PRIOR_WEIGHT
        self._unmatched = 0.0  # tokens for which the drafter had no proposal, with exponential decay per round
        # By source, and by whether a correct guess had drafted some of the block ahead.
        self._rounds = {(source, hit): RoundStats() for source in self.sources for hit in (True, False)}

    def should_continue(
        self, drafted: int, confidences: Seq[Confidence], source: DraftSource = DraftSource.MODEL
    ) -> bool:
        """Return whether one more token of a source with a cost pays. confidences: the known ones of those drafted."""
        if source is DraftSource.LOOKUP and drafted >= MAX_GROWTH * self._longest:
            return False
        next_acceptance = self.acceptance.next_acceptance(confidences, source)
        gain = self.acceptance.survival_probability(drafted, confidences) * next_acceptance
        return gain * (1.0 - self._hit_value * (1.0 - next_acceptance)) >= self.token_costs[source]

    def prefers_lookup(self, match_length: int) -> bool:
        """Return whether a token after a match of this length is worth more than one of the model.

        The acceptance rates decide until both sources have been timed, then the tokens that a block of each source
        brings, less its cost.
        """
        if not self.switch.should_speculate(0, DraftSource.LOOKUP):
            return False
        if len(self.token_costs) < len(DraftSource):
            return self.acceptance.prefers_lookup(match_length)
        lengths = range(match_length, match_length + MAX_BLOCK_LENGTH)
        copied = (self.acceptance.acceptance_probability(MatchLength(length)) for length in lengths)
        drafted = repeat(self.acceptance.rate_of(DraftSource.MODEL), MAX_BLOCK_LENGTH)
        lookup = block_value(copied, self.token_costs[DraftSource.LOOKUP])
        return lookup >= block_value(drafted, self.token_costs[DraftSource.MODEL])

    def drafted(self, count: int, seconds: float, source: DraftSource = DraftSource.MODEL) -> None:
        """Observe that drafting `count` tokens took `seconds`."""
        if count:
            self.times.update_draft(seconds / count, source)

    def decided(
        self,
        confidences: Seq[Confidence | None],
        accepted: int,
        *,
        drafted: Mapping[DraftSource, Drafted],
        seconds: float | None = None,
        compute: float = 0.0,
    ) -> None:
        """Observe a verdict that accepted the first `accepted` of drafts with these confidences.

        seconds: the time until the verdict, None if it is not typical. compute: the verifier's own seconds, 0 if
        unknown.
        """
        self.acceptance.update(confidences, accepted)
        if seconds is not None:
            self.times.update_verify(len(confidences), seconds, compute)
            self._longest = max(self._longest, len(confidences))
        for rounds in self._rounds.values():
            rounds.fade()
        self._prior_rounds *= 1.0 - 1.0 / MEMORY_ROUNDS
        self._unmatched *= 1.0 - 1.0 / MEMORY_ROUNDS
        self.switch.speculated(dict(self._shares(confidences, accepted, drafted, seconds)))
        if self.times.is_ready:
            self._update_estimates()

    def _shares(
        self,
        confidences: Seq[Confidence | None],
        accepted: int,
        drafted: Mapping[DraftSource, Drafted],
        seconds: float | None,
    ) -> Iterator[tuple[DraftSource, Share]]:
        """Yield the share of each source in a round, and count it."""
        sources = list(map(source_of, confidences))
        is_hit = sum(each.tokens for each in drafted.values()) < len(sources)
        slope = self.times.slope
        for source in dict.fromkeys(sources):
            is_first, work = source is sources[0], drafted.get(source, NO_DRAFTS)
            verified, tokens = sources.count(source), sources[:accepted].count(source) + is_first
            self._rounds[source, is_hit].update(tokens, work.tokens, verified, count=is_first)
            waited = slope * verified
            if is_first and seconds is not None:
                waited = seconds - slope * (len(sources) - verified)
            yield source, Share(tokens, None if seconds is None else work.seconds + waited)

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
        """Update the throughput λ, and from it the costs of tokens, the value of a correct guess, and the switch.

        λ includes the tokens for which the drafter had no proposal. The estimates of a source do not.
        """
        times, slope = self.times, self.times.slope
        past = {source: self._past_rounds(source) for source in self.sources if self._has_cost(source)}
        tokens = sum(rounds.tokens for _, rounds in past.values())
        seconds = sum(rounds.seconds(times, source) for source, (_, rounds) in past.items())
        plain_seconds = self.switch.plain_seconds or times.fixed(slope)
        rate = (tokens + self._unmatched) / (seconds + self._unmatched * plain_seconds)
        if self.switch.plain_seconds:
            rate = max(rate, 1.0 / self.switch.plain_seconds)
        estimates = {source: self._estimate(source, *rounds) for source, rounds in past.items()}
        self.switch.update_estimates(estimates, rate, times.compute_fixed)
        self.token_costs = {source: rate * (times.draft_seconds(source) + slope) for source in past}
        self._hit_value = self._estimate_hit_value(rate)

    def _has_cost(self, source: DraftSource) -> bool:
        """Return whether the time of a token is known. A lookup takes next to none."""
        return source is DraftSource.LOOKUP or self.times.draft_seconds(source) > 0.0

    def _estimate(self, source: DraftSource, prior: RoundStats, rounds: RoundStats) -> Estimate:
        """Return the better throughput of the two, since past rounds may have had other lengths than the best one."""
        rates = [each.tokens / each.seconds(self.times, source) for each in (prior, rounds)]
        return Estimate(max(rates), rounds.tokens / rounds.count)

    def _past_rounds(self, source: DraftSource) -> tuple[RoundStats, RoundStats]:
        """Return a round of the best fixed block length, and the past rounds of a source with it as their prior."""
        times, slope, prior, rounds = self.times, self.times.slope, RoundStats(), RoundStats()
        per_token = times.draft_seconds(source) + slope
        k, tokens = best_fixed_length(self.acceptance.rate_of(source), times.fixed(slope), per_token)
        prior.update(tokens, k, k)
        rounds.add(prior, max(self._prior_rounds, MIN_PRIOR_WEIGHT))
        for hit in (True, False):
            rounds.add(self._rounds[source, hit])
        return prior, rounds

    def _estimate_hit_value(self, rate: float) -> float:
        """Return h·c·λ: the surplus of a round after a correct guess, in tokens net of the cost of its time."""
        surplus = {}
        for hit in (True, False):
            count = sum(self._rounds[source, hit].count for source in self.sources)
            if count < 1.0:
                return 0.0
            each = ((self._rounds[source, hit], source) for source in self.sources)
            surplus[hit] = (
                sum(rounds.tokens - rate * rounds.seconds(self.times, source) for rounds, source in each) / count
            )
        return max(surplus[True] - surplus[False], 0.0)


def block_value(acceptances: Iterable[float], token_cost: float) -> float:
    """Return the expected accepted tokens of the best block, less its cost. acceptances: of each of its tokens."""
    value, survival = 0.0, 1.0
    for acceptance in acceptances:
        survival *= acceptance
        if survival < token_cost:
            break
        value += survival - token_cost
    return value


def best_fixed_length(alpha: float, fixed: float, per_token: float) -> tuple[int, float]:
    """Return k* and the tokens of its round, for acceptance `alpha` and fixed + per_token · k seconds a round."""
    k, tokens, survival = 1, 1.0 + alpha, alpha * alpha
    while k < MAX_BLOCK_LENGTH and survival * (fixed + per_token * k) > per_token * tokens:
        k, tokens, survival = k + 1, tokens + survival, survival * alpha
    return k, tokens
