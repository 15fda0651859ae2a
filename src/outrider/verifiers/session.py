"""The verifier's half of a sequence: its tokens, and the arithmetic of a verdict. It holds no cache and does no I/O.

session.prepare(request)  →  ForwardPlan(ids, rows)      what the engine must read, and of how many tokens rows are
wanted session.judge(plan, rows)  →  Verdict         and the session has moved on
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.decoding.actions import Verify
from outrider.errors import OutOfSync
from outrider.sampling.acceptance import AcceptanceRule, Verdict, count_disagreements, verify_block
from outrider.sampling.policy import ForwardOutput, Policy

MAX_AUDITED = 128  # skipped tokens that one verdict compares at most: a row of logits for each is held in memory


@dataclass(frozen=True)
class ForwardPlan:
    """What a verdict needs: the logits after each of the last `rows` of `ids`. start: tokens known before."""

    request: Verify
    ids: list[int]
    start: int

    @property
    def audit_from(self) -> int:
        """The first of the skipped tokens that are compared in passing; base_length where none were skipped."""
        return max(self.start, self.request.base_length - MAX_AUDITED)

    @property
    def rows(self) -> int:
        return len(self.ids) - self.audit_from + 1


class Session:
    """`ids` holds what is committed as far as this side knows: the prompt, then what verdicts and the edge added.

    prompt_length: what comes after it may be forgotten by `rewind`. noise: in logits, of whoever reads for it.
    """

    def __init__(
        self, ids: tuple[int, ...], prompt_length: int, policy: Policy, rule: AcceptanceRule, noise: float
    ) -> None:
        self.ids: list[int] = list(ids)
        self.prompt_length = prompt_length
        self._policy, self._rule, self.noise = policy, rule, noise
        self._last: tuple[Verify, Verdict] | None = None
        self._resumed_at: int | None = None  # where the edge stands, if it lacks the last answer

    @property
    def vocab_size(self) -> int:
        """Ids that the target may emit, and the edge may draft."""
        return self._policy.vocab_size

    @property
    def rounds(self) -> int:
        return self._last[0].round if self._last else 0

    def prepare(self, request: Verify) -> ForwardPlan | Verdict:
        """What must be read to judge a block; for the same request again, the same verdict.

        Raises:
            OutOfSync: the edge's base length is not ours (both are named), or the round was answered for others.
        """
        if self._resumed_at is not None:
            self._finish_resume(request)
        if self._last is not None and request.round == self._last[0].round:
            return self._repeat_verdict(request)
        start = len(self.ids)
        if start + len(request.new_ids) != request.base_length:
            raise OutOfSync(
                f"round {request.round}: the edge's base length is {request.base_length}, but this session has "
                f"{start} tokens and was sent {len(request.new_ids)} new ones"
            )
        return ForwardPlan(request, [*self.ids, *request.new_ids, *request.draft_ids], start)

    @property
    def sampling_policy(self) -> Policy | None:
        """By what to choose from the rows, if all that `verify_block` needs of them is the choices."""
        return None if self._rule.needs_logits else self._policy

    def judge(self, plan: ForwardPlan, rows: ForwardOutput) -> Verdict:
        """The verdict. rows [plan.rows, …]: first the audit's (skipped tokens), then the drafts'."""
        request, ids, start = plan.request, plan.ids, plan.audit_from
        base = request.base_length
        verdict = verify_block(
            request.round, ids, base, rows[base - start :], self._policy, self._rule, request.q, self.noise
        )
        if base > start:
            disagreed = count_disagreements(ids, start, base, rows, self._policy)
            verdict = Verdict(
                verdict.round, verdict.accepted, verdict.next_token, verdict.near_ties, base - start, disagreed
            )
        self.ids += [*request.new_ids, *request.draft_ids[: verdict.accepted], verdict.next_token]
        self._last = (request, verdict)
        return verdict

    def rewind(self, length: int) -> None:
        """The edge knows the first `length` tokens; the rest is forgotten.

        If the edge lacks the last answer and nothing else, that is kept until its next request: repeating the one
        that was answered costs nothing then, however often the answer got lost.

        Raises:
            OutOfSync: there are fewer, or the prompt itself would be cut.
        """
        if not self.prompt_length <= length <= len(self.ids):
            raise OutOfSync(
                f"the edge resumes at {length} tokens, but this session has {len(self.ids)}, "
                f"{self.prompt_length} of them the prompt"
            )
        self._resumed_at = None
        last = self._last[0] if self._last is not None else None
        if last is not None and length == last.base_length - len(last.new_ids):
            self._resumed_at = length
        elif length < len(self.ids):
            self._truncate(length)

    def _finish_resume(self, request: Verify) -> None:
        """The first request after a rewind: a repeat is answered from memory, for any other that is forgotten."""
        assert self._last is not None
        assert self._resumed_at is not None
        if not _same(request, self._last[0]):
            self._truncate(self._resumed_at)
        self._resumed_at = None

    def _truncate(self, length: int) -> None:
        del self.ids[length:]
        self._last = self._resumed_at = None

    def _repeat_verdict(self, request: Verify) -> Verdict:
        assert self._last is not None
        answered, verdict = self._last
        if not _same(request, answered):
            raise OutOfSync(f"round {request.round} was answered already, for other tokens")
        return verdict


def _same(one: Verify, other: Verify) -> bool:
    """The same round about the same tokens; q is not compared."""
    return all(getattr(one, name) == getattr(other, name) for name in ("round", "base_length", "new_ids", "draft_ids"))
