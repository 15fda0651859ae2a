"""All text metrics of a run in one call. docs/metrics.md has the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.evals.attributes import NAMES, Parse, accuracy, parse
from outrider.evals.bertscore import Encoder, bertscore
from outrider.evals.bootstrap import Measure, Resampling, Score, measure
from outrider.evals.format_metrics import FormatRules, compliance, language_match, repetition
from outrider.evals.latency import Timing, latency
from outrider.evals.manifest import Item
from outrider.evals.overlap import Pair, bleu, chrf, cider_d, rouge_l

__all__ = ["Measure", "Resampling", "Score", "Scoring", "Timing", "agreement", "latency", "score"]


@dataclass(frozen=True)
class Scoring:
    """Settings of the metrics. parse: reads attributes from a text. names: the labels that are attributes."""

    resampling: Resampling = field(default_factory=Resampling)
    rules: FormatRules = field(default_factory=FormatRules)
    parse: Parse = parse
    names: tuple[str, ...] = NAMES
    encoder: Encoder | None = None


def score(
    items: Sequence[Item], texts: Sequence[str], cloud_texts: Sequence[str] | None = None, how: Scoring | None = None
) -> dict[str, Measure]:
    """Return all metrics by name, except those without an item to compute them on.

    Args:
        texts: the answer to each item.
        cloud_texts: the answers of the cloud model alone, for the agreement.

    Raises:
        ValueError: texts and items differ in number.
        SettingsError: a package of the extra `eval` is missing.
    """
    how = how or Scoring()
    draws, langs = how.resampling, [item.lang for item in items]
    pairs = [Pair(text, item.references, item.lang) for item, text in zip(items, texts, strict=True)]
    found: dict[str, Measure | None] = {
        "bleu": bleu(pairs, draws),
        "chrf": chrf(pairs, draws),
        "rouge_l": rouge_l(pairs, draws),
        "cider_d": cider_d(pairs, draws),
        "bertscore": bertscore(pairs, how.encoder, draws) if how.encoder else None,
        "language_match": language_match(texts, langs, draws),
        **repetition(texts, langs, draws),
        **compliance(texts, langs, draws, how.rules),
        **accuracy(items, texts, draws, how.parse, how.names),
        **(agreement(texts, cloud_texts, langs, draws) if cloud_texts is not None else {}),
    }
    return {name: result for name, result in found.items() if result is not None}


def agreement(
    texts: Sequence[str], cloud_texts: Sequence[str], langs: Sequence[str], how: Resampling
) -> dict[str, Measure | None]:
    """Return same_text, the share of texts equal to the cloud's, and cloud_chrf, the chrF against the cloud's texts."""
    pairs = [Pair(text, (cloud,), lang) for text, cloud, lang in zip(texts, cloud_texts, langs, strict=True)]
    same = [float(text == cloud) for text, cloud in zip(texts, cloud_texts, strict=True)]
    return {"same_text": measure(same, langs, how), "cloud_chrf": chrf(pairs, how)}
