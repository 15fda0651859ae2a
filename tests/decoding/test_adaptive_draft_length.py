"""What is learnt of a model pair: acceptance, times, and what a draft is worth."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.acceptance_model import BUCKET_EDGES, MEMORY_TOKENS, AcceptanceModel
from outrider.decoding.adaptive_draft_length import (
    MAX_BLOCK_LENGTH,
    MEMORY_ROUNDS,
    Drafted,
    DraftLengthController,
    LatencyModel,
    LinearFit,
    RoundStats,
    best_fixed_length,
    block_value,
)
from outrider.decoding.draft_source import DraftSource, MatchLength
from outrider.decoding.speculation_switch import MedianClip
from tests.support.drafted import by_model

KINDS = [0.5 * (low + high) for low, high in zip((0.0, *BUCKET_EDGES), (*BUCKET_EDGES, 5.0), strict=True)]
MODEL, LOOKUP = DraftSource.MODEL, DraftSource.LOOKUP


# Acceptance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprob", [0.0, 0.2, 3.0, math.inf])
def test_at_first_a_token_is_as_sure_as_its_drafter_says(logprob: float) -> None:
    assert AcceptanceModel().acceptance_probability(logprob) == pytest.approx(math.exp(-logprob))


def test_each_kind_of_token_has_its_own_frequency() -> None:
    """The drafter says the opposite of what is true; the verdicts are believed."""
    found = AcceptanceModel()
    for n in range(300):
        found.update([KINDS[0]], n % 4 == 0)
        found.update([KINDS[-1]], n % 4 != 0)
    assert found.acceptance_probability(KINDS[0]) == pytest.approx(0.25, abs=0.04)
    assert found.acceptance_probability(KINDS[-1]) == pytest.approx(0.75, abs=0.04)
    assert found.rate_of(MODEL) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("right", "of", "power"), [(4, 5, math.log(0.8) / -0.1), (1, 2, 4.0), (19, 20, math.log(0.95) / -0.1)]
)
def test_tokens_of_a_kind_not_seen_are_as_sure_as_the_drafter_is_right(right: int, of: int, power: float) -> None:
    """It says 90 %; how often it is right gives the power to which all that it says is taken, at most 4."""
    found = AcceptanceModel()
    for n in range(4000):
        found.update([0.1], n % of < right)
    assert found.acceptance_probability(0.7) == pytest.approx(math.exp(-0.7 * power), rel=0.06)


@pytest.mark.parametrize(("logprob", "accepted"), [(0.0, 1), (math.inf, 0), (0.0, 0), (math.inf, 1)])
def test_chances_stay_chances_after_any_number_of_extremes(logprob: float, accepted: int) -> None:
    """The prior keeps the mean and the claims inside (0, 1), where their logarithms are finite."""
    found = AcceptanceModel()
    for _ in range(20 * int(MEMORY_TOKENS)):
        found.update([logprob], accepted)
    assert 0.0 < found.rate_of(MODEL) < 1.0
    assert all(0.0 <= found.acceptance_probability(kind) <= 1.0 for kind in (*KINDS, 0.0, math.inf))


def test_tokens_after_a_rejection_are_not_counted() -> None:
    one, other = AcceptanceModel(), AcceptanceModel()
    one.update([0.1, 0.2, 0.3, 3.0], 1)
    other.update([0.1, 0.2], 1)
    assert [one.acceptance_probability(kind) for kind in KINDS] == [
        other.acceptance_probability(kind) for kind in KINDS
    ]
    assert one.rate_of(MODEL) == other.rate_of(MODEL)


def test_the_next_token_is_judged_by_the_one_before() -> None:
    found = AcceptanceModel()
    for _ in range(100):
        found.update([KINDS[0], 0.3, KINDS[-1], 0.3], 3)
    assert found.next_acceptance([KINDS[0]]) > 0.9
    assert found.next_acceptance([KINDS[-1]]) < 0.15
    assert found.next_acceptance([]) == found.rate_of(MODEL)


def test_a_block_survives_by_the_product() -> None:
    found = AcceptanceModel()
    assert found.survival_probability(2, [0.1, 0.5]) == pytest.approx(math.exp(-0.6))
    assert found.survival_probability(3, [0.1, 0.5]) == pytest.approx(math.exp(-0.6) * found.rate_of(MODEL))
    assert found.survival_probability(1, [math.inf]) == 0.0


def test_old_observations_decay() -> None:
    """Else a kind of token behind which drafting once stopped would be held for bad for ever."""
    found = AcceptanceModel()
    for _ in range(100):
        found.update([KINDS[-1], 0.3], 1)
    assert found.next_acceptance([KINDS[-1]]) < 0.3 * found.rate_of(MODEL)
    for _ in range(int(6 * MEMORY_TOKENS)):
        found.update([0.3], 1)
    assert found.next_acceptance([KINDS[-1]]) > 0.8 * found.rate_of(MODEL)


# Prompt lookup and a model ----------------------------------------------------------------------------------------


def test_before_any_verdict_long_matches_win() -> None:
    found = AcceptanceModel()
    assert [found.prefers_lookup(length) for length in (1, 2, 3, 5, 9, 16)] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("length", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("model", [None, 0.1])
def test_the_source_that_is_accepted_more_often_wins(length: int, model: float | None) -> None:
    found, lookup = AcceptanceModel(), MatchLength(length)
    for _ in range(50):
        found.update([lookup, lookup], 2)
        found.update([model, model], 0)
    assert found.prefers_lookup(length)
    for _ in range(200):
        found.update([lookup, lookup], 0)
        found.update([model, model], 2)
    assert not found.prefers_lookup(length)


def test_a_source_that_is_not_used_is_tried_again() -> None:
    """Its rate decays towards the prior."""
    found = AcceptanceModel()
    for _ in range(20):
        found.update([MatchLength(9)], 0)
    assert not found.prefers_lookup(9)
    for _ in range(6000):
        found.update([0.3], 1)
        found.update([0.3], 0)
    assert found.prefers_lookup(9)


def test_looked_up_tokens_do_not_change_the_rates_of_a_model() -> None:
    alone, both = AcceptanceModel(), AcceptanceModel()
    for n in range(300):
        for found in (alone, both):
            found.update([0.1, 0.1], n % 3)
        both.update([MatchLength(9)] * 4, 0)
    for logprob in (0.1, 2.0):
        both_says, alone_says = both.acceptance_probability(logprob), alone.acceptance_probability(logprob)
        assert both_says == pytest.approx(alone_says, abs=0.06)
    assert both.next_acceptance([0.1]) == pytest.approx(alone.next_acceptance([0.1]), abs=0.06)
    assert [found.rate_of(MODEL) for found in (both, alone)] == pytest.approx([3 / 5, 3 / 5], abs=0.01)
    assert both.rate_of(LOOKUP) < 0.05


def test_the_next_token_of_a_copy_has_a_longer_match() -> None:
    found = AcceptanceModel()
    for _ in range(100):
        found.update([MatchLength(4)], 0)
        found.update([MatchLength(5)], 1)
    assert found.next_acceptance([MatchLength(3)], LOOKUP) < 0.1
    assert found.next_acceptance([MatchLength(4)], LOOKUP) > 0.9


# Times ------------------------------------------------------------------------------------------------------------


def test_the_line_is_that_of_the_points() -> None:
    line = LinearFit()
    for n in range(60):
        line.update(n % 7, 3.0 + 0.5 * (n % 7))
    assert line.slope == pytest.approx(0.5)
    assert line.mean_y - line.slope * line.mean_x == pytest.approx(3.0)


@pytest.mark.parametrize("points", [[], [(4, 1.0)] * 9, [(n, 9.0 - n) for n in range(8)], [(1, 0.0), (2, 0.0)]])
def test_a_slope_that_is_not_there_is_0(points: list[tuple[int, float]]) -> None:
    line = LinearFit()
    for x, y in points:
        line.update(x, y)
    assert line.slope == 0.0


def test_a_slope_in_doubt_is_drawn_to_0() -> None:
    rng, line = random.Random(3), LinearFit()
    for _ in range(60):
        line.update(rng.randint(3, 5), rng.gauss(100.0, 30.0))
    assert line.slope < 3.0


def test_a_slope_is_drawn_to_0_by_the_noise_around_it() -> None:
    """A slope of 5 with noise of standard deviation 30: ridge regression towards 0 by SLOPE."""
    clean, noisy = LinearFit(), LinearFit()
    for n in range(1200):
        x = 3 + n % 3
        clean.update(x, 100.0 + 5.0 * x)
        noisy.update(x, 100.0 + 5.0 * x + (30.0 if n % 2 else -30.0))
    spread = MEMORY_ROUNDS * 2 / 3  # Σ (x − mean)²
    assert clean.slope == pytest.approx(5.0)
    assert noisy.slope == pytest.approx(5.0 * spread / (spread + 30.0**2 / (0.05 * 120.0) ** 2), rel=0.05)


def test_a_stall_counts_as_a_few_usual_values() -> None:
    usual = MedianClip()
    assert [usual(value) for value in (1.0, 1.1, 0.9, 100.0)] == [1.0, 1.1, 0.9, pytest.approx(3.3)]


def test_a_network_that_became_slow_is_believed_after_a_few_rounds() -> None:
    usual = MedianClip()
    assert [usual(value) for value in [1.0] * 9 + [10.0] * 6][-1] == 10.0


def test_the_verifier_s_own_seconds_say_what_a_longer_block_adds() -> None:
    rng, times = random.Random(2), LatencyModel()
    for _ in range(100):
        drafts = rng.randint(1, 8)
        times.update_verify(drafts, 0.5 + rng.random(), 0.05 + 0.01 * drafts)
    assert times.slope == pytest.approx(0.01, rel=0.02)
    assert times.fixed(times.slope) == pytest.approx(1.0, abs=0.15)


# What a draft is worth --------------------------------------------------------------------------------------------


def taught(
    pace: DraftLengthController, rounds: int, *, drafts: int = 4, accepted: int = 4, drafted: int = 4, wait: float = 0.1
) -> DraftLengthController:
    for _ in range(rounds):
        pace.drafted(drafted, 0.01 * drafted)
        pace.decided([0.1] * drafts, accepted, drafted=by_model(drafted), seconds=wait)
    return pace


def test_there_is_no_price_before_there_are_times() -> None:
    pace = DraftLengthController()
    assert not pace.token_costs
    pace.decided([0.1], 1, drafted=by_model(1), seconds=0.1)
    assert not pace.token_costs, "drafting was not timed"
    pace = DraftLengthController()
    pace.drafted(4, 0.04)
    pace.decided([0.1] * 4, 1, drafted=by_model(4))
    assert not pace.token_costs, "the verdict was not timed"


def test_the_price_is_what_the_time_of_a_draft_brings_elsewhere() -> None:
    """Rounds of 5 tokens in 0.14 s: 0.357 tokens in the 0.01 s of a draft."""
    assert taught(DraftLengthController(), 400).token_costs[MODEL] == pytest.approx(5 / 0.14 * 0.01, rel=0.02)


def test_a_draft_that_no_one_waited_for_is_not_paid() -> None:
    """Drafted while a verdict was in flight: 5 tokens in 0.1 s."""
    pace = DraftLengthController()
    pace.drafted(4, 0.04)
    assert taught(pace, 400, drafted=0).token_costs[MODEL] == pytest.approx(0.5, rel=0.02)


def test_a_change_is_followed() -> None:
    pace = taught(DraftLengthController(), 300)
    assert pace.token_costs[MODEL] == pytest.approx(5 / 0.14 * 0.01, rel=0.05)
    assert taught(pace, 300, wait=1.0).token_costs[MODEL] == pytest.approx(5 / 1.04 * 0.01, rel=0.05)


def test_a_block_that_may_cost_a_right_guess_is_cut_earlier() -> None:
    """The same price; but in the one case every other round was drafted ahead."""
    waits, overlaps = DraftLengthController(), DraftLengthController()
    for n in range(400):
        for pace, drafted, seconds in ((waits, 4, 0.08), (overlaps, 4 * (n % 2), 0.1)):
            pace.drafted(drafted, 0.01 * drafted)
            pace.decided([0.1] * 4, (4, 0, 2, 4)[n % 4], drafted=by_model(drafted), seconds=seconds)
    assert waits.token_costs[MODEL] == pytest.approx(overlaps.token_costs[MODEL], rel=0.02)
    lengths = [next(n for n in range(64) if not pace.should_continue(n, [0.1] * n)) for pace in (overlaps, waits)]
    assert lengths[0] < lengths[1]


# k* ---------------------------------------------------------------------------------------------------------------


@given(alpha=st.floats(0.0, 1.0), fixed=st.floats(0.0, 10.0), each=st.floats(1e-3, 1.0))
def test_k_star_brings_the_most_tokens_a_second(alpha: float, fixed: float, each: float) -> None:
    """By brute force over all lengths. A block of k brings 1 + α + … + α^k tokens on average."""
    tokens = [sum(alpha**n for n in range(k + 1)) for k in range(MAX_BLOCK_LENGTH + 1)]
    rates = [tokens[k] / (fixed + each * k) for k in range(1, MAX_BLOCK_LENGTH + 1)]
    k, found = best_fixed_length(alpha, fixed, each)
    assert 1 <= k <= MAX_BLOCK_LENGTH
    assert found == pytest.approx(tokens[k])
    assert rates[k - 1] == pytest.approx(max(rates))


@pytest.mark.parametrize(("alpha", "fixed", "longest"), [(1.0, 2.0, True), (0.0, 1e9, False), (0.5, 0.0, False)])
def test_k_star_at_its_ends(alpha: float, fixed: float, longest: bool) -> None:
    assert best_fixed_length(alpha, fixed, 1.0)[0] == (MAX_BLOCK_LENGTH if longest else 1)


def test_rounds_are_forgotten_at_their_rate() -> None:
    """What is noted weighs 1/e after as many rounds; all of them together never weigh more than ROUNDS."""
    rounds = RoundStats()
    rounds.update(2.0, 3.0, 5.0)
    for _ in range(MEMORY_ROUNDS):
        rounds.fade()
    assert rounds.count == pytest.approx((1 - 1 / MEMORY_ROUNDS) ** MEMORY_ROUNDS)
    assert (rounds.tokens, rounds.drafted, rounds.verified) == pytest.approx([n * rounds.count for n in (2, 3, 5)])
    for _ in range(20 * MEMORY_ROUNDS):
        rounds.fade()
        rounds.update(2.0, 3.0, 5.0)
    assert rounds.count == pytest.approx(MEMORY_ROUNDS, rel=1e-3)


def test_rounds_add_up_with_their_weights() -> None:
    one, other = RoundStats(), RoundStats()
    one.update(2.0, 3.0, 5.0, count=2.0, weight=0.5)
    other.update(1.0, 1.0, 1.0)
    one.add(other, 3.0)
    assert (one.count, one.tokens, one.drafted, one.verified) == (4.0, 4.0, 4.5, 5.5)


def test_the_first_rounds_are_padded_with_less_and_less() -> None:
    pace = DraftLengthController()
    for _ in range(3):
        pace.drafted(4, 0.04)
        pace.decided([0.1] * 4, 4, drafted=by_model(4), seconds=0.1)
    assert pace._prior_rounds == pytest.approx(4.0 * (1 - 1 / MEMORY_ROUNDS) ** 3)


# Two sources ------------------------------------------------------------------------------------------------------


def taught_both(
    draft_s: float, alpha: float, copied: float, *, slope: float = 0.02, rounds: int = 200
) -> DraftLengthController:
    """Return a controller after rounds of each source in turn. A plain token takes 1 s, a verdict 1 s and slope·k."""
    controller, rng = DraftLengthController(DraftSource), random.Random(1)
    for n in range(400):
        source, chance, seconds = ((MODEL, alpha, draft_s), (LOOKUP, copied, 1e-6))[n % 2]
        k = n % 4 + 1
        block = [0.3] * k if source is MODEL else [MatchLength(3)] * k
        controller.drafted(k, k * seconds, source)
        accepted = next((i for i in range(k) if rng.random() >= chance), k)
        work = {source: Drafted(k, k * seconds)}
        controller.decided(block, accepted, drafted=work, seconds=1.0 + slope * k)
        while controller.switch.needs_sample:
            controller.decoded_plain(1.0)
    return controller


def test_a_round_is_divided_between_its_sources() -> None:
    """The first source has the bonus token and what the drafts do not add to the verdict."""
    controller = taught_both(0.1, 0.7, 0.7, slope=0.2)
    slope = controller.times.slope
    assert slope == pytest.approx(0.2, rel=0.05)
    block = [MatchLength(3), MatchLength(4), 0.1, 0.1]
    work = {LOOKUP: Drafted(2, 0.0), MODEL: Drafted(2, 0.2)}
    shares = dict(controller._shares(block, 3, work, 1.8))
    assert [(source, share.tokens) for source, share in shares.items()] == [(LOOKUP, 3), (MODEL, 1)]
    assert shares[LOOKUP].seconds == pytest.approx(1.8 - 2 * slope)
    assert shares[MODEL].seconds == pytest.approx(0.2 + 2 * slope)
    assert dict(controller._shares([0.1, 0.1], 1, {}, None)) == {MODEL: (2, None)}


@pytest.mark.parametrize(("draft_s", "copied", "prefers"), [(0.01, 0.6, False), (0.01, 0.9, True), (0.7, 0.6, True)])
def test_at_a_match_the_source_drafts_whose_block_is_worth_more(draft_s: float, copied: float, prefers: bool) -> None:
    """The model is right in 80 % of the cases. A cheaper token may be right less often."""
    controller = taught_both(draft_s, 0.8, copied)
    for account in controller.switch.accounts.values():
        account.pays, account.budget = True, 1.0
    assert controller.prefers_lookup(3) is prefers


def test_each_source_has_its_own_estimate() -> None:
    controller = taught_both(1.5, 0.8, 0.8)
    assert [controller.switch.accounts[source].pays for source in (MODEL, LOOKUP)] == [False, True]
    controller = taught_both(0.02, 0.9, 0.05, slope=0.2)
    assert [controller.switch.accounts[source].pays for source in (MODEL, LOOKUP)] == [True, False]


def test_a_looked_up_block_grows_step_by_step() -> None:
    """Before a verdict on a long block, nothing is known of its time. A lookup itself is free."""
    controller, lengths = DraftLengthController([LOOKUP]), []
    for _ in range(6):
        controller.drafted(1, 1e-6, LOOKUP)
        block = [MatchLength(9)]
        while controller.token_costs and controller.should_continue(len(block), block, LOOKUP):
            block.append(MatchLength(9 + len(block)))
        lengths.append(len(block))
        controller.decided(block, len(block), drafted={LOOKUP: Drafted(len(block))}, seconds=1.0)
    assert lengths == [1, 2, 4, 8, 16, 32]


@given(
    acceptances=st.lists(st.floats(0.0, 1.0), max_size=12),
    cost=st.floats(0.0, 1.5),
)
def test_the_value_of_a_block_is_that_of_its_best_length(acceptances: list[float], cost: float) -> None:
    survivals = [math.prod(acceptances[: n + 1]) for n in range(len(acceptances))]
    values = [sum(survivals[:k]) - k * cost for k in range(len(acceptances) + 1)]
    assert block_value(acceptances, cost) == pytest.approx(max(values), abs=1e-9)
