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
        started = time.perf_counter()
        self._index.extend(ids[len(self._index) :])
        proposals = [self._propose(token) for token in self._find(action.count)]
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        self.prefill_seconds = self.prefill_seconds or elapsed
        return proposals

    def rollback_to(self, length: int) -> None:
        """Roll the index back to a proper prefix of the first `length` tokens."""
        self._index.truncate(length - 1)

    def close(self) -> None:
        """Do nothing: the index is freed with the drafter."""

    def _find(self, count: int) -> list[int]:
        """Return the tokens to propose, up to one that the target cannot emit, and up to an EOS."""
        match = self._index.find()
        tokens: list[int] = []
        for token in self._index.continuation(match, count) if match is not None else ():
            if token >= self._vocab_size or token in self._excluded_ids:
                break
            tokens.append(token)
            if token in self._eos_ids:
                break
        return tokens

    def _propose(self, token: int) -> Proposal:
        return Proposal(token, q=Support(torch.tensor([token]), torch.zeros(1)) if self._needs_q else None)
