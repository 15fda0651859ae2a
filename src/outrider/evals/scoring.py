"""Metrics of a run from its lines, for summary.json. docs/metrics.md has the definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from outrider.decoding.result import TIME_FIELDS, Stats
from outrider.evals.latency import Timing, latency
from outrider.evals.manifest import Item
from outrider.evals.metrics import Scoring, score
from outrider.evals.store import Key, Row
from outrider.evals.summary import REFERENCE

Figures = dict[str, dict[str, Any]]  # by metric: value, n, low, high, and by_lang for texts


def quality(
    items: Sequence[Item], modes: Sequence[str], results: Mapping[Key, Row], how: Scoring
) -> dict[str, Figures]:
    """Return the text metrics by mode, which are empty without a tokenizer.

    All modes are scored on the same items, those that every mode with answers has answered. `n` is their number.

    Raises:
        SettingsError: a package of the extra `eval` is missing.
    """
    texts = {mode: _texts(items, mode, results) for mode in modes}
    answering = [answers.keys() for answers in texts.values() if answers]
    common = [item for item in items if all(item.id in answered for answered in answering)]
    cloud = texts.get(REFERENCE) or None
    return {mode: _quality(common, texts[mode], cloud, how) if texts[mode] else {} for mode in modes}


def times(
    items: Sequence[Item], modes: Sequence[str], results: Mapping[Key, Row], timings: Mapping[Key, Row], how: Scoring
) -> dict[str, Figures]:
    """Return the latency metrics by mode."""
    found: dict[str, Figures] = {}
    for mode in modes:
        keys = [(item.id, mode) for item in items if (item.id, mode) in timings]
        measured = [_timing(timings[key], len(results[key]["token_ids"])) for key in keys]
        divided = all("wait_s" in timings[key] for key in keys)  # transformers does not report its stages
        scores = latency(measured, how.resampling).items()
        found[mode] = {name: asdict(one) for name, one in scores if divided or not name.startswith("share_")}
    return found


def _texts(items: Sequence[Item], mode: str, results: Mapping[Key, Row]) -> dict[str, str]:
    rows = {item.id: results.get((item.id, mode), {}) for item in items}
    return {name: row["text"] for name, row in rows.items() if row.get("text") is not None}


def _quality(items: Sequence[Item], texts: dict[str, str], cloud: dict[str, str] | None, how: Scoring) -> Figures:
    cloud_texts = None if cloud is None else [cloud[item.id] for item in items]
    found = score(items, [texts[item.id] for item in items], cloud_texts, how)
    return {name: measure.to_json() for name, measure in found.items()}


def _timing(row: Row, tokens: int) -> Timing:
    spent: dict[str, Any] = {name: row[name] for name in TIME_FIELDS if name in row}
    stats = Stats(**spent)
    gaps = row.get("itl_s")
    arrivals = tuple(accumulate([stats.ttft_s, *gaps])) if gaps else ()
    return Timing(stats, tokens, arrivals)
