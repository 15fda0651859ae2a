"""The small model's part: propose tokens, and say how sure it was."""

from __future__ import annotations

import time

from torch import Tensor

from outrider.decoding.actions import Draft, Proposal
from outrider.decoding.gate import compute_signals
from outrider.edge.cancellation import Cancellation
from outrider.engines.base import CachedSequence, as_device_sampler
from outrider.engines.batching import PREFILL_CHUNK
from outrider.sampling.acceptance import REJECTION_SHORTLIST
from outrider.sampling.policy import Policy

FLUSH_INTERVAL_S = 0.02  # a block that takes longer is handed over in pieces: whoever watches sees single tokens come


class Drafter:
    """Drafts from one sequence. needs_signals, needs_q: what gate, lookahead and acceptance rule will ask for.

    cancellation: looked at before every token, and while a long prompt is read.
    """

    def __init__(
        self,
        reader: CachedSequence,
        policy: Policy,
        *,
        needs_signals: bool,
        needs_q: bool,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._reader, self._policy, self._cancellation = reader, policy, cancellation
        self._needs_signals, self._needs_q = needs_signals, needs_q
        self._device_sampler = None if needs_q else as_device_sampler(reader.engine)
        self.seconds = 0.0  # spent drafting
        self.prefill_seconds = 0.0  # of these, until the first token was there

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Up to action.count proposals that follow `ids`: fewer after an EOS, or when some are there to be shown.

        The first call gives one: nobody waits longer than for that, and its time is that of the prompt.
        """
        started, first = time.perf_counter(), not self.prefill_seconds
        count = 1 if first else action.count
        if self._cancellation is not None:
            self._prefill_chunks(ids, self._cancellation)
        on_device = self._device_sampler is not None and not action.leave_loop
        if on_device:
            proposals = self._draft_on_device(ids, count)
        else:
            proposals = self._draft(ids, count, deadline=started + FLUSH_INTERVAL_S, leave_loop=action.leave_loop)
        elapsed = time.perf_counter() - started
        self.seconds += elapsed
        if first:
            self.prefill_seconds = elapsed
        return proposals

    def _draft(self, ids: list[int], count: int, *, deadline: float, leave_loop: bool) -> list[Proposal]:
        """One at a time. deadline: when what is there is handed over, by time.perf_counter."""
        ids = list(ids)
        proposals: list[Proposal] = []
        for n in range(count):
            if n and time.perf_counter() > deadline:
                break
            if self._cancellation is not None:
                self._cancellation.check()
            row = self._reader.extend(ids, 1)[0]
            proposals.append(self._propose(row, ids, leave_loop=leave_loop and n == 0))
            ids.append(proposals[-1].token)
            if ids[-1] in self._policy.processors.eos_ids:
                break
        return proposals

    def _draft_on_device(self, ids: list[int], count: int) -> list[Proposal]:
        """All at once. What the cache holds behind an EOS is dropped by `rollback_to`."""
        assert self._device_sampler is not None
        seq_input = self._reader.next_input(ids, 1)
        return self._device_sampler.draft(
            seq_input.slot, seq_input.ids, count, self._policy, with_signals=self._needs_signals
        )

    def _prefill_chunks(self, ids: list[int], cancellation: Cancellation) -> None:
        """Read all but the last part of what the cache lacks."""
        cancellation.check()
        while len(ids) - (known := self._reader.cached_len) > PREFILL_CHUNK:
            self._reader.extend(ids[: known + PREFILL_CHUNK], 1)
            cancellation.check()

    def rollback_to(self, length: int) -> None:
        """Roll the cache back to a proper prefix of the first `length` tokens."""
        self._reader.rollback_to(length)

    def close(self) -> None:
        self._reader.close()

    def _propose(self, row: Tensor, ids: list[int], *, leave_loop: bool) -> Proposal:
        q = None
        if leave_loop:
            token = self._policy.leave_loop(row, ids, len(ids))
        else:
            distribution = self._policy.distribution(row, ids, len(ids))
            if self._needs_q:  # cut q first, then draw from what is cut: what is sent is what was drawn from
                q = distribution.support.top_k(REJECTION_SHORTLIST)
                token = q.draw(distribution.sampling.seed, distribution.position)
            else:
                token = distribution.token
        signals = None
        if self._needs_signals:
            signals = compute_signals(row[: self._policy.vocab_size], token, self._policy.sampling.temperature)
        return Proposal(token, signals, q, leave_loop)
