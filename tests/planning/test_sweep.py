"""Sweeps: a row for each combination, and the front of those worth having."""

from __future__ import annotations

import json
import random

import pytest

from outrider.errors import SettingsError
from outrider.netem.conditions import parse_conditions
from outrider.planning.gate_candidates import thresholds
from outrider.planning.simulator import Setup, replay, summarise
from outrider.planning.sweep import Row, pareto, sweep
from tests.support.synthetic_traces import COSTS, TRACES

GATES = ["always", "never", *thresholds(TRACES, cloud_shares=(0.8, 0.6, 0.4, 0.2))]
NETS = [parse_conditions("none"), parse_conditions("rtt=50ms")]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return sweep(TRACES[:5], COSTS, gates=GATES, ks=(1, 5), drivers=("sequential", "pipelined"), nets=NETS)


def test_there_is_a_row_for_each_combination(rows: list[Row]) -> None:
    assert len(rows) == len({(row.gate, row.k, row.driver, row.net) for row in rows}) == 6 * 2 * 2 * 2
    assert {row.rtt_s for row in rows} == {0.0, 0.05}


def test_a_row_is_what_a_simulation_says(rows: list[Row]) -> None:
    row = next(row for row in rows if (row.gate, row.k, row.driver, row.net) == ("never", 5, "sequential", "rtt=50ms"))
    setup = Setup(gate="never", net=NETS[1])
    assert row.summary == summarise(replay(TRACES[:5], setup, COSTS))


def test_what_is_shared_is_kept() -> None:
    (row,) = sweep(TRACES[:2], COSTS, gates=["entropy:0.9"], base=Setup(scope="repair", queue_s=1.0))
    setup = Setup(gate="entropy:0.9", scope="repair", queue_s=1.0)
    assert row.summary == summarise(replay(TRACES[:2], setup, COSTS))


def test_the_front_is_what_nothing_beats(rows: list[Row]) -> None:
    front = pareto(random.Random(1).sample(rows, len(rows)))
    points = [(row.summary.cloud_share, row.summary.disagreement) for row in front]
    assert points == sorted(points, reverse=True)
    assert sorted(point[1] for point in points) == [point[1] for point in points]
    for row in rows:
        mine = (row.summary.cloud_share, row.summary.disagreement)
        assert any(share <= mine[0] and wrong <= mine[1] for share, wrong in points)
    assert not any(
        beats != point and beats[0] <= point[0] and beats[1] <= point[1] for beats in points for point in points
    )


def test_of_equals_the_fastest_is_on_the_front(rows: list[Row]) -> None:
    never = [row for row in rows if row.gate == "never"]
    (kept,) = pareto(never)
    assert kept.summary.total_s == min(row.summary.total_s for row in never)
    assert pareto([]) == []


def test_rows_are_flat_and_readable_by_others(rows: list[Row]) -> None:
    value = json.loads(json.dumps(rows[0].to_json()))
    assert value["gate"] == "always"
    assert value["cloud_share"] == 1.0
    assert "summary" not in value
    assert isinstance(rows[0], Row)


def test_a_gate_that_there_is_not_is_refused_before_anything_runs() -> None:
    with pytest.raises(SettingsError, match="gate"):
        sweep(TRACES, COSTS, gates=["always", "entropie:1"])
