"""Running estimate of a calibrated gate's risk from audits, with a confidence interval.

Every block that the gate would skip is audited with the same probability, independent of its content. So:

- Some outputs are *seen* to differ: a verdict, of an audit or of an escalation, compares all skipped tokens before it.
- Tokens skipped after the last verdict of an output are *unseen*. The block that ended such an output was not audited
  by chance alone. So the audited blocks whose skipping would have ended their output are a random sample of the ends:
  the share of them that was wrong (or followed wrong skipped tokens) estimates the share of wrong unseen ends.

    risk  =  seen to differ ÷ results  +  unseen ends ÷ results · wrong audited ends ÷ audited ends

of outputs. With the loss "tokens" each difference counts with the share of the target's output from there on. That
share can depend on unobserved values: the position of the first wrong token in a skipped stretch, and the length of the
target's output. The two ends of the interval then take its least and its largest value.

The interval combines Chernoff bounds of each share (Hoeffding 1963, theorem 1), which hold for any number of results
and for values between 0 and 1. All four bounds together fail with a probability of at most 5 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider.config import Loss
from outrider.sampling.acceptance import Verdict

MIN_RESULTS = 5  # results before an audit may warn: fewer do not show their variation
MISS_PROBABILITY = 0.05  # the probability that an interval misses the risk
FALSE_ALARM = 0.01  # the probability of a false warning, per result


@dataclass(frozen=True)
class Risk:
    """A calibrated gate's budget, and the audits' estimate over all results of one decoder so far.

    budget: the expected share of outputs that may differ from the cloud's, or, with the loss "tokens", of the cloud's
    output that may lie behind the first difference. estimate: the present share, audits included, or None while there
    are unseen ends and no audited end. low, high: its 95 % interval. results: their number, without those that
    lost the cloud. audited, disagreed: skipped tokens covered by a verdict, and those that the cloud would have
    changed.
    """

    budget: float
    loss: Loss
    audited: int
    disagreed: int
    estimate: float | None
    low: float = 0.0
    high: float = 1.0
    results: int = 0


@dataclass(frozen=True)
class Span:
    """The range of generated tokens that holds the first disagreement with the target."""

    first: int
    last: int


@dataclass
class AuditTrail:
    """The evidence of one generation's verdicts on its skipped tokens. Positions count generated tokens.

    first_difference: the first difference from the target's output. ends: for each audited block that would have ended
    the output if skipped, the first difference of that output, or None. unseen: the first skipped token that no verdict
    compared. has_gap: a verdict did not compare it although it could. output: the length of the output.
    """

    first_difference: Span | None = None
    ends: list[Span | None] = field(default_factory=list)
    unseen: int | None = None
    has_gap: bool = False
    output: OutputLength | None = None

    def record_verdict(self, verdict: Verdict, base: int, skipped: int, end: int | None) -> None:
        """Record a verdict on the drafts behind `base`, before which `skipped` tokens were new to the verifier.

        end: the length at which the output would have ended without this audit, None if it would not have ended.
        """
        if self.first_difference is not None:
            return
        if verdict.audited < skipped:
            self.has_gap, self.unseen = True, base - skipped if self.unseen is None else self.unseen
        if verdict.disagreed:
            self.first_difference = Span(base - skipped if self.unseen is None else self.unseen, base - 1)
        repaired = Span(base + verdict.accepted, base + verdict.accepted)
        if end is not None and not self.has_gap:
            self.ends.append(self.first_difference or (repaired if repaired.first < end else None))

    def close(self, verified_length: int, output: OutputLength) -> None:
        """Close the record of a complete output, of which the verifier knows the first `verified_length` tokens."""
        self.output = output
        if verified_length < output.length and not self.has_gap:
            self.unseen = verified_length


@dataclass(frozen=True)
class OutputLength:
    """The length of an output and its limit. ends_at_limit: only this limit ends the target's output."""

    length: int
    limit: int
    ends_at_limit: bool

    def losses(self, span: Span, loss: Loss) -> tuple[float, float, float]:
        """Return the least, the likely and the largest share of the target's output from the first difference on."""
        if loss == "outputs":
            return (1.0, 1.0, 1.0)
        likely = (span.first + span.last) / 2
        shortest = self.limit if self.ends_at_limit else span.last + 1
        length = self.limit if self.ends_at_limit else max(self.length, span.last + 1)
        return 1 - span.last / shortest, 1 - likely / length, 1 - span.first / self.limit


@dataclass
class LossSums:
    """A number of cases, and the sums of their least, likely and largest losses."""

    cases: int = 0
    least: float = 0.0
    likely: float = 0.0
    largest: float = 0.0

    def add(self, losses: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> None:
        """Add a case."""
        self.cases += 1
        self.least += losses[0]
        self.likely += losses[1]
        self.largest += losses[2]


class RiskEstimator:
    """The running estimate of a calibrated gate's risk, in whole results: errors within one are correlated."""

    def __init__(self, budget: float, loss: Loss) -> None:
        self._budget, self._loss = budget, loss
        self._seen = LossSums()  # results that a verdict showed to differ
        self._ends = LossSums()  # of audited ends
        self._results = self._unseen = self._gaps = 0
        self._audited = self._disagreed = 0

    def add(self, trail: AuditTrail, audited: int, disagreed: int) -> None:
        """Count one result with its closed trail. audited, disagreed: numbers of its skipped tokens."""
        output = trail.output
        assert output is not None
        self._results += 1
        self._audited += audited
        self._disagreed += disagreed
        for end in trail.ends:
            self._ends.add(output.losses(end, self._loss) if end is not None else (0.0, 0.0, 0.0))
        if trail.first_difference is not None:
            self._seen.add(output.losses(trail.first_difference, self._loss))
        elif trail.unseen is not None:
            self._unseen += 1
            self._gaps += trail.has_gap

    @property
    def risk(self) -> Risk:
        """The present estimate with its 95 % interval."""
        low, high = self.interval(MISS_PROBABILITY)
        return Risk(self._budget, self._loss, self._audited, self._disagreed, self._estimate, low, high, self._results)

    @property
    def _estimate(self) -> float | None:
        if not self._results or (self._unseen and not self._ends.cases):
            return None
        end = self._ends.likely / self._ends.cases if self._ends.cases else 0.0
        return (self._seen.likely + self._unseen * end) / self._results

    def interval(self, miss: float) -> tuple[float, float]:
        """Return an interval that misses the risk with probability `miss`, half of it at either end."""
        if not self._results:
            return 0.0, 1.0
        each, ends, unseen = miss / 4, self._ends, self._unseen - self._gaps
        least, largest = 0.0, 1.0
        if ends.cases:
            least = lower_bound(ends.least / ends.cases, ends.cases, each)
            largest = upper_bound(ends.largest / ends.cases, ends.cases, each)
        low = (self._seen.least + unseen * least) / self._results
        high = (self._seen.largest + unseen * largest + self._gaps) / self._results
        return lower_bound(low, self._results, each), upper_bound(high, self._results, each)

    def warnings(self) -> list[str]:
        """Return the warning if the audits contradict the budget."""
        low, _ = self.interval(2 * FALSE_ALARM)
        if self._results < MIN_RESULTS or low <= self._budget:
            return []
        estimate = "" if self._estimate is None else f" at {100 * self._estimate:.2g} % of {self._loss},"
        return [
            f"audits put the risk{estimate} at no less than {100 * low:.2g} %, above the budget of "
            f"{100 * self._budget:.2g} % ({self._seen.cases} of {self._results} results were seen to differ): the "
            "gate was not calibrated for requests like these"
        ]


def upper_bound(share: float, count: int, miss: float) -> float:
    """Return the upper bound (confidence 1 − `miss`) of the mean of `count` values in [0, 1] with average `share`."""
    return 1.0 - lower_bound(max(1.0 - share, 0.0), count, miss)


def lower_bound(share: float, count: int, miss: float) -> float:
    """Return the lower bound: the p below `share` with count · KL(share, p) = −log(miss)."""
    share = min(share, 1.0)
    low, high, limit = 0.0, share, -math.log(miss) / count
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _kl_divergence(share, middle) > limit else (low, middle)
    return low


def _kl_divergence(share: float, p: float) -> float:
    """Return KL(share, p) of two Bernoulli distributions, in nats. p is between 0 and share, and 0 only if share is."""
    heads = share * math.log(share / p) if share > 0 else 0.0
    tails = (1 - share) * math.log((1 - share) / (1 - p)) if share < 1 else 0.0
    return heads + tails
