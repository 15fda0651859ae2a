"""The gain of speculation over the cloud alone, in one sentence, from measured figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from outrider.config import Loss, format_number
from outrider.decoding.risk_estimate import Risk

EQUAL_SPEED_TOLERANCE = 0.05  # a difference in speed that is within the noise of a measurement

_EXPECTED: dict[Loss, str] = {
    "outputs": "The share of outputs that differ from the cloud's is expected to be at most {} % (bounded)",
    "tokens": "The share of the cloud's tokens from the first difference on is expected to be at most {} % (bounded)",
}


class Counters(Protocol):
    """The counters of a `Stats` that a gain sums up."""

    rounds: int
    blocks: int
    escalated: int
    cloud_tokens: int
    total_s: float


class Counted(Protocol):
    """The part of a `Result` that a gain sums up."""

    @property
    def guarantee(self) -> str:
        """Guarantee of the output."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the output."""
        ...

    @property
    def stats(self) -> Counters:
        """Counters of the generation."""
        ...

    @property
    def risk(self) -> Risk | None:
        """Estimate for a calibrated gate, else None."""
        ...


@dataclass(frozen=True)
class CloudBaseline:
    """The same prompts decoded by the cloud alone.

    same: outputs with equal tokens. seconds: of all outputs. modelled: the seconds come from a simulation.
    """

    outputs: int
    same: int
    seconds: float
    modelled: bool = False


@dataclass(frozen=True)
class Gain:
    """Sums over the outputs of one decoding mode.

    rounds: verdicts, each one forward pass of the large model. bounded: the outputs within the budget of a calibrated
    gate. risk: that gate's.
    """

    outputs: int
    exact: int
    tokens: int
    cloud_tokens: int
    rounds: int
    blocks: int
    escalated: int
    seconds: float
    bounded: int = 0
    risk: Risk | None = None

    @classmethod
    def of(cls, results: Iterable[Counted]) -> Gain:
        """Sum up results."""
        results = list(results)
        return cls(
            outputs=len(results),
            exact=sum(result.guarantee == "exact" for result in results),
            tokens=sum(len(result.token_ids) for result in results),
            cloud_tokens=sum(result.stats.cloud_tokens for result in results),
            rounds=sum(result.stats.rounds for result in results),
            blocks=sum(result.stats.blocks for result in results),
            escalated=sum(result.stats.escalated for result in results),
            seconds=sum(result.stats.total_s for result in results),
            bounded=sum(result.guarantee == "bounded" for result in results),
            risk=next((result.risk for result in results if result.risk is not None), None),
        )

    def describe(self, baseline: CloudBaseline | None = None) -> str:
        """Return the sentence: the text's agreement with the cloud's, the runs of the large model, and the speed."""
        if not self.outputs or not self.tokens:
            return ""
        if not self.rounds and baseline is None:
            return "The cloud was not used: the text is the edge's own."
        parts = [self._describe_text(baseline), self._describe_work(), self._describe_speed(baseline)]
        return "; ".join(filter(None, parts)) + "."

    def _describe_text(self, baseline: CloudBaseline | None) -> str:
        if baseline is not None and baseline.outputs:
            if baseline.same == baseline.outputs:
                return "Same text as the cloud alone"
            return f"Same text as the cloud alone in {baseline.same} of {baseline.outputs} outputs"
        if self.exact == self.outputs:
            return "Same text as the cloud alone would give"
        if self.exact + self.bounded == self.outputs:
            if self.risk is None:
                return "Every output is within the budget of its gate's calibration (bounded)"
            return _EXPECTED[self.risk.loss].format(format_number(round(100 * self.risk.budget, 9)))
        return f"Same text as the cloud alone is promised for {self.exact} of {self.outputs} outputs"

    def _describe_work(self) -> str:
        if not self.rounds:
            return "the cloud was not used"
        if self.cloud_tokens < self.tokens:
            return f"{self.escalated:,} of {self.blocks:,} blocks went to the cloud"
        return f"the large model ran {self.rounds:,} times instead of {self.tokens:,}"

    def _describe_speed(self, baseline: CloudBaseline | None) -> str:
        if baseline is None or not self.seconds or not baseline.seconds:
            return ""
        return describe_speedup(baseline.seconds / self.seconds, "modelled" if baseline.modelled else "measured")


def describe_speedup(factor: float, source: str) -> str:
    """Return the speed relative to the cloud alone, with a note if it does not pay. source: measured or modelled."""
    if factor >= 1 + EQUAL_SPEED_TOLERANCE:
        return f"{factor:.1f} times as fast as the cloud alone ({source})"
    if factor > 1 - EQUAL_SPEED_TOLERANCE:
        return f"as fast as the cloud alone ({source})"
    return f"{factor:.2g} times as fast as the cloud alone ({source}): it does not pay here"
