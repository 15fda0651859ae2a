"""Prompt lookup drafters: copy the tokens that followed earlier occurrences, alone or combined with a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from outrider.decoding.actions import Draft, Proposal
from outrider.decoding.ngram_index import Match, NgramIndex
from outrider.edge.drafter import Proposer
from outrider.sampling.policy import Policy
from outrider.sampling.sampler import Support


class LookupDrafter:
    """Drafts the tokens of one sequence from the sequence itself.

    A proposal depends only on its prefix, not on the division into calls or on the timing of verdicts.

    policy: the target's. Tokens that it bans are not proposed, as with `no_repeat_ngram_size`, and an EOS ends a block.
    placeholder: the token of recordings, never proposed. needs_q: proposals carry q for rejection sampling. Lookup is
    deterministic, so q is a point mass: d is accepted with probability p(d), and a rejected d is replaced by a draw
    from p without d.
    """

    def __init__(
        self,
        index: NgramIndex,
        policy: Policy,
        *,
        placeholder: int | None = None,
        needs_q: bool = False,
    ) -> None:
        self._index, self._policy, self._needs_q = index, policy, needs_q
        self._placeholders = () if placeholder is None else (placeholder,)
        self.seconds = 0.0  # seconds of all drafts
        self.prefill_seconds = 0.0  # seconds of the first draft, which indexes the prompt

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Return up to action.count proposals that follow `ids`: none without a match, fewer at an EOS."""
        started, ids = time.perf_counter(), list(ids)
        proposals: list[Proposal] = []
        for _ in range(action.count):
            if (match := self._find(ids)) is None:
                break
            proposals.append(self._propose(match))
            ids.append(match.token)
            if match.token in self._policy.processors.eos_ids:
                break
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        self.prefill_seconds = self.prefill_seconds or elapsed
        return proposals

    def match_length(self, ids: list[int]) -> int:
        """Return the length of the match to copy from, 0 if there is none."""
        match = self._find(ids)
        return 0 if match is None else match.length

    def rollback_to(self, length: int) -> None:
        """Roll the index back to `length` − 1 tokens."""
        self._index.truncate(length - 1)

    @property
    def cached_len(self) -> int:
        """0: lookup has no KV cache."""
        return 0

    def close(self, *, keep: bool = False) -> None:
        """Do nothing: the index is freed with the drafter."""

    def _find(self, ids: list[int]) -> Match | None:
        """Return the longest match of `ids` with a token that the target can emit, or None."""
        self._index.extend(ids[len(self._index) :])
        excluded = {*self._policy.banned_ids(ids), *self._placeholders}
        match = self._index.find(excluded)
        return match if match is not None and self._policy.allows(ids, match.token) else None

    def _propose(self, match: Match) -> Proposal:
        q = Support(torch.tensor([match.token]), torch.zeros(1)) if self._needs_q else None
        return Proposal(match.token, q=q, match_length=match.length)


class CombinedDrafter:
    """Drafts each part of a block with the source that is accepted more often: prompt lookup or the model.

    Looked-up tokens are not in the model's KV cache until its next draft, which feeds them in one forward.

    Tokens that will not be verified come from the model alone. prefers_lookup: chooses between lookup, after a match of
    this length, and the model. per_token: choose the source of each token, not of each call. This is required if the
    output depends on the drafts, so that it does not depend on their division into calls.
    """

    def __init__(
        self, model: Proposer, lookup: LookupDrafter, prefers_lookup: Callable[[int], bool], *, per_token: bool
    ) -> None:
        self._model, self._lookup, self._prefers_lookup = model, lookup, prefers_lookup
        self._per_token = per_token

    @property
    def seconds(self) -> float:
        """Seconds of drafting."""
        return self._model.seconds + self._lookup.seconds

    @property
    def prefill_seconds(self) -> float:
        """Seconds of drafting until the first token of each source."""
        return self._model.prefill_seconds + self._lookup.prefill_seconds

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Return up to action.count proposals of one source."""
        source = self._lookup if action.lookup_only or self._chooses_lookup(ids, action) else self._model
        return source.draft(ids, replace(action, count=1) if self._per_token else action)

    def _chooses_lookup(self, ids: list[int], action: Draft) -> bool:
        length = 0 if action.model_only else self._lookup.match_length(ids)
        return length > 0 and self._prefers_lookup(length)

    def rollback_to(self, length: int) -> None:
        """Roll both sources back to fewer than `length` tokens."""
        self._model.rollback_to(length)
        self._lookup.rollback_to(length)

    @property
    def cached_len(self) -> int:
        """Number of tokens that the model's cache holds."""
        return self._model.cached_len

    def close(self, *, keep: bool = False) -> None:
        """Release the model's slot. keep: keep its KV cache for prompts that begin with the same tokens."""
        self._model.close(keep=keep)
        self._lookup.close(keep=keep)
