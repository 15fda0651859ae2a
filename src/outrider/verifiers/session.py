"""The verifier's state of one sequence: its committed tokens and the last verdict. It holds no KV cache, does no I/O.

session.prepare(request)     →  ForwardPlan  the ids to run the model over, and the number of logits rows needed
session.judge(plan, output)  →  Verdict      after which the accepted tokens are committed
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from outrider.decoding.actions import Verify
from outrider.errors import OutOfSync
from outrider.sampling.acceptance import (
    AcceptanceRule,
    Exact,
    Verdict,
    count_disagreements,
    verify_block,
    verify_sampled,
)
from outrider.sampling.policy import ForwardOutput, Policy
from outrider.sampling.sampler import SampledRows

MAX_AUDITED = 128  # unverified tokens that one verdict audits at most, since each holds a row of logits in memory


@dataclass(frozen=True)
class ForwardPlan:
    """The forward pass for a verdict: the logits after each of the last `rows` of `ids`.

    committed: the session's tokens before the request, of which there are `start`. They grow only with the verdict.
    """

    request: Verify
    committed: list[int]
    start: int

    @cached_property
    def ids(self) -> list[int]:
        """All tokens: the session's, and those of the request."""
        return self.ids_from(0)

    def ids_from(self, position: int) -> list[int]:
        """Return the tokens from a position on."""
        ids = [*self.committed[position : self.start], *self.request.new_ids, *self.request.draft_ids]
        return ids[position - self.start :] if position > self.start else ids

    def __len__(self) -> int:
        """Return the number of all tokens."""
        return self.request.base_length + len(self.request.draft_ids)

    @property
    def audit_from(self) -> int:
        """Return the position of the first unverified token to audit, or base_length if there is none."""
        return max(self.start, self.request.base_length - MAX_AUDITED)

    @property
    def rows(self) -> int:
        """Return how many rows of logits the verdict needs."""
        return len(self) - self.audit_from + 1


class Session:
    """The tokens of one sequence and the verdicts on it.

    ids: the committed tokens, prompt first. prompt_length: `rewind` never goes below it. noise: numeric noise of the
    engine, in logits.
    """

    def __init__(
        self, ids: tuple[int, ...], prompt_length: int, policy: Policy, rule: AcceptanceRule, noise: float
    ) -> None:
        self.ids: list[int] = list(ids)
        self.prompt_length = prompt_length
        self._policy, self._rule, self.noise = policy, rule, noise
        self._last: tuple[Verify, Verdict] | None = None
        self._resumed_at: int | None = None  # length at which the edge resumed without the last verdict

    @property
    def vocab_size(self) -> int:
        """Return how many ids the target may emit and the edge may draft."""
        return self._policy.vocab_size

    @property
    def rounds(self) -> int:
        """Return the last verified round, 0 before the first."""
        return self._last[0].round if self._last else 0

    def prepare(self, request: Verify) -> ForwardPlan | Verdict:
        """Return the forward pass that the request needs, or the stored verdict of a repeated request.

        Raises:
            OutOfSync: the base length differs from the session's (the message has both), or the round was answered for
                other tokens.
        """
        is_repeat = self._last is not None and request.round == self._last[0].round and _same(request, self._last[0])
        if self._resumed_at is not None and not is_repeat:
            self._truncate(self._resumed_at)  # the edge does not repeat the request of the stored verdict
        self._resumed_at = None
        if self._last is not None and request.round == self._last[0].round:
            if not is_repeat:
                raise OutOfSync(f"round {request.round} was answered already, for other tokens")
            return self._last[1]
        start = len(self.ids)
        if start + len(request.new_ids) != request.base_length:
            raise OutOfSync(
                f"round {request.round}: the edge's base length is {request.base_length}, but this session has "
                f"{start} tokens and was sent {len(request.new_ids)} new ones"
            )
        return ForwardPlan(request, self.ids, start)

    @property
    def sampling_policy(self) -> Policy | None:
        """Return the policy for on-device sampling, or None if the acceptance rule or the policy needs the logits."""
        return None if self._rule.needs_logits or self._policy.needs_logits else self._policy

    def judge(self, plan: ForwardPlan, output: ForwardOutput, queue_s: float = 0.0, compute_s: float = 0.0) -> Verdict:
        """Verify the block and commit its accepted tokens.

        output: [plan.rows, …], first the rows of audited tokens, then those of the drafts. queue_s, compute_s: for the
        verdict.
        """
        request, start = plan.request, plan.audit_from
        base = request.base_length
        rows = output[base - start :] if base > start else output
        if isinstance(rows, SampledRows) and isinstance(self._rule, Exact):
            noise = self.noise * self._policy.noise_gain
            times = queue_s, compute_s
            verdict = verify_sampled(request.round, request.draft_ids, base, rows, noise, times)
        else:
            verdict = verify_block(request.round, plan.ids, base, rows, self._policy, self._rule, request.q, self.noise)
            verdict = replace(verdict, queue_s=queue_s, compute_s=compute_s)
        if base > start:
            disagreed = count_disagreements(plan.ids, start, base, output, self._policy)
            verdict = replace(verdict, audited=base - start, disagreed=disagreed)
        decided = [*request.draft_ids[: verdict.accepted], verdict.next_token]
        if logprobs := self._policy.report_logprobs(rows, decided, base):
            verdict = replace(verdict, logprobs=logprobs)
        self.ids += [*request.new_ids, *decided]
        self._last = (request, verdict)
        return verdict

    def rewind(self, length: int) -> None:
        """Roll the session back to the first `length` tokens, which the edge has.

        If the edge lacks only the last verdict, the session keeps it until the next request. A repeat of the answered
        request then costs no computation, however often the verdict was lost.

        Raises:
            OutOfSync: the session has fewer tokens, or the roll-back would cut the prompt.
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

    def _truncate(self, length: int) -> None:
        del self.ids[length:]
        self._last = self._resumed_at = None


def _same(one: Verify, other: Verify) -> bool:
    """Return whether two requests of one round have the same tokens. q is not compared."""
    return all(getattr(one, name) == getattr(other, name) for name in ("base_length", "new_ids", "draft_ids"))
