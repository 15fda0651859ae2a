"""The verifier's half of a sequence: its tokens, its place in the engine, and the arithmetic of a verdict."""

from __future__ import annotations

from outrider.core.acceptance import Rule, Verdict, audit, judge
from outrider.core.decoder import Verify
from outrider.core.policy import Policy
from outrider.engines.base import Reader
from outrider.errors import StateError


class Session:
    """`ids` holds what is committed as far as this side knows: the prompt, then what verdicts and the edge added."""

    def __init__(self, reader: Reader, prompt_ids: tuple[int, ...], policy: Policy, rule: Rule, noise: float) -> None:
        self.ids: list[int] = list(prompt_ids)
        self.reader = reader
        self._policy, self._rule, self._noise = policy, rule, noise
        self._last: tuple[Verify, Verdict] | None = None

    @property
    def rounds(self) -> int:
        return self._last[0].round if self._last else 0

    def verify(self, request: Verify) -> Verdict:
        """Judge a block. The same request again gets the same verdict and changes nothing.

        Raises:
            StateError: the edge's base length is not ours (both are named), or the round was answered for others.
        """
        if self._last is not None and request.round == self._last[0].round:
            return self._again(request)
        start = len(self.ids)
        if start + len(request.new_ids) != request.base_length:
            raise StateError(
                f"round {request.round}: the edge's base length is {request.base_length}, but this session has "
                f"{start} tokens and was sent {len(request.new_ids)} new ones"
            )
        verdict = self._judge([*self.ids, *request.new_ids, *request.draft_ids], start, request)
        self.ids += [*request.new_ids, *request.draft_ids[: verdict.accepted], verdict.next_token]
        self.reader.settle(len(self.ids))
        self._last = (request, verdict)
        return verdict

    def _again(self, request: Verify) -> Verdict:
        assert self._last is not None
        asked, verdict = self._last
        same = ("base_length", "new_ids", "draft_ids")
        if any(getattr(asked, name) != getattr(request, name) for name in same):
            raise StateError(f"round {request.round} was answered already, for other tokens")
        return verdict

    def _judge(self, ids: list[int], start: int, request: Verify) -> Verdict:
        """Read what the cache lacks; its last rows are the audit's (skipped tokens), then the verdict's."""
        base = request.base_length
        self.reader.settle(start)
        rows = self.reader.read(ids, len(ids) - start + 1)
        verdict = judge(
            request.round, ids, base, rows[base - start :], self._policy, self._rule, request.q, self._noise
        )
        if base == start:
            return verdict
        disagreed = audit(ids, start, base, rows, self._policy)
        return Verdict(verdict.round, verdict.accepted, verdict.next_token, verdict.near_ties, base - start, disagreed)
