"""Rounds of chains and trees: cases that can be counted by hand, and the simulator's rounds for chains."""

from __future__ import annotations

import argparse
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tree_traces import DEPTH, Pair, Place, TreeTrace, best_two, record, spread
from benchmarks.trees import (
    KINDS,
    Round,
    Shape,
    acceptance_rate,
    accepted,
    best_first,
    by_margin,
    by_oracle,
    by_path,
    calibrate,
    chain,
    compare,
    decide,
    draft_sizes,
    drafted_pairs,
    hit_rate,
    one_branch,
    synthetic,
    to_trace,
)
from outrider import local
from outrider.config import GenerationSettings
from outrider.engines.base import Prompt
from outrider.evals.manifest import Item
from outrider.netem.conditions import Conditions
from outrider.planning.costs import StepCosts
from outrider.planning.simulator import Setup, simulate
from outrider.planning.trace_recorder import Recorder
from tests.support.fakes import HashRows, ScriptedEngine, reference_output

SURE, UNSURE, ASTRAY = (0.9, 0.05), (0.5, 0.4), (0.3, 0.29)
RTT, DRAFT = 0.1, 0.01


def made(*places: tuple[bool, bool, Pair]) -> TreeTrace:
    return TreeTrace("t", tuple(Place(*each, () if each[0] else (ASTRAY,) * 23) for each in places))


RIGHT, SECOND, NEITHER = (True, False, SURE), (False, True, UNSURE), (False, False, UNSURE)
TEXT = made(RIGHT, SECOND, RIGHT, RIGHT, NEITHER, RIGHT)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(4, {}), 1),
        (Shape(1, {}), 1),
        (Shape(2, {0: 2}), 1),  # the branch is at a right token
        (Shape(2, {1: 1}), 2),
        (Shape(2, {1: 3}), 4),
        (Shape(2, {1: 9}), 4),  # the branch is wrong at position 4
        (Shape(1, {1: 3}), 4),  # the branch stands in place of the spine's next token
    ],
)
def test_accepted_tokens(shape: Shape, expected: int) -> None:
    assert accepted(TEXT, 0, shape) == expected


def test_a_wrong_second_token_is_not_accepted() -> None:
    assert accepted(TEXT, 4, Shape(1, {0: 2})) == 0


def test_rounds_of_a_chain_and_of_a_tree() -> None:
    assert draft_sizes(TEXT, 3, chain) == [(3, 1), (3, 2), (1, 1)]
    # one step less than tokens: the second-best token is free. The last draft has room for one token.
    assert draft_sizes(TEXT, 3, one_branch(by_margin, 1)) == [(2, 2), (2, 1), (1, 1)]


def test_a_draft_behind_a_wrong_token_is_the_drafters_own() -> None:
    assert drafted_pairs(TEXT, 0, 4) == [SURE, UNSURE, ASTRAY, ASTRAY]
    assert drafted_pairs(TEXT, 2, 2) == [SURE, SURE]


def test_choices_of_a_position() -> None:
    assert by_margin(TEXT, 0, 2) == 1
    assert by_margin(TEXT, 0, 4) == 2  # behind the wrong token the drafter is less sure
    assert by_path(TEXT, 0, 4) == 1
    assert [by_oracle(TEXT, 0, 4), by_oracle(TEXT, 2, 2)] == [1, 1]


def test_best_first_takes_the_most_probable_nodes() -> None:
    shape = best_first(0.5)(TEXT, 0, 3)
    # reached: 0.9, 0.45, 0.135 along the spine; the branch at position 1 has 0.9 · 0.4 and half of it
    assert shape == Shape(2, {1: 1})
    assert best_first(0.5)(TEXT, 2, 2) == Shape(2, {})


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(KINDS),
    alpha=st.sampled_from((0.3, 0.6, 0.9)),
    size=st.sampled_from((1, 2, 5, 8)),
)
def test_a_chain_takes_the_rounds_and_the_time_of_the_simulator(seed: int, kind: str, alpha: float, size: int) -> None:
    text = synthetic(kind, alpha, 0.5, seed, length=40)
    costs = StepCosts(draft_s=DRAFT, verify_s=0.005)
    done = simulate(to_trace(text), Setup(k=size, net=Conditions(rtt=RTT)), costs, ends=frozenset())
    rounds = draft_sizes(text, size, chain)
    assert (len(rounds), sum(steps for steps, _ in rounds)) == (done.rounds, done.drafted)
    assert Round(RTT + 0.005, DRAFT).seconds(rounds) == pytest.approx(done.total_s)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), size=st.integers(2, 12), data=st.data())
def test_a_tree_verifies_as_many_tokens_as_a_chain(seed: int, kind: str, size: int, data: st.DataObject) -> None:
    text, length = synthetic(kind, 0.7, 0.5, seed, length=30), data.draw(st.integers(1, size - 1))
    for policy in (one_branch(by_margin, length), one_branch(by_path, length), best_first(0.7)):
        shape = policy(text, 0, size)
        assert shape.spine + sum(shape.branches.values()) == size
        assert all(0 <= at <= shape.spine for at in shape.branches)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), size=st.integers(2, 12), data=st.data())
def test_no_choice_of_a_position_accepts_more_than_the_oracle(
    seed: int, kind: str, size: int, data: st.DataObject
) -> None:
    text, length = synthetic(kind, 0.7, 0.5, seed, length=30), data.draw(st.integers(1, size - 1))
    best = accepted(text, 0, one_branch(by_oracle, length)(text, 0, size))
    for choose in (by_margin, by_path):
        assert accepted(text, 0, one_branch(choose, length)(text, 0, size)) <= best


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_traces_have_the_chosen_rates(kind: str) -> None:
    texts = [synthetic(kind, 0.8, 0.5, seed) for seed in range(40)]
    assert acceptance_rate(texts) == pytest.approx(0.8, abs=0.03)
    assert hit_rate(texts) == pytest.approx(0.5, abs=0.06)


def test_calibration_replaces_probabilities_by_rates() -> None:
    found = calibrate([TEXT])[0].places
    assert found[0].pair == (1.0, 0.0)
    assert found[1].pair == (0.0, 0.5)
    assert found[1].astray[0] == (0.0, 0.5)


def test_the_decision_takes_the_median_at_the_best_size() -> None:
    args = argparse.Namespace(rtt_ms=100.0, verdict_ms=5.4)
    never = [synthetic("uninformed", 0.7, 0.0, seed, length=40) for seed in range(4)]
    always = [synthetic("informed", 0.5, 1.0, seed, length=40) for seed in range(4)]
    assert not decide({"never": compare(never, args)})["build"]
    assert decide({"always": compare(always, args)})["build"]


def test_a_recorded_trace_is_what_the_drafter_would_draft() -> None:
    vocabulary, prompt = 24, (3, 1, 4)
    draft, target = (ScriptedEngine(HashRows(seed, vocabulary), vocabulary) for seed in (2, 1))
    recorder = Recorder(draft, local(target), GenerationSettings(max_new_tokens=30))
    trace = record(recorder, "t", Prompt(prompt))
    output = reference_output(HashRows(1, vocabulary), list(prompt), vocabulary, max_new_tokens=30)
    assert len(trace.places) == len(output)
    for n, place in enumerate(trace.places):
        before = [*prompt, *output[:n]]
        drafted = reference_output(HashRows(2, vocabulary), before, vocabulary, max_new_tokens=1)
        assert place.best_right == (drafted == output[n : n + 1])
        assert len(place.astray) == (0 if place.best_right else DEPTH)
        if place.astray:
            assert place.astray[0] == pytest.approx(best_two(HashRows(2, vocabulary)((*before, *drafted)))[1])
    assert 0 < statistics.fmean(place.best_right for place in trace.places) < 1


def test_categories_take_turns() -> None:
    items = [Item(str(n), prompt="x", labels={"category": name}) for n, name in enumerate("aabbb")]
    assert [item.id for item in spread(items)] == ["0", "2", "1", "3", "4"]
