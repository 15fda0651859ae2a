"""The small model's part: propose tokens, and say how sure it was."""

from __future__ import annotations

import time

from torch import Tensor

from outrider.core.acceptance import RESIDUAL_SHORTLIST
from outrider.core.decoder import Draft, Proposal
from outrider.core.gate import measure
from outrider.core.policy import Policy
from outrider.engines.base import Reader, chooser


class Drafter:
    """Drafts from one sequence. needs_signals, needs_q: what gate, lookahead and acceptance rule will ask for."""

    def __init__(self, reader: Reader, policy: Policy, *, needs_signals: bool, needs_q: bool) -> None:
        self._reader, self._policy = reader, policy
        self._needs_signals, self._needs_q = needs_signals, needs_q
        self._chooser = None if needs_q else chooser(reader.engine)
        self.seconds = 0.0  # spent drafting

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Up to action.count proposals that follow `ids`; an EOS ends the block early."""
        started = time.perf_counter()
        on_device = self._chooser is not None and not action.leave_loop
        proposals = self._draft_on_device(ids, action.count) if on_device else self._draft(ids, action)
        self.seconds += time.perf_counter() - started
        return proposals

    def _draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        ids = list(ids)
        proposals: list[Proposal] = []
        for n in range(action.count):
            row = self._reader.read(ids, 1)[0]
            proposals.append(self._propose(row, ids, leave_loop=action.leave_loop and n == 0))
            ids.append(proposals[-1].token)
            if ids[-1] in self._policy.constraints.eos_ids:
                break
        return proposals

    def _draft_on_device(self, ids: list[int], count: int) -> list[Proposal]:
        """All at once; what the cache holds behind an EOS is dropped by `settle`."""
        assert self._chooser is not None
        feed = self._reader.feed(ids, 1)
        return self._chooser.draft(feed.slot, feed.ids, count, self._policy, sure=self._needs_signals)

    def settle(self, length: int) -> None:
        """Roll the cache back to a proper prefix of the first `length` tokens."""
        self._reader.settle(length)

    def close(self) -> None:
        self._reader.close()

    def _propose(self, row: Tensor, ids: list[int], *, leave_loop: bool) -> Proposal:
        q = None
        if leave_loop:
            token = self._policy.leave_loop(row, ids, len(ids))
        else:
            drawn = self._policy.distribution(row, ids, len(ids))
            if self._needs_q:  # cut q first, then draw from what is cut: what is sent is what was drawn from
                q = drawn.support.head(RESIDUAL_SHORTLIST)
                token = q.draw(drawn.sampling.seed, drawn.position)
            else:
                token = drawn.choice
        signals = None
        if self._needs_signals:
            signals = measure(row[: self._policy.vocab_size], token, self._policy.sampling.temperature)
        return Proposal(token, signals, q, leave_loop)
