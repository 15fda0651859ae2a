"""The observer of rounds, which reports times and acceptances to the draft length controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_source import DraftSourceController
from outrider.sampling.acceptance import Verdict

Clock = Callable[[], float]


class RoundObserver:
    """Reports the rounds of one generation to its decoder's draft length controller, and to `draft_source`.

    Nothing is reported if the output depends on its division into blocks: no clock may influence an output. The seconds
    of the first draft and the first verdict include the prefill, so they are left out. lock: serialises the reports of
    concurrent generations. The controller is read without it, since a partial update does no harm.
    """

    def __init__(
        self,
        decoder: Decoder,
        clock: Clock = time.perf_counter,
        *,
        lock: threading.Lock | None = None,
        draft_source: DraftSourceController | None = None,
    ) -> None:
        self._lock = lock or threading.Lock()
        draft_length, is_block_invariant = decoder.plan.draft_length, decoder.plan.is_block_invariant
        self._controller = draft_length.controller if draft_length is not None and is_block_invariant else None
        self._draft_source = draft_source if is_block_invariant else None
        self._decoder, self.clock = decoder, clock
        self._drafted_since_verdict = 0

    def record_draft(self, count: int, started: float) -> None:
        """Report a draft of `count` tokens. Call it before the decoder gets them."""
        self._drafted_since_verdict += count
        if self._controller is not None and self._decoder.stats.drafted:
            with self._lock:
                self._controller.drafted(count, self.clock() - started)

    def record_verdict(self, verdict: Verdict, started: float) -> None:
        """Report a verdict. Call it before the decoder gets it."""
        drafted, self._drafted_since_verdict = self._drafted_since_verdict, 0
        if self._draft_source is not None:
            lengths = [proposal.match_length for proposal in self._decoder.pending_proposals]
            with self._lock:
                self._draft_source.update(lengths, verdict.accepted)
        if self._controller is not None:
            seconds = self.clock() - started if verdict.round > 1 else None
            logprobs = [None if p.signals is None else p.signals.logprob for p in self._decoder.pending_proposals]
            compute = verdict.compute_s
            with self._lock:
                self._controller.decided(logprobs, verdict.accepted, drafted=drafted, seconds=seconds, compute=compute)
