"""One generation from its parts, under either driver, with the invariants checked at every event."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.config import GenerationSettings, OnCloudLoss
from outrider.decoding.actions import Done, Draft, Plan, Proposal
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_length import parse_draft_length
from outrider.decoding.gate import Decision, Gate
from outrider.decoding.gate_parsing import gate as parse_gate
from outrider.decoding.result import Guarantee, derive_guarantee
from outrider.decoding.sequence import Source
from outrider.decoding.stopping import StopRules
from outrider.edge.drafter import Drafter
from outrider.edge.drivers import pipelined, sequential
from outrider.edge.verifier_session import VerifierSession
from outrider.engines.base import CachedSequence, Prompt
from outrider.sampling.acceptance import parse_acceptance_rule
from outrider.sampling.policy import Policy
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier
from tests.support.fakes import FarVerifier, HashRows, Rows, ScriptedEngine

V = 24
PROMPT = (3, 1, 4, 1, 5)
TARGET, OTHER, LOOPY = HashRows(1, V), HashRows(2, V), HashRows(3, V, memory=1)


def letters(ids: list[int]) -> str:
    return "".join(chr(97 + token) for token in ids)


def block(
    drafter: Any, ids: Seq[int], length: int, *, leave_loop: bool = False, eos: Collection[int] = ()
) -> list[Proposal]:
    """A drafter hands a block over in pieces: all of it, up to an EOS."""
    proposals: list[Proposal] = []
    while len(proposals) < length and not (proposals and proposals[-1].token in eos):
        known = [*ids, *(proposal.token for proposal in proposals)]
        proposals += drafter.draft(known, Draft(length - len(proposals), leave_loop=leave_loop and not proposals))
    return proposals


@dataclass
class Scheduled:
    """A gate that answers as it was told to, then always yes."""

    answers: Seq[bool]
    exact: bool = False
    needs_signals: bool = False
    asked: int = field(default=0, init=False)

    def decide(self, block: Any) -> Decision:
        self.asked += 1
        return Decision(self.answers[self.asked - 1] if self.asked <= len(self.answers) else True, "scheduled")


@dataclass(frozen=True)
class Case:
    """What to generate. gate: a text, or ("trigger" or "skip", answers)."""

    draft: Callable[[], ScriptedEngine]
    target: Rows = TARGET
    gate: str | tuple[str, Seq[bool]] = "always"
    k: int | str = 3
    accept: str = "exact"
    scope: Any = "block"
    on_loop: Any = "escalate"
    options: dict[str, Any] = field(default_factory=dict)

    def build_gate(self) -> Gate:
        if isinstance(self.gate, str):
            return parse_gate(self.gate)
        return Scheduled(self.gate[1], exact=self.gate[0] == "trigger")

    @property
    def wanted(self) -> GenerationSettings:
        return GenerationSettings.build({"max_new_tokens": 30, **self.options})

    @property
    def merges(self) -> bool:
        return self.build_gate().exact and self.accept == "exact"


class Generation:
    """`case` with everything that it needs; `run` runs it to its end and closes what was opened."""

    def __init__(
        self,
        case: Case,
        driver: str,
        *,
        polls: Seq[int] = (0,),
        losses: Collection[int] = (),
        heard: bool = False,
        on_loss: OnCloudLoss = "fail",
    ) -> None:
        self.case, self.driver, wanted = case, driver, case.wanted
        self.plan = self._plan(wanted)
        self.decoder = Decoder(PROMPT, self.plan, letters)
        self.draft, self.target = case.draft(), ScriptedEngine(case.target, V, eos_ids=(0,))
        self.policy = Policy.build(wanted, (0,), V, len(PROMPT))
        self.drafter = self._drafter()
        self.verifier = FarVerifier(LocalVerifier(self.target), polls=polls, losses=losses, heard=heard)
        params = SessionParams(wanted, case.accept, V)
        self.link = VerifierSession(self.verifier, lambda verifier: verifier.open(Prompt(PROMPT), params), on_loss)
        self.seen: list[int] = []
        self.final = 0

    def run(self) -> Generation:
        try:
            events = (
                pipelined(self.decoder, self.drafter, self.link)
                if self.driver == "pipelined"
                else sequential(self.decoder, self.drafter, self.link.verify)
            )
            for event in events:
                self.see(event)
                self.check()
            self.check()
        finally:
            self.drafter.close()
            self.link.close()
        assert self.seen[: self.final] == self.tokens
        return self

    def see(self, event: Any) -> None:
        """What someone sees who knows nothing but the events."""
        if event.kind == "revised":
            del self.seen[event.index :]
            self.final = event.index
        if event.index == len(self.seen):
            self.seen.append(event.token)
        assert self.seen[event.index] == event.token
        if event.kind != "provisional":
            self.final = max(self.final, event.index + 1)

    def check(self) -> None:
        """The cache holds a proper prefix of what drafting continues from; the books balance."""
        decoder = self.decoder
        sequence, stats = decoder.sequence, decoder.stats
        assert decoder.context[: len(sequence.ids)] == sequence.ids
        assert len(decoder.context) == decoder.context_length
        for slot in self.draft.slots.values():
            assert slot.tokens == decoder.context[: len(slot.tokens)]
            assert len(slot.tokens) < decoder.context_length
        stats.count_sources(sequence.sources)
        assert stats.cloud_tokens + stats.edge_tokens == len(sequence.generated)
        assert stats.accepted + stats.corrected + stats.bonus == stats.cloud_tokens
        assert stats.accepted <= stats.verified <= stats.drafted
        assert stats.corrected + stats.bonus <= stats.rounds <= stats.escalated <= stats.blocks
        assert stats.forced_by_loop <= stats.escalated

    # What came of it ------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        return self.decoder.sequence.generated

    @property
    def reason(self) -> str:
        action = self.decoder.next()
        assert isinstance(action, Done)
        return action.reason

    @property
    def guarantee(self) -> Guarantee:
        accept, gate = self.plan.accept, self.plan.gate
        return derive_guarantee(self.decoder.stats, lossless=accept.lossless and (gate.exact or not accept.needs_q))

    @property
    def sources(self) -> list[Source]:
        return self.decoder.sequence.sources

    @property
    def asked(self) -> list[tuple[Any, ...]]:
        return [(r.round, r.base_length, r.new_ids, r.draft_ids) for r in self.verifier.requests]

    def said(self) -> tuple[Any, ...]:
        """What must not depend on the driver."""
        return self.tokens, self.reason, self.guarantee, [source.by_cloud for source in self.sources]

    def counted(self) -> dict[str, Any]:
        """What must not depend on the driver where blocks are cut alike: not seconds, nor what was drafted in vain."""
        counters = asdict(self.decoder.stats).items()
        return {name: value for name, value in counters if name != "drafted" and not name.endswith("_s")}

    def _plan(self, wanted: GenerationSettings) -> Plan:
        case, eos = self.case, () if wanted.ignore_eos else (0,)
        rules = StopRules(wanted.max_new_tokens, eos, wanted.stop, wanted.sentences, wanted.min_new_tokens)
        gate, accept = case.build_gate(), parse_acceptance_rule(case.accept)
        return Plan(rules, gate, accept, parse_draft_length(case.k), True, case.on_loop, case.scope)

    def _drafter(self) -> Drafter:
        plan = self.plan
        assert plan.draft_length is not None
        reader = CachedSequence(self.draft, Prompt(PROMPT), "drafter")
        needs_signals = plan.gate.needs_signals or plan.draft_length.needs_signals
        return Drafter(reader, self.policy, needs_signals=needs_signals, needs_q=plan.accept.needs_q)
