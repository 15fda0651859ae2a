"""Draft length: fixed (k), bounded by the drafter's confidence, or adaptive (k "auto")."""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from outrider.decoding.acceptance_model import MATCH_PRIORS
from outrider.decoding.adaptive_draft_length import DraftLengthController
from outrider.decoding.draft_source import Confidence, DraftSource, MatchLength, source_of
from outrider.errors import SettingsError, quote

MAX_K = 64
AUTO_MAX_K = 16
AUTO_MIN_SURVIVAL = 0.4


class NextTokens(NamedTuple):
    """The tokens to add to a block next. lookup_only: a draft model would cost more time than it saves."""

    number: int
    lookup_only: bool = False


class DraftLength(Protocol):
    """The policy for the number of tokens in a block."""

    @property
    def needs_signals(self) -> bool:
        """True if the policy reads the signals of a model's tokens."""
        ...

    @property
    def controller(self) -> DraftLengthController | None:
        """The controller that learns from the rounds, or None if the policy does not learn."""
        ...

    @property
    def without_verifier(self) -> DraftLength:
        """The policy after the loss of the verifier. Its blocks have at least one token."""
        ...

    def tokens_to_draft(self, drafted: int, block: Seq[Confidence], unread: int = 0) -> NextTokens:
        """Return the tokens to add to a block of `drafted` tokens. Their number is 0 if the block is complete.

        block: the known confidences of its tokens. unread: tokens before the last one that a draft
        model has not read.
        """
        ...


@dataclass(frozen=True)
class FixedDraftLength:
    """Blocks of k tokens."""

    k: int
    needs_signals = False
    controller = None

    @property
    def without_verifier(self) -> Self:
        """The same policy."""
        return self

    def tokens_to_draft(self, drafted: int, block: Seq[Confidence], unread: int = 0) -> NextTokens:
        """Return the tokens that are missing from k."""
        return NextTokens(self.k - drafted)


@dataclass(frozen=True)
class ConfidenceStop:
    """Blocks that end when the estimated probability of their complete acceptance falls below `min_survival`.

    The estimate is the product of the drafter's own probabilities, and of the prior acceptance rates of looked-up
    tokens. It needs no verdict. `max_tokens` bounds the block.
    """

    max_tokens: int = AUTO_MAX_K
    min_survival: float = AUTO_MIN_SURVIVAL
    needs_signals = True
    controller = None

    @property
    def without_verifier(self) -> Self:
        """The same policy."""
        return self

    def tokens_to_draft(self, drafted: int, block: Seq[Confidence], unread: int = 0) -> NextTokens:
        """Return 1 until the block ends."""
        return NextTokens(int(self.should_continue(drafted, block)))

    def should_continue(self, drafted: int, block: Seq[Confidence]) -> bool:
        """Return whether the block goes on after these tokens."""
        return drafted < self.max_tokens and math.prod(map(_prior_acceptance, block)) >= self.min_survival


@dataclass(frozen=True)
class AdaptiveDraftLength:
    """Blocks that end when another token costs more time than it saves (`decoding.adaptive_draft_length`).

    Each source of drafts is judged by itself. A block is empty if plain decoding of the target is faster than either.
    The fallback decides until drafts and verdicts have been timed, unless drafts without proposals have taken too long.
    """

    controller: DraftLengthController = field(default_factory=DraftLengthController)
    fallback: ConfidenceStop = ConfidenceStop()
    needs_signals = True

    @property
    def without_verifier(self) -> ConfidenceStop:
        """The fallback, as there is no target to leave a token to."""
        return self.fallback

    def tokens_to_draft(self, drafted: int, block: Seq[Confidence], unread: int = 0) -> NextTokens:
        """Return 1 until the block ends: for the model, or for prompt lookup alone if the model would lose time."""
        for source in self.controller.sources:
            if self._allows(source, drafted, block, unread):
                return NextTokens(1, lookup_only=source is DraftSource.LOOKUP)
        return NextTokens(0)

    def _allows(self, source: DraftSource, drafted: int, block: Seq[Confidence], unread: int) -> bool:
        """Return whether the next token may be one of this source."""
        if not drafted:
            return self._may_begin(source, unread)
        is_used = source in map(source_of, block) or (source is DraftSource.MODEL and drafted > len(block))
        if not is_used and not self._may_begin(source, unread):
            return False
        if source not in self.controller.token_costs:
            return self.fallback.should_continue(drafted, block)
        return drafted < MAX_K and self.controller.should_continue(drafted, block, source)

    def _may_begin(self, source: DraftSource, unread: int) -> bool:
        switch = self.controller.switch
        if source in self.controller.token_costs:
            return switch.should_speculate(unread, source)
        return not (switch.needs_sample or switch.is_overdrawn(source))


def _prior_acceptance(confidence: Confidence) -> float:
    """Return the acceptance probability of a token before any verdict."""
    return MATCH_PRIORS[confidence.bucket] if isinstance(confidence, MatchLength) else math.exp(-confidence)


def parse_draft_length(k: int | str, sources: Collection[DraftSource] = (DraftSource.MODEL,)) -> DraftLength:
    """Return the policy of k tokens per block, or the adaptive one for "auto". sources: those of the drafter.

    Raises:
        SettingsError: k is neither "auto" nor 1 to 64.
    """
    if k == "auto":
        return AdaptiveDraftLength(DraftLengthController(sources))
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_K:
        raise SettingsError(f"k is a whole number from 1 to {MAX_K}, or 'auto', not {quote(k)}")
    return FixedDraftLength(k)
