"""Batching rules: padding stays bounded, every item is in one batch, chunks cover a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.scheduler import (
    FREE_PADDING_TOKENS,
    batch_with_first,
    group_by_width,
    may_pad_together,
    next_chunk_size,
)

widths = st.lists(st.integers(1, 96), max_size=30)


def width_of(item: tuple[int, int]) -> int:
    return item[1]


@pytest.mark.parametrize(
    ("narrowest", "widest", "allowed"),
    [(1, FREE_PADDING_TOKENS, True), (1, FREE_PADDING_TOKENS + 1, False), (20, 40, True), (20, 41, False)],
)
def test_padding_is_at_most_double_or_free(narrowest: int, widest: int, allowed: bool) -> None:
    assert may_pad_together(narrowest, widest) is allowed


@given(widths, st.integers(1, 8))
def test_groups_hold_every_item_once_and_limit_size_and_padding(widths: list[int], limit: int) -> None:
    items = list(enumerate(widths))
    groups = group_by_width(items, width_of, limit)
    assert sorted(item for group in groups for item in group) == items
    for group in groups:
        assert len(group) <= limit
        assert may_pad_together(min(map(width_of, group)), max(map(width_of, group)))


@given(widths.filter(bool), st.integers(1, 8), st.integers(1, 200))
def test_batch_starts_with_the_first_item_and_keeps_the_order(widths: list[int], limit: int, max_tokens: int) -> None:
    items = list(enumerate(widths))
    batch = batch_with_first(items, width_of, limit=limit, max_tokens=max_tokens)
    assert batch[0] == items[0]
    assert batch == sorted(batch)
    assert len(batch) <= limit
    assert len(batch) == 1 or sum(map(width_of, batch)) <= max_tokens
    assert may_pad_together(min(map(width_of, batch)), max(map(width_of, batch)))


def test_batch_skips_an_item_that_is_too_wide_and_takes_a_later_one() -> None:
    assert batch_with_first([2, 90, 3], lambda item: item, limit=8, max_tokens=256) == [2, 3]


@given(st.integers(1, 2000), st.integers(1, 300), st.data())
def test_chunks_cover_the_prompt_and_the_last_one_holds_the_logits(total: int, chunk: int, data: st.DataObject) -> None:
    logits_to_keep = data.draw(st.integers(1, total))
    remaining, sizes = total, []
    while remaining:
        sizes.append(next_chunk_size(remaining, chunk, logits_to_keep))
        remaining -= sizes[-1]
    assert sum(sizes) == total
    assert sizes[-1] >= logits_to_keep
    assert all(0 < size <= chunk for size in sizes[:-1])
    assert sizes[-1] <= max(chunk, logits_to_keep)
