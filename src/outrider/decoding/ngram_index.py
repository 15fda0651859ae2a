"""The n-gram index of prompt lookup: earlier occurrences of the last tokens of a sequence.

For each position the index stores the previous position that ends with the same `min_ngram` tokens. These links form
one chain per n-gram, from its most recent occurrence backwards, as in the hash chains of Deflate (RFC 1951):

    ids        a  b  c  a  b  d  a  b
    chain of "b"  ^--------^--------^        find() walks it from the right, and keeps the longest match

Appending a token adds one link. Removing it restores the head of its chain. Both are O(1), so a roll-back costs no more
than the tokens that it removes, and each of them was appended once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

MAX_CANDIDATES = 1024  # compare only the most recent occurrences, to bound the time in repetitive texts


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the last tokens.

    length: the number of matching tokens. token: the one that followed them.
    """

    length: int
    token: int


class NgramIndex:
    """A sequence of tokens, with the earlier occurrences of its last n-gram.

    min_ngram, max_ngram: limits of the length of a match. Longer matches count as `max_ngram`.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._ids: list[int] = []
        self._last_end: dict[tuple[int, ...], int] = {}  # length of the prefix up to the last end of each n-gram
        self._previous_end: list[int] = []  # at index end − 1: the previous end of the same n-gram, or 0

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._ids.append(token)
            end = len(self._ids)
            if end < self._min_ngram:
                self._previous_end.append(0)
                continue
            ngram = self._last_ngram()
            self._previous_end.append(self._last_end.get(ngram, 0))
            self._last_end[ngram] = end

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, or all if there are fewer."""
        while len(self._ids) > length:
            previous_end = self._previous_end.pop()
            if previous_end:
                self._last_end[self._last_ngram()] = previous_end
            elif len(self._ids) >= self._min_ngram:
                del self._last_end[self._last_ngram()]
            self._ids.pop()

    def find(self, excluded: Collection[int] = ()) -> Match | None:
        """Return the longest match of the last tokens, or None. Of several, return the earliest.

        excluded: tokens that must not follow the match.

        Long matches are rare, and the earliest of short ones lies in the prompt, which an output copies in its order.
        The result depends on the tokens alone, not on the calls that appended them.
        """
        best: Match | None = None
        end = self._previous_end[-1] if self._ids else 0
        for _ in range(MAX_CANDIDATES):
            if not end:
                break
            length = self._match_length(end)
            if (best is None or length >= best.length) and self._ids[end] not in excluded:
                best = Match(length, self._ids[end])
            end = self._previous_end[end - 1]
        return best

    def _last_ngram(self) -> tuple[int, ...]:
        return tuple(self._ids[len(self._ids) - self._min_ngram :])

    def _match_length(self, end: int) -> int:
        """Return how many tokens before `end` equal the last tokens, at most `max_ngram`."""
        ids, last = self._ids, len(self._ids)
        length, limit = self._min_ngram, min(end, self._max_ngram)
        while length < limit and ids[end - length - 1] == ids[last - length - 1]:
            length += 1
        return length
