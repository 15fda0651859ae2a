"""CIDEr-D: similarity of a caption to its references by tf-idf weighted n-grams.

Vedantam, Zitnick & Parikh, CIDEr: Consensus-based Image Description Evaluation, CVPR 2015 (arXiv:1411.5726),
equations 1 to 4 and 6. Details follow the authors' code (github.com/vrama91/cider), which captioning papers use:
n = 1…4, sigma = 6, a factor of 10, one document per item's references, raw counts as tf, and the number of bigrams as
the length in the penalty. The package aac-metrics has the same metric, but depends on four large packages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Gram = tuple[str, ...]
Vector = list[dict[Gram, float]]  # per n, the tf-idf weight of each n-gram

N = 4
SIGMA = 6.0
SCALE = 10.0


def cider_d(candidates: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> list[float]:
    """Return the score of each candidate, 0 to 10. The corpus score is their mean.

    Args:
        candidates: the words of each text.
        references: the words of each text's references, at least one. They determine the idf weights. An n-gram that
            occurs in the references of every item has weight 0, so that with a single item every score is 0.
    """
    documents = Counter(gram for refs in references for gram in {g for ref in refs for g in _grams(ref)})
    scores = []
    for words, refs in zip(candidates, references, strict=True):
        vector = _vector(words, documents, len(references))
        near = [_similarity(vector, words, _vector(ref, documents, len(references)), ref) for ref in refs]
        scores.append(SCALE * sum(near) / len(near))
    return scores


def _grams(words: Sequence[str]) -> Counter[Gram]:
    return Counter(tuple(words[i : i + n]) for n in range(1, N + 1) for i in range(len(words) - n + 1))


def _vector(words: Sequence[str], documents: Counter[Gram], total: int) -> Vector:
    vector: Vector = [{} for _ in range(N)]
    for gram, count in _grams(words).items():
        vector[len(gram) - 1][gram] = count * (math.log(total) - math.log(max(1, documents[gram])))
    return vector


def _similarity(ours: Vector, our_words: Sequence[str], theirs: Vector, their_words: Sequence[str]) -> float:
    """Return the mean over n of the clipped cosine, times the Gaussian penalty for a difference in length."""
    apart = max(0, len(our_words) - 1) - max(0, len(their_words) - 1)
    cosines = [_clipped_cosine(a, b) for a, b in zip(ours, theirs, strict=True)]
    return math.exp(-(apart**2) / (2 * SIGMA**2)) * sum(cosines) / N


def _clipped_cosine(ours: dict[Gram, float], theirs: dict[Gram, float]) -> float:
    norms = math.sqrt(sum(w * w for w in ours.values()) * sum(w * w for w in theirs.values()))
    shared = sum(min(weight, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0) for gram, weight in ours.items())
    return shared / norms if norms else 0.0
