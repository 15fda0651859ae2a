"""The decoding loop, without I/O.

`Decoder` is a state machine. A driver executes the action of `next()` and returns its result:

    Draft(count)  →  decoder.drafted(proposals)     the drafter's proposals, up to `count`. No proposal ends the block
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

The decoder decides when a block is complete and whether it goes to the verifier. Each state has one owner:

    Sequence      the tokens
    DraftBuffer   the proposals since the last verdict, those drafted ahead, and their blocks
    Committer     the end of the output, detected loops, and the length of the verifier's sequence
    Recorder      events, counters, and the evidence of audits
    Decoder       the plan, and the request in flight

Drivers move data and engines own caches. Neither keeps tokens of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.config import OnLoop
from outrider.decoding.actions import Action, Done, Draft, Plan, Proposal, Verify, measured_signals
from outrider.decoding.calibrated_gate import Calibrated
from outrider.decoding.committer import Committer
from outrider.decoding.draft_buffer import MAX_PROVISIONAL, NO_TOKENS, DraftBuffer
from outrider.decoding.draft_length import NextTokens
from outrider.decoding.events import Event as Event
from outrider.decoding.gate import MAX_UNREPAIRED, Decision
from outrider.decoding.recorder import Recorder
from outrider.decoding.result import Stats
from outrider.decoding.risk_estimate import AuditTrail, OutputLength
from outrider.decoding.sequence import Sequence, Source
from outrider.decoding.stopping import DecodeFn
from outrider.errors import StateError
from outrider.sampling.acceptance import Verdict
from outrider.sampling.logprobs import Logprobs


class Decoder:
    """The state machine of one generation. decode: converts ids to text, for stop rules that need it."""

    def __init__(self, prompt_ids: Seq[int], plan: Plan, decode: DecodeFn | None = None) -> None:
        self.plan = plan
        self.sequence = Sequence(prompt_ids)
        self._drafts = DraftBuffer(plan.draft_length, plan.stop_rules.eos_ids)
        self._recorder = Recorder(self.sequence)
        self._committer = Committer(plan, self.sequence, self._recorder, decode)
        self._request: Verify | None = None  # the request in flight
        self._drafted_length = 0  # of `context` after the last draft
        self._read_by_lookup = 0  # tokens that were decoded without drafts and read by prompt lookup, not by the model
        self._is_lookup_only = False  # whether the last block began without the draft model

    # The driver's interface ---------------------------------------------------------------------------------

    def next(self) -> Action:
        """Return the next action. Calling again changes nothing."""
        while self._committer.finish_reason is None:
            if self._request is not None:
                return self._request
            missing = self._missing_in_block()
            if missing.number:
                if not self._draft_from_ahead():
                    return self._request_draft(missing)
            elif self._gate():
                self._request = self._verify()
            else:
                self._skip()
        self._drafts.drop_ahead()
        return Done(self._committer.finish_reason)

    def drafted(self, proposals: Seq[Proposal]) -> None:
        """Add the drafter's proposals to the block. Drop those after its end. Without proposals the block is complete.

        Raises:
            StateError: there are neither proposals nor a verifier.
        """
        unread = self.unread_length
        if not proposals:
            if not self.plan.has_verifier:
                raise StateError("the drafter proposed no token, and there is no verifier to continue with")
            self._drafts.close_block()
        for proposal in proposals:
            if not self._missing_in_block().number:
                break
            self._recorder.record_drafted()
            self._draft(proposal)
            if not self.plan.has_verifier and self._committer.loop_found:
                break
        self._record_read(proposals, unread)

    def ahead(self) -> Draft | None:
        """Return the draft that may continue `context` during the wait for a verdict: one token, or None.

        Without drafts in the request, plain decoding is faster than drafting, or the drafter has no proposal.
        """
        waits = self._request is not None and bool(self._request.draft_ids)
        if not waits or not self._drafts.may_extend_ahead(self.sequence.ids[-1], self._room):
            return None
        return Draft(1, lookup_only=self._is_lookup_only)

    def drafted_ahead(self, proposals: Seq[Proposal]) -> None:
        """Add proposals drafted ahead. Drop those that `ahead` did not request."""
        unread = self.unread_length
        for proposal in proposals:
            if self.ahead() is None:
                break
            self._recorder.record_drafted()
            self._drafts.add_ahead(proposal)
        self._record_read(proposals, unread)

    def decided(self, verdict: Verdict) -> None:
        """Commit the verdict on the block of the last `Verify`.

        Raises:
            StateError: the verdict is for another request.
        """
        request = self._request
        if request is None or verdict.round != request.round or not 0 <= verdict.accepted <= len(request.draft_ids):
            raise StateError(f"{verdict} does not answer {request}")
        self._request = None
        self._recorder.record_verdict(verdict, request)
        self._drafts.resolve_guess(verdict.next_token if verdict.accepted == len(request.draft_ids) else None)
        self._drafts.end_block(awaits_verdict=False)
        self._committer.commit_verdict(verdict, request)

    def on_verifier_lost(self) -> None:
        """Continue edge-only after the loss of the verifier.

        Provisional tokens are committed unverified, up to the first one from prompt lookup.

        Raises:
            StateError: there is no drafter.
        """
        if self.plan.draft_length is None:
            raise StateError("the verifier is lost, and there is no drafter to continue with")
        on_loop: OnLoop = "sample" if self.plan.on_loop == "escalate" else self.plan.on_loop
        self.plan = replace(self.plan, has_verifier=False, on_loop=on_loop)
        self._recorder.record_loss()
        self._request = None
        if (kept := self._drafts.drop_lookups()) < self.sequence.pending_count:
            self.sequence.discard(kept)
            self._recorder.record_drop()
        self._drafts.on_verifier_lost()
        self._committer.end_repairs()
        self._committer.commit_unverified()

    def events(self) -> list[Event]:
        """Return the events since the last call."""
        return self._recorder.take_events()

    # Reports ------------------------------------------------------------------------------------------------

    @property
    def context(self) -> list[int]:
        """The tokens that the next draft continues: the sequence and the tokens drafted ahead."""
        return self.sequence.ids + [proposal.token for proposal in self._drafts.ahead]

    @property
    def context_length(self) -> int:
        """The length of `context`. The drafter's cache must hold a proper prefix of it."""
        return len(self.sequence.ids) + len(self._drafts.ahead)

    @property
    def unread_length(self) -> int:
        """The number of tokens before the last one that were decoded without drafts and not read by a draft model.

        They include the prompt before the model's first draft. Prompt lookup reads in negligible time.
        """
        return self._read_by_lookup + max(len(self.sequence.ids) - 1 - self._drafted_length, 0)

    @property
    def pending_proposals(self) -> Seq[Proposal]:
        """One proposal for each token that the next verdict decides."""
        return self._drafts.pending

    @property
    def stats(self) -> Stats:
        """The counters so far."""
        return self._recorder.stats

    @property
    def near_ties(self) -> set[int]:
        """Indices of generated tokens whose margin lay within numeric noise, also after the end of the output."""
        return self._recorder.near_ties

    def logprobs(self) -> list[Logprobs]:
        """Return the log-probabilities of the generated tokens, or [] if none are requested."""
        known, start = self._recorder.logprobs, self.sequence.prompt_length
        return [known[at] for at in range(start, self.sequence.committed_length)] if known else []

    def audit_trail(self) -> AuditTrail:
        """Return the closed trail of the complete output."""
        rules, trail = self.plan.stop_rules, self._recorder.trail
        ends_at_limit = not (rules.eos_ids or rules.needs_text or self.plan.on_loop == "stop")
        output = OutputLength(len(self.sequence.sources), rules.max_new_tokens, ends_at_limit)
        trail.close(self._committer.verifier_length - self.sequence.prompt_length, output)
        return trail

    # Draft --------------------------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        """The number of tokens that may follow the pending ones."""
        return self.plan.stop_rules.max_new_tokens + self.sequence.prompt_length - len(self.sequence.ids)

    def _request_draft(self, missing: NextTokens) -> Draft:
        """Return the draft of the missing tokens."""
        has_verifier = self.plan.has_verifier
        lookup_only = has_verifier and missing.lookup_only
        if not self._drafts.block:
            self._is_lookup_only = lookup_only
        return Draft(
            missing.number, leave_loop=self._must_leave_loop(), model_only=not has_verifier, lookup_only=lookup_only
        )

    def _missing_in_block(self) -> NextTokens:
        """Return how many tokens are missing from the block, 0 after the end of the output."""
        if self._committer.finish_reason is not None:
            return NO_TOKENS
        return self._drafts.missing(self._room, self.unread_length)

    def _record_read(self, proposals: Seq[Proposal], unread: int) -> None:
        """Record which source has read `context` for these proposals. unread: `unread_length` before them."""
        if proposals and not proposals[0].match_length:
            self._read_by_lookup = 0
        elif self._is_lookup_only:
            return
        else:  # without a match, a token of plain decoding follows
            self._read_by_lookup = unread + (not self._drafts.block)
        self._drafted_length = self.context_length

    def _draft(self, proposal: Proposal) -> None:
        """Make the proposal pending. Without a verifier, commit it at once."""
        self.sequence.draft(proposal.token)
        begins_block = self._drafts.add(proposal)
        self._recorder.record_pending(proposal, self._committer.settled_length, begins_block=begins_block)
        if proposal.left_loop:
            self._committer.restart_loop_search()
        if not self.plan.has_verifier:
            self._committer.commit_pending(Source.SAMPLED if proposal.left_loop else Source.EDGE)

    def _draft_from_ahead(self) -> bool:
        """Draft the next token from those drafted ahead, if any. A loop to leave needs a random token instead."""
        if self._must_leave_loop():
            self._drafts.drop_ahead()
        if (proposal := self._drafts.take_ahead()) is None:
            return False
        self._draft(proposal)
        return True

    def _must_leave_loop(self) -> bool:
        return self._committer.loop_found and self.plan.on_loop == "sample"

    # Gate ---------------------------------------------------------------------------------------------------

    def _gate(self) -> bool:
        """Return whether the complete block goes to the verifier, by gate, loop policy and end of the output."""
        if not self.plan.has_verifier:
            return False
        block = self._drafts.block
        decision = self.plan.gate.decide(measured_signals(block)) if block else Decision(True, "plain decoding")
        if not decision.escalate and (reason := self._forced_reason()):
            decision = Decision(True, reason)
        end = self._committer.end_if_skipped() if decision.reason == "audit" else None
        self._recorder.record_decision(decision, block, end)
        return decision.escalate

    def _forced_reason(self) -> str:
        """Return the reason to verify a block that the gate would skip, or "" for none."""
        gate = self.plan.gate
        if self._committer.loop_found and self.plan.on_loop == "escalate":
            return "loop"
        ends = self._room <= 0 or self.sequence.ids[-1] in self.plan.stop_rules.eos_ids
        if gate.exact and (ends or self.sequence.pending_count >= MAX_PROVISIONAL):
            return "end of the provisional stretch"
        unverified = len(self.sequence.ids) - self._committer.verifier_length
        if self.plan.scope == "repair" and unverified >= MAX_UNREPAIRED:
            return "repair"
        return "audit" if isinstance(gate, Calibrated) and gate.is_audited_at(len(self.sequence.sources)) else ""

    # Verify or skip -----------------------------------------------------------------------------------------

    def _verify(self) -> Verify:
        """Return the request for a verdict on all pending tokens."""
        number, sequence, known = self._recorder.begin_round(), self.sequence, self._committer.verifier_length
        if self._committer.loop_found:
            self._committer.restart_loop_search()
        if self.plan.is_block_invariant:
            self._add_blocks_ahead()
        if self.plan.scope == "repair":
            sequence.reopen(known)
        base = sequence.committed_length
        q = tuple(proposal.q for proposal in self._drafts.pending if proposal.q is not None)
        return Verify(number, base, tuple(sequence.ids[known:base]), tuple(sequence.pending), q)

    def _add_blocks_ahead(self) -> None:
        """Add complete blocks that were drafted ahead to the pending ones."""
        while block := self._drafts.take_block_ahead(self._room, MAX_PROVISIONAL - self.sequence.pending_count):
            self._drafts.end_block(awaits_verdict=True)
            for proposal in block:
                self._draft(proposal)
            self._gate()  # only for the counters: the block is in the request in any case

    def _skip(self) -> None:
        """Commit the block unverified, or leave it provisional for an exact gate (trigger)."""
        plan = self.plan
        if not plan.gate.exact:
            self._committer.commit_unverified()
        self._drafts.end_block(awaits_verdict=plan.has_verifier and (plan.gate.exact or plan.scope == "repair"))
