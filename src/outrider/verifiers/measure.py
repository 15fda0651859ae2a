"""What a few rows of a known prompt tell of the server that sent them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.core.partial import PartialRow
from outrider.errors import CloudRefused

PROMPT = tuple(17 + (n * 37) % 101 for n in range(70))  # ids that every vocabulary has; more than two blocks of a cache
DRAFTS = (23, 41, 29, 67, 31)
FLOAT32 = 1e-3  # logits; below it, what differs is the order of a float32 sum
PROBED = 5  # entries of each row that are compared; what OpenAI's interface allows, too
USUAL = 16.0  # logits; where only log-probabilities are known, a step is that of logits of this size
LIKELY = 4.0  # times the noise that was measured on a few rows, others of the same server may be apart
WRONG = 4.0  # logits; no rounding makes such a difference


def compare(name: str, one: Sequence[PartialRow], other: Sequence[PartialRow]) -> float:
    """The numeric noise in logits: how far two readings of the same rows are apart, doubled; 0 in float32.

    Where values are those of a short format, it is at least two of their steps: what these rows did not show, others
    will.

    Raises:
        CloudRefused: they are not readings of the same rows.
    """
    apart = max(_difference(a, b) for a, b in zip(one, other, strict=True))
    if not apart < WRONG:
        raise CloudRefused(f"{name} answers the same prompt with other rows, {apart:.3g} apart: it cannot verify")
    step = _step(one)
    return 0.0 if apart < FLOAT32 and not step else max(2.0 * apart, 2.0 * step)


def require_same(name: str, one: Sequence[PartialRow], other: Sequence[PartialRow], noise: float) -> None:
    """Raise CloudRefused unless two servers, or one at two times, read the same rows alike, but for the noise."""
    apart = max(_difference(a, b) for a, b in zip(one, other, strict=True))
    if not apart <= max(LIKELY * noise, FLOAT32):
        how = f"rows {apart:.3g} apart" if apart < math.inf else "rows of other tokens"
        raise CloudRefused(f"{name} serves other weights: the same prompt gives {how}")


def is_normalised(rows: Sequence[PartialRow]) -> bool:
    """Whether values are log-probabilities: none above 0, and no row's add up to more than 1."""
    return all(row.values.max() <= 0 and np.exp(row.values.astype(np.float64)).sum() <= 1.001 for row in rows)


def _difference(one: PartialRow, other: PartialRow) -> float:
    """The largest difference of entries that both name, each counted from the best of them; infinite below two.

    Counted so, logits and log-probabilities of the same row are the same.
    """
    values = dict(zip(other.ids.tolist(), other.values.tolist(), strict=True))
    shared = [(v, values[t]) for t, v in zip(one.ids.tolist(), one.values.tolist(), strict=True) if t in values]
    if len(shared) < 2:
        return math.inf
    best, its = max(shared)
    apart = [abs((a - best) - (b - its)) for a, b in shared]
    return math.inf if any(math.isnan(each) for each in apart) else max(apart)


def _step(rows: Sequence[PartialRow]) -> float:
    """The distance of neighbouring values where they are those of bfloat16 or float16; 0 in float32.

    Seen in differences to the best, which are whole multiples of a step whether or not a logarithm was subtracted.
    """
    differences = np.concatenate([row.values.max() - row.values for row in rows]).astype(np.float64)
    largest = max(float(np.abs(row.values).max()) for row in rows)
    for finest, digits in ((2.0**-8, 7), (2.0**-11, 10)):
        multiples = differences / finest
        if (np.abs(multiples - np.rint(multiples)) < 0.05).all():
            return float(2.0 ** (math.floor(math.log2(max(largest, USUAL))) - digits))
    return 0.0
