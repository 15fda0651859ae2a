"""What a generation teaches the lookahead: how long drafts and verdicts took, and what was accepted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outrider.decoding.decoder import Decoder
from outrider.sampling.acceptance import Verdict

Clock = Callable[[], float]


class RoundObserver:
    """Tells `decoder`'s lookahead what came of its blocks, by `clock`.

    Where the output depends on how it is cut into blocks, nothing is told: no clock may decide on an output. The first
    draft and the first verdict also read the prompt, so that their seconds say nothing about the next ones. lock: of
    what generations that run at once tell the same lookahead; it is read without, and a figure half told does no harm.
    """

    def __init__(
        self, decoder: Decoder, clock: Clock = time.perf_counter, *, lock: threading.Lock | None = None
    ) -> None:
        self._lock = lock or threading.Lock()
        draft_length, free = decoder.plan.draft_length, decoder.plan.is_block_invariant
        self._controller = draft_length.controller if draft_length is not None and free else None
        self._decoder, self.clock = decoder, clock
        self._drafted_since_verdict = 0  # drafted since the last verdict

    def record_draft(self, count: int, started: float) -> None:
        """`count` tokens were drafted, and the decoder does not have them yet."""
        self._drafted_since_verdict += count
        if self._controller is not None and self._decoder.stats.drafted:
            with self._lock:
                self._controller.drafted(count, self.clock() - started)

    def record_verdict(self, verdict: Verdict, started: float) -> None:
        """The verdict is there, and the decoder does not have it yet."""
        drafted, self._drafted_since_verdict = self._drafted_since_verdict, 0
        if self._controller is not None:
            seconds = self.clock() - started if verdict.round > 1 else None
            logprobs = [None if p.signals is None else p.signals.logprob for p in self._decoder.pending_proposals]
            compute = verdict.compute_s
            with self._lock:
                self._controller.decided(logprobs, verdict.accepted, drafted=drafted, seconds=seconds, compute=compute)
