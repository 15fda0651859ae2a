"""The observer of rounds, which reports times and acceptances to the draft length controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.decoding.actions import Proposal
from outrider.decoding.adaptive_draft_length import AcceptanceModel
from outrider.decoding.decoder import Decoder
from outrider.sampling.acceptance import Verdict

Clock = Callable[[], float]


class RoundObserver:
    """Reports the rounds of one generation to its decoder's draft length controller.

    Nothing is reported if the output depends on its division into blocks: no clock may influence an output. The seconds
    of the first draft of each source and of the first verdict include the prefill, so they are left out. acceptance:
    learns from the verdicts if there is no controller, whose own model does otherwise. lock: serialises the reports of
    concurrent generations. The controller is read without it, since a partial update does no harm.
    """

    def __init__(
        self,
        decoder: Decoder,
        clock: Clock = time.perf_counter,
        *,
        lock: threading.Lock | None = None,
        acceptance: AcceptanceModel | None = None,
    ) -> None:
        self._lock = lock or threading.Lock()
        draft_length, is_block_invariant = decoder.plan.draft_length, decoder.plan.is_block_invariant
        self._controller = draft_length.controller if draft_length is not None and is_block_invariant else None
        self._acceptance = acceptance if is_block_invariant and self._controller is None else None
        self._decoder, self.clock = decoder, clock
        self._drafted_since_verdict = 0
        self._known_sources: set[bool] = set()  # whether drafts were looked up

    def record_draft(self, proposals: Seq[Proposal], started: float) -> None:
        """Report a draft of one source. Call it before the decoder gets it."""
        self._drafted_since_verdict += len(proposals)
        if self._controller is None or not proposals:
            return
        is_lookup = proposals[0].match_length > 0
        if is_lookup in self._known_sources:
            with self._lock:
                self._controller.drafted(len(proposals), self.clock() - started, is_lookup=is_lookup)
        self._known_sources.add(is_lookup)

    def record_verdict(self, verdict: Verdict, started: float) -> None:
        """Report a verdict. Call it before the decoder gets it."""
        drafted, self._drafted_since_verdict = self._drafted_since_verdict, 0
        confidences = [proposal.confidence for proposal in self._decoder.pending_proposals]
        with self._lock:
            if self._acceptance is not None:
                self._acceptance.update(confidences, verdict.accepted)
            if self._controller is not None:
                seconds = self.clock() - started if verdict.round > 1 else None
                self._controller.decided(
                    confidences, verdict.accepted, drafted=drafted, seconds=seconds, compute=verdict.compute_s
                )
