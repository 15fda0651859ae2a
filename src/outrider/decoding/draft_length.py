"""How many tokens to draft next: a fixed k, until the drafter stops being sure, or for as long as it pays."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from outrider.decoding.adaptive_draft_length import DraftLengthController
from outrider.errors import SettingsError
from outrider.sampling.sampler import Signals

MAX_K = 64
AUTO_MAX_K = 16
AUTO_MIN_SURVIVAL = 0.4


class DraftLength(Protocol):
    """`controller` is None where nothing is learnt."""

    @property
    def needs_signals(self) -> bool: ...

    @property
    def controller(self) -> DraftLengthController | None: ...

    def tokens_to_draft(self, drafted: int, block: Seq[Signals]) -> int:
        """How many more tokens to draft for a block that has `drafted`; 0 when it is complete."""
        ...


@dataclass(frozen=True)
class FixedDraftLength:
    k: int
    needs_signals = False
    controller = None

    def tokens_to_draft(self, drafted: int, block: Seq[Signals]) -> int:
        return self.k - drafted


@dataclass(frozen=True)
class ConfidenceStop:
    """Stop when the chance that the whole block survives falls under `min_survival`.

    The chance is the product of the drafter's own probabilities of its tokens: an estimate of their acceptance
    that needs nothing from the verifier. `max_tokens` bounds the block.
    """

    max_tokens: int = AUTO_MAX_K
    min_survival: float = AUTO_MIN_SURVIVAL
    needs_signals = True
    controller = None

    def tokens_to_draft(self, drafted: int, block: Seq[Signals]) -> int:
        survival = math.exp(-sum(token.logprob for token in block))
        return 1 if drafted < self.max_tokens and survival >= self.min_survival else 0


@dataclass(frozen=True)
class AdaptiveDraftLength:
    """Draft on for as long as it pays (decoding/adaptive_draft_length.py); by confidence alone until that is known."""

    controller: DraftLengthController = field(default_factory=DraftLengthController)
    fallback: ConfidenceStop = ConfidenceStop()
    needs_signals = True

    def tokens_to_draft(self, drafted: int, block: Seq[Signals]) -> int:
        if self.controller.token_cost is None or not drafted:
            return self.fallback.tokens_to_draft(drafted, block)
        return int(drafted < MAX_K and self.controller.should_continue(drafted, [token.logprob for token in block]))


def parse_draft_length(k: int | str) -> DraftLength:
    """`k` tokens per block, or "auto" for as many as pay, learnt on the way.

    Raises:
        SettingsError: k is neither "auto" nor 1 to 64.
    """
    if k == "auto":
        return AdaptiveDraftLength()
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        raise SettingsError(f"k is a whole number from 1 to {MAX_K}, or 'auto', not {k!r}")
    return FixedDraftLength(k)
