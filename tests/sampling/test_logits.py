"""Cheap operations on one row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.logits import argmax, clone_logits, gather_logits, scatter_logits, top2_margin

value_lists = st.lists(st.integers(-3, 3) | st.just(-math.inf), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(value_lists)
def test_best_is_the_first_of_the_largest(values: list[float]) -> None:
    assert argmax(torch.tensor(values, dtype=torch.float32)) == values.index(max(values))


@settings(max_examples=100, deadline=None)
@given(value_lists)
def test_lead_is_the_distance_to_the_next(values: list[float]) -> None:
    if max(values) == -math.inf:
        return
    ordered = sorted(values, reverse=True)
    expected = ordered[0] - ordered[1] if len(values) > 1 else math.inf
    assert top2_margin(torch.tensor(values, dtype=torch.float32)) == expected


@pytest.mark.parametrize("values", [[1.0, 4.0, 2.0], [4.0, 1.0, 2.0], [1.0, 2.0, 4.0], [-math.inf, 0.0]])
def test_lead_wherever_the_best_stands(values: list[float]) -> None:
    assert top2_margin(torch.tensor(values)) == (2.0 if len(values) == 3 else math.inf)


def test_a_copy_is_independent() -> None:
    original = torch.zeros(3)
    copied = clone_logits(original[:2])
    copied[0] = 7.0
    assert original.tolist() == [0.0, 0.0, 0.0]
    assert copied.tolist() == [7.0, 0.0]


def test_take_and_put_at_some_places() -> None:
    values = torch.tensor([1.0, 2.0, -3.0, 4.0])
    at = np.array([2, 0])
    assert gather_logits(values, at).tolist() == [-3.0, 1.0]
    scatter_logits(values, at, np.array([7.0, 8.0], dtype=np.float32))
    assert values.tolist() == [8.0, 2.0, 7.0, 4.0]
    scatter_logits(values, at, -np.inf)
    assert values.tolist() == [-math.inf, 2.0, -math.inf, 4.0]


# Elsewhere than on a CPU ------------------------------------------------------------------------------------------


class Device(str):
    """A device by another name, whose memory is the CPU's."""

    type = "elsewhere"


class Elsewhere(torch.Tensor):
    """A tensor that takes the way of the other devices."""

    device = Device("cpu")  # type: ignore[assignment]


@settings(max_examples=60, deadline=None)
@given(value_lists.filter(lambda values: len(values) > 1))
def test_another_device_gives_the_same(values: list[float]) -> None:
    here = torch.tensor(values, dtype=torch.float32)
    there = here.clone().as_subclass(Elsewhere)
    assert argmax(there) == argmax(here)
    if max(values) > -math.inf:
        assert top2_margin(there) == top2_margin(here)
    copied, at = clone_logits(there), np.array([len(values) - 1, 0])
    assert gather_logits(there, at).tolist() == [values[-1], values[0]]
    scatter_logits(copied, at, np.array([7.0, 8.0], dtype=np.float32))
    assert copied.tolist() == [8.0, *values[1:-1], 7.0]
    scatter_logits(copied, at[:1], -np.inf)
    assert copied[-1] == -math.inf
    assert there.tolist() == values
