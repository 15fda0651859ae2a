"""How many tokens to draft next: a fixed k, until the drafter stops being sure, or for as long as it pays."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core.gate import Signals
from outrider.core.pace import Pace
from outrider.errors import SettingsError

MAX_K = 64
AUTO_CAP = 16
AUTO_FLOOR = 0.4


class Lookahead(Protocol):
    """`pace` is None where nothing is learnt."""

    @property
    def needs_signals(self) -> bool: ...

    @property
    def pace(self) -> Pace | None: ...

    def more(self, drafted: int, block: Seq[Signals]) -> int:
        """How many more tokens to draft for a block that has `drafted`; 0 when it is complete."""
        ...


@dataclass(frozen=True)
class FixedK:
    k: int
    needs_signals = False
    pace = None

    def more(self, drafted: int, block: Seq[Signals]) -> int:
        return self.k - drafted


@dataclass(frozen=True)
class ConfidenceStop:
    """Stop when the chance that the whole block survives falls under `floor`.

    The chance is the product of the drafter's own probabilities of its tokens: an estimate of their acceptance
    that needs nothing from the verifier. `cap` bounds the block.
    """

    cap: int = AUTO_CAP
    floor: float = AUTO_FLOOR
    needs_signals = True
    pace = None

    def more(self, drafted: int, block: Seq[Signals]) -> int:
        survives = math.exp(-sum(token.logprob for token in block))
        return 1 if drafted < self.cap and survives >= self.floor else 0


@dataclass(frozen=True)
class Paced:
    """Draft on for as long as it pays (core/pace.py); by confidence alone until that is known."""

    pace: Pace = field(default_factory=Pace)
    start: ConfidenceStop = ConfidenceStop()
    needs_signals = True

    def more(self, drafted: int, block: Seq[Signals]) -> int:
        if self.pace.price is None or not drafted:
            return self.start.more(drafted, block)
        return int(drafted < MAX_K and self.pace.pays(drafted, [token.logprob for token in block]))


def lookahead(k: int | str) -> Lookahead:
    """`k` tokens per block, or "auto" for as many as pay, learnt on the way.

    Raises:
        SettingsError: k is neither "auto" nor 1 to 64.
    """
    if k == "auto":
        return Paced()
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        raise SettingsError(f"k is a whole number from 1 to {MAX_K}, or 'auto', not {k!r}")
    return FixedK(k)
