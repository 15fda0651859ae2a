"""Committed and pending tokens, and the invariant that ties a cache to them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.sequence import Sequence, Source, check_cache
from outrider.errors import StateError

tokens = st.integers(0, 9)
sources = st.sampled_from(list(Source))
operations = st.one_of(
    st.tuples(st.just("draft"), tokens),
    st.tuples(st.just("accept"), sources),
    st.tuples(st.just("replace"), tokens, sources),
    st.tuples(st.just("discard")),
    st.tuples(st.just("reopen"), st.integers(-2, 30)),
)


class TwoLists:
    """The same, kept the slow way: one list of (token, source), one of pending tokens."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.committed, self.pending = prompt, [], []

    def draft(self, token: int) -> None:
        self.pending.append(token)

    def accept(self, source: Source) -> bool:
        if self.pending:
            self.committed.append((self.pending.pop(0), source))
            return True
        return False

    def replace(self, token: int, source: Source) -> None:
        self.pending = []
        self.committed.append((token, source))

    def discard(self) -> None:
        self.pending = []

    def reopen(self, length: int) -> bool:
        keep = length - len(self.prompt)
        if not 0 <= keep <= len(self.committed):
            return False
        self.pending = [token for token, _ in self.committed[keep:]] + self.pending
        self.committed = self.committed[:keep]
        return True


def same(sequence: Sequence, model: TwoLists) -> None:
    assert sequence.generated == [token for token, _ in model.committed]
    assert sequence.sources == [source for _, source in model.committed]
    assert sequence.pending == model.pending
    assert sequence.pending_count == len(model.pending)
    assert sequence.committed_length == len(model.prompt) + len(model.committed)
    assert sequence.ids == model.prompt + sequence.generated + model.pending


@settings(max_examples=150, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=4), st.lists(operations, max_size=40))
def test_any_schedule_keeps_the_arithmetic(prompt: list[int], schedule: list[tuple]) -> None:
    sequence, model = Sequence(prompt), TwoLists(list(prompt))
    for name, *arguments in schedule:
        possible = getattr(model, name)(*arguments)
        method = getattr(sequence, "replace_pending" if name == "replace" else name)
        if possible is False:
            with pytest.raises(StateError):
                method(*arguments)
        else:
            method(*arguments)
        same(sequence, model)


def test_accept_commits_the_first_pending_token() -> None:
    sequence = Sequence([7, 8])
    sequence.draft(1)
    sequence.draft(2)
    sequence.accept(Source.ACCEPTED)
    assert (sequence.generated, sequence.pending) == ([1], [2])
    sequence.accept(Source.ACCEPTED)
    assert (sequence.generated, sequence.pending) == ([1, 2], [])
    with pytest.raises(StateError, match="nothing is pending"):
        sequence.accept(Source.ACCEPTED)


def test_the_prompt_is_copied_and_never_reopened() -> None:
    prompt = [7, 8]
    sequence = Sequence(prompt)
    sequence.draft(1)
    assert prompt == [7, 8]
    with pytest.raises(StateError, match="cannot reopen at 1"):
        sequence.reopen(1)
    assert sequence.generated == []


def test_who_decided() -> None:
    assert {source for source in Source if source.by_cloud} == {Source.ACCEPTED, Source.CORRECTION, Source.BONUS}


@pytest.mark.parametrize(("committed", "kv"), [(5, 4), (5, 0), (1, 0)])
def test_a_cache_behind_the_tokens_is_fine(committed: int, kv: int) -> None:
    check_cache(committed, kv, "drafter")


@pytest.mark.parametrize(("committed", "kv"), [(5, 5), (5, 6), (0, 0), (5, -1)])
def test_a_cache_that_ran_ahead_is_named(committed: int, kv: int) -> None:
    with pytest.raises(StateError, match=rf"verifier: the cache holds {kv} positions but only {committed} "):
        check_cache(committed, kv, "verifier")
