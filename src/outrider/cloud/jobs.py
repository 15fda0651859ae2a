"""The batcher's jobs: a verdict, or a generation that continues by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from outrider.cloud.sessions import SessionEntry
from outrider.decoding.actions import Verify
from outrider.engines.base import LAST_SAMPLED, CachedSequence, SequenceInput
from outrider.engines.scheduler import Request
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.session import ForwardPlan


@dataclass(eq=False)
class Job(Request):
    """One request. plan: its forward, once planned. length: the plan's. sequence: its KV cache, once admitted.

    ended: its future has an outcome, or will have it with the next delivery. cached: for a session's first request, the
    tokens whose KV cache its base had.
    """

    entry: SessionEntry
    request: Verify
    future: Future[Any] = field(default_factory=Future)
    arrived: float = field(default_factory=time.perf_counter)
    plan: ForwardPlan | None = None
    length: int = 0
    sequence: CachedSequence = field(init=False)
    ended: bool = False
    cancelled: bool = False
    cached: int = 0

    def __post_init__(self) -> None:
        self.identity = self.entry.identity

    @property
    def remaining(self) -> int:
        """Return how many tokens can be launched now, once the job is admitted."""
        return 0 if self.in_flight else self._missing

    @property
    def _missing(self) -> int:
        """Return how many tokens of the plan the KV cache lacks."""
        return self.length - self.sequence.cached_len

    def next_input(self, count: int) -> SequenceInput:
        """Return the next `count` tokens of the plan. Parts before the last keep one row of logits."""
        assert self.plan is not None
        ids = self.plan.ids_from(self.sequence.cached_len)
        if count == len(ids):
            return SequenceInput(self.slot, ids, self.logits_to_keep)
        return SequenceInput(self.slot, ids[:count], 1)

    def begin(self) -> bool:
        """Return whether the job may start: it was not cancelled while it waited for the batcher."""
        return self.future.set_running_or_notify_cancel()

    def on_launched(self) -> bool:
        """Note a launched forward. Return whether its output holds the rows of the verdict."""
        self.in_flight += 1
        return not self._missing

    def next_request(self, verdict: Verdict) -> Verify | None:
        """Return the request that follows a verdict, or None if the job is complete."""
        return None

    def deliver(self, verdict: Verdict) -> None:
        """Pass a verdict on. Called in the receiver's thread."""
        self.future.set_result(verdict)


@dataclass(eq=False)
class Generation(Job):
    """A job that requests the target's next token again and again. `Batcher.grant` allows tokens.

    A forward may be launched while the one before it runs: its input is the token that the device samples. An end is
    therefore noticed one forward late, and the surplus position rolled back. future: None at the end.

    limit: the most tokens. end_ids: tokens that end the output. on_verdict: called with each verdict. granted: tokens
    that may be computed. launched: those whose forward was launched. generated: those whose verdict was passed on.
    """

    limit: int = 1
    end_ids: Collection[int] = ()
    on_verdict: Callable[[Verdict], None] = lambda verdict: None
    granted: int = 0
    launched: int = 0
    generated: int = 0

    @property
    def remaining(self) -> int:
        """Return how many tokens can be launched now."""
        if self.stalled:
            return 0
        if not self.in_flight:
            return self._missing
        return 1 if self._missing <= 0 else 0  # the token after a launched one, or a prefill in flight

    @property
    def stalled(self) -> bool:
        """Return whether no further token may be launched now."""
        return self.cancelled or self.launched >= min(self.granted, self.limit)

    def next_input(self, count: int) -> SequenceInput:
        """Return the next part of the plan, or the token that the device samples at the moment."""
        return SequenceInput(self.slot, (LAST_SAMPLED,), 1) if self.in_flight else super().next_input(count)

    def begin(self) -> bool:
        """Return whether the job may start. It starts again whenever tokens are granted to a parked one."""
        return self.future.running() or super().begin()

    def on_launched(self) -> bool:
        """Note a launched forward. Return whether it samples a token."""
        self.in_flight += 1
        samples = self._missing <= 0
        self.launched += samples
        return samples

    def next_request(self, verdict: Verdict) -> Verify | None:
        """Return the request of the next token, or None at the end of the output."""
        self.generated += 1
        self.launched = max(self.launched, self.generated)  # a repeated request needs no forward
        if verdict.next_token in self.end_ids or self.generated == self.limit:
            return None
        return Verify(verdict.round + 1, len(self.entry.session.ids), (), ())

    def deliver(self, verdict: Verdict) -> None:
        """Pass a verdict on."""
        self.on_verdict(verdict)
