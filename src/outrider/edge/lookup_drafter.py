"""The drafter of prompt lookup: it proposes what followed an earlier occurrence of the last tokens."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch

from outrider.decoding.actions import Draft, Proposal
from outrider.decoding.ngram_index import NgramIndex
from outrider.sampling.sampler import Support


class LookupDrafter:
    """Drafts the tokens of one sequence from the sequence itself.

    Each token is looked up behind the earlier ones, so a proposal depends on its prefix alone. The division into calls
    and the timing of verdicts do not matter.

    vocab_size: the number of ids that the target may emit. eos_ids: one of them ends a block. excluded_ids: never
    proposed. needs_q: proposals carry q for rejection sampling. Lookup is deterministic, so q is a point mass: d is
    accepted with probability p(d), and a rejected d is replaced by a draw from p without d.
    """

    def __init__(
        self,
        index: NgramIndex,
        vocab_size: int,
        *,
        eos_ids: Collection[int] = (),
        excluded_ids: Collection[int] = (),
        needs_q: bool = False,
    ) -> None:
        self._index, self._vocab_size = index, vocab_size
        self._eos_ids, self._excluded_ids, self._needs_q = eos_ids, excluded_ids, needs_q
        self.seconds = 0.0  # of drafting
        self.prefill_seconds = 0.0  # of these, of the first draft, which indexes the prompt

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Return up to action.count proposals that follow `ids`: none without a match, fewer at an EOS."""
        started, ids = time.perf_counter(), list(ids)
        proposals: list[Proposal] = []
        for _ in range(action.count):
            self._index.extend(ids[len(self._index) :])
            if (token := self._next_token()) is None:
                break
            proposals.append(self._propose(token))
            ids.append(token)
            if token in self._eos_ids:
                break
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        self.prefill_seconds = self.prefill_seconds or elapsed
        return proposals

    def rollback_to(self, length: int) -> None:
        """Roll the index back to a proper prefix of the first `length` tokens."""
        self._index.truncate(length - 1)

    def close(self) -> None:
        """Do nothing: the index is freed with the drafter."""

    def _next_token(self) -> int | None:
        """Return the token to propose, or None without a match, or if the target cannot emit it."""
        match = self._index.find()
        if match is None or match.token >= self._vocab_size or match.token in self._excluded_ids:
            return None
        return match.token

    def _propose(self, token: int) -> Proposal:
        return Proposal(token, q=Support(torch.tensor([token]), torch.zeros(1)) if self._needs_q else None)
