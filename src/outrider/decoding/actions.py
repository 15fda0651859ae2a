"""The decoder's actions, which a driver executes, and the plan of one generation."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.config import OnLoop, Scope
from outrider.decoding.draft_length import DraftLength
from outrider.decoding.draft_source import Confidence, DraftSource, MatchLength
from outrider.decoding.gate import Gate, Signals
from outrider.decoding.loop_detection import DEFAULT_RULE, LoopRule
from outrider.decoding.stopping import FinishReason, StopRules
from outrider.sampling.acceptance import AcceptanceRule, Exact
from outrider.sampling.logprobs import Logprobs
from outrider.sampling.sampler import Support


@dataclass(frozen=True)
class Proposal:
    """One drafted token.

    signals: confidence, for the gate and the draft length. q: the drafting distribution, for rejection sampling.
    match_length: matching tokens in prompt lookup, 0 for a model's token. logprobs: the drafter's, if they are
    requested.
    """

    token: int
    signals: Signals | None = None
    q: Support | None = None
    left_loop: bool = False
    match_length: int = 0
    logprobs: Logprobs | None = None

    @property
    def source(self) -> DraftSource:
        """The source that drafted the token."""
        return DraftSource.LOOKUP if self.match_length else DraftSource.MODEL

    @property
    def confidence(self) -> Confidence | None:
        """The match length of a looked-up token, −log q of a model's token, or None if it is unknown."""
        if self.match_length:
            return MatchLength(self.match_length)
        return None if self.signals is None else self.signals.logprob


def measured_signals(proposals: Seq[Proposal]) -> list[Signals]:
    """Return the signals of the proposals that have any."""
    return [proposal.signals for proposal in proposals if proposal.signals is not None]


@dataclass(frozen=True)
class Draft:
    """Draft up to `count` tokens.

    leave_loop: draw the first one at random from the best few. model_only: the tokens will not be verified, so a model
    must draft them. lookup_only: a draft model would cost more time than it saves.
    """

    count: int
    leave_loop: bool = False
    model_only: bool = False
    lookup_only: bool = False


@dataclass(frozen=True)
class Verify:
    """Verify draft_ids, which follow the committed tokens.

    base_length: committed tokens, prompt included. new_ids: the committed tokens that are new to the verifier.
    """

    round: int
    base_length: int
    new_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    q: tuple[Support, ...] = ()


@dataclass(frozen=True)
class Done:
    """End the generation: the output is complete."""

    reason: FinishReason


Action = Draft | Verify | Done


@dataclass(frozen=True)
class Plan:
    """The plan of one generation: stop rules, gate, acceptance rule, loop policy and scope.

    draft_length is None without a drafter (cloud-only). has_verifier is False without a verifier (edge-only).
    """

    stop_rules: StopRules
    gate: Gate
    accept: AcceptanceRule
    draft_length: DraftLength | None
    has_verifier: bool
    on_loop: OnLoop
    scope: Scope = "block"
    loop_rule: LoopRule = DEFAULT_RULE

    @property
    def is_block_invariant(self) -> bool:
        """True if the output does not depend on its division into blocks."""
        return self.gate.exact and isinstance(self.accept, Exact)
