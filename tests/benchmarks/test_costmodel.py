"""The cost model against brute force, against its own identities, and against what was measured."""

from __future__ import annotations

import heapq
import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import lambertw

from benchmarks.costmodel import (
    Network,
    RoundBytes,
    ServerLoadModel,
    Speculation,
    Workload,
    dollars_per_million,
    expected_tokens,
    servers_for,
    traffic_bytes_per_s,
)
from benchmarks.roofline import Gpu, Host, Server, Target
from outrider.errors import SettingsError

H100 = Gpu(memory_bytes=80e9, bytes_per_s=3.0e12, flops_per_s=989e12)
QWEN_7B = Target.of_shape(
    layers=28, hidden=3584, heads=28, kv_heads=4, head=128, feed_forward=18_944, vocabulary=152_064
)
SERVER = Server(QWEN_7B, H100)
SERVED = replace(SERVER, host=Host(0.4e-3, 0.06e-3))
WORK = Workload(prompt=500, tokens=250)

alphas = st.floats(0.0, 1.0)
seconds = st.floats(1e-4, 0.5)
lengths = st.integers(1, 32)


def speculation(alpha: float, draft: float, verify: float, rtt: float, slope: float = 0.0) -> Speculation:
    return Speculation(alpha, draft, lambda k: verify + slope * k, Network(rtt))


# Rounds -----------------------------------------------------------------------------------------------------------


def accepted_in_a_row(rng: random.Random, alpha: float, k: int) -> int:
    return next((n for n in range(k) if rng.random() >= alpha), k)


@pytest.mark.parametrize(("alpha", "k"), [(0.0, 5), (0.3, 1), (0.8, 5), (0.95, 12), (1.0, 5)])
def test_expected_tokens_are_those_of_simulated_rounds(alpha: float, k: int) -> None:
    rng, rounds = random.Random(f"{alpha} {k}"), 20_000
    mean = sum(accepted_in_a_row(rng, alpha, k) + 1 for _ in range(rounds)) / rounds
    assert expected_tokens(alpha, k) == pytest.approx(mean, abs=4 * (k + 1) / 2 / math.sqrt(rounds))


@given(st.floats(0.0, 0.999), lengths)
def test_expected_tokens_are_the_closed_form(alpha: float, k: int) -> None:
    found = expected_tokens(alpha, k)
    assert found == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), rel=1e-9)
    assert 1 <= found <= min(k + 1, 1 / (1 - alpha)) * (1 + 1e-12)


def test_a_target_without_drafts_brings_a_token_a_round() -> None:
    assert expected_tokens(0.8, 0) == 1.0
    assert expected_tokens(1.0, 7) == 8.0


def test_sequential_time_is_that_of_simulated_rounds() -> None:
    one, rng = speculation(0.8, 0.004, 0.006, 0.05, slope=0.0002), random.Random(1)
    tokens = sum(accepted_in_a_row(rng, 0.8, 5) + 1 for _ in range(20_000))
    assert one.sequential_s(5) == pytest.approx(20_000 * (5 * 0.004 + 0.05 + 0.006 + 5 * 0.0002) / tokens, rel=0.02)


def test_pipelined_time_is_that_of_a_stream_that_stops_at_each_wrong_draft() -> None:
    one, rng, now, tokens = speculation(0.8, 0.004, 0.006, 0.05), random.Random(2), 0.0, 50_000
    for _ in range(tokens):
        now += 0.004
        if rng.random() >= 0.8:
            now += 0.056  # its verdict brings the correction
    assert one.pipelined_s(5) == pytest.approx(now / tokens, rel=0.02)


@given(alphas, seconds, seconds, seconds, lengths)
def test_pipelining_is_no_slower_where_a_block_outnumbers_its_tokens(
    alpha: float, draft: float, verify: float, rtt: float, k: int
) -> None:
    one = speculation(alpha, draft, verify, rtt)
    if k >= expected_tokens(alpha, k):
        assert one.pipelined_s(k) <= one.sequential_s(k) * (1 + 1e-9)
    else:
        assert one.pipelined_s(k) <= one.sequential_s(k) + draft


def test_pipelining_is_slower_where_waiting_is_nothing_and_drafts_are_dear() -> None:
    one = speculation(0.9, 0.1, 0.001, 0.0)
    assert one.pipelined_s(1) > one.sequential_s(1)


@given(alphas, seconds, seconds, seconds, lengths)
def test_a_draft_more_often_right_never_costs(alpha: float, draft: float, verify: float, rtt: float, k: int) -> None:
    low, high = (speculation(each, draft, verify, rtt) for each in (0.9 * alpha, alpha))
    assert high.sequential_s(k) <= low.sequential_s(k) * (1 + 1e-12)
    assert high.pipelined_s(k) <= low.pipelined_s(k) * (1 + 1e-12)


@given(st.floats(0.05, 0.99), st.floats(0.001, 0.05), st.floats(0.001, 0.1), st.floats(0.0, 0.3))
def test_the_best_k_is_that_of_the_closed_form(alpha: float, draft: float, verify: float, rtt: float) -> None:
    """k* = (−A − W₋₁(−e^(−A)))/Λ − 1, A = 1 + Λ(C/c − 1), of docs/design/maths.md: an integer beside it, or an end."""
    best = speculation(alpha, draft, verify, rtt).best_k(64)
    rate = math.log(1 / alpha)
    a = 1 + rate * ((verify + rtt) / draft - 1)
    if a <= 1:
        assert best == 1
    elif a < 300:  # e^−A is a number
        exact = (-a - lambertw(-math.exp(-a), -1).real) / rate - 1
        assert abs(best - min(64, max(1, exact))) <= 1


def test_the_best_k_is_the_least_of_all() -> None:
    one = speculation(0.8, 0.005, 0.006, 0.05, slope=0.0001)
    times = {k: (5e-3 * k + 0.056 + 1e-4 * k) / expected_tokens(0.8, k) for k in range(1, 65)}
    assert one.best_k() == min(times, key=lambda k: times[k])
    assert one.best_k(3) == 3


@given(st.floats(0.0, 0.99), seconds, seconds, lengths, st.floats(0.001, 1.0))
def test_at_the_break_even_round_trip_the_two_times_are_equal(
    alpha: float, draft: float, verify: float, k: int, other: float
) -> None:
    one = speculation(alpha, draft, verify, 0.0)
    found = one.breakeven_rtt_s(k, other)
    if found >= 0:
        assert speculation(alpha, draft, verify, found).sequential_s(k) == pytest.approx(other, rel=1e-9)
        assert speculation(alpha, draft, verify, found + 0.01).sequential_s(k) > other
    else:
        assert one.sequential_s(k) > other


def test_break_even_against_cloud_only_is_the_formula() -> None:
    """docs/design/maths.md: (E − 1)·t_v − k·t_d."""
    one = speculation(0.8, 0.001, 0.02, 0.05)
    assert one.breakeven_rtt_s(5, 0.02) == pytest.approx((expected_tokens(0.8, 5) - 1) * 0.02 - 0.005)


def test_bytes_and_queue_take_time() -> None:
    link = Network(0.05, up_bytes_per_s=1000.0, down_bytes_per_s=4000.0)
    one = Speculation(0.8, 0.01, lambda _: 0.006, link, RoundBytes(19.0, 3.0, 48.0), queue_s=0.002)
    assert one.round_s(5) == pytest.approx(5 * 0.01 + 0.05 + 34 / 1000 + 0.002 + 0.006 + 48 / 4000)


# The roofline -----------------------------------------------------------------------------------------------------


def test_the_shape_of_the_7b_model_is_the_real_one() -> None:
    """7.6 G parameters; a position's keys and values in each of 28 layers: 2 × 4 × 128 bfloat16."""
    assert QWEN_7B.weight_bytes == pytest.approx(2 * 7.616e9, rel=0.001)
    assert QWEN_7B.kv_bytes == 57_344


@pytest.mark.parametrize(
    ("sessions", "tokens", "context", "measured"),
    [(1, 1, 200, 5.45), (1, 6, 200, 6.01), (1, 6, 2000, 6.22), (32, 1, 1000, 6.91), (32, 6, 1000, 8.45)],
)
def test_forwards_that_were_measured_are_predicted(sessions: int, tokens: int, context: int, measured: float) -> None:
    """docs/performance.md, "On a GPU", on an H100; nothing was fitted."""
    assert 1e3 * SERVER.forward_s(sessions, tokens, context) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(("sessions", "cloud_only", "verifying"), [(1, 178, 549), (8, 1144, 4140), (32, 3579, 10_773)])
def test_throughput_that_was_measured_is_predicted(sessions: int, cloud_only: float, verifying: float) -> None:
    """docs/performance.md, before 2026-11-29: tokens per second through the service, whose host times SERVED has."""
    assert sessions / SERVED.batch_s(sessions, 1, 1000) == pytest.approx(cloud_only, rel=0.2)
    assert sessions * expected_tokens(0.8, 5) / SERVED.batch_s(sessions, 6, 1000) == pytest.approx(verifying, rel=0.2)


@given(st.integers(1, 512), st.integers(1, 16), st.integers(0, 32_000), st.sampled_from([1, 2, 4, 8]))
def test_an_estimate_grows_with_sessions_and_tokens(sessions: int, tokens: int, context: int, gpus: int) -> None:
    one = replace(SERVER, gpus=gpus)
    assert (
        one.forward_s(sessions, tokens, context)
        <= one.forward_s(sessions + 1, tokens, context)
        <= one.forward_s(sessions + 1, tokens + 1, context)
    )


def test_more_gpus_share_the_work_and_pay_for_the_exchange() -> None:
    four = replace(SERVER, gpus=4)
    assert four.reading_s(8, 1000) == pytest.approx(SERVER.reading_s(8, 1000) / 4)
    assert four.computing_s(48, 1000) == pytest.approx(SERVER.computing_s(48, 1000) / 4)
    assert SERVER.exchanging_s(48) == 0.0
    volume = 2 * 28 * 2 * 0.75 * 48 * 3584 * 2 / 450e9
    assert four.exchanging_s(48) == pytest.approx(2 * 28 * 15e-6 + volume)


def test_each_session_s_cache_is_read_and_the_weights_once() -> None:
    assert SERVER.reading_s(8, 1000) == pytest.approx((QWEN_7B.weight_bytes + 8 * 1000 * 57_344) / 3.0e12)


def test_slots_are_what_fits_beside_the_weights() -> None:
    slots = SERVER.slots(4096)
    assert QWEN_7B.weight_bytes + slots * 4096 * QWEN_7B.kv_bytes <= 0.9 * 80e9
    assert QWEN_7B.weight_bytes + (slots + 1) * 4096 * QWEN_7B.kv_bytes > 0.9 * 80e9
    assert replace(SERVER, gpu=replace(H100, memory_bytes=8e9)).slots(1) == 0


def test_a_prompt_in_pieces_reads_the_weights_once_for_each() -> None:
    whole, pieces = SERVER.prefill_s(1000, 1000), SERVER.prefill_s(1000, 256)
    assert pieces - whole == pytest.approx(3 * QWEN_7B.weight_bytes / 3.0e12, rel=0.05)


# Many sessions ----------------------------------------------------------------------------------------------------


def model(away: float, k: int = 5, server: Server = SERVED) -> ServerLoadModel:
    return ServerLoadModel(server, WORK, 0.8, k, away)


def simulate(one: ServerLoadModel, sessions: int, rounds: int = 12_000) -> tuple[float, float]:
    """Mean cycle and batch of sessions that think (away ± 50 %), queue, and are all taken by the next step."""
    rng = random.Random(sessions)
    arrivals = [rng.uniform(0, one.think_s) for _ in range(sessions)]
    heapq.heapify(arrivals)
    now = waited = 0.0
    served = steps = 0
    while served < rounds:
        now = max(now, arrivals[0])
        waiting = []
        while arrivals and arrivals[0] <= now:
            waiting.append(heapq.heappop(arrivals))
        done = now + one.step_s(len(waiting))
        waited += sum(done - came for came in waiting)
        for _ in waiting:
            heapq.heappush(arrivals, done + rng.uniform(0.5, 1.5) * one.think_s)
        now, served, steps = done, served + len(waiting), steps + 1
    return one.think_s + waited / served, served / steps


@pytest.mark.parametrize(
    ("away", "sessions"), [(0.15, 1), (0.15, 10), (0.15, 100), (0.15, 400), (0.05, 100), (1.0, 60)]
)
def test_the_balance_is_that_of_a_simulated_queue(away: float, sessions: int) -> None:
    one = model(away)
    cycle, batch = simulate(one, sessions)
    found = one.steady_state(sessions)
    assert found.token_s * one.round_tokens == pytest.approx(cycle, rel=0.1)
    if found.busy == 1:
        assert found.batch == pytest.approx(batch, rel=0.15)


def test_one_session_has_the_server_to_itself() -> None:
    one = model(0.2)
    found, step = one.steady_state(1), one.step_s(1)
    assert found.token_s * one.round_tokens == pytest.approx(0.2 + step, rel=0.01)
    assert found.duty == pytest.approx(step / (0.2 + step), rel=0.01)


def test_a_reply_s_rounds_pay_for_its_prompt_once() -> None:
    one = model(0.2)
    rounds = WORK.tokens / expected_tokens(0.8, 5)
    assert rounds * one.round_prefill_s == pytest.approx(SERVED.prefill_s(500, 256))
    assert rounds * one.step_s(1) == pytest.approx(rounds * SERVED.batch_s(1, 6, 625) + SERVED.prefill_s(500, 256))
    many = one.steady_state(400)
    prompts_per_s = many.tokens_per_s / WORK.tokens  # the server is busy all the time
    assert many.prefill == pytest.approx(prompts_per_s * SERVED.prefill_s(500, 256), rel=1e-6)


def test_cloud_only_is_always_in_the_step() -> None:
    one = ServerLoadModel(SERVED, WORK, 0.0, 0, 0.0)
    found = one.steady_state(40)
    assert (found.batch, found.busy, found.duty) == (40, 1, 1)
    assert found.token_s == pytest.approx(SERVED.batch_s(40, 1, 625) + 40 * SERVED.prefill_s(500, 256) / 250)


@given(st.floats(0.0, 2.0), st.integers(1, 2000), st.integers(0, 16))
def test_another_session_makes_nobody_faster(away: float, sessions: int, k: int) -> None:
    one = model(away, k)
    less, more = one.steady_state(sessions), one.steady_state(sessions + 1)
    assert more.token_s >= less.token_s * (1 - 1e-9)
    assert less.token_s * one.round_tokens >= away + one.step_s(1) * (1 - 1e-9)
    assert 1 <= less.batch <= sessions
    assert all(0 < part <= 1 for part in (less.busy, less.duty, less.prefill))


@settings(max_examples=40)
@given(st.floats(0.0, 0.3), st.floats(0.005, 0.2))
def test_sessions_within_the_limit_are_the_most(away: float, limit: float) -> None:
    one = model(away)
    max_sessions = one.max_sessions(limit)
    assert max_sessions == 0 or one.steady_state(max_sessions).token_s <= limit
    assert max_sessions == SERVED.slots(WORK.context) or one.steady_state(max_sessions + 1).token_s > limit


def test_memory_bounds_the_sessions_where_time_does_not() -> None:
    small = replace(SERVED, gpu=replace(H100, memory_bytes=20e9))
    assert model(0.15, server=small).max_sessions(1.0) == small.slots(WORK.context) == 64


# Fleets -----------------------------------------------------------------------------------------------------------


def test_servers_for_a_share_of_the_edges() -> None:
    assert servers_for(1_000_000, 0.01, 100) == 100
    assert servers_for(1_000_001, 0.01, 100) == 101
    assert servers_for(1_000_000, 0.01, 100, spare=0.5) == 200
    assert servers_for(7, 0.1, 1, spare=0.3) == 1  # exactly one, but for the last bit


def test_traffic_of_a_session_is_that_of_its_reply() -> None:
    """Counted over one reply of 250 tokens in 250 / E rounds, 20 ms per token."""
    one, size = model(0.15), RoundBytes(100.0, 3.0, 170.0)
    rounds = 250 / expected_tokens(0.8, 5)
    up, down = traffic_bytes_per_s(one, size, 0.02)
    assert up * 5.0 == pytest.approx(rounds * 115 + 3 * 500)
    assert down * 5.0 == pytest.approx(rounds * 170)


def test_dollars_for_a_million_tokens() -> None:
    assert dollars_per_million(3.6, 4, 1000.0) == pytest.approx(3.6 * 4 * (1e6 / 1000 / 3600))


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: expected_tokens(1.1, 5), "acceptance"),
        (lambda: expected_tokens(math.nan, 5), "acceptance"),
        (lambda: expected_tokens(0.5, -1), "k"),
        (lambda: expected_tokens(0.5, 2.0), "k"),  # type: ignore[arg-type]
        (lambda: expected_tokens(0.5, True), "k"),
        (lambda: Network(-0.1), "rtt_s"),
        (lambda: Network(0.1, up_bytes_per_s=0.0), "up_bytes_per_s"),
        (lambda: RoundBytes(down=-1.0), "down"),
        (lambda: speculation(0.5, -1.0, 1.0, 0.0), "draft_s"),
        (lambda: speculation(0.5, 1.0, -1.0, 0.0).sequential_s(1), "verify_s"),
        (lambda: speculation(0.5, 1.0, 1.0, 0.0).sequential_s(0), "k"),
        (lambda: speculation(0.5, 1.0, 1.0, 0.0).best_k(0), "longest"),
        (lambda: speculation(0.5, 1.0, 1.0, 0.0).breakeven_rtt_s(1, 0.0), "other_s"),
        (lambda: Gpu(0, 1, 1), "memory_bytes"),
        (lambda: Gpu(1, math.inf, 1), "bytes_per_s"),
        (lambda: Host(-1.0), "batch_s"),
        (lambda: replace(SERVER, gpus=0), "gpus"),
        (lambda: replace(SERVER, share=1.5), "share"),
        (lambda: SERVER.forward_s(0, 1, 1), "sessions"),
        (lambda: SERVER.prefill_s(10, 0), "chunk"),
        (lambda: Workload(0, 10), "prompt"),
        (lambda: model(-1.0), "think_s"),
        (lambda: ServerLoadModel(SERVED, Workload(10, 3), 0.8, 5, 1.0), "longer than a reply"),
        (lambda: model(1.0).max_sessions(0.0), "limit_s"),
        (lambda: model(1.0).steady_state(0), "sessions"),
        (lambda: servers_for(10, 0.1, 0), "no number of servers"),
        (lambda: servers_for(10, 1.1, 1), "active"),
        (lambda: dollars_per_million(10**400, 1, 1.0), "gpu_hour"),
        (lambda: dollars_per_million(1.0, 1, 0.0), "tokens_per_s"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(call: object, named: str) -> None:
    assert callable(call)
    with pytest.raises(SettingsError, match=rf"\b{named}\b"):
        call()


def test_planning_needs_no_torch() -> None:
    code = "import sys, benchmarks.costmodel; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
