"""What the rows of one prompt, read twice, tell of a server's arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import CloudRefused
from outrider.sampling.top_logprobs import TopLogprobs
from outrider.verifiers.llm_server.logit_noise import (
    FLOAT32_NOISE,
    MAX_NOISE,
    PROBE_DRAFTS,
    PROBE_PROMPT,
    is_normalised,
    measure_noise,
)

ROWS, V, TOP = 6, 50, 8
seeds = st.integers(0, 2**32)


def read(seed: int, scale: float = 6.0, offset: float = 0.0) -> np.ndarray:
    """Logits: float32 [ROWS, V]."""
    return (np.random.default_rng(seed).normal(0.0, scale, (ROWS, V)) + offset).astype(np.float32)


def best(values: np.ndarray, top: int = TOP) -> list[TopLogprobs]:
    ids = np.argsort(-values, axis=-1)[:, :top]
    return [TopLogprobs(at, row[at], float(row[at].min())) for at, row in zip(ids, values, strict=True)]


def bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


def log_softmax(values: np.ndarray) -> np.ndarray:
    return torch.log_softmax(torch.from_numpy(values), -1).numpy()


def moved(values: np.ndarray, by: float, row: int = 3, place: int = 0) -> np.ndarray:
    """A copy with the entry at `place` (0: the best) of one row changed."""
    values = values.copy()
    values[row, np.argsort(-values[row])[place]] += by
    return values


def step(rows: list[TopLogprobs]) -> float:
    """From the largest value to its neighbour in bfloat16, towards 0; below 1 it does not get smaller."""
    largest = max(1.0, *(float(np.abs(row.values).max()) for row in rows))
    return 2.0 ** (math.frexp(largest)[1] - 8)


# Noise ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(seeds, st.floats(0.0, FLOAT32_NOISE / 4))
def test_float32_has_no_noise(seed: int, apart: float) -> None:
    values = read(seed)
    assert measure_noise("a", best(values), best(values)) == 0.0
    assert measure_noise("a", best(values), best(moved(values, apart))) == 0.0
    assert measure_noise("a", best(log_softmax(values)), best(log_softmax(values))) == 0.0


@settings(max_examples=50)
@given(seeds, st.sampled_from([0.01, 0.5, 3.0, 20.0, 90.0]), st.sampled_from([0.0, -100.0]))
def test_bfloat16_has_at_least_two_steps(seed: int, scale: float, offset: float) -> None:
    rows = best(bfloat16(read(seed, scale, offset)))
    assert measure_noise("a", rows, rows) == pytest.approx(2.0 * step(rows))


@settings(max_examples=80)
@given(seeds, st.floats(0.01, MAX_NOISE - 0.1), st.integers(0, ROWS - 1), st.integers(0, TOP - 2))
def test_noise_is_twice_the_largest_difference(seed: int, apart: float, row: int, place: int) -> None:
    one, other = best(read(seed)), best(moved(read(seed), apart, row, place))
    for a, b in ((one, other), (other, one)):
        assert measure_noise("a", a, b) == pytest.approx(2.0 * max(apart, step(a)), abs=1e-4)


def test_one_row_that_is_no_bfloat16_is_enough() -> None:
    rows = best(bfloat16(read(1)))
    assert measure_noise("a", [*rows[:-1], *best(read(1))[-1:]], rows) > 0.01  # rounding is what they differ by
    rows[2] = TopLogprobs(rows[2].ids, rows[2].values + np.float32(1e-5), rows[2].missing_max)
    assert measure_noise("a", rows, rows) == 0.0


def test_entries_that_only_one_names_do_not_count() -> None:
    """Which of two near-equal entries comes last may differ; padding of another length too."""
    values = read(2)
    assert measure_noise("a", best(values, 8), best(values, 3)) == 0.0
    with pytest.raises(CloudRefused, match="other rows"):  # one is too few to compare
        measure_noise("a", best(values, 1), best(values))


# Other rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", range(ROWS))
@pytest.mark.parametrize("place", [0, 1, TOP - 1])
@pytest.mark.parametrize("by", [MAX_NOISE + 0.01, 50.0, math.inf])
def test_other_rows_are_refused(row: int, place: int, by: float) -> None:
    values = read(3)
    other = best(moved(values, by, row, place))
    with pytest.raises(CloudRefused, match="a-server answers the same prompt with other rows"):
        measure_noise("a-server", best(values), other)
    with pytest.raises(CloudRefused, match="cannot verify"):
        measure_noise("a-server", other, best(values))


def test_rows_that_share_no_entry_are_refused() -> None:
    one, other = (TopLogprobs(np.array(ids), np.zeros(2, np.float32), 0.0) for ids in ([1, 2], [3, 4]))
    with pytest.raises(CloudRefused, match="other rows"):
        measure_noise("a-server", [one], [other])


def test_rows_of_another_prompt_are_refused() -> None:
    with pytest.raises(CloudRefused, match="other rows"):
        measure_noise("a-server", best(read(4), V), best(read(5), V))


@pytest.mark.parametrize("row", range(ROWS))
@pytest.mark.parametrize("place", [0, 1, TOP - 1])
def test_not_a_number_is_refused_wherever_it_stands(row: int, place: int) -> None:
    rows, values = best(read(6)), best(read(6))
    values[row].values[place] = np.nan
    for one, other in ((rows, values), (values, rows), (values, values)):
        with pytest.raises(CloudRefused, match="other rows"):
            measure_noise("a-server", one, other)


# Log-probabilities ----------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(seeds, st.sampled_from([0.1, 3.0, 30.0]), st.integers(1, V))
def test_log_probabilities_are_told_from_logits(seed: int, scale: float, top: int) -> None:
    values = read(seed, scale)
    assert is_normalised(best(log_softmax(values), top))
    assert not is_normalised(best(log_softmax(values) + 20.0, top))


def test_one_row_of_logits_is_enough() -> None:
    rows = best(log_softmax(read(7)))
    assert not is_normalised([*rows[:-1], *best(read(7, offset=20.0))[-1:]])


def test_negative_logits_are_no_log_probabilities() -> None:
    assert not is_normalised([TopLogprobs(np.arange(3), np.full(3, -1.0, np.float32), -1.0)])  # 3/e > 1
    assert is_normalised([TopLogprobs(np.arange(2), np.full(2, -1.0, np.float32), -1.0)])


def test_not_a_number_is_no_log_probability() -> None:
    assert not is_normalised([TopLogprobs(np.arange(2), np.array([-1.0, np.nan], np.float32), -1.0)])


def test_the_prompt_is_longer_than_two_blocks_of_a_cache_and_has_no_draft_twice() -> None:
    assert len(PROBE_PROMPT) > 2 * 32
    assert len(set(PROBE_DRAFTS)) == len(PROBE_DRAFTS)


@settings(max_examples=50)
@given(seeds, st.sampled_from([torch.bfloat16, torch.float16]))
def test_a_short_format_is_seen_in_log_probabilities(seed: int, dtype: torch.dtype) -> None:
    """A constant is subtracted from each row, in float32: equal readings have noise all the same."""
    logits = torch.from_numpy(read(seed) + 12.0).clamp(min=2.0).to(dtype).float().numpy()
    rows = best(log_softmax(logits))
    assert measure_noise("a", rows, rows) > 0.0
