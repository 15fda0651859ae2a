"""The sources of drafted tokens, and what is known of a token's acceptance before its verdict."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum

MATCH_BUCKETS = (2, 3, 5, 9)  # the shortest match of each bucket but the first


class DraftSource(Enum):
    """The source of a drafted token."""

    MODEL = "model"
    LOOKUP = "lookup"  # prompt lookup

    __hash__ = object.__hash__  # that of Enum is computed in Python at each use as a key


@dataclass(frozen=True)
class MatchLength:
    """The number of tokens before a looked-up token that match those before its source."""

    tokens: int

    @property
    def bucket(self) -> int:
        """The index of the bucket of this length."""
        return bisect_right(MATCH_BUCKETS, self.tokens)


Confidence = float | MatchLength  # −log q of a model's token, or the match length of a looked-up one


def source_of(confidence: Confidence | None) -> DraftSource:
    """Return the source of a token with this confidence. None: a model's token without signals."""
    return DraftSource.LOOKUP if isinstance(confidence, MatchLength) else DraftSource.MODEL
