"""Counters, the guarantee, and the JSON of a result."""

from __future__ import annotations

import json

import pytest
from scipy.stats import binomtest, norm

from outrider.decoding.result import Result, Risk, Stats, derive_guarantee, wilson_interval
from outrider.decoding.sequence import Source

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
    assert derive_guarantee(stats_of(sources), lossless=lossless) == expected


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
    assert derive_guarantee(stats, lossless=lossless, bounded=True) == expected


@pytest.mark.parametrize("sources", [[A, C, B, E], [A, A, E], [E, E]])
def test_a_cloud_that_was_lost_leaves_an_edge_only_result_and_honest_counters(sources: list[Source]) -> None:
    stats = stats_of(sources)
    stats.cloud_lost = True
    assert derive_guarantee(stats, lossless=True) == "edge-only"
    assert stats.cloud_tokens == len(sources) - sources.count(E)
    assert result(stats=stats).to_json()["stats"]["cloud_lost"] is True


def test_rates_are_those_of_the_vocabulary() -> None:
    stats = stats_of([A, A, C, E])
    stats.verified, stats.blocks, stats.escalated = 5, 4, 1
    assert (stats.acceptance_rate, stats.escalation_rate, stats.cloud_share) == (2 / 5, 1 / 4, 3 / 4)


def test_a_rate_of_nothing_is_none() -> None:
    assert (Stats().acceptance_rate, Stats().escalation_rate, Stats().cloud_share) == (None, None, None)


@pytest.mark.parametrize(("hits", "count"), [(0, 1), (1, 1), (0, 9), (8, 10), (50, 100), (399, 400), (400, 400)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_the_interval_is_wilson_s(hits: int, count: int, confidence: float) -> None:
    expected = binomtest(hits, count).proportion_ci(confidence, method="wilson")
    found = wilson_interval(hits / count, count, float(norm.ppf(0.5 + confidence / 2)))
    assert found == pytest.approx((expected.low, expected.high), abs=1e-12)


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
    out = result(risk=Risk(0.02, "tokens", 10, 1, 0.05, 0.01, 0.2, 9)).to_json()
    counted = {"audited": 10, "disagreed": 1, "estimate": 0.05, "low": 0.01, "high": 0.2, "results": 9}
    assert out["risk"] == {"budget": 0.02, "loss": "tokens", **counted}
