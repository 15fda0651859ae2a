"""The decoding loop, without I/O.

`Decoder` is a state machine. A driver executes the action of `next()` and returns its result:

    Draft(count)  →  decoder.drafted(proposals)     the drafter's proposals, up to `count`
    Verify(…)     →  decoder.decided(verdict)       the verdict on the pending block, or
                     decoder.on_verifier_lost()     the loss of the verifier
    Done(reason)                                    the output is complete

During the wait for a verdict, a driver may draft ahead from a guess: the block is accepted completely, and the bonus
token is the drafter's own next token. Tokens drafted ahead thus continue the pending block:

    |<--- committed --->|<--- pending --->|<------- ahead ------->|      context = all of it
                        | (in the request)| guess | next blocks …

    decoder.ahead()  →  decoder.drafted_ahead(proposals)     until the verdict arrives

After a correct guess, the rest of `ahead` is used as if drafted then. Otherwise it is dropped. The output is the same
as without drafting ahead.

All decisions are made here: which tokens are committed, and by which side, when a block is complete, whether it goes to
the verifier, and where the output ends. Drivers move data and engines own caches. Neither keeps tokens of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.config import OnLoop
from outrider.decoding.actions import Action, Done, Draft, Plan, Proposal, Verify
from outrider.decoding.events import Event as Event
from outrider.decoding.events import EventKind
from outrider.decoding.gate import MAX_UNREPAIRED, SIGNAL_NAMES, Calibrated, Decision, Signals
from outrider.decoding.result import Stats
from outrider.decoding.risk_estimate import AuditTrail, OutputLength
from outrider.decoding.sequence import Sequence, Source
from outrider.decoding.stopping import DecodeFn, FinishReason, find_finish_reason
from outrider.errors import StateError
from outrider.sampling.acceptance import Verdict

log = logging.getLogger(__name__)

LEAST_CONFIDENT = {name: min if name == "margin" else max for name in SIGNAL_NAMES}  # of a block's tokens
MAX_PROVISIONAL = 64  # limit of pending tokens without a verdict, and of tokens drafted ahead


class Decoder:
    """The state machine of one generation. decode: converts ids to text, for stop rules that need it."""

    def __init__(self, prompt_ids: Seq[int], plan: Plan, decode: DecodeFn | None = None) -> None:
        self.plan = plan
        self.sequence = Sequence(prompt_ids)
        self.stats = Stats()
        self.near_ties: set[int] = set()
        self._decode = decode
        self._events: list[Event] = []
        self._signals: dict[int, Signals] = {}  # of drafted tokens, by index into the sequence
        self._block: list[Proposal] = []  # since the last decision of the gate
        self.pending_proposals: list[Proposal] = []  # one for each pending token, until the verdict
        self._ahead: list[Proposal] = []  # drafted ahead, behind all pending tokens
        self._verifier_length = len(prompt_ids)  # length of the sequence that the verifier knows
        self._loop_search_start = 0  # index of the generated token from which loops are detected
        self._loop_found = False
        self._request: Verify | None = None  # the request in flight
        self._trail = AuditTrail()
        self._end_without_audit: int | None = None  # length of the output without the pending audit
        self._reason: FinishReason | None = None

    # The driver's interface ---------------------------------------------------------------------------------

    def next(self) -> Action:
        """Return the next action. Calling again changes nothing."""
        while self._reason is None:
            if self._request is not None:
                return self._request
            remaining = self._remaining_in_block()
            if remaining <= 0:
                self._end_block()
            elif self._can_use_ahead():
                self._draft(self._ahead.pop(0))
            else:
                return Draft(remaining, leave_loop=self._must_leave_loop())
        self._ahead.clear()
        return Done(self._reason)

    def drafted(self, proposals: Seq[Proposal]) -> None:
        """Add the drafter's proposals to the block. Drop those behind its end."""
        for proposal in proposals:
            if self._remaining_in_block() <= 0:
                break
            self.stats.drafted += 1
            self._draft(proposal)
            if not self.plan.has_verifier and self._loop_found:
                break

    def ahead(self) -> Draft | None:
        """Return the draft that may continue `context` during the wait for a verdict: one token, or None."""
        if self._request is None or self.plan.draft_length is None or len(self._ahead) >= MAX_PROVISIONAL:
            return None
        last = self._ahead[-1].token if self._ahead else self.sequence.ids[-1]
        # The first one only guesses the bonus token, which is useless without room behind it.
        useless = last in self.plan.stop_rules.eos_ids or self._remaining_tokens <= max(len(self._ahead), 1)
        return None if useless else Draft(1)

    def drafted_ahead(self, proposals: Seq[Proposal]) -> None:
        """Add proposals drafted ahead. Drop those that `ahead` did not request."""
        for proposal in proposals:
            if self.ahead() is None:
                break
            self.stats.drafted += 1
            self._ahead.append(proposal)

    @property
    def context(self) -> list[int]:
        """The tokens that the next draft continues: the sequence and the tokens drafted ahead."""
        return self.sequence.ids + [proposal.token for proposal in self._ahead]

    @property
    def context_length(self) -> int:
        """The length of `context`. The drafter's cache must hold a proper prefix of it."""
        return len(self.sequence.ids) + len(self._ahead)

    def decided(self, verdict: Verdict) -> None:
        """Commit the verdict on the block of the last `Verify`.

        Raises:
            StateError: the verdict is for another request.
        """
        request = self._request
        if request is None or verdict.round != request.round or not 0 <= verdict.accepted <= len(request.draft_ids):
            raise StateError(f"{verdict} does not answer {request}")
        self._request = None
        self._verifier_length = request.base_length + verdict.accepted + 1
        self._ahead = self._ahead[1:] if self._guess_was_right(verdict, request) else []
        self._record(verdict, request)
        self._commit_verdict(verdict, len(request.draft_ids))
        self._block.clear()
        self.pending_proposals.clear()

    def on_verifier_lost(self) -> None:
        """Continue edge-only after the loss of the verifier. Provisional tokens are committed unverified.

        Raises:
            StateError: there is no drafter.
        """
        if self.plan.draft_length is None:
            raise StateError("the verifier is lost, and there is no drafter to continue with")
        on_loop: OnLoop = "sample" if self.plan.on_loop == "escalate" else self.plan.on_loop
        self.plan = replace(self.plan, has_verifier=False, on_loop=on_loop)
        self.stats.cloud_lost = True
        self._request = None
        self._commit_unverified()
        self._block.clear()

    def events(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def audit_trail(self) -> AuditTrail:
        """Return the closed trail of the complete output."""
        rules, plan = self.plan.stop_rules, self.plan
        ends_at_limit = not (rules.eos_ids or rules.needs_text or plan.on_loop == "stop")
        output = OutputLength(len(self.sequence.sources), rules.max_new_tokens, ends_at_limit)
        self._trail.close(self._verifier_length - self.sequence.prompt_length, output)
        return self._trail

    # Drafting -----------------------------------------------------------------------------------------------

    @property
    def _remaining_tokens(self) -> int:
        """The number of tokens that may follow the pending ones."""
        return self.plan.stop_rules.max_new_tokens - len(self.sequence.sources) - self.sequence.pending_count

    def _remaining_in_block(self) -> int:
        """Return how many tokens are missing from the current block."""
        return 0 if self._reason is not None else self._remaining_after(self._block, self._remaining_tokens)

    def _remaining_after(self, block: list[Proposal], remaining_tokens: int) -> int:
        """Return how many tokens are missing from `block`, at most `remaining_tokens`."""
        plan = self.plan
        if plan.draft_length is None or remaining_tokens <= 0 or (block and block[-1].token in plan.stop_rules.eos_ids):
            return 0
        signals = [proposal.signals for proposal in block if proposal.signals is not None]
        return min(remaining_tokens, plan.draft_length.tokens_to_draft(len(block), signals))

    def _draft(self, proposal: Proposal) -> None:
        self.stats.blocks += not self._block
        self.sequence.draft(proposal.token)
        self._block.append(proposal)
        self.pending_proposals.append(proposal)
        if proposal.signals is not None:
            self._signals[len(self.sequence.ids) - 1] = proposal.signals
        self._emit("provisional", len(self.sequence.ids) - 1, Source.EDGE)
        if proposal.left_loop:
            self._restart_loop_search()
        if not self.plan.has_verifier:
            self._commit_pending(Source.SAMPLED if proposal.left_loop else Source.EDGE)

    def _must_leave_loop(self) -> bool:
        return self._loop_found and self.plan.on_loop == "sample"

    # Drafting ahead -----------------------------------------------------------------------------------------

    def _guess_was_right(self, verdict: Verdict, request: Verify) -> bool:
        """Return whether the verdict equals the guess, so that the tokens drafted ahead continue the output."""
        accepted_all = verdict.accepted == len(request.draft_ids)
        return accepted_all and bool(self._ahead) and self._ahead[0].token == verdict.next_token

    def _can_use_ahead(self) -> bool:
        """Return whether a token drafted ahead is the next one. A loop to leave needs a random token instead."""
        if self._must_leave_loop():
            self._ahead.clear()
        return bool(self._ahead)

    def _next_block_length_ahead(self) -> int:
        """Return the length of the next block if it was drafted ahead completely, else 0."""
        ends = (
            n
            for n in range(1, len(self._ahead) + 1)
            if self._remaining_after(self._ahead[:n], self._remaining_tokens - n) <= 0
        )
        return next(ends, 0)

    def _add_blocks_ahead(self) -> None:
        """Add complete blocks that were drafted ahead to the pending request."""
        while 0 < (length := self._next_block_length_ahead()) <= MAX_PROVISIONAL - self.sequence.pending_count:
            self._block.clear()
            for _ in range(length):
                self._draft(self._ahead.pop(0))
            self._decide_escalation()  # only for the counters: the block is in the request in any case

    # Deciding -----------------------------------------------------------------------------------------------

    def _end_block(self) -> None:
        if self._decide_escalation():
            self._request = self._verify()
        else:
            self._skip_block()

    def _decide_escalation(self) -> bool:
        """Return whether the complete block goes to the verifier, by gate, loop policy and end of the output."""
        if not self.plan.has_verifier:
            return False
        self.stats.blocks += not self._block  # cloud-only: nothing was drafted
        decision = self._decision()
        self.stats.escalated += decision.escalate
        self.stats.forced_by_loop += decision.reason == "loop"
        self.stats.forced_by_audit += decision.reason == "audit"
        self._end_without_audit = self._end_if_skipped() if decision.reason == "audit" else None
        if log.isEnabledFor(logging.DEBUG):
            self._log_block(decision)
        return decision.escalate

    def _log_block(self, decision: Decision) -> None:
        """Log the block's number, length, signals and decision, never its tokens."""
        block_signals = [p.signals for p in self._block if p.signals is not None]
        signals = [
            f"{name} {LEAST_CONFIDENT[name](getattr(one, name) for one in block_signals):.3g}"
            for name in SIGNAL_NAMES
            if block_signals
        ]
        outcome = f"verified{f' ({decision.reason})' if decision.reason else ''}" if decision.escalate else "skipped"
        log.debug("block %d: %d drafted, %s", self.stats.blocks, len(self._block), ", ".join([outcome, *signals]))

    def _decision(self) -> Decision:
        decision = self.plan.gate.decide([p.signals for p in self._block if p.signals is not None])
        forced_reason = "" if decision.escalate else self._forced_reason()
        return Decision(True, forced_reason) if forced_reason else decision

    def _forced_reason(self) -> str:
        """Return the reason to verify a block that the gate would skip, or "" for none."""
        gate = self.plan.gate
        if self._loop_found and self.plan.on_loop == "escalate":
            return "loop"
        if gate.exact and self._must_verify():
            return "end of the provisional stretch"
        if self.plan.scope == "repair" and len(self.sequence.ids) - self._verifier_length >= MAX_UNREPAIRED:
            return "repair"
        return "audit" if isinstance(gate, Calibrated) and gate.is_audited_at(len(self.sequence.sources)) else ""

    def _end_if_skipped(self) -> int | None:
        """Return the length of the output if skipping the pending block ends it, else None."""
        generated = self.sequence.generated
        for token in self.sequence.pending:
            generated.append(token)
            looped = self.plan.on_loop == "stop" and self._has_loop(generated)
            if looped or find_finish_reason(self.plan.stop_rules, generated, self._decode) is not None:
                return len(generated)
        return None

    def _must_verify(self) -> bool:
        """Return whether provisional tokens need a verdict now: the output may end, or they are too many."""
        sequence, rules = self.sequence, self.plan.stop_rules
        at_end = len(sequence.sources) + sequence.pending_count >= rules.max_new_tokens
        return at_end or sequence.pending_count >= MAX_PROVISIONAL or sequence.ids[-1] in rules.eos_ids

    def _verify(self) -> Verify:
        self.stats.rounds += 1
        sequence = self.sequence
        if self._loop_found:
            self._restart_loop_search()
        if self.plan.is_block_invariant:
            self._add_blocks_ahead()
        if self.plan.scope == "repair":
            sequence.reopen(self._verifier_length)
        base = sequence.committed_length
        q = tuple(proposal.q for proposal in self.pending_proposals if proposal.q is not None)
        return Verify(
            self.stats.rounds, base, tuple(sequence.ids[self._verifier_length : base]), tuple(sequence.pending), q
        )

    def _skip_block(self) -> None:
        """Commit the block unverified, or leave it provisional for an exact gate (trigger)."""
        if self.plan.has_verifier and not self.plan.gate.exact:
            self._commit_unverified()
            if self.plan.scope == "block":
                self.pending_proposals.clear()
        self._block.clear()

    # Committing ---------------------------------------------------------------------------------------------

    def _commit_pending(self, source: Source) -> None:
        self.sequence.accept(source)
        self._committed(source)

    def _commit_unverified(self) -> None:
        while self.sequence.pending_count and self._reason is None:
            self._commit_pending(Source.EDGE)
        self.sequence.discard()

    def _commit_verdict(self, verdict: Verdict, drafts: int) -> None:
        for n in range(verdict.accepted):
            self._commit_pending(Source.ACCEPTED)
            if self._reason is not None:
                self.stats.verified += n + 1
                self.sequence.discard()
                return
        self.stats.verified += drafts
        source = Source.BONUS if verdict.accepted == drafts else Source.CORRECTION
        revised = self.sequence.pending_count > 0
        self.sequence.replace_pending(verdict.next_token, source)
        # A repair may have rolled back below the start.
        self._loop_search_start = min(self._loop_search_start, len(self.sequence.sources) - 1)
        self._committed(source, revised)

    def _committed(self, source: Source, revised: bool = False) -> None:
        """Emit the event of the committed token, apply the stop rules, and detect loops."""
        self._emit("revised" if revised else "confirmed", self.sequence.committed_length - 1, source)
        generated = self.sequence.generated
        self._reason = find_finish_reason(self.plan.stop_rules, generated, self._decode)
        if self._reason is None and self.plan.on_loop != "ignore" and not self._loop_found:
            self._loop_found = self._has_loop(generated)
            if self._loop_found and self.plan.on_loop == "stop":
                self._reason = "loop"

    def _has_loop(self, generated: list[int]) -> bool:
        return self.plan.loop_rule.find_period(generated[self._loop_search_start :]) is not None

    def _restart_loop_search(self) -> None:
        """Detect further loops only in tokens from here on: each loop causes one intervention."""
        self._loop_found = False
        self._loop_search_start = len(self.sequence.sources)

    @property
    def _stable_length(self) -> int:
        """The number of generated tokens that are final. With scope "repair", the verifier must know them."""
        repairs = self.plan.scope == "repair" and self.plan.has_verifier
        committed = self.sequence.committed_length
        return (min(self._verifier_length, committed) if repairs else committed) - self.sequence.prompt_length

    # Recording ----------------------------------------------------------------------------------------------

    def _record(self, verdict: Verdict, request: Verify) -> None:
        base = request.base_length - self.sequence.prompt_length
        self._trail.record_verdict(verdict, base, len(request.new_ids), self._end_without_audit)
        self.near_ties |= {base + offset for offset in verdict.near_ties}
        self.stats.audited += verdict.audited
        self.stats.disagreed += verdict.disagreed
        self.stats.queue_s += verdict.queue_s
        self.stats.verify_s += verdict.compute_s
        if verdict.round == 1:
            self.stats.verify_prefill_s = verdict.compute_s

    def _emit(self, kind: EventKind, at: int, source: Source) -> None:
        signals = None if source in (Source.CORRECTION, Source.BONUS) else self._signals.get(at)
        index = at - self.sequence.prompt_length
        self._events.append(Event(kind, index, self.sequence.ids[at], source, signals, self._stable_length))
