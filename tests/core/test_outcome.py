"""Counters, the guarantee, and the JSON of a result."""

from __future__ import annotations

import json

import pytest

from outrider.config import Loss
from outrider.core.outcome import FEWEST_AUDITED, Audits, Result, Risk, Stats, guarantee
from outrider.core.sequence import Source

E, S, A, C, B = Source.EDGE, Source.SAMPLED, Source.ACCEPTED, Source.CORRECTION, Source.BONUS


def stats_of(sources: list[Source]) -> Stats:
    stats = Stats()
    stats.count_sources(sources)
    return stats


def test_counting_sources() -> None:
    stats = stats_of([A, A, A, C, B, E, S, A])
    assert (stats.accepted, stats.corrected, stats.bonus) == (4, 1, 1)
    assert (stats.cloud_tokens, stats.edge_tokens, stats.loop_sampled) == (6, 2, 1)


@pytest.mark.parametrize(
    ("sources", "lossless", "expected"),
    [
        ([A, C, B], True, "exact"),
        ([A, C, B], False, "best-effort"),
        ([A, C, B, E], True, "best-effort"),
        ([E, A], False, "best-effort"),
        ([E, E, S], True, "edge-only"),
        ([E, E], False, "edge-only"),
    ],
)
def test_the_guarantee_is_judged_by_what_was_done(sources: list[Source], lossless: bool, expected: str) -> None:
    assert guarantee(stats_of(sources), lossless=lossless) == expected


@pytest.mark.parametrize(
    ("sources", "lossless", "lost", "expected"),
    [
        ([A, C, E], True, False, "bounded"),
        ([E, E], True, False, "bounded"),
        ([A, C, B], True, False, "exact"),
        ([A, C, E], False, False, "best-effort"),
        ([E, E], False, False, "edge-only"),
        ([A, C, E], True, True, "edge-only"),
        ([E, E], True, True, "edge-only"),
        ([A, C, B], True, True, "edge-only"),
    ],
)
def test_a_budget_covers_what_was_skipped_and_nothing_else(
    sources: list[Source], lossless: bool, lost: bool, expected: str
) -> None:
    stats = stats_of(sources)
    stats.cloud_lost = lost
    assert guarantee(stats, lossless=lossless, bounded=True) == expected


@pytest.mark.parametrize("sources", [[A, C, B, E], [A, A, E], [E, E]])
def test_a_cloud_that_was_lost_leaves_an_edge_only_result_and_honest_counters(sources: list[Source]) -> None:
    stats = stats_of(sources)
    stats.cloud_lost = True
    assert guarantee(stats, lossless=True) == "edge-only"
    assert stats.cloud_tokens == len(sources) - sources.count(E)
    assert result(stats=stats).to_json()["stats"]["cloud_lost"] is True


def test_rates_are_those_of_the_vocabulary() -> None:
    stats = stats_of([A, A, C, E])
    stats.verified, stats.blocks, stats.escalated = 5, 4, 1
    assert (stats.acceptance_rate, stats.escalation_rate, stats.cloud_share) == (2 / 5, 1 / 4, 3 / 4)


def test_a_rate_of_nothing_is_none() -> None:
    assert (Stats().acceptance_rate, Stats().escalation_rate, Stats().cloud_share) == (None, None, None)


def result(**changes: object) -> Result:
    values = {
        "text": "社区",
        "token_ids": [5, 6],
        "finish_reason": "eos",
        "guarantee": "exact",
        "prompt_tokens": 3,
        "stats": Stats(total_s=1 / 3),
        "sources": [A, B],
        "near_ties": [1],
    }
    return Result(**{**values, **changes})  # type: ignore[arg-type]


def test_json_has_the_keys_of_the_design() -> None:
    out = json.loads(json.dumps(result().to_json()))
    design = "text token_ids finish_reason guarantee prompt_tokens stats"
    assert set(design.split()) <= set(out)
    counters = (
        "rounds blocks escalated forced_by_loop loop_sampled drafted verified accepted corrected bonus cloud_tokens "
        "edge_tokens bytes_up bytes_down media_bytes_up ttft_s total_s"
    )
    assert set(counters.split()) <= set(out["stats"])


def test_json_values() -> None:
    out = result().to_json()
    assert (out["text"], out["token_ids"], out["near_ties"], out["warnings"]) == ("社区", [5, 6], [1], [])
    assert out["sources"] == ["accepted", "bonus"]
    assert out["stats"]["total_s"] == 0.333333
    assert result(text=None).to_json()["text"] is None


def test_the_risk_of_a_result_in_json() -> None:
    assert result().to_json()["risk"] is None
    out = result(risk=Risk(0.02, "tokens", 10, 1, 0.05)).to_json()
    assert out["risk"] == {"budget": 0.02, "loss": "tokens", "audited": 10, "disagreed": 1, "estimate": 0.05}


# Audits ---------------------------------------------------------------------------------------------------------


def audits_of(*results: tuple[int, int], budget: float = 0.02, loss: Loss = "tokens") -> Audits:
    """Each result has 8 edge and 2 cloud tokens; (audited, disagreed)."""
    audits = Audits(budget, loss)
    for audited, disagreed in results:
        stats = stats_of([E] * 8 + [A] * 2)
        stats.audited, stats.disagreed = audited, disagreed
        audits.add(stats)
    return audits


def test_the_estimate_is_of_all_tokens() -> None:
    assert audits_of((5, 1), (5, 0)).risk == Risk(0.02, "tokens", 10, 1, pytest.approx(0.1 * 0.8))


def test_before_the_first_audit_there_is_no_estimate() -> None:
    assert Audits(0.02, "tokens").risk == Risk(0.02, "tokens", 0, 0, None)
    assert audits_of((0, 0)).risk == Risk(0.02, "tokens", 0, 0, None)
    assert Audits(0.02, "tokens").warnings() == audits_of((0, 0)).warnings() == []


def test_of_outputs_the_estimate_is_the_share_that_was_seen_to_differ() -> None:
    audits = audits_of((5, 1), (5, 0), (0, 0), (5, 4), loss="outputs")
    assert audits.risk == Risk(0.02, "outputs", 15, 5, 0.5)
    assert audits.lower == 0.0, "too few"


def test_a_budget_of_outputs_is_warned_of_by_outputs_not_by_tokens() -> None:
    one_bad_token_in_each_tenth = [(8, int(n % 10 == 0)) for n in range(200)]
    assert audits_of(*one_bad_token_in_each_tenth, budget=0.02).warnings() == []
    (warning,) = audits_of(*one_bad_token_in_each_tenth, budget=0.02, loss="outputs").warnings()
    assert "risk at 10 % of all outputs, above the budget of 2 % (20 of 1600 audited tokens, in 20 of 200" in warning
    assert audits_of(*one_bad_token_in_each_tenth, budget=0.09, loss="outputs").warnings() == []


def test_a_result_that_lost_the_cloud_counts_for_nothing() -> None:
    audits = audits_of((5, 1))
    lost = stats_of([E] * 100)
    lost.audited, lost.disagreed, lost.cloud_lost = 50, 50, True
    audits.add(lost)
    assert audits.risk == audits_of((5, 1)).risk


def test_few_results_show_nothing_however_bad() -> None:
    assert audits_of(*[(8, 8)] * (FEWEST_AUDITED - 1)).lower == 0.0
    assert audits_of(*[(8, 8)] * FEWEST_AUDITED).lower > 0.5


def test_the_bound_lies_below_the_estimate_and_comes_closer() -> None:
    few, many = audits_of(*[(8, 2), (8, 4)] * 5), audits_of(*[(8, 2), (8, 4)] * 500)
    for audits in (few, many):
        assert audits.risk.estimate == pytest.approx(3 / 8 * 0.8)
        assert 0 < audits.lower < audits.risk.estimate
    assert many.lower > few.lower
    assert many.lower == pytest.approx(3 / 8 * 0.8, rel=0.1)


def test_errors_that_come_together_show_less() -> None:
    spread, together = audits_of(*[(8, 1)] * 40), audits_of(*[(8, 8), *[(8, 0)] * 7] * 5)
    assert spread.risk == together.risk
    assert spread.lower > together.lower


def test_a_warning_names_estimate_and_budget() -> None:
    assert audits_of(*[(8, 0), (8, 1)] * 10, budget=0.1).warnings() == []
    (warning,) = audits_of(*[(8, 2)] * 20, budget=0.1).warnings()
    assert (
        "risk at 20 % of all tokens, above the budget of 10 % (40 of 160 audited tokens, in 20 of 20 results)"
        in warning
    )
