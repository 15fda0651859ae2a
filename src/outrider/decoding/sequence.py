"""The tokens of one generation, and the invariant between them and a KV cache.

        |<--- prompt --->|<--- generated --->|<--- pending --->|
        |<----------- committed ------------>|
        0            prompt_length      committed_length    len(ids)

`committed` only grows at its end, except through `reopen`. A KV cache of this sequence holds the keys and values of
ids[0:kv_len]. After every commit this must be a proper prefix of the committed tokens: the next forward pass then reads
the missing ones, at least the last token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum

from outrider.errors import StateError


class Source(Enum):
    """The side and the step that decided a committed token."""

    EDGE = "edge"  # drafted, unverified
    SAMPLED = "sampled"  # drafted at random to leave a loop
    ACCEPTED = "accepted"  # drafted, and accepted by a verdict
    CORRECTION = "correction"  # the verifier's token at the first rejected position
    BONUS = "bonus"  # the verifier's token after a fully accepted block

    @property
    def by_cloud(self) -> bool:
        """True if a verdict decided the token."""
        return self in (Source.ACCEPTED, Source.CORRECTION, Source.BONUS)


class Sequence:
    """Owner of the tokens: the committed ones, then the pending ones, which are drafted and not yet decided."""

    def __init__(self, prompt_ids: Seq[int]) -> None:
        self.prompt_length = len(prompt_ids)
        self.ids: list[int] = list(prompt_ids)
        self.sources: list[Source] = []

    @property
    def committed_length(self) -> int:
        """Number of committed tokens, prompt included."""
        return self.prompt_length + len(self.sources)

    @property
    def generated(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.ids[self.prompt_length : self.committed_length]

    @property
    def pending(self) -> list[int]:
        """The drafted tokens that are not yet decided."""
        return self.ids[self.committed_length :]

    @property
    def pending_count(self) -> int:
        """Number of pending tokens."""
        return len(self.ids) - self.committed_length

    def draft(self, token: int) -> None:
        """Append a drafted token, which is pending until it is accepted or discarded."""
        self.ids.append(token)

    def accept(self, source: Source) -> None:
        """Commit the first pending token."""
        if not self.pending_count:
            raise StateError("nothing is pending: there is no token to accept")
        self.sources.append(source)

    def replace_pending(self, token: int, source: Source) -> None:
        """Replace the pending tokens by the verifier's own token and commit it."""
        self.discard()
        self.ids.append(token)
        self.sources.append(source)

    def discard(self, kept: int = 0) -> None:
        """Drop the pending tokens after the first `kept`."""
        del self.ids[self.committed_length + kept :]

    def reopen(self, length: int) -> None:
        """Make committed tokens from `length` on pending again (`--scope repair`)."""
        if not self.prompt_length <= length <= self.committed_length:
            raise StateError(
                f"cannot reopen at {length}: committed {self.committed_length}, prompt {self.prompt_length}"
            )
        del self.sources[length - self.prompt_length :]


def check_cache(committed_length: int, kv_len: int, owner: str) -> None:
    """Check the invariant after a commit: 0 < committed − kv_len.

    Raises:
        StateError: the cache of `owner` holds more than the committed tokens.
    """
    if not 0 <= kv_len < committed_length:
        raise StateError(
            f"{owner}: the cache holds {kv_len} positions but only {committed_length} tokens are committed"
        )
