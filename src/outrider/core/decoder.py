"""The loop, without I/O.

`Decoder` is a state machine. A driver asks it what to do `next()`, does that, and hands back what came of it:

    Draft(count)  →  decoder.drafted(proposals)     let the drafter propose up to `count` more tokens
    Verify(…)     →  decoder.decided(verdict)       let the verifier judge the pending block
                     decoder.lose_verifier()        or go on without it
    Done(reason)                                    the output is complete

While a verdict is awaited, a driver may draft on from a guess: that the whole block is accepted, and that the bonus
token is the drafter's own next token. So what is drafted ahead is a plain continuation of the pending block:

    |<--- committed --->|<--- pending --->|<------- ahead ------->|      context = all of it
                        |    (asked)      | guess | next blocks …

    decoder.ahead()  →  decoder.drafted_ahead(proposals)     until the verdict is there

Where the guess was right, the rest of `ahead` is taken as if it were drafted only then; else it is dropped. Either
way the output is that of a driver which waits.

Everything that could be decided in two places is decided here, once: what is committed and on whose word, when a
block is complete, whether it goes to the verifier, and where the output ends. Drivers move data; engines own
caches; neither keeps a token of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.config import OnLoop
from outrider.core.acceptance import Verdict
from outrider.core.actions import Action, Done, Draft, Plan, Proposal, Verify
from outrider.core.audits import AuditTrail, Output
from outrider.core.events import Event as Event
from outrider.core.events import Kind
from outrider.core.gate import MAX_UNREPAIRED, NAMES, Calibrated, Decision, Signals
from outrider.core.outcome import Stats
from outrider.core.sequence import Sequence, Source
from outrider.core.stopping import Decode, Reason, stop_reason
from outrider.errors import StateError

log = logging.getLogger(__name__)

LEAST_SURE = {name: min if name == "margin" else max for name in NAMES}  # of a block's tokens
MAX_PROVISIONAL = 64  # pending tokens after which a verdict is asked for, and tokens drafted ahead at most


class Decoder:
    """One generation. `decode` turns ids into text for text rules; None where there are none."""

    def __init__(self, prompt_ids: Seq[int], plan: Plan, decode: Decode | None = None) -> None:
        self.plan = plan
        self.sequence = Sequence(prompt_ids)
        self.stats = Stats()
        self.near_ties: set[int] = set()
        self._decode = decode
        self._events: list[Event] = []
        self._signals: dict[int, Signals] = {}  # of drafted tokens, by their place in the sequence
        self._block: list[Proposal] = []  # since the last decision of the gate
        self.undecided: list[Proposal] = []  # behind every pending token: what a verdict will settle
        self._ahead: list[Proposal] = []  # drafted while a verdict is awaited, behind all pending tokens
        self._shared = len(prompt_ids)  # how much of the sequence the verifier knows
        self._looked_until = 0  # loops are sought in what was generated after this point
        self._loop_found = False
        self._asked: Verify | None = None  # the verdict that is awaited
        self._trail = AuditTrail()
        self._audited_end: int | None = None  # where the output would have ended without the pending audit
        self._reason: Reason | None = None

    # What a driver sees -------------------------------------------------------------------------------------

    def next(self) -> Action:
        """What to do now. Asking again changes nothing."""
        while self._reason is None:
            if self._asked is not None:
                return self._asked
            wanted = self._wanted()
            if wanted <= 0:
                self._end_block()
            elif self._ahead_is_usable():
                self._draft(self._ahead.pop(0))
            else:
                return Draft(wanted, leave_loop=self._must_leave_loop())
        self._ahead.clear()
        return Done(self._reason)

    def drafted(self, proposals: Seq[Proposal]) -> None:
        """Take the drafter's proposals. Those after the end of the block are dropped."""
        for proposal in proposals:
            if self._wanted() <= 0:
                break
            self.stats.drafted += 1
            self._draft(proposal)
            if not self.plan.has_verifier and self._loop_found:
                break

    def ahead(self) -> Draft | None:
        """What may be drafted behind `context` while a verdict is awaited: one token more, or nothing."""
        if self._asked is None or self.plan.lookahead is None or len(self._ahead) >= MAX_PROVISIONAL:
            return None
        last = self._ahead[-1].token if self._ahead else self.sequence.ids[-1]
        # The first one only guesses the bonus token: of no use without room behind it.
        useless = last in self.plan.rules.eos_ids or self._room <= max(len(self._ahead), 1)
        return None if useless else Draft(1)

    def drafted_ahead(self, proposals: Seq[Proposal]) -> None:
        """Take what was drafted ahead. What `ahead` would not have asked for is dropped."""
        for proposal in proposals:
            if self.ahead() is None:
                break
            self.stats.drafted += 1
            self._ahead.append(proposal)

    @property
    def context(self) -> list[int]:
        """The tokens that drafting continues from: the sequence, and what was drafted ahead of it."""
        return self.sequence.ids + [proposal.token for proposal in self._ahead]

    @property
    def context_length(self) -> int:
        """How many tokens `context` has: a drafter's cache must hold a proper prefix of them."""
        return len(self.sequence.ids) + len(self._ahead)

    def decided(self, verdict: Verdict) -> None:
        """Take the verdict on the block that `next` asked about."""
        asked = self._asked
        if asked is None or verdict.round != asked.round or not 0 <= verdict.accepted <= len(asked.draft_ids):
            raise StateError(f"{verdict} does not answer {asked}")
        self._asked = None
        self._shared = asked.base_length + verdict.accepted + 1
        self._ahead = self._ahead[1:] if self._guessed(verdict, asked) else []
        self._record(verdict, asked)
        self._commit_verdict(verdict, len(asked.draft_ids))
        self._block.clear()
        self.undecided.clear()

    def lose_verifier(self) -> None:
        """The cloud cannot be reached: what is provisional stands on the edge's word, and the edge goes on alone.

        Raises:
            StateError: there is no drafter either.
        """
        if self.plan.lookahead is None:
            raise StateError("the verifier is lost, and there is no drafter to go on with")
        on_loop: OnLoop = "sample" if self.plan.on_loop == "escalate" else self.plan.on_loop
        self.plan = replace(self.plan, has_verifier=False, on_loop=on_loop)
        self.stats.cloud_lost = True
        self._asked = None
        self._commit_on_the_edges_word()
        self._block.clear()

    def events(self) -> list[Event]:
        """What became of tokens since the last call."""
        events, self._events = self._events, []
        return events

    def trail(self) -> AuditTrail:
        """Return the closed trail of the complete output."""
        rules, plan = self.plan.rules, self.plan
        sure = not (rules.eos_ids or rules.needs_text or plan.on_loop == "stop")
        output = Output(len(self.sequence.sources), rules.max_new_tokens, sure)
        self._trail.close(self._shared - self.sequence.prompt_length, output)
        return self._trail

    # Drafting -----------------------------------------------------------------------------------------------

    @property
    def _room(self) -> int:
        """How many tokens may follow the pending ones."""
        return self.plan.rules.max_new_tokens - len(self.sequence.sources) - self.sequence.pending_count

    def _wanted(self) -> int:
        """How many more tokens belong to the current block."""
        return 0 if self._reason is not None else self._more(self._block, self._room)

    def _more(self, block: list[Proposal], room: int) -> int:
        """How many more tokens belong to `block`, with `room` for that many behind it."""
        plan = self.plan
        if plan.lookahead is None or room <= 0 or (block and block[-1].token in plan.rules.eos_ids):
            return 0
        signals = [proposal.signals for proposal in block if proposal.signals is not None]
        return min(room, plan.lookahead.more(len(block), signals))

    def _draft(self, proposal: Proposal) -> None:
        self.stats.blocks += not self._block
        self.sequence.draft(proposal.token)
        self._block.append(proposal)
        self.undecided.append(proposal)
        if proposal.signals is not None:
            self._signals[len(self.sequence.ids) - 1] = proposal.signals
        self._emit("provisional", len(self.sequence.ids) - 1, Source.EDGE)
        if proposal.left_loop:
            self._watch_from_here()
        if not self.plan.has_verifier:
            self._commit_pending(Source.SAMPLED if proposal.left_loop else Source.EDGE)

    def _must_leave_loop(self) -> bool:
        return self._loop_found and self.plan.on_loop == "sample"

    # Drafting ahead -----------------------------------------------------------------------------------------

    def _guessed(self, verdict: Verdict, asked: Verify) -> bool:
        """Whether the verdict is what was guessed, so that what was drafted ahead continues the output."""
        accepted_all = verdict.accepted == len(asked.draft_ids)
        return accepted_all and bool(self._ahead) and self._ahead[0].token == verdict.next_token

    def _ahead_is_usable(self) -> bool:
        """Whether a token is there that would be drafted now. A loop that must be left is left by another one."""
        if self._must_leave_loop():
            self._ahead.clear()
        return bool(self._ahead)

    def _whole_block_ahead(self) -> int:
        """The length of the next block, if it was drafted ahead to its end; else 0."""
        ends = (n for n in range(1, len(self._ahead) + 1) if self._more(self._ahead[:n], self._room - n) <= 0)
        return next(ends, 0)

    def _add_blocks_ahead(self) -> None:
        """Let the request that is being made take whole blocks along that were drafted ahead."""
        while 0 < (length := self._whole_block_ahead()) <= MAX_PROVISIONAL - self.sequence.pending_count:
            self._block.clear()
            for _ in range(length):
                self._draft(self._ahead.pop(0))
            self._escalates()  # asked for the count: the block goes along in any case

    # Deciding -----------------------------------------------------------------------------------------------

    def _end_block(self) -> None:
        if self._escalates():
            self._asked = self._verify()
        else:
            self._skip_block()

    def _escalates(self) -> bool:
        """Whether the complete block goes to the verifier: the one place where gate, loop and end are combined."""
        if not self.plan.has_verifier:
            return False
        self.stats.blocks += not self._block  # cloud-only: nothing was drafted
        decision = self._decision()
        self.stats.escalated += decision.escalate
        self.stats.forced_by_loop += decision.reason == "loop"
        self.stats.forced_by_audit += decision.reason == "audit"
        self._audited_end = self._end_if_skipped() if decision.reason == "audit" else None
        if log.isEnabledFor(logging.DEBUG):
            self._log_block(decision)
        return decision.escalate

    def _log_block(self, decision: Decision) -> None:
        """Log the block's number, length, signals and decision, never its tokens."""
        known = [p.signals for p in self._block if p.signals is not None]
        signals = [f"{name} {LEAST_SURE[name](getattr(one, name) for one in known):.3g}" for name in NAMES if known]
        fate = f"verified{f' ({decision.reason})' if decision.reason else ''}" if decision.escalate else "skipped"
        log.debug("block %d: %d drafted, %s", self.stats.blocks, len(self._block), ", ".join([fate, *signals]))

    def _decision(self) -> Decision:
        decision = self.plan.gate.decide([p.signals for p in self._block if p.signals is not None])
        return decision if decision.escalate or not (forced := self._forced()) else Decision(True, forced)

    def _forced(self) -> str:
        """Why a block is verified that the gate would pass; empty where it is not."""
        gate = self.plan.gate
        if self._loop_found and self.plan.on_loop == "escalate":
            return "loop"
        if gate.exact and self._must_settle():
            return "end of the provisional stretch"
        if self.plan.scope == "repair" and len(self.sequence.ids) - self._shared >= MAX_UNREPAIRED:
            return "repair"
        return "audit" if isinstance(gate, Calibrated) and gate.audits(len(self.sequence.sources)) else ""

    def _end_if_skipped(self) -> int | None:
        """Return the length of the output if skipping the pending block ends it, else None."""
        generated = self.sequence.generated
        for token in self.sequence.pending:
            generated.append(token)
            looped = (
                self.plan.on_loop == "stop" and self.plan.loop_rule.find(generated[self._looked_until :]) is not None
            )
            if looped or stop_reason(self.plan.rules, generated, self._decode) is not None:
                return len(generated)
        return None

    def _must_settle(self) -> bool:
        """Provisional tokens cannot wait any longer: an end is in sight, or there are too many."""
        sequence, rules = self.sequence, self.plan.rules
        at_end = len(sequence.sources) + sequence.pending_count >= rules.max_new_tokens
        return at_end or sequence.pending_count >= MAX_PROVISIONAL or sequence.ids[-1] in rules.eos_ids

    def _verify(self) -> Verify:
        self.stats.rounds += 1
        sequence = self.sequence
        if self._loop_found:
            self._watch_from_here()
        if self.plan.cut_is_free:
            self._add_blocks_ahead()
        if self.plan.scope == "repair":
            sequence.reopen(self._shared)
        base = sequence.committed_length
        q = tuple(proposal.q for proposal in self.undecided if proposal.q is not None)
        return Verify(self.stats.rounds, base, tuple(sequence.ids[self._shared : base]), tuple(sequence.pending), q)

    def _skip_block(self) -> None:
        """The gate was satisfied: commit on the drafter's word, or (trigger) leave the block provisional."""
        if self.plan.has_verifier and not self.plan.gate.exact:
            self._commit_on_the_edges_word()
            if self.plan.scope == "block":
                self.undecided.clear()
        self._block.clear()

    # Committing ---------------------------------------------------------------------------------------------

    def _commit_pending(self, source: Source) -> None:
        self.sequence.accept(source)
        self._committed(source)

    def _commit_on_the_edges_word(self) -> None:
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
        self._looked_until = min(self._looked_until, len(self.sequence.sources) - 1)  # a repair may have cut below it
        self._committed(source, revised)

    def _committed(self, source: Source, revised: bool = False) -> None:
        """After each committed token: the event, the stop rules, the watch for loops."""
        self._emit("revised" if revised else "confirmed", self.sequence.committed_length - 1, source)
        generated = self.sequence.generated
        self._reason = stop_reason(self.plan.rules, generated, self._decode)
        if self._reason is None and self.plan.on_loop != "ignore" and not self._loop_found:
            self._loop_found = self.plan.loop_rule.find(generated[self._looked_until :]) is not None
            if self._loop_found and self.plan.on_loop == "stop":
                self._reason = "loop"

    def _watch_from_here(self) -> None:
        """One intervention per loop: seek the next one only in what is generated from now on."""
        self._loop_found = False
        self._looked_until = len(self.sequence.sources)

    @property
    def _settled(self) -> int:
        """How many generated tokens nothing can take back: with scope "repair", those that the verifier knows."""
        repairs = self.plan.scope == "repair" and self.plan.has_verifier
        committed = self.sequence.committed_length
        return (min(self._shared, committed) if repairs else committed) - self.sequence.prompt_length

    # Recording ----------------------------------------------------------------------------------------------

    def _record(self, verdict: Verdict, asked: Verify) -> None:
        base = asked.base_length - self.sequence.prompt_length
        self._trail.take(verdict, base, len(asked.new_ids), self._audited_end)
        self.near_ties |= {base + offset for offset in verdict.near_ties}
        self.stats.audited += verdict.audited
        self.stats.disagreed += verdict.disagreed
        self.stats.queue_s += verdict.queue_s
        self.stats.verify_s += verdict.compute_s
        if verdict.round == 1:
            self.stats.verify_prefill_s = verdict.compute_s

    def _emit(self, kind: Kind, at: int, source: Source) -> None:
        signals = None if source in (Source.CORRECTION, Source.BONUS) else self._signals.get(at)
        index = at - self.sequence.prompt_length
        self._events.append(Event(kind, index, self.sequence.ids[at], source, signals, self._settled))
