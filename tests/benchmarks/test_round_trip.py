"""Speculation and streaming at costs that can be worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.round_trip import (
    OVERHEAD_MS,
    STREAM_MS,
    TOKENS,
    VERDICT_MS,
    Cell,
    bisect,
    breakeven_ms,
    run,
    speculate,
    step_costs,
    stream,
    traces,
    with_prompt,
)
from outrider.netem.conditions import Conditions
from outrider.planning.simulator import Setup


@pytest.mark.parametrize("alpha", [0.6, 0.9])
def test_outputs_have_exactly_the_acceptance_rate(alpha: float) -> None:
    for trace in traces(alpha):
        assert sum(trace.agrees) == round(alpha * TOKENS)


def test_a_stream_waits_for_one_round_trip() -> None:
    far, near = (stream(step_costs(10.0), Conditions(rtt=rtt)).token_s * TOKENS for rtt in (0.2, 0.0))
    assert far - near == pytest.approx(0.2)
    assert near == pytest.approx((TOKENS * STREAM_MS + OVERHEAD_MS) / 1e3)


def test_a_sequential_round_of_five_drafts_costs_its_parts() -> None:
    done = run(0.8, step_costs(10.0), Setup(k=5, net=Conditions(rtt=0.05)))
    assert step_costs(10.0).computing_s(6, first=False) == pytest.approx(VERDICT_MS / 1e3)
    # blocks at the end of an output are shorter, and no verdict reads the newest token twice
    round_s = (50 + VERDICT_MS + OVERHEAD_MS + 5 * 10) / 1e3
    assert done.token_s * done.tokens == pytest.approx(done.rounds * round_s, rel=0.02)


def test_the_best_k_is_no_worse_than_any_other() -> None:
    costs, net = step_costs(0.75), Conditions(rtt=0.05)
    best = speculate(0.9, costs, net, "sequential")
    assert best.k >= 16
    assert best.rate > Cell(1 / run(0.9, costs, Setup(k=5, net=net)).token_s, 5).rate


def test_the_prompt_delays_the_first_token_alone() -> None:
    costs = step_costs(10.0)
    plain, read = (run(0.8, c, Setup(k=5)) for c in (costs, with_prompt(costs)))
    assert read.ttft_s - plain.ttft_s == pytest.approx(read.total_s - plain.total_s)
    assert 0.73 < read.ttft_s - plain.ttft_s < 0.75


def test_bisection() -> None:
    assert bisect(lambda value: value < 100.0, 512.0) == pytest.approx(100.0, abs=2.0)
    assert bisect(lambda value: False, 512.0) is None


def test_speculation_breaks_even_where_a_streamed_token_is_slow() -> None:
    """Sequential rounds of k drafts pay up to (E − 1)·t_v − k·t_d (docs/design/maths.md, "Cloud capacity")."""
    assert breakeven_ms(0.6, 40.0, 4.6) is None
    slow = breakeven_ms(0.8, 10.0, 60.0)
    assert slow is not None
    assert slow > 2.36 * 60 - 4 * 10 - 15
