"""The numeric noise of a server's logits, measured on a probe prompt, and the check for the same model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.errors import CloudRefused
from outrider.sampling.top_logprobs import TopLogprobs

PROBE_PROMPT = tuple(17 + (n * 37) % 101 for n in range(70))  # ids of every vocabulary; over two KV cache blocks
PROBE_DRAFTS = (23, 41, 29, 67, 31)
FLOAT32_NOISE = 1e-3  # logits; smaller differences come from the order of float32 sums
PROBE_TOP = 5  # entries of each row to compare; OpenAI's API allows as many
TYPICAL_LOGIT = 16.0  # assumed size of a logit where only log-probabilities are known
NOISE_TOLERANCE = 4.0  # the difference between two servers may be this multiple of the measured noise
BFLOAT16, FLOAT16 = 7, 10  # bits of the fraction
MAX_NOISE = 4.0  # logits; no rounding causes a larger difference


def measure_noise(name: str, one: Sequence[TopLogprobs], other: Sequence[TopLogprobs]) -> float:
    """Return the numeric noise in logits: twice the difference between two computations of the same rows.

    Values in a 16-bit format give at least two rounding steps, because a few rows may not show the full noise. Values
    in float32 give 0.

    Raises:
        CloudRefused: the difference is too large for noise.
    """
    difference = max(_difference(a, b) for a, b in zip(one, other, strict=True))
    if not difference < MAX_NOISE:
        raise CloudRefused(f"{name} answers the same prompt with other rows, {difference:.3g} apart: it cannot verify")
    step = _rounding_step(one)
    if not step and difference < FLOAT32_NOISE:
        return 0.0
    return 2.0 * max(difference, step or _spacing(np.concatenate([row.values for row in one]), BFLOAT16))


def require_same_model(name: str, one: Sequence[TopLogprobs], other: Sequence[TopLogprobs], noise: float) -> None:
    """Raise CloudRefused if rows of two servers, or of one at two times, differ by more than the noise."""
    difference = max(_difference(a, b) for a, b in zip(one, other, strict=True))
    if not difference <= max(NOISE_TOLERANCE * noise, FLOAT32_NOISE):
        how = f"rows {difference:.3g} apart" if difference < math.inf else "rows of other tokens"
        raise CloudRefused(f"{name} serves other weights: the same prompt gives {how}")


def is_normalised(rows: Sequence[TopLogprobs]) -> bool:
    """Return whether values are log-probabilities: none is above 0, and no row of probabilities sums to over 1."""
    return all(row.values.max() <= 0 and np.exp(row.values.astype(np.float64)).sum() <= 1.001 for row in rows)


def _difference(one: TopLogprobs, other: TopLogprobs) -> float:
    """Return the largest difference between the shared entries of two rows, infinite if they share fewer than two.

    Entries are taken relative to the best shared one, which makes logits and log-probabilities comparable.
    """
    values = dict(zip(other.ids.tolist(), other.values.tolist(), strict=True))
    shared = [(v, values[t]) for t, v in zip(one.ids.tolist(), one.values.tolist(), strict=True) if t in values]
    if len(shared) < 2:
        return math.inf
    best, its = max(shared)
    difference = [abs((a - best) - (b - its)) for a, b in shared]
    return math.inf if any(math.isnan(each) for each in difference) else max(difference)


def _rounding_step(rows: Sequence[TopLogprobs]) -> float:
    """Return the rounding step of values in bfloat16 or float16, and 0 for float32."""
    values = np.concatenate([row.values for row in rows]).astype(np.float32)
    if (digits := _fraction_bits(values)) is not None:
        return _spacing(values, digits)
    if not is_normalised(rows):
        return 0.0
    differences = np.concatenate([row.values.max() - row.values for row in rows]).astype(np.float64)
    for finest, digits in ((2.0**-8, BFLOAT16), (2.0**-11, FLOAT16)):
        multiples = differences / finest  # integers for logits of at least 1, also after a subtraction
        if (np.abs(multiples - np.rint(multiples)) < 0.05).all():
            return _spacing(np.array([TYPICAL_LOGIT]), digits)
    return 0.0


def _fraction_bits(values: np.ndarray) -> int | None:
    """Return the number of fraction bits if all values fit a 16-bit format, else None."""
    if not (values.view(np.uint32) & 0xFFFF).any():
        return BFLOAT16
    with np.errstate(over="ignore"):
        return FLOAT16 if (values.astype(np.float16) == values).all() else None


def _spacing(values: np.ndarray, digits: int) -> float:
    """Return the rounding step at the largest value, which is at least that at 1."""
    return float(2.0 ** (math.floor(math.log2(max(float(np.abs(values).max()), 1.0))) - digits))
