"""The planner: what it ranks first is what simulation says, under each goal and budget."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.costmodel import Network, Speculation, expected_tokens
from outrider.errors import DataError, SettingsError
from outrider.netem.conditions import parse_conditions
from outrider.planning.costs import StepCosts
from outrider.planning.planner import DRIVERS, MAX_RTT_S, Goal, Planner, find_root
from outrider.planning.simulator import Setup, replay
from outrider.planning.traces import Trace
from outrider.sampling.sampler import Signals
from tests.support.synthetic_traces import COSTS, GATES, NEAR, TRACES

FAST = StepCosts(draft_s=0.001, verify_s=0.03)


def test_every_mode_is_ranked() -> None:
    ranking = NEAR.rank(Goal())
    names = {f"{gate} {driver}" for gate in ("exact", *GATES) for driver in DRIVERS} | {"edge-only", "cloud-only"}
    assert {option.name for option in ranking.options} == names
    assert ranking.best is ranking.options[0]
    assert ranking.named("cloud-only").breakeven_rtt_s is None


@pytest.mark.parametrize("aim", ["latency", "cloud", "quality", "privacy"])
@pytest.mark.parametrize("budget", [None, 0.0, 0.1, 1.0])
def test_options_within_the_budget_come_first_by_their_worth(aim: Any, budget: float | None) -> None:
    goal = Goal(aim, budget)
    options = NEAR.rank(goal).options
    allowed = [option for option in options if option.allowed]
    assert list(options[: len(allowed)]) == allowed
    assert all(option.summary.disagreement <= goal.limit for option in allowed)
    worths = [goal.worth(option.summary) for option in allowed]
    assert worths == sorted(worths)
    assert options[0].behind == 1.0


def test_by_default_nothing_lossy_wins() -> None:
    assert NEAR.rank(Goal()).best.summary.disagreement == 0.0
    assert NEAR.rank(Goal(budget=1.0)).best.name == "edge-only"
    assert NEAR.rank(Goal("privacy")).best.name == "edge-only"


def test_the_best_k_is_chosen() -> None:
    chosen = NEAR.rank(Goal()).named("exact sequential")
    others = [NEAR.simulate(replace(chosen.setup, k=k)).total_s for k in (1, 4)]
    assert chosen.summary.total_s == min(others)


def test_far_away_cloud_only_is_faster_and_the_break_even_says_from_where() -> None:
    planner = Planner(TRACES[:4], FAST, ks=(5,))
    setup = Setup(k=5)
    edge = planner.breakeven_rtt_s(setup)
    assert edge is not None
    assert 0.0 < edge < MAX_RTT_S
    for rtt, faster in ((edge - 0.002, True), (edge + 0.002, False)):
        net = replace(setup.net, rtt=rtt)
        alone = planner.simulate(Setup("cloud-only", net=net)).total_s
        assert (planner.simulate(replace(setup, net=net)).total_s < alone) is faster
    far = Planner(TRACES[:4], FAST, Setup(net=replace(setup.net, rtt=edge + 0.1)), ks=(5,))
    assert far.rank(Goal()).best.name == "cloud-only"


def test_break_evens_at_either_end() -> None:
    slow = Planner(TRACES[:2], StepCosts(draft_s=0.1, verify_s=0.01), ks=(3,))
    assert slow.breakeven_rtt_s(Setup(k=3)) == 0.0
    assert NEAR.breakeven_rtt_s(Setup("edge-only")) == math.inf


def independent_trace(acceptance: float, seed: int, length: int = 100) -> Trace:
    """A trace whose drafts are accepted independently, with one probability."""
    rng, target = random.Random(seed), tuple(range(2, length + 2))
    draft = tuple(token if rng.random() < acceptance else 1 for token in target)
    return Trace(str(seed), 1, target, draft, (Signals(0.5, 0.5, 0.5, 0.5),) * length)


def test_the_simulation_agrees_with_the_formula() -> None:
    alpha, k = 0.8, 4
    traces = [independent_trace(alpha, n) for n in range(40)]
    found = Planner(traces, FAST).simulate(Setup(net=parse_conditions("rtt=30ms"), k=k))
    formula = Speculation(alpha, FAST.draft_s, lambda _: FAST.verify_s, Network(0.03))
    assert found.token_s == pytest.approx(formula.sequential_s(k), rel=0.03)
    assert found.tokens / found.rounds == pytest.approx(expected_tokens(alpha, k), rel=0.03)


def test_a_root_is_found_to_a_millisecond_on_lines_and_steps() -> None:
    assert find_root(lambda x: 3 * x - 1, 0.0, 2.0) == pytest.approx(1 / 3, abs=1e-3)
    assert find_root(lambda x: 1.0 if x > 0.7 else -1e-9, 0.0, 2.0) == pytest.approx(0.7, abs=1e-3)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Goal("speed"), "goal"),  # type: ignore[arg-type]
        (lambda: Goal(budget=1.5), "budget"),
        (lambda: Planner(TRACES, COSTS, gates=["sometimes"]), "gate"),
    ],
)
def test_invalid_goals_and_gates_are_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        make()


def test_without_traces_there_is_nothing_to_plan() -> None:
    with pytest.raises(DataError, match="traces"):
        Planner([], COSTS).rank(Goal())


def test_plain_decoding_is_compared_with_the_fastest_k() -> None:
    """Here a verdict on k drafts takes as long as k + 1 tokens of the target, as on a CPU without idle arithmetic."""
    cpu = StepCosts(draft_s=0.02, verify_s=0.06, verify_per_token_s=0.05)
    plain = Planner(TRACES[:4], cpu, ks=(1, 2, 4)).rank(Goal()).plain
    assert plain.is_faster
    assert plain.token_s == pytest.approx(0.06, rel=0.05)
    speeds = [
        Planner(TRACES[:4], cpu, ks=(k,)).simulate(Setup(k=k, driver=driver)).token_s
        for k in (1, 2, 4)
        for driver in DRIVERS
    ]
    assert plain.speculative_token_s == min(speeds) > 0.06
    assert not Planner(TRACES[:4], FAST, ks=(1, 4)).rank(Goal()).plain.is_faster


def test_auto_is_plain_decoding_where_no_k_pays() -> None:
    cpu = StepCosts(draft_s=0.02, verify_s=0.06, verify_per_token_s=0.05)
    outcomes = replay(TRACES, Setup(k="auto", net=parse_conditions("rtt=40ms")), cpu)
    assert sum(outcome.drafted for outcome in outcomes[3:]) < 0.1 * sum(outcome.tokens for outcome in outcomes[3:])
    alone = replay(TRACES, Setup("cloud-only", net=parse_conditions("rtt=40ms")), cpu)
    found, best = (sum(outcome.total_s for outcome in each[3:]) for each in (outcomes, alone))
    assert found <= best / 0.95
