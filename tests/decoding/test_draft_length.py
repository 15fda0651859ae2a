"""How many tokens to draft next."""

from __future__ import annotations

import math
import random

import pytest

from outrider.decoding.acceptance_model import MATCH_PRIORS
from outrider.decoding.adaptive_draft_length import Drafted, DraftLengthController
from outrider.decoding.draft_length import (
    AUTO_MAX_K,
    MAX_K,
    AdaptiveDraftLength,
    ConfidenceStop,
    FixedDraftLength,
    parse_draft_length,
)
from outrider.decoding.draft_source import DraftSource, MatchLength
from outrider.errors import SettingsError
from tests.support.drafted import by_lookup, by_model


def sure(*probabilities: float) -> list[float]:
    """−log q of tokens with these probabilities."""
    return [-math.log(p) for p in probabilities]


@pytest.mark.parametrize("drafted", [0, 1, 4, 5])
def test_fixed_k_asks_for_what_is_missing(drafted: int) -> None:
    assert FixedDraftLength(5).tokens_to_draft(drafted, []).number == 5 - drafted


@pytest.mark.parametrize(
    ("probabilities", "more"),
    [((), 1), ((0.9,), 1), ((0.9, 0.7), 1), ((0.9, 0.5), 0), ((0.5, 0.9), 0), ((0.51,), 1), ((0.49,), 0)],
)
def test_the_product_of_the_chances_decides(probabilities: tuple[float, ...], more: int) -> None:
    assert (
        ConfidenceStop(max_tokens=8, min_survival=0.5).tokens_to_draft(len(probabilities), sure(*probabilities)).number
        == more
    )


def test_the_cap_bounds_a_sure_drafter() -> None:
    stop = ConfidenceStop(max_tokens=3, min_survival=0.1)
    assert [stop.tokens_to_draft(n, sure(*[1.0] * n)).number for n in range(5)] == [1, 1, 1, 0, 0]


def test_an_impossible_token_ends_the_block() -> None:
    assert ConfidenceStop().tokens_to_draft(1, [math.inf]).number == 0


def test_draft_length_is_parsed_as_a_number_or_auto() -> None:
    assert parse_draft_length(7) == FixedDraftLength(7)
    assert not parse_draft_length(7).needs_signals
    auto = parse_draft_length("auto")
    assert auto.needs_signals
    assert auto.tokens_to_draft(AUTO_MAX_K - 1, []).number == 1
    assert auto.tokens_to_draft(AUTO_MAX_K, []).number == 0


def test_the_cut_of_auto_is_part_of_what_a_lossy_gate_gives() -> None:
    """Gated outputs depend on where blocks end: another cap or floor would change them."""
    stop = ConfidenceStop()
    assert [stop.tokens_to_draft(n, sure(*[1.0] * n)).number for n in (15, 16)] == [1, 0]
    assert [stop.tokens_to_draft(1, sure(p)).number for p in (0.41, 0.39)] == [1, 0]


# Learnt -----------------------------------------------------------------------------------------------------------


def sampled(auto: AdaptiveDraftLength, plain: float = 1e3) -> AdaptiveDraftLength:
    """Time the plain tokens that the policy needs."""
    while auto.controller.switch.needs_sample:
        auto.controller.decoded_plain(plain)
    return auto


def learnt(
    *, wait: float, alpha: float, step: float = 0.01, rounds: int = 200, plain: float = 1e3
) -> AdaptiveDraftLength:
    """Return a policy after rounds of 4 tokens, each accepted with chance alpha. plain: seconds of a plain token."""
    auto, rng = AdaptiveDraftLength(), random.Random(1)
    for _ in range(rounds):
        accepted = next((n for n in range(4) if rng.random() >= alpha), 4)
        auto.controller.drafted(4, 4 * step)
        auto.controller.decided([0.1] * 4, accepted, drafted=by_model(4), seconds=wait)
    return sampled(auto, plain)


def length(auto: AdaptiveDraftLength, probability: float = math.exp(-0.1)) -> int:
    """Of a block all of whose tokens are that sure."""
    return next(n for n in range(MAX_K + 1) if not auto.tokens_to_draft(n, sure(*[probability] * n)).number)


def test_until_times_are_known_confidence_alone_decides() -> None:
    auto = AdaptiveDraftLength()
    for probabilities in ((), (0.9,), (0.7, 0.5), (0.39,)):
        block = sure(*probabilities)
        assert (
            auto.tokens_to_draft(len(block), block).number == ConfidenceStop().tokens_to_draft(len(block), block).number
        )
    auto.controller.decided([0.1] * 4, 0, drafted=by_model(4))
    assert auto.tokens_to_draft(3, sure(0.9, 0.9, 0.9)).number == 1


def test_tokens_to_draft_changes_no_state() -> None:
    auto = learnt(wait=0.1, alpha=0.8)
    assert len({tuple(auto.tokens_to_draft(n, sure(*[0.9] * n)).number for n in range(12)) for _ in range(5)}) == 1


def test_a_dear_verdict_makes_long_blocks() -> None:
    lengths = [length(learnt(wait=wait, alpha=0.85)) for wait in (0.005, 0.05, 0.5)]
    assert lengths[0] < lengths[1] < lengths[2]


def test_a_good_drafter_makes_long_blocks() -> None:
    lengths = [length(learnt(wait=0.1, alpha=alpha)) for alpha in (0.3, 0.7, 0.95)]
    assert lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.9])
def test_the_length_is_near_the_best_constant_one(alpha: float) -> None:
    """Where every token is alike, the rule is that of k* (docs/design/maths.md): its rate is within 3 % of the best."""
    found = length(learnt(wait=0.1, alpha=alpha, rounds=2000))
    rates = [(1 - alpha ** (k + 1)) / (1 - alpha) / (0.1 + 0.01 * k) for k in range(MAX_K)]
    best = max(rates)
    assert rates[found] >= 0.97 * best
    assert rates[2 * found + 2] < 0.97 * best, "the bound would hold for any length"


def test_at_least_one_token_at_most_the_protocol_s() -> None:
    assert length(learnt(wait=1e-6, alpha=0.0)) == 1
    assert length(learnt(wait=1e3, alpha=1.0)) == MAX_K


def test_no_token_if_plain_decoding_is_faster() -> None:
    """Rounds of 0.07 s bring (1 − 0.7^5) / 0.3 tokens: one in 0.025 s."""
    assert length(learnt(wait=0.03, alpha=0.7, plain=0.02)) == 0
    assert length(learnt(wait=0.03, alpha=0.7, plain=0.03)) >= 1


def test_the_edge_alone_always_drafts() -> None:
    auto = learnt(wait=1.0, alpha=0.1, plain=1e-3)
    assert auto.tokens_to_draft(0, []).number == 0
    assert auto.without_verifier.tokens_to_draft(0, []).number == 1
    assert FixedDraftLength(3).without_verifier == FixedDraftLength(3)


def test_a_token_that_is_known_to_fail_ends_the_block() -> None:
    auto, rng = AdaptiveDraftLength(), random.Random(1)
    for _ in range(200):
        unsure = [rng.random() < 0.3 for _ in range(4)]
        accepted = unsure.index(True) if any(unsure) else 4
        auto.controller.drafted(4, 0.04)
        auto.controller.decided([2.0 if bad else 0.001 for bad in unsure], accepted, drafted=by_model(4), seconds=0.1)
    assert auto.tokens_to_draft(3, sure(0.999, 0.999, 0.999)).number == 1
    assert auto.tokens_to_draft(3, sure(0.999, 0.999, math.exp(-2.0))).number == 0


@pytest.mark.parametrize("accepted", [0, 4])
def test_without_signals_the_mean_decides(accepted: int) -> None:
    auto = AdaptiveDraftLength()
    for _ in range(200):
        auto.controller.drafted(4, 0.04)
        auto.controller.decided([None] * 4, accepted, drafted=by_model(4), seconds=0.1)
    assert [sampled(auto).tokens_to_draft(n, []).number for n in (0, 3)] == [1, accepted == 4]


# Prompt lookup ----------------------------------------------------------------------------------------------------


def copied(start: int, count: int) -> list[MatchLength]:
    """Tokens that were looked up one behind the other: each match is longer by one than the one before."""
    return [MatchLength(start + n) for n in range(count)]


def lookup_length(auto: AdaptiveDraftLength, match_length: int) -> int:
    """The length of a block that is copied from a match of this length."""
    return next(n for n in range(MAX_K + 1) if not auto.tokens_to_draft(n, copied(match_length, n)).number)


def auto_with(*sources: DraftSource) -> AdaptiveDraftLength:
    return AdaptiveDraftLength(DraftLengthController(sources))


def test_before_any_verdict_a_long_match_is_copied_further() -> None:
    lengths = [lookup_length(AdaptiveDraftLength(), match_length) for match_length in (1, 2, 3, 9)]
    assert lengths[0] == 1
    assert lengths == sorted(lengths)
    assert lengths[-1] == next(n for n in range(AUTO_MAX_K) if MATCH_PRIORS[-1] ** n < 0.4)


def test_a_long_match_is_copied_further_if_long_matches_are_accepted_more_often() -> None:
    """Copies from short matches fail at their first token, those from long matches never. Each token costs 10 ms."""
    auto = auto_with(DraftSource.LOOKUP)
    for n in range(400):
        auto.controller.drafted(1, 1e-5, DraftSource.LOOKUP)
        block, accepted = (copied(12, 6), 6) if n % 2 else (copied(1, 2), 0)
        auto.controller.decided(block, accepted, drafted=by_lookup(len(block)), seconds=0.1 + 0.01 * len(block))
    assert lookup_length(sampled(auto), 1) == 1
    assert lookup_length(auto, 12) > 8


def test_tokens_of_each_source_have_their_own_cost() -> None:
    """Ten times as many looked-up tokens do not make a model's token cheap, nor count its times as outliers."""
    auto = auto_with(*DraftSource)
    for _ in range(200):
        for _ in range(10):
            auto.controller.drafted(1, 1e-5, DraftSource.LOOKUP)
        auto.controller.drafted(1, 0.05)
        work = {DraftSource.LOOKUP: Drafted(10, 1e-4), DraftSource.MODEL: Drafted(1, 0.05)}
        auto.controller.decided([*copied(3, 10), 0.1], 11, drafted=work, seconds=0.1)
    times = auto.controller.times
    assert times.draft_seconds(DraftSource.MODEL) == pytest.approx(0.05)
    assert times.draft_seconds(DraftSource.LOOKUP) == pytest.approx(1e-5)
    assert auto.controller.token_costs[DraftSource.MODEL] == pytest.approx(12 / 0.15 * 0.05, rel=0.1)
    assert auto.controller.token_costs[DraftSource.LOOKUP] == pytest.approx(12 / 0.15 * 1e-5, rel=0.1)


@pytest.mark.parametrize("k", [0, -1, MAX_K + 1, "5", "Auto", 2.0, True, None])
def test_other_values_are_refused(k: object) -> None:
    with pytest.raises(SettingsError, match="k is a whole number from 1 to 64, or 'auto'"):
        parse_draft_length(k)  # type: ignore[arg-type]
