"""The tokens of one generation, and the invariant that ties a KV cache to them.

        |<--- prompt --->|<--- generated --->|<--- pending --->|
        |<----------- committed ------------>|
        0            prompt_length      committed_length    len(ids)

`committed` only grows at its end, except through `reopen`. A cache that serves this sequence holds the keys and
values of ids[0:kv_len]. After every commit it must hold a *proper* prefix of what is committed, so that whatever
is missing (at least the last token) is fed by the next forward. There is no other seed and no other mask.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum

from outrider.errors import StateError


class Source(Enum):
    """Who decided a committed token."""

    EDGE = "edge"  # the drafter's word, unverified
    SAMPLED = "sampled"  # the drafter's, drawn at random to leave a loop
    ACCEPTED = "accepted"  # drafted, and accepted by a verdict
    CORRECTION = "correction"  # the verifier's token at the first rejected position
    BONUS = "bonus"  # the verifier's token after a fully accepted block

    @property
    def by_cloud(self) -> bool:
        """True where a verdict stands behind the token."""
        return self in (Source.ACCEPTED, Source.CORRECTION, Source.BONUS)


class Sequence:
    """Owner of the tokens: what is committed, then what is drafted and not yet decided."""

    def __init__(self, prompt_ids: Seq[int]) -> None:
        self.prompt_length = len(prompt_ids)
        self.ids: list[int] = list(prompt_ids)
        self.sources: list[Source] = []

    @property
    def committed_length(self) -> int:
        return self.prompt_length + len(self.sources)

    @property
    def generated(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.ids[self.prompt_length : self.committed_length]

    @property
    def pending(self) -> list[int]:
        return self.ids[self.committed_length :]

    @property
    def pending_count(self) -> int:
        return len(self.ids) - self.committed_length

    def draft(self, token: int) -> None:
        """Append a drafted token; it stays pending until it is accepted or discarded."""
        self.ids.append(token)

    def accept(self, source: Source) -> int:
        """Commit the first pending token and return it."""
        if not self.pending_count:
            raise StateError("nothing is pending: there is no token to accept")
        self.sources.append(source)
        return self.ids[self.committed_length - 1]

    def replace_pending(self, token: int, source: Source) -> None:
        """Drop all that is pending and commit the verifier's own token instead."""
        self.discard()
        self.ids.append(token)
        self.sources.append(source)

    def discard(self) -> None:
        """Drop all that is pending."""
        del self.ids[self.committed_length :]

    def reopen(self, length: int) -> None:
        """Make committed tokens from `length` on pending again (`--scope repair`)."""
        if not self.prompt_length <= length <= self.committed_length:
            raise StateError(
                f"cannot reopen at {length}: committed {self.committed_length}, prompt {self.prompt_length}"
            )
        del self.sources[length - self.prompt_length :]


def check_cache(committed_length: int, kv_len: int, owner: str) -> None:
    """The invariant after a commit: 0 < committed − kv_len.

    Raises:
        StateError: the cache of `owner` has run ahead of the tokens.
    """
    if not 0 <= kv_len < committed_length:
        raise StateError(
            f"{owner}: the cache holds {kv_len} positions but only {committed_length} tokens are committed"
        )
