"""The index of prompt lookup, against a search through the whole sequence."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.decoding.ngram_index import MAX_CANDIDATES, Match, NgramIndex

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def naive_match(ids: Seq[int], min_ngram: int, max_ngram: int, excluded: Collection[int] = ()) -> Match | None:
    """The longest suffix, up to max_ngram, that occurs earlier before a token not excluded; the first of several."""
    for length in range(min(max_ngram, len(ids) - 1), min_ngram - 1, -1):
        for end in range(length, len(ids)):
            if ids[end - length : end] == ids[len(ids) - length :] and ids[end] not in excluded:
                return Match(length, ids[end])
    return None


class Rollbacks(RuleBasedStateMachine):
    """Appends and roll-backs in any order: after each, every match is that of the plain search."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []
        self.sizes = [(1, 1), (1, 3), (2, 2), (2, 5), (3, 16)]
        self.indices = [NgramIndex(*size) for size in self.sizes]

    @rule(tokens=TOKENS)
    def append(self, tokens: list[int]) -> None:
        self.ids += tokens
        for index in self.indices:
            index.extend(tokens)

    @rule(share=st.floats(0, 1))
    def roll_back(self, share: float) -> None:
        length = int(share * len(self.ids))
        del self.ids[length:]
        for index in self.indices:
            index.truncate(length)

    @rule()
    def keep_more_than_there_is(self) -> None:
        for index in self.indices:
            index.truncate(len(self.ids) + 1)

    @invariant()
    def matches_are_those_of_a_plain_search(self) -> None:
        for size, index in zip(self.sizes, self.indices, strict=True):
            assert len(index) == len(self.ids)
            for excluded in ((), (0,), (1, 2), (0, 1, 2, 3)):
                assert index.find(excluded) == naive_match(self.ids, *size, excluded)


TestRollbacks = Rollbacks.TestCase


@given(TOKENS, TOKENS, TOKENS)
def test_a_roll_back_leaves_no_trace(kept: list[int], dropped: list[int], added: list[int]) -> None:
    rolled_back, fresh = NgramIndex(2, 4), NgramIndex(2, 4)
    rolled_back.extend(kept + dropped)
    rolled_back.truncate(len(kept))
    for index, tokens in ((rolled_back, added), (fresh, kept + added)):
        index.extend(tokens)
    assert vars(rolled_back) == vars(fresh)


def test_only_so_many_occurrences_are_compared() -> None:
    """The best match lies behind more worse ones than are compared."""
    index = NgramIndex(1, 8)
    index.extend([7, 8, 9, *[n % 5 for n in range(10)], *[6, 9] * MAX_CANDIDATES, 7, 8, 9])
    match = index.find()
    assert match is not None
    assert match.length == 1
