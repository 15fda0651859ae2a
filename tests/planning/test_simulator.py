"""Replays in virtual time: identities that hold for every trace, and counts that can be done by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import DataError, SettingsError
from outrider.netem.conditions import Conditions, parse_conditions
from outrider.planning.costs import TRANSPORT_DOWN, StepCosts, md1_wait_s, median_costs
from outrider.planning.simulator import Outcome, Setup, end_tokens, replay, simulate, summarise
from outrider.planning.traces import Trace
from outrider.planning.virtual_time import FRAMING, WINDOW, SimulatedLink
from tests.support.synthetic_traces import COSTS, ENDS, EOS, TRACES, trace

DRIVERS: tuple[Any, ...] = ("sequential", "pipelined")
EXACT = ("always", "trigger:entropy:0.5", "trigger:never")
LOSSY = ("never", "entropy:0.5", "entropy:0.2|logprob:1.5")


def outcomes(setup: Setup, costs: StepCosts = COSTS) -> list[Outcome]:
    return replay(TRACES, setup, costs, ends=ENDS)


# Identities -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    acceptance=st.floats(0, 1),
    gate=st.sampled_from(EXACT),
    k=st.sampled_from((1, 3, 7, "auto")),
    driver=st.sampled_from(DRIVERS),
    scope=st.sampled_from(("block", "repair")),
    net=st.sampled_from(("none", "rtt=50ms", "rtt=10ms,bw=100kbit")),
)
def test_an_exact_gate_brings_the_targets_output(
    seed: int, acceptance: float, gate: str, k: Any, driver: Any, scope: Any, net: str
) -> None:
    text = trace(seed, acceptance=acceptance)
    done = simulate(
        text, Setup(gate=gate, k=k, driver=driver, scope=scope, net=parse_conditions(net)), COSTS, ends=ENDS
    )
    assert (done.tokens, done.cloud_tokens, done.disagreements) == (len(text.target), len(text.target), 0)
    assert done.cloud_share == 1.0
    assert done.ttft_s <= done.total_s


@pytest.mark.parametrize("gate", LOSSY)
@pytest.mark.parametrize("driver", DRIVERS)
def test_skipped_and_escalated_blocks_add_up(gate: str, driver: Any) -> None:
    for text, done in zip(TRACES, outcomes(Setup(gate=gate, driver=driver)), strict=True):
        assert done.cloud_tokens + done.edge_tokens == done.tokens <= len(text.target) + 1
        assert done.disagreements <= sum(not same for same in text.agrees)
        assert done.skipped + done.escalated == done.blocks


def test_repair_leaves_fewer_disagreements() -> None:
    kept, repaired = (
        sum(done.disagreements for done in outcomes(Setup(gate="entropy:0.9", scope=scope)))
        for scope in ("block", "repair")
    )
    assert 0 <= repaired < kept


@pytest.mark.parametrize("setup", [Setup(gate="never"), Setup(gate="never", driver="pipelined"), Setup("edge-only")])
def test_never_asking_is_edge_only(setup: Setup) -> None:
    for text, done in zip(TRACES, outcomes(replace(setup, net=parse_conditions("rtt=80ms"))), strict=True):
        end = text.draft.index(EOS) + 1 if EOS in text.draft else len(text.draft) + 1
        assert (done.tokens, done.edge_tokens, done.rounds, done.cloud_share) == (end, end, 0, 0.0)
        assert done.disagreements == sum(not same for same in text.agrees[:end])
        assert (done.bytes_up, done.bytes_down, done.cloud_s) == (0, 0, 0.0)
        assert done.total_s == pytest.approx(COSTS.draft_prefill_s + done.drafted * COSTS.draft_s)


@pytest.mark.parametrize("net", ["none", "rtt=70ms"])
def test_sequential_time_is_the_sum_of_its_parts(net: str) -> None:
    rtt = parse_conditions(net).rtt
    for done in outcomes(Setup(k=4, net=parse_conditions(net), queue_s=0.003)):
        drafting = COSTS.draft_prefill_s + done.drafted * COSTS.draft_s
        each = COSTS.verify_s + COSTS.per_round_overhead_s + 0.003 + rtt
        judging = done.rounds * each + COSTS.verify_prefill_s + COSTS.verify_per_token_s * done.drafted
        assert done.total_s == pytest.approx(drafting + judging)
        assert done.draft_s == pytest.approx(drafting)
        assert done.cloud_s == pytest.approx(judging - done.rounds * (each - COSTS.verify_s))


def test_signals_cost_where_they_are_asked_for() -> None:
    plain, sure = (outcomes(Setup(gate=gate))[0] for gate in ("always", "entropy:0"))
    assert plain.draft_s == pytest.approx(COSTS.draft_prefill_s + plain.drafted * COSTS.draft_s)
    assert sure.draft_s == pytest.approx(COSTS.draft_prefill_s + sure.drafted * (COSTS.draft_s + COSTS.signals_s))


@pytest.mark.parametrize("each", [None, 0.011])
def test_cloud_only_pays_one_round_trip_and_its_stream(each: float | None) -> None:
    setup, costs = Setup("cloud-only", net=parse_conditions("rtt=80ms")), replace(COSTS, stream_s=each)
    for text, done in zip(TRACES, replay(TRACES, setup, costs, ends=ENDS), strict=True):
        head = 0.08 + COSTS.per_round_overhead_s + COSTS.verify_prefill_s
        token = COSTS.verify_s if each is None else each
        assert done.total_s == pytest.approx(head + len(text.target) * token)
        assert done.ttft_s == pytest.approx(head + token)
        assert done.cloud_s == pytest.approx(COSTS.verify_prefill_s + len(text.target) * token)
        assert (done.tokens, done.cloud_share, done.drafted) == (len(text.target), 1.0, 0)


def test_a_streamed_token_has_no_window_updates() -> None:
    """No request arrives between the tokens of a stream. Their bytes had been simulated as 1.8 times the link's."""
    short, long = (simulate(trace(1, length), Setup("cloud-only"), COSTS, ends=ENDS) for length in (10, 60))
    per_token = (long.bytes_down - short.bytes_down) / (long.tokens - short.tokens)
    assert FRAMING < per_token < FRAMING + TRANSPORT_DOWN
    assert short.bytes_down == pytest.approx(TRANSPORT_DOWN + per_token * short.tokens, abs=short.tokens)


def test_a_perfect_drafter_hides_the_round_trips_when_pipelined() -> None:
    text = replace(trace(1, 60), draft=trace(1, 60).target)
    near, far = (
        simulate(
            text, Setup(driver=driver, net=parse_conditions("rtt=15ms")), replace(COSTS, verify_s=0.004), ends=ENDS
        )
        for driver in ("sequential", "pipelined")
    )
    assert far.total_s < near.total_s - 5 * 0.015
    assert far.draft_s == pytest.approx(near.draft_s, rel=0.2)


def test_exact_counts_do_not_depend_on_the_driver() -> None:
    for one, other in zip(outcomes(Setup(k=1)), outcomes(Setup(k=1, driver="pipelined")), strict=True):
        assert one.tokens == other.tokens
        assert one.rounds >= other.rounds


# Gates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5])
def test_a_looser_threshold_asks_the_cloud_less(k: int) -> None:
    limits = (0.0, 0.3, 0.6, 0.9, 1.0)
    found = [summarise(outcomes(Setup(gate=f"entropy:{limit}", k=k))) for limit in limits]
    assert all(tight.cloud_share >= loose.cloud_share for tight, loose in pairwise(found))
    assert all(tight.disagreement <= loose.disagreement for tight, loose in pairwise(found))
    assert found[0].cloud_share == 1.0
    assert found[-1].at_home == 1.0


def test_the_recording_crosses_at_the_first_escalation_only() -> None:
    text = trace(3, media=40_000)
    asked = simulate(text, Setup(net=parse_conditions("up=1Mbit")), COSTS, ends=ENDS)
    never = simulate(text, Setup(gate="never", net=parse_conditions("up=1Mbit")), COSTS, ends=ENDS)
    free = simulate(text, Setup(), COSTS, ends=ENDS)
    assert (asked.media_bytes, never.media_bytes) == (40_000, 0)
    assert asked.bytes_up == free.bytes_up > 40_000
    assert asked.total_s == pytest.approx(free.total_s + asked.bytes_up * 8 / 1e6)


# Ends -------------------------------------------------------------------------------------------------------------


def test_end_tokens_are_those_that_only_end() -> None:
    assert end_tokens(TRACES) == ENDS
    odd = Trace("odd", 1, (7, EOS, 7), (7, EOS, 7), TRACES[0].signals[:3])
    assert end_tokens([*TRACES, odd]) == frozenset()
    assert end_tokens([TRACES[0]]) == ENDS


def test_an_end_that_the_edge_invents_ends_the_output() -> None:
    text = TRACES[0]
    draft = (*text.target[:9], EOS, *text.target[10:])
    done = simulate(replace(text, draft=draft), Setup(gate="never"), COSTS, ends=ENDS)
    assert (done.tokens, done.disagreements) == (10, 1)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_an_end_that_the_drafter_misses_is_corrected(k: int) -> None:
    text = TRACES[0]
    wrong = replace(text, draft=(*text.target[:-1], 9))
    done = simulate(wrong, Setup(k=k, max_new_tokens=60), COSTS, ends=ENDS)
    assert (done.tokens, done.disagreements) == (len(text.target), 0)
    assert done.drafted == done.verified  # behind the end too, as a live drafter would


def test_a_trace_without_an_end_stops_at_its_length() -> None:
    text = replace(TRACES[0], target=TRACES[0].target[:-1], draft=TRACES[0].draft[:-1], signals=TRACES[0].signals[:-1])
    assert simulate(text, Setup(), COSTS).tokens == len(text.target)


# Network and load -------------------------------------------------------------------------------------------------


def test_a_line_is_a_queue_and_half_a_round_trip() -> None:
    line = SimulatedLink(8_000.0, 0.1)
    assert line.arrival(100, 1.0) == pytest.approx(1.0 + 0.1 + 0.05)
    assert line.arrival(50, 1.0) == pytest.approx(1.15 + 0.05)
    assert line.arrival(50, 9.0) == pytest.approx(9.05 + 0.05)
    assert line.bytes == 200


def test_more_than_a_window_waits_for_room() -> None:
    assert SimulatedLink(None, 0.1).arrival(WINDOW, 0.0) == pytest.approx(0.05)
    assert SimulatedLink(None, 0.1).arrival(2 * WINDOW + 1, 0.0) == pytest.approx(0.25)
    slow = SimulatedLink(WINDOW * 8 / 0.2, 0.1)  # a window takes two round trips: the link is the limit
    assert slow.arrival(2 * WINDOW, 0.0) == pytest.approx(0.45)


def test_bytes_are_those_of_the_frames() -> None:
    done = outcomes(Setup())[0]
    assert done.rounds * (FRAMING + 4) < done.bytes_up - 300 - 3 * 30 < done.rounds * (FRAMING + 30)


def test_a_busy_server_makes_one_wait() -> None:
    assert md1_wait_s(0.5, 0.03) == pytest.approx(0.015)
    free, busy = (outcomes(Setup(utilisation=rho))[0] for rho in (0.0, 0.5))
    assert busy.total_s == pytest.approx(free.total_s + busy.rounds * 0.015)


def test_costs_are_summed_up_field_by_field() -> None:
    several = [replace(COSTS, draft_s=value, verify_s=4 - value) for value in (1, 3, 2)]
    assert median_costs(several) == replace(COSTS, draft_s=2, verify_s=2)


# What makes no sense ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Setup(mode="edge"), "mode"),
        (lambda: Setup(driver="both"), "driver"),
        (lambda: Setup(gate="entropy"), "gate"),
        (lambda: Setup(k=0), "k is"),
        (lambda: Setup(accept="rank:2"), "accept 'rank:2': only the default is simulated"),
        (lambda: Setup(on_loop="stop"), "on_loop 'stop': only the default is simulated"),
        (lambda: Setup(net=Conditions(rtt=0.1, jitter=0.01)), "jitter"),
        (lambda: Setup(net=Conditions(cut_after=3.0)), "cut"),
        (lambda: Setup(queue_s=-1.0), "queue_s"),
        (lambda: Setup(utilisation=1.0), "utilisation"),
        (lambda: Setup(max_new_tokens=0), "max_new_tokens"),
        (lambda: StepCosts(draft_s=0.0, verify_s=1.0), "draft_s"),
        (lambda: median_costs([]), "costs"),
        (lambda: simulate(TRACES[0], Setup(max_new_tokens=5), COSTS), "max_new_tokens 5"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        make()


def test_nothing_cannot_be_replayed() -> None:
    with pytest.raises(DataError, match="traces"):
        replay([], Setup(), COSTS)
    with pytest.raises(DataError, match="outcomes"):
        summarise([])
