"""The record of one generation: events, counters, near-ties, and the evidence of audits."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from outrider.decoding.actions import Proposal, Verify, measured_signals
from outrider.decoding.events import Event, EventKind
from outrider.decoding.gate import SIGNAL_NAMES, Decision, Signals, least_confident
from outrider.decoding.result import Stats
from outrider.decoding.risk_estimate import AuditTrail
from outrider.decoding.sequence import Sequence, Source
from outrider.sampling.acceptance import Verdict
from outrider.sampling.logprobs import Logprobs

log = logging.getLogger(__name__)


class Recorder:
    """Owner of all observations. It has no influence on the output.

    near_ties: indices of generated tokens, also of some after the end of the output. logprobs: by index into the
    sequence, the drafter's until the token is verified, if they are requested.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self.stats = Stats()
        self.near_ties: set[int] = set()
        self.logprobs: dict[int, Logprobs] = {}
        self.trail = AuditTrail()
        self._events: list[Event] = []
        self._signals: dict[int, Signals] = {}  # of drafted tokens, by index into the sequence
        self._dropped_from = -1  # index into the sequence of the first dropped token, or -1
        self._end_without_audit: int | None = None  # length of the output without the pending audit

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def record_drafted(self) -> None:
        """Record a proposal of the drafter, also one drafted ahead that may be dropped."""
        self.stats.drafted += 1

    def record_pending(self, proposal: Proposal, settled_length: int, *, begins_block: bool) -> None:
        """Record that `proposal` became the last pending token."""
        self.stats.blocks += begins_block
        at = len(self._sequence.ids) - 1
        if proposal.signals is not None:
            self._signals[at] = proposal.signals
        if proposal.logprobs is not None:
            self.logprobs[at] = proposal.logprobs
        kind: EventKind = "revised" if at == self._dropped_from else "provisional"
        self._dropped_from = -1
        self._emit(kind, at, Source.EDGE, settled_length)

    def record_drop(self) -> None:
        """Record that pending tokens were dropped. The next one is a revision, as it replaces the first of them."""
        self._dropped_from = len(self._sequence.ids)

    def record_decision(self, decision: Decision, block: Seq[Proposal], end_without_audit: int | None) -> None:
        """Record the decision on a block. Log its number, length, signals and decision, never its tokens."""
        stats = self.stats
        stats.blocks += not block  # cloud-only: nothing was drafted
        stats.escalated += decision.escalate
        stats.forced_by_loop += decision.reason == "loop"
        stats.forced_by_audit += decision.reason == "audit"
        self._end_without_audit = end_without_audit
        if not log.isEnabledFor(logging.DEBUG):
            return
        signals = measured_signals(block)
        outcome = f"verified{f' ({decision.reason})' if decision.reason else ''}" if decision.escalate else "skipped"
        least = [f"{name} {least_confident(signals, name):.3g}" for name in SIGNAL_NAMES if signals]
        log.debug("block %d: %d drafted, %s", stats.blocks, len(block), ", ".join([outcome, *least]))

    def begin_round(self) -> int:
        """Return the number of the next request."""
        self.stats.rounds += 1
        return self.stats.rounds

    def record_loss(self) -> None:
        """Record the loss of the verifier."""
        self.stats.cloud_lost = True

    def record_verdict(self, verdict: Verdict, request: Verify) -> None:
        """Record a verdict before its tokens are committed."""
        base, stats = request.base_length - self._sequence.prompt_length, self.stats
        self.trail.record_verdict(verdict, base, len(request.new_ids), self._end_without_audit)
        self.near_ties |= {base + offset for offset in verdict.near_ties}
        self.logprobs |= {request.base_length + n: each for n, each in enumerate(verdict.logprobs)}
        stats.audited += verdict.audited
        stats.disagreed += verdict.disagreed
        stats.queue_s += verdict.queue_s
        stats.verify_s += verdict.compute_s
        if verdict.round == 1:
            stats.verify_prefill_s = verdict.compute_s
            stats.cloud_cached_tokens = verdict.cached

    def record_verified(self, drafts: int) -> None:
        """Record that a verdict decided this many drafts of the output."""
        self.stats.verified += drafts

    def record_commit(self, source: Source, settled_length: int, *, revised: bool) -> None:
        """Record the commit of the last committed token. revised: it replaced a pending one."""
        self._emit("revised" if revised else "confirmed", self._sequence.committed_length - 1, source, settled_length)

    def _emit(self, kind: EventKind, at: int, source: Source, settled_length: int) -> None:
        signals = None if source in (Source.CORRECTION, Source.BONUS) else self._signals.get(at)
        index = at - self._sequence.prompt_length
        logprobs = self.logprobs.get(at)
        self._events.append(Event(kind, index, self._sequence.ids[at], source, signals, settled_length, logprobs))
