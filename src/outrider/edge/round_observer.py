"""The observer of rounds, which reports times and acceptances to the draft length controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outrider.decoding.decoder import Decoder
from outrider.sampling.acceptance import Verdict

Clock = Callable[[], float]


class RoundObserver:
    """Reports the rounds of one generation to its decoder's draft length controller.

    Nothing is reported if the output depends on its division into blocks: no clock may influence an output. The seconds
    of the first draft and the first verdict include the prefill, so they are left out. So are those of the first plain
    token after a speculative round, which may start a stream of the verifier. lock: serialises the reports of
    concurrent generations. The controller is read without it, since a partial update does no harm.
    """

    def __init__(
        self, decoder: Decoder, clock: Clock = time.perf_counter, *, lock: threading.Lock | None = None
    ) -> None:
        self._lock = lock or threading.Lock()
        draft_length, is_block_invariant = decoder.plan.draft_length, decoder.plan.is_block_invariant
        self._controller = draft_length.controller if draft_length is not None and is_block_invariant else None
        self._decoder, self.clock = decoder, clock
        self._drafted_since_verdict, self._draft_seconds = 0, 0.0
        self._is_plain = False  # the last verdict was one of plain decoding

    def record_draft(self, count: int, started: float) -> None:
        """Report a draft of `count` tokens. Call it before the decoder gets them."""
        self._drafted_since_verdict += count
        if self._controller is None:
            return
        seconds, unread = self.clock() - started, self._decoder.unread_length
        with self._lock:
            if unread:
                reading = max(seconds - count * self._controller.times.draft_seconds, 0.0)
                self._controller.switch.read(unread, reading)
                seconds -= reading
            if self._decoder.stats.drafted and not unread:
                self._controller.drafted(count, seconds)
        self._draft_seconds += seconds

    def record_verdict(self, verdict: Verdict, started: float) -> None:
        """Report a verdict. Call it before the decoder gets it."""
        drafted, self._drafted_since_verdict = self._drafted_since_verdict, 0
        draft_seconds, self._draft_seconds = self._draft_seconds, 0.0
        if self._controller is None:
            return
        seconds = self.clock() - started if verdict.round > 1 else None
        logprobs = [None if p.signals is None else p.signals.logprob for p in self._decoder.pending_proposals]
        was_plain, self._is_plain = self._is_plain, not logprobs
        with self._lock:
            if verdict.round == 1:
                self._controller.switch.begin_generation()
            if not logprobs:
                self._controller.decoded_plain(seconds if was_plain else None)
                return
            self._controller.decided(
                logprobs,
                verdict.accepted,
                drafted=drafted,
                seconds=seconds,
                compute=verdict.compute_s,
                draft_seconds=draft_seconds,
            )
