"""Gates worth trying: what they would do with blocks, and that none does better."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.decoding.gate import SIGNAL_NAMES, Signals, Threshold
from outrider.planning.gate_candidates import CLOUD_SHARES, evaluate_signal, frontier, thresholds
from outrider.planning.planner import Goal, Planner
from outrider.planning.simulator import Setup, replay, summarise
from outrider.planning.sweep import sweep
from outrider.planning.traces import Trace
from tests.support import adversaries
from tests.support.synthetic_traces import COSTS

TRACES = [adversaries.trace(adversaries.PAIRS["honest"](seed)) for seed in range(16)]


@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("signal", SIGNAL_NAMES)
def test_what_is_tried_is_what_a_simulation_says(k: int, signal: str) -> None:
    tried = evaluate_signal(TRACES, k, signal)  # type: ignore[arg-type]
    for n in range(0, len(tried.thresholds), 40):
        found = summarise(replay(TRACES, Setup(gate=tried.thresholds[n], k=k), COSTS))
        assert tried.cloud_shares[n] == pytest.approx(found.cloud_share, abs=0.01)
        assert tried.changed[n] == pytest.approx(found.changed_outputs * len(TRACES))


def test_the_grid_of_a_sweep_leaves_no_wide_gap() -> None:
    rows = sweep(TRACES, COSTS, gates=["always", *thresholds(TRACES), "never"])
    shares = sorted(row.summary.cloud_share for row in rows)
    assert shares[0] == 0.0
    assert all(later - earlier < 0.26 for earlier, later in pairwise(shares))
    assert sum(0 < share < 0.25 for share in shares) >= 3
    assert len(thresholds(TRACES)) <= len(CLOUD_SHARES)


@pytest.mark.parametrize(("budget", "ks"), [(0.005, (1, 5)), (0.02, (3,)), (0.1, (2, 8))])
def test_the_plan_takes_as_little_from_the_cloud_as_any_gate_that_changes_no_more(
    budget: float, ks: tuple[int, ...]
) -> None:
    planner = Planner(TRACES, COSTS, gates=frontier(TRACES, ks, budget), ks=ks)
    best = planner.rank(Goal("quality", budget)).best
    changed = round(best.summary.changed_outputs * len(TRACES))
    tried = [evaluate_signal(TRACES, k, signal) for k in ks for signal in SIGNAL_NAMES]
    least = min(float(found.cloud_shares[found.changed <= changed].min(initial=1.0)) for found in tried)
    assert best.allowed
    assert best.summary.cloud_share <= least + 0.02


def test_a_frontier_changes_more_and_more_outputs_for_less_and_less_of_the_cloud() -> None:
    rows = sweep(TRACES, COSTS, gates=frontier(TRACES, (5,), 0.1))
    assert [row.summary.changed_outputs for row in rows] == sorted(row.summary.changed_outputs for row in rows)
    shares = [row.summary.cloud_share for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert rows[0].summary.changed_outputs == 0.0
    assert len(rows) > 2


# What few traces show -----------------------------------------------------------------------------------------------


def nearly_right(outputs: int, wrong: int, length: int = 100) -> list[Trace]:
    """Of some outputs one token each is wrong, and the drafter is no less sure of it."""
    sure = (Signals(0.1, 0.9, 0.1, 0.1),) * length
    target = tuple(range(3, length + 3))
    right = Trace("right", 1, target, target, sure)
    other = replace(right, draft=(*target[:-1], 1))
    return [replace(other if n < wrong else right, id=str(n)) for n in range(outputs)]


@pytest.mark.parametrize(("outputs", "wrong"), [(6, 0), (10, 1), (30, 3)])
def test_few_traces_do_not_recommend_the_edge_alone(outputs: int, wrong: int) -> None:
    traces = nearly_right(outputs, wrong)
    planner = Planner(traces, COSTS, gates=["never", *frontier(traces, (5,), 0.005)], ks=(5,))
    ranking = planner.rank(Goal("quality", 0.005))
    assert ranking.named("edge-only").summary.disagreement <= 0.005
    assert not ranking.named("edge-only").allowed
    assert ranking.best.summary.cloud_share > 0.0


def test_many_traces_do() -> None:
    ranking = Planner(nearly_right(1500, 0, length=3), COSTS, ks=(3,)).rank(Goal("quality", 0.005))
    assert ranking.best.name == "edge-only"


def test_a_gate_whose_few_errors_may_be_more_elsewhere_is_not_allowed() -> None:
    asks = Threshold("entropy", 0.05)
    traces = [*nearly_right(10, 1), *[replace(t, signals=(Signals(0, 1, 0, 0),) * 100) for t in nearly_right(2, 2)]]
    traces = [replace(trace, id=str(n)) for n, trace in enumerate(traces)]
    found = Planner(traces, COSTS, gates=[asks], ks=(5,)).rank(Goal("quality", 0.003)).named(f"{asks} sequential")
    assert 0 < found.summary.disagreement <= 0.003 < found.summary.disagreement_high
    assert not found.allowed


def test_a_budget_of_nothing_is_kept_by_what_is_exact() -> None:
    traces = nearly_right(4, 0)
    options = Planner(traces, COSTS, gates=["entropy:0.05"], ks=(5,)).rank(Goal("quality", 0.0)).options
    assert {option.name for option in options if option.allowed} == {
        "cloud-only",
        "exact sequential",
        "exact pipelined",
    }
