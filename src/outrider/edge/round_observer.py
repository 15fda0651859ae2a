"""The observer of rounds, which reports times and acceptances to the draft length controller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.decoding.acceptance_model import AcceptanceModel
from outrider.decoding.actions import Proposal
from outrider.decoding.adaptive_draft_length import NO_DRAFTS, Drafted, DraftLengthController
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_source import Confidence, DraftSource
from outrider.sampling.acceptance import Verdict

Clock = Callable[[], float]


class RoundObserver:
    """Reports the rounds of one generation to its decoder's draft length controller.

    Nothing is reported if the output depends on its division into blocks: no clock may influence an output. The seconds
    of the first draft of each source and of the first verdict include the prefill, so they are not reported. The same
    holds for the first plain token after a speculative round, which may start a stream of the verifier.

    acceptance: updated with the verdicts if there is no controller, which has an acceptance model of its own. lock:
    serialises the reports of concurrent generations. The controller is read without the lock, since a partial update
    does no harm. in_bursts: time rounds instead of drafts, since one draft may do the work of the following ones.
    """

    def __init__(
        self,
        decoder: Decoder,
        clock: Clock = time.perf_counter,
        *,
        lock: threading.Lock | None = None,
        acceptance: AcceptanceModel | None = None,
        in_bursts: bool = False,
    ) -> None:
        self._lock = lock or threading.Lock()
        draft_length, is_block_invariant = decoder.plan.draft_length, decoder.plan.is_block_invariant
        self._controller = draft_length.controller if draft_length is not None and is_block_invariant else None
        self._acceptance = acceptance if is_block_invariant and self._controller is None else None
        self._decoder, self.clock = decoder, clock
        self._drafted: dict[DraftSource, Drafted] = {}  # since the last verdict, with the time of first drafts
        self._in_bursts = in_bursts
        self._known_sources: set[DraftSource] = set()  # that have drafted
        self._bursts: dict[DraftSource, Drafted] = {}  # of this round, to be timed
        self._has_drafted = False
        self._is_unmatched = False  # the last draft was empty
        self._is_plain = False  # the last verdict was one of plain decoding

    def record_draft(self, proposals: Seq[Proposal], started: float, *, lookup_only: bool = False) -> None:
        """Report a draft of one source. Call it before the decoder gets it. lookup_only: that of the action."""
        self._is_unmatched = not proposals
        if self._controller is None:
            return
        seconds = self.clock() - started
        if not proposals:
            self._record_vain_draft(self._controller, seconds, lookup_only=lookup_only)
            return
        source = proposals[0].source
        unread = 0 if source is DraftSource.LOOKUP else self._decoder.unread_length
        with self._lock:
            if unread:
                drafting = len(proposals) * self._controller.times.draft_seconds(source)
                reading = max(seconds - drafting, 0.0)
                self._controller.switch.read(unread, reading)
                seconds -= reading
            elif source in self._known_sources:
                self._record_times(self._controller, source, len(proposals), seconds)
        self._known_sources.add(source)
        self._has_drafted = True
        self._drafted[source] = self._drafted.get(source, NO_DRAFTS).plus(len(proposals), seconds)

    def _record_times(
        self, controller: DraftLengthController, source: DraftSource, tokens: int, seconds: float
    ) -> None:
        if self._in_bursts:
            self._bursts[source] = self._bursts.get(source, NO_DRAFTS).plus(tokens, seconds)
        else:
            controller.drafted(tokens, seconds, source)

    def _record_vain_draft(self, controller: DraftLengthController, seconds: float, *, lookup_only: bool) -> None:
        """Report a draft without proposals. The first one of the generation is a prefill."""
        source = DraftSource.LOOKUP if lookup_only else DraftSource.MODEL
        with self._lock:
            if self._has_drafted:
                controller.switch.drafted_in_vain(seconds, source)
            else:
                controller.switch.read(self._decoder.unread_length, seconds, source)
        self._has_drafted = True

    def record_verdict(self, verdict: Verdict, started: float) -> None:
        """Report a verdict. Call it before the decoder gets it."""
        confidences = [proposal.confidence for proposal in self._decoder.pending_proposals]
        with self._lock:
            if self._acceptance is not None:
                self._acceptance.update(confidences, verdict.accepted)
            if self._controller is not None:
                self._report(self._controller, verdict, confidences, started)
        self._drafted, self._bursts = {}, {}
        self._is_unmatched, self._is_plain = False, not confidences

    def _report(
        self,
        controller: DraftLengthController,
        verdict: Verdict,
        confidences: Seq[Confidence | None],
        started: float,
    ) -> None:
        seconds = self.clock() - started if verdict.round > 1 else None
        for source, drafted in self._bursts.items():
            controller.drafted(drafted.tokens, drafted.seconds, source)
        if verdict.round == 1:
            controller.switch.begin_generation()
        if not confidences:
            controller.decoded_plain(seconds if self._is_plain else None, is_unmatched=self._is_unmatched)
            return
        controller.decided(
            confidences,
            verdict.accepted,
            drafted=self._drafted,
            seconds=seconds,
            compute=verdict.compute_s,
        )
