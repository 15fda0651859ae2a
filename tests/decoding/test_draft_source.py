"""The choice between prompt lookup and the draft model, by measured acceptance."""

from __future__ import annotations

import pytest

from outrider.decoding.draft_source import DraftSourceController


def test_before_any_verdict_long_matches_win() -> None:
    controller = DraftSourceController()
    assert [controller.prefers_lookup(length) for length in (1, 2, 3, 5, 9, 16)] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("length", [1, 2, 4, 8, 16])
def test_the_source_that_is_accepted_more_often_wins(length: int) -> None:
    controller = DraftSourceController()
    for _ in range(50):
        controller.update([length, length], 2)
        controller.update([0, 0], 0)
    assert controller.prefers_lookup(length)
    for _ in range(200):
        controller.update([length, length], 0)
        controller.update([0, 0], 2)
    assert not controller.prefers_lookup(length)


def test_drafts_behind_the_first_rejection_do_not_count() -> None:
    counted, short = DraftSourceController(), DraftSourceController()
    counted.update([3, 0, 9, 9, 9], 1)
    short.update([3, 0], 1)
    assert vars(counted)["_tokens_seen"] == vars(short)["_tokens_seen"] == 2


def test_a_source_that_is_not_used_is_tried_again() -> None:
    """Its rate decays towards the prior."""
    controller = DraftSourceController()
    for _ in range(20):
        controller.update([9], 0)
    assert not controller.prefers_lookup(9)
    for _ in range(6000):
        controller.update([0], 1)
        controller.update([0], 0)
    assert controller.prefers_lookup(9)
