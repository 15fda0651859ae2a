"""The tables of `outrider plan` and `outrider sweep`: what they say of each option, in a pipe and in a terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from outrider.cli import plan, terminal
from outrider.planning.costs import StepCosts
from outrider.planning.planner import DRIVERS, Goal, Planner
from outrider.planning.sweep import sweep
from tests.support.synthetic_traces import COSTS, NEAR, TRACES

LONG = "entropy.mean:0.0005893"


def planned(capsys: pytest.CaptureFixture[str], aim: Any) -> str:
    plan._show_plan(NEAR.rank(Goal(aim, budget=1.0)), COSTS, "rtt=20ms")
    return capsys.readouterr().out


def test_a_free_best_option_is_described_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, "privacy")
    assert "inf" not in said
    advice = "Stay on the edge (--cloud none): by this goal it costs nothing, and every other option costs something."
    assert said.splitlines()[-1].startswith(f"{advice} It changed 4 of 4 outputs here")
    assert "times as much by this goal" in planned(capsys, "latency")


@pytest.mark.parametrize("aim", ["privacy", "latency"])
def test_what_has_no_end_is_said_in_json_that_every_reader_takes(aim: Any) -> None:
    options = plan._options(NEAR.rank(Goal(aim, budget=1.0)))
    assert json.dumps(options, allow_nan=False)
    assert any(option["pays_up_to_rtt"] == "over 2000 ms" for option in options)


def test_the_bytes_are_shown_where_they_are_what_is_ranked_by(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bytes up per output" in (said := planned(capsys, "privacy"))
    assert f"{NEAR.rank(Goal('privacy')).named('cloud-only').summary.bytes_up:,.0f}" in said
    assert "bytes" not in planned(capsys, "latency")


def test_changed_is_said_to_count_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, "latency")
    assert "changed: outputs that differ from the cloud's, and the share of tokens" in said
    assert "outputs changed" in said
    assert "tokens changed" in said
    assert "4 of 4" in said


def test_what_few_traces_leave_open_is_said_of_what_is_not_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert "It changed" not in plan._verdict(NEAR.rank(Goal()))
    (option,) = (option for option in NEAR.rank(Goal(budget=1.0)).options if option.name == "entropy:0.4 sequential")
    assert "of 4 outputs here, and may change up to" in plan._sample(option)


def test_without_a_budget_the_default_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    plan._show_plan(NEAR.rank(Goal("latency")), COSTS, "rtt=20ms")
    said = capsys.readouterr().out
    assert plan.NO_BUDGET in said
    assert "over budget" not in said
    assert "not exact" in said
    plan._show_plan(NEAR.rank(Goal("latency", budget=1e-6)), COSTS, "rtt=20ms")
    said = capsys.readouterr().out
    assert "over budget" in said
    assert plan.NO_BUDGET not in said
    plan._show_plan(NEAR.rank(Goal("privacy")), COSTS, "rtt=20ms")
    assert plan.NO_BUDGET not in capsys.readouterr().out


def test_what_is_piped_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, "privacy")
    assert all(f"\n{gate} {driver} " in said for gate in ("entropy:0.4", "entropy:0.9") for driver in DRIVERS)
    rows = sweep(TRACES[:2], COSTS, gates=[LONG], drivers=DRIVERS)
    plan._show_sweep(rows, rows)
    assert capsys.readouterr().out.count(LONG) == 2


def test_a_narrow_terminal_folds_a_gate_and_cuts_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sweep(TRACES[:2], COSTS, gates=[LONG])
    monkeypatch.setattr(terminal, "stdout", lambda: Console(width=60))
    plan._show_sweep(rows, rows)
    said = capsys.readouterr().out
    assert "…" not in said
    assert "".join(line.split(" ")[0] for line in said.splitlines()[1:]).endswith(LONG)


def test_the_plan_says_that_no_draft_length_pays(capsys: pytest.CaptureFixture[str]) -> None:
    cpu = StepCosts(draft_s=0.02, verify_s=0.06, verify_per_token_s=0.05)
    ranking = Planner(TRACES[:4], cpu, ks=(1, 4)).rank(Goal())
    plan._show_plan(ranking, cpu, "none")
    said = " ".join(capsys.readouterr().out.split())
    fastest = f"{1000 * ranking.plain.speculative_token_s:.1f} at k 1, its fastest"
    assert "Plain decoding of the target is faster than exact speculation at any k: 60.0 ms per token" in said
    assert fastest in said
    assert "Use the cloud alone (--edge none)" in said
    plan._show_plan(NEAR.rank(Goal()), COSTS, "none")
    assert "Plain decoding" not in capsys.readouterr().out
