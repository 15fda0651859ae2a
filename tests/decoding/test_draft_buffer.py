"""The buffer of drafts: its blocks, and the tokens drafted ahead of them."""

from __future__ import annotations

import pytest

from outrider.decoding.actions import Proposal
from outrider.decoding.draft_buffer import MAX_PROVISIONAL, DraftBuffer
from outrider.decoding.draft_length import FixedDraftLength

EOS = 9


def buffer(*tokens: int, ahead: tuple[int, ...] = (), k: int = 3) -> DraftBuffer:
    drafts = DraftBuffer(FixedDraftLength(k), (EOS,))
    for token in tokens:
        drafts.add(Proposal(token))
    for token in ahead:
        drafts.add_ahead(Proposal(token))
    return drafts


def tokens(proposals: list[Proposal]) -> list[int]:
    return [proposal.token for proposal in proposals]


def test_a_block_misses_the_rest_of_k_within_the_room() -> None:
    assert buffer().missing(20, 0).number == 3
    assert buffer(1).missing(20, 0).number == 2
    assert buffer(1).missing(1, 0).number == 1
    assert (
        buffer(1).missing(0, 0).number
        == buffer(1, EOS).missing(20, 0).number
        == buffer(1, 2, 3).missing(20, 0).number
        == 0
    )
    assert DraftBuffer(None, (EOS,)).missing(20, 0).number == 0


@pytest.mark.parametrize(("awaits_verdict", "pending"), [(True, [1, 2, 3]), (False, [])])
def test_an_ended_block_stays_pending_only_while_it_awaits_a_verdict(awaits_verdict: bool, pending: list[int]) -> None:
    drafts = buffer(1, 2, 3)
    drafts.end_block(awaits_verdict=awaits_verdict)
    assert tokens(drafts.pending) == pending
    assert drafts.block == []
    assert drafts.add(Proposal(4))
    assert not drafts.add(Proposal(5))
    assert tokens(drafts.block) == [4, 5]


@pytest.mark.parametrize(("bonus", "kept"), [(7, [8, 1]), (6, []), (None, [])])
def test_a_correct_guess_alone_keeps_the_tokens_behind_it(bonus: int | None, kept: list[int]) -> None:
    drafts = buffer(ahead=(7, 8, 1))
    drafts.resolve_guess(bonus)
    assert tokens(drafts.ahead) == kept


def test_a_block_ahead_is_taken_only_if_it_is_complete_and_within_the_limit() -> None:
    assert tokens(buffer(ahead=(1, 2, 3, 4)).take_block_ahead(20, 64)) == [1, 2, 3]
    assert tokens(buffer(ahead=(1, EOS, 3)).take_block_ahead(20, 64)) == [1, EOS]
    assert tokens(buffer(ahead=(1, 2)).take_block_ahead(2, 64)) == [1, 2]
    for drafts, limit in ((buffer(ahead=(1, 2)), 64), (buffer(ahead=(1, 2, 3)), 2), (buffer(), 64)):
        before = tokens(drafts.ahead)
        assert drafts.take_block_ahead(20, limit) == []
        assert tokens(drafts.ahead) == before


def test_no_token_is_drafted_ahead_that_cannot_be_of_use() -> None:
    assert buffer(1).may_extend_ahead(1, 2)
    assert not buffer(1).may_extend_ahead(1, 1)  # the guess of the bonus token alone
    assert not buffer(EOS).may_extend_ahead(EOS, 20)
    assert not buffer(1, ahead=(2, EOS)).may_extend_ahead(1, 20)
    assert not buffer(1, ahead=(2, 3)).may_extend_ahead(1, 2)
    assert not buffer(1, ahead=(2,) * MAX_PROVISIONAL).may_extend_ahead(1, 100)
