"""How many tokens to draft next: a fixed k, or until the drafter stops being sure."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from outrider.core.gate import Signals
from outrider.errors import SettingsError

MAX_K = 64
AUTO_CAP = 16
AUTO_FLOOR = 0.4


class Lookahead(Protocol):
    needs_signals: bool

    def more(self, drafted: int, block: Seq[Signals]) -> int:
        """How many more tokens to draft for a block that has `drafted`; 0 when it is complete."""
        ...


@dataclass(frozen=True)
class FixedK:
    k: int
    needs_signals = False

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

    def more(self, drafted: int, block: Seq[Signals]) -> int:
        survives = math.exp(-sum(token.logprob for token in block))
        return 1 if drafted < self.cap and survives >= self.floor else 0


def lookahead(k: int | str) -> Lookahead:
    """`k` tokens per block, or "auto" for the confidence stop.

    Raises:
        SettingsError: k is neither "auto" nor 1 to 64.
    """
    if k == "auto":
        return ConfidenceStop()
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        raise SettingsError(f"k is a whole number from 1 to {MAX_K}, or 'auto', not {k!r}")
    return FixedK(k)
