"""Commits: pending tokens become part of the output, up to the token that ends it."""

from __future__ import annotations

from outrider.decoding.actions import Plan, Verify
from outrider.decoding.recorder import Recorder
from outrider.decoding.sequence import Sequence, Source
from outrider.decoding.stopping import DecodeFn, FinishReason, find_finish_reason
from outrider.sampling.acceptance import Verdict


class Committer:
    """Owner of the end of the output, and of loop detection in it.

    finish_reason: None until a committed token ends the output. verifier_length: the length of the sequence that the
    verifier knows. loop_found: a loop that no step has reacted to yet.
    """

    def __init__(self, plan: Plan, sequence: Sequence, recorder: Recorder, decode: DecodeFn | None) -> None:
        self._rules, self._loop_rule, self._on_loop = plan.stop_rules, plan.loop_rule, plan.on_loop
        self._sequence, self._recorder, self._decode = sequence, recorder, decode
        self._repairs = plan.scope == "repair" and plan.has_verifier
        self._loop_search_start = 0  # index of the generated token from which loops are detected
        self.loop_found = False
        self.verifier_length = sequence.prompt_length
        self.finish_reason: FinishReason | None = None

    @property
    def settled_length(self) -> int:
        """The number of generated tokens that are final. With scope "repair", the verifier must know them."""
        committed = self._sequence.committed_length
        return (min(self.verifier_length, committed) if self._repairs else committed) - self._sequence.prompt_length

    def commit_pending(self, source: Source) -> None:
        """Commit the first pending token."""
        self._sequence.accept(source)
        self._finish_commit(source)

    def commit_unverified(self) -> None:
        """Commit the pending tokens without a verdict. Drop those behind the end of the output."""
        while self._sequence.pending_count and self.finish_reason is None:
            self.commit_pending(Source.EDGE)
        self._sequence.discard()

    def commit_verdict(self, verdict: Verdict, request: Verify) -> None:
        """Commit the accepted drafts of the request and the verifier's own token, up to the end of the output."""
        self.verifier_length = request.base_length + verdict.accepted + 1
        for n in range(verdict.accepted):
            self.commit_pending(Source.ACCEPTED)
            if self.finish_reason is not None:
                self._recorder.record_verified(n + 1)
                self._sequence.discard()
                return
        drafts = len(request.draft_ids)
        self._recorder.record_verified(drafts)
        source = Source.BONUS if verdict.accepted == drafts else Source.CORRECTION
        revised = self._sequence.pending_count > 0
        self._sequence.replace_pending(verdict.next_token, source)
        # A repair may have rolled back below the start.
        self._loop_search_start = min(self._loop_search_start, len(self._sequence.sources) - 1)
        self._finish_commit(source, revised=revised)

    def _finish_commit(self, source: Source, *, revised: bool = False) -> None:
        """Record the commit of the last committed token, apply the stop rules, and detect loops."""
        self._recorder.record_commit(source, self.settled_length, revised=revised)
        generated = self._sequence.generated
        self.finish_reason = find_finish_reason(self._rules, generated, self._decode)
        if self.finish_reason is None and self._on_loop != "ignore" and not self.loop_found:
            self.loop_found = self._has_loop(generated)
            if self.loop_found and self._on_loop == "stop":
                self.finish_reason = "loop"

    def _has_loop(self, generated: list[int]) -> bool:
        return self._loop_rule.find_period(generated[self._loop_search_start :]) is not None

    def restart_loop_search(self) -> None:
        """Detect further loops only in tokens from here on: each loop causes one intervention."""
        self.loop_found = False
        self._loop_search_start = len(self._sequence.sources)

    def end_repairs(self) -> None:
        """Make all committed tokens final, since no verdict will revise them."""
        self._repairs = False

    def end_if_skipped(self) -> int | None:
        """Return the length of the output if skipping the pending tokens ends it, else None."""
        generated = self._sequence.generated
        for token in self._sequence.pending:
            generated.append(token)
            looped = self._on_loop == "stop" and self._has_loop(generated)
            if looped or find_finish_reason(self._rules, generated, self._decode) is not None:
                return len(generated)
        return None
