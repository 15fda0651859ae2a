"""One sentence on what speculation gained over the cloud alone, from measured facts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.core.outcome import Result

EVEN = 0.05  # a difference in speed that is within the noise of a measurement


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
    """Sums over the outputs of one way of decoding. rounds: verdicts, each one forward pass of the large model."""

    outputs: int
    exact: int
    tokens: int
    cloud_tokens: int
    rounds: int
    blocks: int
    escalated: int
    seconds: float

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
        )

    def sentence(self, alone: Alone | None = None) -> str:
        """Return the sentence: is the text the cloud's, the large model's runs, and the speed if it is known."""
        if not self.outputs or not self.tokens:
            return ""
        if not self.rounds and alone is None:
            return "The cloud was not asked: the text is the edge's own."
        return "; ".join([self._text(alone), self._work(), self._speed(alone)]) + "."

    def _text(self, alone: Alone | None) -> str:
        if alone is not None and alone.outputs:
            if alone.same == alone.outputs:
                return "Same text as the cloud alone"
            return f"Same text as the cloud alone in {alone.same} of {alone.outputs} outputs"
        if self.exact == self.outputs:
            return "Same text as the cloud alone would give"
        return f"Same text as the cloud alone is promised for {self.exact} of {self.outputs} outputs"

    def _work(self) -> str:
        if not self.rounds:
            return "the cloud was not asked"
        if self.cloud_tokens < self.tokens:
            return f"{self.escalated:,} of {self.blocks:,} blocks went to the cloud"
        return f"the large model ran {self.rounds:,} times instead of {self.tokens:,}"

    def _speed(self, alone: Alone | None) -> str:
        if alone is None or not self.seconds or not alone.seconds:
            return "speed against the cloud alone was not measured"
        return speed(alone.seconds / self.seconds, "modelled" if alone.modelled else "measured")


def speed(factor: float, how: str) -> str:
    """Return the speed relative to the cloud alone, with a note if it does not pay. how: measured or modelled."""
    if factor >= 1 + EVEN:
        return f"{factor:.1f} times as fast as the cloud alone ({how})"
    if factor > 1 - EVEN:
        return f"as fast as the cloud alone ({how})"
    return f"{factor:.2g} times as fast as the cloud alone ({how}): it does not pay here"
