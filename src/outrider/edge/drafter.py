"""The drafter: the small model proposes tokens, with signals of its confidence."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from outrider.decoding.actions import Draft, Proposal
from outrider.decoding.gate import compute_signals
from outrider.edge.cancellation import Cancellation
from outrider.engines.base import CachedSequence, as_device_sampler
from outrider.engines.prefix_cache import close_sequence
from outrider.engines.scheduler import prefill_chunk
from outrider.sampling.acceptance import REJECTION_SHORTLIST
from outrider.sampling.grammar import DeadEnd
from outrider.sampling.policy import Policy

FLUSH_INTERVAL_S = 0.02  # a slower block is returned in parts, so that a stream shows single tokens


class Proposer(Protocol):
    """A source of drafts for one sequence: a model (`Drafter`), or the sequence itself (`LookupDrafter`)."""

    @property
    def seconds(self) -> float:
        """Seconds of drafting."""
        ...

    @property
    def prefill_seconds(self) -> float:
        """Seconds of drafting until the first token."""
        ...

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Return up to action.count proposals that follow `ids`, or none."""
        ...

    def rollback_to(self, length: int) -> None:
        """Keep fewer than the first `length` tokens, because the last of them may have changed."""
        ...

    @property
    def cached_len(self) -> int:
        """Number of tokens in the KV cache of a model, 0 without one."""
        ...

    def close(self, *, keep: bool = False) -> None:
        """Free the resources of the sequence. keep: keep a KV cache for prompts that begin with the same tokens."""
        ...


class Drafter:
    """Drafts the tokens of one sequence with a model.

    needs_signals, needs_q: proposals carry signals, or the distribution q of rejection sampling. cancellation: checked
    before every token, and between the chunks of a long prefill.
    """

    def __init__(
        self,
        sequence: CachedSequence,
        policy: Policy,
        *,
        needs_signals: bool,
        needs_q: bool,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._sequence, self._policy, self._cancellation = sequence, policy, cancellation
        self._needs_signals, self._needs_q = needs_signals, needs_q
        on_host = needs_q or policy.needs_logits
        self._device_sampler = None if on_host else as_device_sampler(sequence.engine)
        self.seconds = 0.0  # of drafting
        self.prefill_seconds = 0.0  # of these, until the first token

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Return up to action.count proposals that follow `ids`: fewer at an EOS or after FLUSH_INTERVAL_S.

        The first call returns one proposal, to keep the time to the first token short and to measure the prefill. With
        a verifier, a dead end of the grammar only ends the draft, because a wrong draft can lead to one.

        Raises:
            DeadEnd: no token can follow, and there is no verifier.
        """
        started, first = time.perf_counter(), not self.prefill_seconds
        count = 1 if first else action.count
        if self._cancellation is not None:
            self._prefill_chunks(ids, self._cancellation)
        on_device = self._device_sampler is not None and not action.leave_loop
        if on_device:
            proposals = self._draft_on_device(ids, count)
        else:
            proposals = self._draft(ids, replace(action, count=count), deadline=started + FLUSH_INTERVAL_S)
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        if first:
            self.prefill_seconds = elapsed
        return proposals

    def _draft(self, ids: list[int], action: Draft, *, deadline: float) -> list[Proposal]:
        """Draft token by token until the deadline (time.perf_counter)."""
        ids = list(ids)
        proposals: list[Proposal] = []
        for n in range(action.count):
            if n and time.perf_counter() > deadline:
                break
            if self._cancellation is not None:
                self._cancellation.check()
            logits = self._sequence.extend(ids, 1)[0]
            try:
                proposals.append(self._propose(logits, ids, leave_loop=action.leave_loop and n == 0))
            except DeadEnd:
                if action.model_only and not proposals:
                    raise
                break
            ids.append(proposals[-1].token)
            if ids[-1] in self._policy.processors.eos_ids:
                break
        return proposals

    def _draft_on_device(self, ids: list[int], count: int) -> list[Proposal]:
        """Draft all tokens in one call. `rollback_to` drops the cache after an EOS."""
        assert self._device_sampler is not None
        seq_input = self._sequence.next_input(ids, 1)
        return self._device_sampler.draft(
            seq_input.slot, seq_input.ids, count, self._policy, with_signals=self._needs_signals
        )

    def _prefill_chunks(self, ids: list[int], cancellation: Cancellation) -> None:
        """Prefill the missing tokens in chunks, except for the last chunk."""
        cancellation.check()
        chunk = prefill_chunk(self._sequence.engine)
        while len(ids) - (cached := self._sequence.cached_len) > chunk:
            self._sequence.extend(ids[: cached + chunk], 1)
            cancellation.check()

    def rollback_to(self, length: int) -> None:
        """Roll the cache back to a proper prefix of the first `length` tokens."""
        self._sequence.rollback_to(length)

    @property
    def cached_len(self) -> int:
        """Number of tokens that the cache holds."""
        return self._sequence.cached_len

    def close(self, *, keep: bool = False) -> None:
        """Release the drafter's slot. keep: keep its KV cache for prompts that begin with the same tokens."""
        close_sequence(self._sequence, keep=keep)

    def _propose(self, logits: Tensor, ids: list[int], *, leave_loop: bool) -> Proposal:
        q = None
        if leave_loop:
            token = self._policy.leave_loop(logits, ids, len(ids))
        else:
            distribution = self._policy.distribution(logits, ids, len(ids))
            if self._needs_q:  # truncate q, then draw from it: rejection sampling needs the q that was drawn from
                q = distribution.support.top_k(REJECTION_SHORTLIST)
                token = q.draw(distribution.sampling.seed, distribution.position)
            else:
                token = distribution.token
        signals = None
        if self._needs_signals:
            signals = compute_signals(logits[: self._policy.vocab_size], token, self._policy.sampling.temperature)
        logprobs = self._policy.report_logprobs(logits[None], [token], len(ids))
        return Proposal(token, signals, q, leave_loop, logprobs=logprobs[0] if logprobs else None)
