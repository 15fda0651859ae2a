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
LIKELY = 4.0  # times the noise that was measured on a few rows, others of the same server may be apart
WRONG = 4.0  # logits; no rounding makes such a difference


def compare(name: str, one: Sequence[PartialRow], other: Sequence[PartialRow]) -> float:
    """The numeric noise in logits: how far two readings of the same rows are apart, doubled; 0 in float32.

    Where values are those of bfloat16, it is at least two of their steps: what these rows did not show, others will.

    Raises:
        CloudRefused: they are not readings of the same rows.
    """
    apart = max(_difference(a, b) for a, b in zip(one, other, strict=True))
    if not apart < WRONG:
        raise CloudRefused(f"{name} answers the same prompt with other rows, {apart:.3g} apart: it cannot verify")
    rounded = all(_is_bfloat16(row.values) for row in one)
    if apart < FLOAT32 and not rounded:
        return 0.0
    largest = max(float(np.abs(row.values).max()) for row in one)
    step = 2.0 ** (math.floor(math.log2(max(largest, 1.0))) - 7)
    return max(2.0 * apart, 2.0 * step)


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
    """The largest difference of entries that both name; infinite where they share none."""
    values = dict(zip(other.ids.tolist(), other.values.tolist(), strict=True))
    shared = [abs(v - values[t]) for t, v in zip(one.ids.tolist(), one.values.tolist(), strict=True) if t in values]
    return math.inf if np.isnan(shared).any() else max(shared, default=math.inf)


def _is_bfloat16(values: np.ndarray) -> bool:
    return not (np.ascontiguousarray(values, np.float32).view(np.uint32) & 0xFFFF).any()
