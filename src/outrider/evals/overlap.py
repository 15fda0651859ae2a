"""Overlap with references: BLEU, chrF, ROUGE-L and CIDEr-D, with the tokenization of each language.

BLEU and chrF are corpus scores by sacrebleu (0 to 100), ROUGE-L is the mean of rouge-score's F1 (0 to 1), and CIDEr-D
the mean of `evals.cider` (0 to 10). Items without references are left out and not counted in n.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np

from outrider.evals.bootstrap import Array, Finish, Measure, Resampling, mean, measure, pool
from outrider.evals.cider import cider_d as cider_scores
from outrider.evals.word_segmentation import import_extra, primary_language, words

CorpusScorer = Any  # a metric of sacrebleu, which is untyped
_BLEU_TOKENS: Final = {"zh": "zh", **dict.fromkeys(("ja", "th", "lo", "km", "my"), "char")}


@dataclass(frozen=True)
class Pair:
    """A text with its references."""

    text: str
    references: tuple[str, ...]
    lang: str


def bleu(pairs: Sequence[Pair], how: Resampling) -> Measure | None:
    """Return corpus BLEU, 0 to 100.

    Tokenization is sacrebleu's "zh" for Chinese, "char" for Japanese and others without spaces, else "13a".
    """
    return _corpus(pairs, how, lambda lang: _sacrebleu("BLEU", tokenize=_BLEU_TOKENS.get(lang, "13a")))


def chrf(pairs: Sequence[Pair], how: Resampling) -> Measure | None:
    """Return corpus chrF2, 0 to 100: character n-grams up to 6, no word n-grams, white space ignored."""
    return _corpus(pairs, how, lambda _lang: _sacrebleu("CHRF"))


def rouge_l(pairs: Sequence[Pair], how: Resampling) -> Measure | None:
    """Return the mean F1 of the longest common subsequence of words with the best reference, 0 to 1."""
    pairs = referenced(pairs)
    if not pairs:
        return None
    rouge = import_extra("rouge_score.rouge_scorer").RougeScorer(["rougeL"], tokenizer=_Words())
    rows = [rouge.score_multi(list(p.references), p.text)["rougeL"].fmeasure for p in pairs]
    return measure(rows, [p.lang for p in pairs], how)


def cider_d(pairs: Sequence[Pair], how: Resampling) -> Measure | None:
    """Return mean CIDEr-D, 0 to 10.

    All references of a language determine its idf weights in every draw. A language with a single item is left out.
    """
    scored: dict[str, Array] = {}
    for lang, group in _by_lang(pairs).items():
        if len(group) > 1:
            references = [[words(ref) for ref in p.references] for p in group]
            scored[lang] = np.asarray(cider_scores([words(p.text) for p in group], references))[:, None]
    return pool(scored, how, dict.fromkeys(scored, mean))


def referenced(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs with references."""
    return [pair for pair in pairs if pair.references]


def _by_lang(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in referenced(pairs):
        groups[primary_language(pair.lang)].append(pair)
    return dict(sorted(groups.items()))


def _corpus(pairs: Sequence[Pair], how: Resampling, metric: Callable[[str], CorpusScorer]) -> Measure | None:
    """Compute a corpus metric of sacrebleu from the counts of each item, which sacrebleu sums to score a corpus."""
    tables: dict[str, Array] = {}
    finish: dict[str, Finish] = {}
    for lang, group in _by_lang(pairs).items():
        scorer = metric(lang)
        counts = [scorer._extract_corpus_statistics([p.text], [[ref] for ref in p.references])[0] for p in group]
        tables[lang] = np.asarray(counts, dtype=np.float64)
        finish[lang] = partial(_finish, scorer)
    return pool(tables, how, finish)


def _finish(scorer: CorpusScorer, sums: Array, _n: int) -> float:
    return float(scorer._compute_score_from_stats([int(count) for count in sums]).score)


@lru_cache
def _sacrebleu(metric: str, **options: str) -> CorpusScorer:
    return getattr(import_extra("sacrebleu.metrics"), metric)(**options)


class _Words:
    """A tokenizer for rouge-score, as its own drops everything that is not ASCII."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        return list(words(text))
