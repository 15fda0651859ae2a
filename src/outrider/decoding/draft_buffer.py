"""Drafted tokens: the pending ones, which a verdict decides, and those drafted ahead during the wait for it.

|<------- pending ------->|<------- ahead ------->|
|  ended blocks |  block  | guess | next blocks … |
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.decoding.actions import Proposal
from outrider.decoding.draft_length import DraftLength, NextTokens
from outrider.decoding.draft_source import Confidence

MAX_PROVISIONAL = 64  # limit of pending tokens without a verdict, and of tokens drafted ahead
NO_TOKENS = NextTokens(0)


class DraftBuffer:
    """Owner of the proposals since the last verdict, and of their division into blocks.

    draft_length: None without a drafter. eos_ids: one of them ends its block. pending: one proposal for each token that
    a verdict may still decide. ahead: the proposals after all pending ones.
    """

    def __init__(self, draft_length: DraftLength | None, eos_ids: tuple[int, ...]) -> None:
        self._draft_length, self._eos_ids = draft_length, eos_ids
        self.pending: list[Proposal] = []
        self.ahead: list[Proposal] = []
        self._block_start = 0  # index into pending
        self._is_closed = False  # whether the drafter has nothing to add to the block

    @property
    def block(self) -> list[Proposal]:
        """The proposals since the last decision of the gate."""
        return self.pending[self._block_start :]

    def missing(self, room: int, unread: int) -> NextTokens:
        """Return how many tokens are missing from the block, and the source of the next.

        room: how many tokens may follow the pending ones. unread: tokens before the last one that a draft model has not
        read.
        """
        return NO_TOKENS if self._is_closed else self._missing(self.block, room, unread)

    def _missing(self, block: Seq[Proposal], room: int, unread: int = 0) -> NextTokens:
        if self._draft_length is None or room <= 0 or (block and block[-1].token in self._eos_ids):
            return NO_TOKENS
        number, lookup_only = self._draft_length.tokens_to_draft(len(block), known_confidences(block), unread)
        return NextTokens(max(0, min(room, number)), lookup_only)

    def add(self, proposal: Proposal) -> bool:
        """Add the next token of the block. Return whether it begins the block."""
        self.pending.append(proposal)
        return len(self.pending) == self._block_start + 1

    def close_block(self) -> None:
        """Complete the block as it is, even without tokens: the drafter has no proposal."""
        self._is_closed = True

    def end_block(self, *, awaits_verdict: bool) -> None:
        """Begin a new block. awaits_verdict: a later verdict may still decide the pending tokens."""
        self._is_closed = False
        if not awaits_verdict:
            self.pending.clear()
        self._block_start = len(self.pending)

    def on_verifier_lost(self) -> None:
        """Draft without a verifier from now on. No later verdict decides the pending tokens."""
        if self._draft_length is not None:
            self._draft_length = self._draft_length.without_verifier
        self.end_block(awaits_verdict=False)

    # Drafting ahead -----------------------------------------------------------------------------------------

    def may_extend_ahead(self, last_pending: int, room: int) -> bool:
        """Return whether one more token drafted ahead can be of use. last_pending: the last pending token."""
        if self._draft_length is None or len(self.ahead) >= MAX_PROVISIONAL:
            return False
        last = self.ahead[-1].token if self.ahead else last_pending
        # The first one only guesses the bonus token, which is useless without room after it.
        return last not in self._eos_ids and room > max(len(self.ahead), 1)

    def add_ahead(self, proposal: Proposal) -> None:
        """Add a token drafted ahead."""
        self.ahead.append(proposal)

    def drop_ahead(self) -> None:
        """Drop the tokens drafted ahead."""
        self.ahead.clear()

    def drop_lookups(self) -> int:
        """Drop the first proposal of prompt lookup and all after it. Return how many pending ones are left."""
        proposals = [*self.pending, *self.ahead]
        kept = next((n for n, proposal in enumerate(proposals) if proposal.match_length), len(proposals))
        self.ahead = self.ahead[: max(0, kept - len(self.pending))]
        del self.pending[kept:]
        return len(self.pending)

    def resolve_guess(self, bonus: int | None) -> None:
        """Keep the tokens after a correct guess of the bonus token, else none. bonus: None if drafts were rejected."""
        self.ahead = self.ahead[1:] if self.ahead and self.ahead[0].token == bonus else []

    def take_ahead(self) -> Proposal | None:
        """Remove and return the first token drafted ahead, if any."""
        return self.ahead.pop(0) if self.ahead else None

    def take_block_ahead(self, room: int, limit: int) -> list[Proposal]:
        """Remove and return the next block if it was drafted ahead completely, in at most `limit` tokens, else []."""
        lengths = range(1, min(len(self.ahead), limit) + 1)
        length = next((n for n in lengths if not self._missing(self.ahead[:n], room - n).number), 0)
        block, self.ahead = self.ahead[:length], self.ahead[length:]
        return block


def known_confidences(block: Seq[Proposal]) -> list[Confidence]:
    """Return the confidences of those proposals that have one."""
    return [proposal.confidence for proposal in block if proposal.confidence is not None]
