"""The sentence on what was gained states measured facts only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.config import Loss
from outrider.decoding.gain import CloudBaseline, Gain
from outrider.decoding.result import Result, Stats
from outrider.decoding.risk_estimate import Risk
from outrider.decoding.sequence import Source

EXACT = Gain(outputs=2, exact=2, tokens=69, cloud_tokens=69, rounds=12, blocks=12, escalated=12, seconds=1.0)
GATED = replace(EXACT, exact=0, cloud_tokens=20, rounds=7, blocks=18, escalated=7)


def test_what_was_not_measured_is_not_claimed() -> None:
    said = EXACT.describe()
    assert said == "Same text as the cloud alone would give; the large model ran 12 times instead of 69."


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        (1.6, "1.6 times as fast as the cloud alone (measured)."),
        (1.0, "as fast as the cloud alone (measured)."),
        (0.5, "0.5 times as fast as the cloud alone (measured): it does not pay here."),
    ],
)
def test_a_measured_speed_is_stated_also_where_it_did_not_pay(seconds: float, named: str) -> None:
    assert EXACT.describe(CloudBaseline(2, 2, seconds)).endswith(named)


def test_a_speed_is_a_ratio_of_seconds() -> None:
    said = replace(EXACT, seconds=2.0).describe(CloudBaseline(2, 2, 5.0))
    assert said.endswith("2.5 times as fast as the cloud alone (measured).")


def test_texts_that_differ_are_counted() -> None:
    said = GATED.describe(CloudBaseline(2, 1, 1.0))
    assert said.startswith("Same text as the cloud alone in 1 of 2 outputs; 7 of 18 blocks went to the cloud;")


def test_a_lossy_run_promises_nothing() -> None:
    assert GATED.describe().startswith("Same text as the cloud alone is promised for 0 of 2 outputs; 7 of 18 blocks")


@pytest.mark.parametrize(
    ("loss", "share"),
    [
        ("outputs", "outputs that differ from the cloud's"),
        ("tokens", "the cloud's tokens from the first difference on"),
    ],
)
def test_a_bounded_run_states_its_budget(loss: Loss, share: str) -> None:
    risk = Risk(budget=0.07, loss=loss, audited=0, disagreed=0, estimate=None)
    bounded = replace(GATED, exact=1, bounded=1, risk=risk)
    start = f"The share of {share} is expected to be at most 7 % (bounded); 7 of 18 blocks went to the cloud."
    assert bounded.describe() == start
    assert replace(bounded, risk=None).describe().startswith("Every output is within the budget")
    assert replace(bounded, bounded=0).describe().startswith("Same text as the cloud alone is promised for 1 of 2")
    assert replace(bounded, exact=2, bounded=0).describe().startswith("Same text as the cloud alone would give")


def test_a_modelled_speed_says_so() -> None:
    assert "(modelled)" in EXACT.describe(CloudBaseline(2, 2, 1.6, modelled=True))


def test_the_edge_alone_and_nothing_at_all() -> None:
    assert replace(GATED, rounds=0, cloud_tokens=0).describe() == "The cloud was not used: the text is the edge's own."
    assert Gain.of([]).describe() == ""
    said = replace(GATED, rounds=0, cloud_tokens=0).describe(CloudBaseline(2, 1, 3.0))
    assert said == (
        "Same text as the cloud alone in 1 of 2 outputs; the cloud was not used; "
        "3.0 times as fast as the cloud alone (measured)."
    )


def test_sums_over_results() -> None:
    stats = Stats(rounds=1, blocks=2, escalated=1, cloud_tokens=1, edge_tokens=1, total_s=0.5)
    result = Result("", [1, 2], "eos", "best-effort", 1, stats, [Source.EDGE, Source.BONUS])
    assert Gain.of([result, result]) == Gain(2, 0, 4, 2, 2, 4, 2, 1.0)
