"""The small model's part: propose tokens, and say how sure it was."""

from __future__ import annotations

import time

from torch import Tensor

from outrider.core.acceptance import RESIDUAL_SHORTLIST
from outrider.core.actions import Draft, Proposal
from outrider.core.gate import measure
from outrider.core.policy import Policy
from outrider.edge.cancellation import Cancellation
from outrider.engines.base import CHUNK, Reader, chooser

SHOWN_S = 0.02  # a block that takes longer is handed over in pieces: whoever watches sees single tokens come


class Drafter:
    """Drafts from one sequence. needs_signals, needs_q: what gate, lookahead and acceptance rule will ask for.

    cancellation: looked at before every token, and while a long prompt is read.
    """

    def __init__(
        self,
        reader: Reader,
        policy: Policy,
        *,
        needs_signals: bool,
        needs_q: bool,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._reader, self._policy, self._cancellation = reader, policy, cancellation
        self._needs_signals, self._needs_q = needs_signals, needs_q
        self._chooser = None if needs_q else chooser(reader.engine)
        self.seconds = 0.0  # spent drafting
        self.prefill_seconds = 0.0  # of these, until the first token was there

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Up to action.count proposals that follow `ids`: fewer after an EOS, or when some are there to be shown.

        The first call gives one: nobody waits longer than for that, and its time is that of the prompt.
        """
        started, first = time.perf_counter(), not self.prefill_seconds
        count = 1 if first else action.count
        if self._cancellation is not None:
            self._read_on(ids, self._cancellation)
        on_device = self._chooser is not None and not action.leave_loop
        if on_device:
            proposals = self._draft_on_device(ids, count)
        else:
            proposals = self._draft(ids, count, until=started + SHOWN_S, leave_loop=action.leave_loop)
        taken = time.perf_counter() - started
        self.seconds += taken
        if first:
            self.prefill_seconds = taken
        return proposals

    def _draft(self, ids: list[int], count: int, *, until: float, leave_loop: bool) -> list[Proposal]:
        """One at a time. until: when what is there is handed over, by time.perf_counter."""
        ids = list(ids)
        proposals: list[Proposal] = []
        for n in range(count):
            if n and time.perf_counter() > until:
                break
            if self._cancellation is not None:
                self._cancellation.check()
            row = self._reader.read(ids, 1)[0]
            proposals.append(self._propose(row, ids, leave_loop=leave_loop and n == 0))
            ids.append(proposals[-1].token)
            if ids[-1] in self._policy.constraints.eos_ids:
                break
        return proposals

    def _draft_on_device(self, ids: list[int], count: int) -> list[Proposal]:
        """All at once. What the cache holds behind an EOS is dropped by `settle`."""
        assert self._chooser is not None
        feed = self._reader.feed(ids, 1)
        return self._chooser.draft(feed.slot, feed.ids, count, self._policy, sure=self._needs_signals)

    def _read_on(self, ids: list[int], cancellation: Cancellation) -> None:
        """Read all but the last part of what the cache lacks."""
        cancellation.check()
        while len(ids) - (known := self._reader.known) > CHUNK:
            self._reader.read(ids[: known + CHUNK], 1)
            cancellation.check()

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
