"""`k auto` with a draft model and prompt lookup: each source drafts where it pays, and never changes the output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.draft_sources import GRID, SOURCES, Case, Simulation, rates
from outrider import SpeculativeDecoder, local, prompt_lookup
from outrider.decoding.draft_source import DraftSource
from outrider.decoding.speculation_switch import SpeculationSwitch
from outrider.edge.round_observer import RoundObserver
from outrider.edge.verifier_session import PipelinedVerifier
from tests.support.fakes import FarVerifier, HashRows, ScriptedEngine, blend

SLOW_MODEL = Case(1.5, 0.1, 0.02, matched=0.3, copied=0.7, drafted=0.7, lasting=True)
CHEAP_MODEL = Case(0.02, 0.002, 0.2, matched=0.5, copied=0.05, drafted=0.9, lasting=True)
VOCAB = 24


@settings(max_examples=8, deadline=None)
@given(case=st.sampled_from(GRID))
def test_both_sources_are_as_fast_as_the_better_one_alone(case: Case) -> None:
    """The cases are those of benchmarks/draft_sources.py, with the same figures on every machine.

    Where matches pass, two generations of the same text may meet different ones, which adds noise.
    """
    found = rates(case, 12)
    assert found["both"] >= (0.95 if case.lasting else 0.92) * max(found["model"], found["lookup"])


def drafts_and_rate(case: Case) -> tuple[dict[DraftSource, int], float]:
    simulation = Simulation(case, SOURCES["both"])
    simulation.run(5)
    before = dict(simulation.drafts)
    rate = simulation.run(12)
    return {source: count - before[source] for source, count in simulation.drafts.items()}, rate


def test_a_model_that_costs_more_than_it_saves_does_not_stop_lookup() -> None:
    drafts, rate = drafts_and_rate(SLOW_MODEL)
    assert rate > 1.2
    assert 20 * drafts[DraftSource.MODEL] < drafts[DraftSource.LOOKUP]


def test_lookup_that_costs_more_than_it_saves_does_not_stop_the_model() -> None:
    drafts, rate = drafts_and_rate(CHEAP_MODEL)
    assert rate > 2.0
    assert 20 * drafts[DraftSource.LOOKUP] < drafts[DraftSource.MODEL]


def test_one_switch_for_both_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SpeculationSwitch.should_speculate
    monkeypatch.setattr(SpeculationSwitch, "should_speculate", lambda self, unread, *_: original(self, unread))
    assert drafts_and_rate(SLOW_MODEL)[1] < 1.05


def test_a_model_returns_when_it_becomes_cheap() -> None:
    """Probes do not end, although lookup alone is faster than plain decoding."""
    simulation = Simulation(replace(SLOW_MODEL, drafted=0.9), SOURCES["both"])
    slow = simulation.run(10)
    simulation.case = replace(simulation.case, draft_s=0.02, read_s=0.002)
    simulation.run(30)
    assert simulation.run(5) > 1.5 * slow


# Never the output -------------------------------------------------------------------------------------------------


@contextmanager
def decisions(of_model: list[bool], of_lookup: list[bool]) -> Iterator[None]:
    """Let the switch decide for each source by a schedule over rounds."""
    schedules, rounds = {DraftSource.MODEL: of_model, DraftSource.LOOKUP: of_lookup}, [0]
    record_verdict = RoundObserver.record_verdict

    def should_speculate(_switch: object, _unread: int, source: DraftSource = DraftSource.MODEL) -> bool:
        return schedules[source][rounds[0] % len(schedules[source])]

    def count_round(*report: Any) -> None:
        record_verdict(*report)
        rounds[0] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculationSwitch, "should_speculate", should_speculate)
        patch.setattr(RoundObserver, "record_verdict", count_round)
        yield


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    of_model=st.lists(st.booleans(), min_size=1, max_size=9),
    of_lookup=st.lists(st.booleans(), min_size=1, max_size=9),
    share=st.sampled_from((0.0, 0.2, 0.6)),
    driver=st.sampled_from(("sequential", "pipelined")),
    polls=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    temperature=st.sampled_from((0.0, 1.0)),
)
def test_the_output_is_the_targets_whatever_each_source_does(
    prompt: list[int],
    of_model: list[bool],
    of_lookup: list[bool],
    share: float,
    driver: Any,
    polls: list[int],
    temperature: float,
) -> None:
    target = ScriptedEngine(HashRows(4, VOCAB, memory=2), VOCAB, eos_ids=(0,))
    model = ScriptedEngine(blend(target.rows, HashRows(5, VOCAB, memory=2), share), VOCAB)
    verifier = FarVerifier(local(target), polls=polls)
    assert isinstance(verifier, PipelinedVerifier)
    wanted = SpeculativeDecoder(None, local(target)).generate(prompt, max_new_tokens=40, temperature=temperature)
    decoder = SpeculativeDecoder(model, verifier, lookup=prompt_lookup(), k="auto", driver=driver)
    with decisions(of_model, of_lookup):
        for _ in range(2):
            result = decoder.generate(prompt, max_new_tokens=40, temperature=temperature)
            assert result.token_ids == wanted.token_ids
            assert result.guarantee == "exact"
