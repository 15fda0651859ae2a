"""From a run's lines to the metrics of summary.json: the right texts to the right items; without a base, nothing."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.evals.manifest import Item
from outrider.evals.metrics import Resampling, Scoring
from outrider.evals.scoring import quality, times

HOW = Scoring(Resampling(draws=20))
ITEMS = [
    Item("a", prompt="x", references=("the cat sat on the mat",)),
    Item("b", prompt="y", references=("a dog ran in the park",)),
    Item("c", prompt="z", references=("it rains",)),
]


def line(mode: str, item: str, text: str | None, tokens: int = 3) -> tuple[tuple[str, str], dict[str, Any]]:
    return (item, mode), {"id": item, "mode": mode, "text": text, "token_ids": list(range(tokens))}


def test_modes_are_scored_on_what_all_of_them_answered() -> None:
    results = dict(
        [
            line("cloud-only", "a", "the cat sat on the mat"),
            line("cloud-only", "b", "a dog ran in the park"),
            line("exact", "a", "the cat sat on the mat"),
            line("exact", "c", "it rains"),
            line("plain", "c", None),
        ]
    )
    results["exact", "b"] = {"id": "b", "mode": "exact", "error": {"type": "X", "message": "y"}}
    found = quality(ITEMS, ["cloud-only", "exact", "plain"], results, HOW)
    assert found["plain"] == {}, "it has no text at all"
    assert found["exact"]["rouge_l"]["value"] == 1.0
    assert found["exact"]["rouge_l"]["n"] == found["cloud-only"]["rouge_l"]["n"] == 1
    assert found["exact"]["same_text"] | {"by_lang": 0} == {
        "value": 1.0,
        "n": 1,
        "low": None,
        "high": None,
        "by_lang": 0,
    }
    assert "attribute_all" not in found["exact"], "no item has labels"


def test_other_texts_than_the_clouds_are_seen() -> None:
    results = dict(
        line(mode, item, text)
        for mode, item, text in [
            ("cloud-only", "a", "yes"),
            ("edge-only", "a", "yes"),
            ("cloud-only", "b", "yes"),
            ("edge-only", "b", "no"),
        ]
    )
    assert quality(ITEMS, ["cloud-only", "edge-only"], results, HOW)["edge-only"]["same_text"]["value"] == 0.5


def test_without_texts_there_are_no_metrics_of_them() -> None:
    results = dict([line("exact", "a", None)])
    assert quality(ITEMS, ["exact"], results, HOW) == {"exact": {}}


def test_times_come_from_arrivals_and_are_divided_where_that_is_known() -> None:
    results = dict([line("exact", "a", "x"), line("plain", "a", "x")])
    shared = {"ttft_s": 0.5, "total_s": 1.0, "itl_s": [0.1, 0.3]}
    timings = {
        ("a", "exact"): {**shared, "draft_s": 0.2, "wait_s": 0.4, "queue_s": 0.1, "verify_s": 0.1, "bytes": {}},
        ("a", "plain"): shared,
    }
    found = times(ITEMS, ["exact", "plain"], results, timings, HOW)
    assert found["exact"]["itl_p50"]["value"] == pytest.approx(0.2)
    assert found["exact"]["share_network"]["value"] == pytest.approx(0.2)
    assert {name for name in found["exact"] if name not in found["plain"]} == {
        f"share_{part}" for part in ("prefill", "draft", "network", "queue", "verify", "rest")
    }
