"""`k auto` with prompt lookup, in virtual time: drafts without a match, and drafts that cost nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from outrider.decoding.actions import Draft, Plan, Proposal, Verify
from outrider.decoding.adaptive_draft_length import DraftLengthController
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_length import AdaptiveDraftLength
from outrider.decoding.draft_source import DraftSource
from outrider.decoding.gate import Always, Signals
from outrider.decoding.speculation_switch import SpeculationSwitch
from outrider.decoding.stopping import StopRules
from outrider.edge.round_observer import RoundObserver
from outrider.planning.virtual_time import Clock, InFlight, run_driver
from outrider.sampling.acceptance import Exact, Verdict
from tests.support.drafted import by_model

RIGHT, WRONG, BONUS = 1, 2, 3
PROMPT, GENERATION, MATCH = 50, 200, 3  # tokens
LOOKUP_S = 1e-6


def auto_with(*sources: DraftSource) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(DraftLengthController(sources))


@dataclass
class Simulation:
    """A drafter and a verifier. A plain token takes 1 s, a verdict 1 s and `slope` seconds per draft.

    matched: the share of rounds with a match. alpha: the acceptance rate. draft, read: seconds of a model for a draft
    and for a token that it reads, without a model if draft is 0.
    """

    slope: float
    matched: float
    alpha: float
    draft_s: float = 0.0
    read_s: float = 0.0
    clock: Clock = field(default_factory=Clock)
    looked_up: int = 0
    drafted: int = 0

    def __post_init__(self) -> None:
        self.auto = auto_with(DraftSource.LOOKUP, *[DraftSource.MODEL] * bool(self.draft_s))
        self._rng = random.Random(1)
        self._read = self._round = self._copied_to = 0

    def run(self, generations: int) -> float:
        """Return the tokens per second."""
        start = self.clock.now
        for _ in range(generations):
            plan = Plan(StopRules(GENERATION, ()), Always(), Exact(), self.auto, has_verifier=True, on_loop="ignore")
            self._read = self._copied_to = 0
            for _event in run_driver(Decoder([0] * PROMPT, plan), self, self, self.clock):
                pass
        return generations * GENERATION / (self.clock.now - start)

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Copy the next token if there is a match, else draft with the model if there is one."""
        is_copy = self._copied_to == len(ids) or self._rng.random() < self.matched
        token = RIGHT if self._rng.random() < self.alpha else WRONG
        if is_copy:
            self.clock.spend(LOOKUP_S)
            self._copied_to = len(ids) + 1
            self.looked_up += 1
            return [Proposal(token, match_length=MATCH)]
        if not self.draft_s or action.lookup_only:
            return []
        self.clock.spend(self.draft_s + self.read_s * max(len(ids) - 1 - self._read, 0))
        self._read = len(ids)
        self.drafted += 1
        return [Proposal(token, Signals(0.0, 0.0, 0.0, 0.3))]

    def rollback_to(self, length: int) -> None:
        self._read = min(self._read, length - 1)

    def submit(self, request: Verify) -> InFlight:
        drafts = request.draft_ids
        accepted = drafts.index(WRONG) if WRONG in drafts else len(drafts)
        return InFlight(
            self.clock, self.clock.now + 1.0 + self.slope * len(drafts), Verdict(request.round, accepted, BONUS)
        )


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculationSwitch, "should_speculate", lambda *_: True)


def test_lookup_where_verification_costs_more_than_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are free, but each one adds 0.85 s to a verdict and brings 0.5 tokens."""
    simulation = Simulation(slope=0.85, matched=0.7, alpha=0.5)
    simulation.run(3)
    before = simulation.looked_up
    assert simulation.run(15) >= 0.97
    assert simulation.looked_up > before, "probes do not end"
    always(monkeypatch)
    assert Simulation(slope=0.85, matched=0.7, alpha=0.5).run(15) < 0.9, "the switch would not matter"


@pytest.mark.parametrize("matched", [0.1, 0.5, 1.0])
def test_lookup_with_cheap_verdicts_drafts_wherever_there_is_a_match(
    matched: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched = Simulation(slope=0.02, matched=matched, alpha=0.7)
    rate = switched.run(15)
    always(monkeypatch)
    best = Simulation(slope=0.02, matched=matched, alpha=0.7).run(15)
    assert best > 1.05
    assert rate >= 0.95 * best


@pytest.mark.parametrize(("slope", "draft_s", "read_s"), [(0.85, 0.3, 0.09), (0.02, 0.1, 0.01), (0.02, 0.1, 0.3)])
def test_a_model_with_lookup_is_no_slower_than_plain_decoding(slope: float, draft_s: float, read_s: float) -> None:
    """In the last case drafting pays, but not the reading of a prompt for 200 tokens."""
    simulation = Simulation(slope, matched=0.3, alpha=0.7, draft_s=draft_s, read_s=read_s)
    simulation.run(5)
    assert simulation.run(15) >= 0.95


def test_tokens_without_a_match_are_samples_of_plain_decoding() -> None:
    simulation = Simulation(slope=0.02, matched=0.0, alpha=0.5)
    assert simulation.run(1) == pytest.approx(1.0)
    assert simulation.auto.controller.switch.plain_seconds == pytest.approx(1.0)


# Reports ----------------------------------------------------------------------------------------------------------


def start() -> tuple[Decoder, AdaptiveDraftLength]:
    auto = auto_with(*DraftSource)
    plan = Plan(StopRules(100, ()), Always(), Exact(), auto, has_verifier=True, on_loop="ignore")
    return Decoder([0] * PROMPT, plan), auto


def decide(decoder: Decoder, accepted: int) -> None:
    while not isinstance(action := decoder.next(), Verify):
        decoder.drafted([])
    decoder.decided(Verdict(action.round, accepted, BONUS))


def test_a_model_has_not_read_what_lookup_has_read() -> None:
    decoder, _ = start()
    assert decoder.unread_length == PROMPT - 1
    decoder.drafted([Proposal(RIGHT, match_length=MATCH)])
    decide(decoder, 1)
    assert decoder.unread_length == PROMPT - 1, "looked-up tokens are a part of drafting"
    decide(decoder, 0)  # without a match
    decide(decoder, 0)
    assert decoder.unread_length == PROMPT + 1
    decoder.drafted([Proposal(RIGHT)])
    assert decoder.unread_length == 0
    decide(decoder, 1)
    assert decoder.unread_length == 0


def test_a_switched_off_model_must_read_what_lookup_drafts() -> None:
    decoder, auto = start()
    switch = auto.controller.switch
    switch.plain_seconds, switch.accounts[DraftSource.MODEL].budget = 1.0, -100.0
    action = decoder.next()
    assert isinstance(action, Draft)
    assert action.lookup_only
    decoder.drafted([Proposal(RIGHT, match_length=MATCH)])
    decide(decoder, 1)
    assert decoder.unread_length == PROMPT + 1, "one looked-up token, of which the bonus token is the last"
    switch.accounts[DraftSource.MODEL].budget = 0.0
    assert decoder.next() == Draft(1)


@pytest.mark.parametrize("sources", [(DraftSource.MODEL,), (DraftSource.LOOKUP,)])
def test_without_the_other_source_nothing_is_asked_of_it(sources: tuple[DraftSource, ...]) -> None:
    auto = auto_with(*sources)
    for budget in (0.0, -100.0):
        auto.controller.switch.plain_seconds = 1.0
        auto.controller.switch.accounts[sources[0]].budget = budget
        found = auto.tokens_to_draft(0, [])
        assert found.number == (budget == 0.0)
        assert found.lookup_only == (bool(found.number) and sources == (DraftSource.LOOKUP,))


@pytest.mark.parametrize("model_budget", [0.0, -100.0])
@pytest.mark.parametrize("lookup_budget", [0.0, -100.0])
def test_each_source_is_judged_at_most_once_for_a_draft(
    model_budget: float, lookup_budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, auto = start()
    switch = auto.controller.switch
    switch.plain_seconds = 1.0
    for source, budget in ((DraftSource.MODEL, model_budget), (DraftSource.LOOKUP, lookup_budget)):
        switch.accounts[source].budget = budget
    judged: list[DraftSource] = []
    judge = type(auto)._may_begin

    def recorded(auto: AdaptiveDraftLength, source: DraftSource, unread: int) -> bool:
        judged.append(source)
        return judge(auto, source, unread)

    monkeypatch.setattr(AdaptiveDraftLength, "_may_begin", recorded)
    action = decoder.next()
    assert len(judged) == len(set(judged)), judged
    if isinstance(action, Draft):
        assert action.lookup_only == (model_budget < 0)
    else:
        assert model_budget < 0 > lookup_budget


def test_the_prompt_is_read_by_the_model_and_in_no_time_by_lookup() -> None:
    decoder, auto = start()
    now = [0.0]
    observer = RoundObserver(decoder, lambda: now[0])
    read: list[tuple[int, float]] = []
    auto.controller.switch.read = lambda tokens, seconds, *_: read.append((tokens, seconds))  # type: ignore[method-assign]
    steps: list[tuple[Any, float]] = [(MATCH, 0.5), (0, 9.0), (0, 0.2)]
    for match_length, seconds in steps:
        began, now[0] = now[0], now[0] + seconds
        proposals = [Proposal(RIGHT, match_length=match_length)]
        observer.record_draft(proposals, began)
        decoder.drafted(proposals)
    assert read == [(PROMPT - 1, 9.0)]
    assert auto.controller.times.draft_seconds(DraftSource.MODEL) == pytest.approx(0.2)


def test_tokens_without_a_match_lower_the_throughput_that_a_draft_costs() -> None:
    """Rounds of 0.5 s bring five tokens. With as many unmatched tokens of 1 s, six tokens take 1.5 s."""
    costs = []
    for unmatched in (False, True):
        controller = AdaptiveDraftLength().controller
        for _ in range(400):
            controller.drafted(4, 0.04)
            controller.decided([0.1] * 4, 4, drafted=by_model(4, 0.04), seconds=0.46)
            controller.decoded_plain(1.0, is_unmatched=unmatched)
        costs.append(controller.token_costs[DraftSource.MODEL])
    assert costs == pytest.approx([5 / 0.5 * 0.01, 6 / 1.5 * 0.01], rel=0.02)
