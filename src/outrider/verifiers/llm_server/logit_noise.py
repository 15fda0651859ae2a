"""What a few rows of a known prompt tell of the server that sent them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.errors import CloudRefused
from outrider.sampling.top_logprobs import TopLogprobs

PROBE_PROMPT = tuple(
    17 + (n * 37) % 101 for n in range(70)
)  # ids that every vocabulary has; more than two blocks of a cache
PROBE_DRAFTS = (23, 41, 29, 67, 31)
FLOAT32_NOISE = 1e-3  # logits; below it, what differs is the order of a float32 sum
PROBE_TOP = 5  # entries of each row that are compared; what OpenAI's interface allows, too
TYPICAL_LOGIT = 16.0  # logits; where only log-probabilities are known, a step is that of logits of this size
NOISE_TOLERANCE = 4.0  # times the noise that was measured on a few rows, others of the same server may be apart
BFLOAT16, FLOAT16 = 7, 10  # binary digits of their fractions
MAX_NOISE = 4.0  # logits; no rounding makes such a difference


def measure_noise(name: str, one: Sequence[TopLogprobs], other: Sequence[TopLogprobs]) -> float:
    """The numeric noise in logits: how far two readings of the same rows are apart, doubled; 0 in float32.

    Where values are those of a short format, it is at least two of their steps: what these rows did not show, others
    will.

    Raises:
        CloudRefused: they are not readings of the same rows.
    """
    difference = max(_difference(a, b) for a, b in zip(one, other, strict=True))
    if not difference < MAX_NOISE:
        raise CloudRefused(f"{name} answers the same prompt with other rows, {difference:.3g} apart: it cannot verify")
    step = _rounding_step(one)
    if not step and difference < FLOAT32_NOISE:
        return 0.0
    return 2.0 * max(difference, step or _spacing(np.concatenate([row.values for row in one]), BFLOAT16))


def require_same_model(name: str, one: Sequence[TopLogprobs], other: Sequence[TopLogprobs], noise: float) -> None:
    """Raise CloudRefused unless two servers, or one at two times, read the same rows alike, but for the noise."""
    difference = max(_difference(a, b) for a, b in zip(one, other, strict=True))
    if not difference <= max(NOISE_TOLERANCE * noise, FLOAT32_NOISE):
        how = f"rows {difference:.3g} apart" if difference < math.inf else "rows of other tokens"
        raise CloudRefused(f"{name} serves other weights: the same prompt gives {how}")


def is_normalised(rows: Sequence[TopLogprobs]) -> bool:
    """Whether values are log-probabilities: none above 0, and no row's add up to more than 1."""
    return all(row.values.max() <= 0 and np.exp(row.values.astype(np.float64)).sum() <= 1.001 for row in rows)


def _difference(one: TopLogprobs, other: TopLogprobs) -> float:
    """The largest difference of entries that both name, each counted from the best of them; infinite below two.

    Counted so, logits and log-probabilities of the same row are the same.
    """
    values = dict(zip(other.ids.tolist(), other.values.tolist(), strict=True))
    shared = [(v, values[t]) for t, v in zip(one.ids.tolist(), one.values.tolist(), strict=True) if t in values]
    if len(shared) < 2:
        return math.inf
    best, its = max(shared)
    difference = [abs((a - best) - (b - its)) for a, b in shared]
    return math.inf if any(math.isnan(each) for each in difference) else max(difference)


def _rounding_step(rows: Sequence[TopLogprobs]) -> float:
    """The distance of neighbouring values where they are those of bfloat16 or float16; 0 in float32."""
    values = np.concatenate([row.values for row in rows]).astype(np.float32)
    if (digits := _fraction_bits(values)) is not None:
        return _spacing(values, digits)
    if not is_normalised(rows):
        return 0.0
    differences = np.concatenate([row.values.max() - row.values for row in rows]).astype(np.float64)
    for finest, digits in ((2.0**-8, BFLOAT16), (2.0**-11, FLOAT16)):
        multiples = differences / finest  # whole ones, of logits from 1 on, also where a logarithm was subtracted
        if (np.abs(multiples - np.rint(multiples)) < 0.05).all():
            return _spacing(np.array([TYPICAL_LOGIT]), digits)
    return 0.0


def _fraction_bits(values: np.ndarray) -> int | None:
    """Of the fraction, if the values are those of a short format."""
    if not (values.view(np.uint32) & 0xFFFF).any():
        return BFLOAT16
    with np.errstate(over="ignore"):
        return FLOAT16 if (values.astype(np.float16) == values).all() else None


def _spacing(values: np.ndarray, digits: int) -> float:
    """Of the largest value and its neighbour; below 1 it does not get smaller."""
    return float(2.0 ** (math.floor(math.log2(max(float(np.abs(values).max()), 1.0))) - digits))
