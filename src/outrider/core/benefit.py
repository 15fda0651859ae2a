"""One sentence on what speculation gained over the cloud alone, from measured facts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.config import Loss, plain_number
from outrider.core.audits import Risk
from outrider.core.outcome import Result

EVEN = 0.05  # a difference in speed that is within the noise of a measurement

_EXPECTED: dict[Loss, str] = {
    "outputs": "The share of outputs that differ from the cloud's is expected to be at most {} % (bounded)",
    "tokens": "The share of the cloud's tokens from the first difference on is expected to be at most {} % (bounded)",
}


@dataclass(frozen=True)
class Alone:
    """The same prompts decoded by the cloud alone. same: outputs with equal tokens. seconds: all outputs together.

    modelled: the seconds come from a simulation.
    """

    outputs: int
    same: int
    seconds: float
    modelled: bool = False


@dataclass(frozen=True)
class Gain:
    """Sums over the outputs of one way of decoding.

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
    def of(cls, results: Iterable[Result]) -> Gain:
        rows = list(results)
        return cls(
            outputs=len(rows),
            exact=sum(row.guarantee == "exact" for row in rows),
            tokens=sum(len(row.token_ids) for row in rows),
            cloud_tokens=sum(row.stats.cloud_tokens for row in rows),
            rounds=sum(row.stats.rounds for row in rows),
            blocks=sum(row.stats.blocks for row in rows),
            escalated=sum(row.stats.escalated for row in rows),
            seconds=sum(row.stats.total_s for row in rows),
            bounded=sum(row.guarantee == "bounded" for row in rows),
            risk=next((row.risk for row in rows if row.risk is not None), None),
        )

    def sentence(self, alone: Alone | None = None) -> str:
        """Return the sentence: is the text the cloud's, the large model's runs, and the speed if it is known."""
        if not self.outputs or not self.tokens:
            return ""
        if not self.rounds and alone is None:
            return "The cloud was not asked: the text is the edge's own."
        return "; ".join(filter(None, [self._text(alone), self._work(), self._speed(alone)])) + "."

    def _text(self, alone: Alone | None) -> str:
        if alone is not None and alone.outputs:
            if alone.same == alone.outputs:
                return "Same text as the cloud alone"
            return f"Same text as the cloud alone in {alone.same} of {alone.outputs} outputs"
        if self.exact == self.outputs:
            return "Same text as the cloud alone would give"
        if self.exact + self.bounded == self.outputs:
            if self.risk is None:
                return "Every output is within the budget of its gate's calibration (bounded)"
            return _EXPECTED[self.risk.loss].format(plain_number(round(100 * self.risk.budget, 9)))
        return f"Same text as the cloud alone is promised for {self.exact} of {self.outputs} outputs"

    def _work(self) -> str:
        if not self.rounds:
            return "the cloud was not asked"
        if self.cloud_tokens < self.tokens:
            return f"{self.escalated:,} of {self.blocks:,} blocks went to the cloud"
        return f"the large model ran {self.rounds:,} times instead of {self.tokens:,}"

    def _speed(self, alone: Alone | None) -> str:
        if alone is None or not self.seconds or not alone.seconds:
            return ""
        return speed(alone.seconds / self.seconds, "modelled" if alone.modelled else "measured")


def speed(factor: float, how: str) -> str:
    """Return the speed relative to the cloud alone, with a note if it does not pay. how: measured or modelled."""
    if factor >= 1 + EVEN:
        return f"{factor:.1f} times as fast as the cloud alone ({how})"
    if factor > 1 - EVEN:
        return f"as fast as the cloud alone ({how})"
    return f"{factor:.2g} times as fast as the cloud alone ({how}): it does not pay here"
