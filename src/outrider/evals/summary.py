"""Counts and rates of a run per mode, computed from its lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from outrider.evals.store import Key, Row

REFERENCE = "cloud-only"


def summarise(
    modes: Sequence[str], results: Mapping[Key, Row], timings: Mapping[Key, Row]
) -> dict[str, dict[str, Any]]:
    """Return figures by mode. A figure without data is None.

    items, failures, skipped: numbers of lines. agreement: share of items with the tokens of cloud-only, among those
    that both answered. tokens_per_s: all tokens ÷ all seconds. acceptance, cloud_share: as in `Stats`, over all
    items. bytes_up, bytes_down: on the network.
    """
    return {mode: _figures(mode, results, timings) for mode in modes}


def failures(results: Mapping[Key, Row]) -> int:
    """Return the number of failures, including traces."""
    return sum("error" in row for row in results.values())


def _figures(mode: str, results: Mapping[Key, Row], timings: Mapping[Key, Row]) -> dict[str, Any]:
    rows = {key[0]: row for key, row in results.items() if key[1] == mode}
    answers = {item: row for item, row in rows.items() if "token_ids" in row}
    times = [timings[item, mode] for item in answers]
    stats = [row["stats"] for row in answers.values()]
    tokens = sum(len(row["token_ids"]) for row in answers.values())
    cloud = _sum(stats, "cloud_tokens")
    return {
        "items": len(rows),
        "failures": sum("error" in row for row in rows.values()),
        "skipped": sum("skipped" in row for row in rows.values()),
        "agreement": _agreement(answers, results),
        "tokens": tokens,
        "tokens_per_s": _ratio(tokens, sum(float(time["total_s"]) for time in times)),
        "ttft_p50_s": median(time["ttft_s"] for time in times) if times else None,
        "cloud_share": _ratio(cloud, cloud + _sum(stats, "edge_tokens")),
        "acceptance": _ratio(_sum(stats, "accepted"), _sum(stats, "verified")),
        "bytes_up": _bytes(times, "up"),
        "bytes_down": _bytes(times, "down"),
    }


def _agreement(answers: Mapping[str, Row], results: Mapping[Key, Row]) -> float | None:
    both = [
        row["token_ids"] == other["token_ids"]
        for item, row in answers.items()
        if "token_ids" in (other := results.get((item, REFERENCE), {}))
    ]
    return _ratio(sum(both), len(both))


def _sum(stats: Sequence[Row], name: str) -> int:
    return sum(int(one.get(name, 0)) for one in stats)


def _bytes(times: Sequence[Row], direction: str) -> int:
    return sum(sum(time.get("bytes", {}).get(direction, {}).values()) for time in times)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
