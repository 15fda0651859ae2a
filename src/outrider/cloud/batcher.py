"""Continuous batching of verification requests, with chunked prefill.

One thread owns the engine. Each step

    admit     answers repeated requests, plans the new ones, and gives slots to as many as fit
    read      runs all short blocks in as few forwards as their widths allow, then one chunk of the long prefills
    judge     computes the verdicts of the blocks that are read to their end

So a long prefill delays other verdicts by one chunk at most. Requests of one identity are served in order of arrival.
Between identities, slots and engine time are shared (fair_share.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import ParamSpec

from outrider.cloud.fair_share import FairShare, limit_to_share, round_robin
from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.cloud.slot_pool import SlotPool
from outrider.decoding.actions import Verify
from outrider.engines.base import CachedSequence, Engine, SequenceInput, forward_or_sample
from outrider.engines.batching import group_by_width, next_chunk_size
from outrider.errors import OutriderError
from outrider.protocol.messages import ErrorCode, FrameError
from outrider.sampling.acceptance import Verdict
from outrider.sampling.policy import ForwardOutput
from outrider.verifiers.session import ForwardPlan

P = ParamSpec("P")
log = logging.getLogger(__name__)

SHORT_BLOCK_TOKENS = 96  # up to here a request is read at once, beyond it in chunks


@dataclass(eq=False)
class Job:
    """One request. plan: the tokens to read, once planned. admitted: the time when it got its slot."""

    entry: SessionEntry
    request: Verify
    future: Future[Verdict] = field(default_factory=Future)
    arrived: float = field(default_factory=time.perf_counter)
    plan: ForwardPlan | None = None
    admitted: float | None = None

    @property
    def identity(self) -> str:
        """Return the identity of the request's session."""
        return self.entry.identity


class Batcher:
    """Owner of the engine's thread.

    chunk: tokens of long prefills per step, over all of them. max_batch: sessions in one forward.
    """

    def __init__(self, engine: Engine, slots: int, metrics: Metrics, *, chunk: int = 256, max_batch: int = 64) -> None:
        self._engine, self._metrics = engine, metrics
        self.slot_pool = SlotPool(engine, slots, metrics)
        self._chunk, self._max_batch = chunk, max_batch
        self._wake = threading.Condition()
        self._submitted: list[Job] = []
        self._closed: list[SessionEntry] = []
        self._running = self._stopped = False
        self._jobs: list[Job] = []
        self._fair_share = FairShare()
        self._engine_seconds: defaultdict[str, float] = defaultdict(float)  # of the present step, by identity
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._running = True
        self._thread.start()

    def stop(self) -> None:
        """Finish the present step, end the thread and free the slots. Unanswered requests are refused."""
        with self._wake:
            self._running, self._stopped = False, True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        for job in self._jobs:
            job.future.set_exception(_draining_error())
        for job in self._submitted:
            _refuse(job)
        self._jobs, self._submitted = [], []
        self.slot_pool.clear()

    def submit(self, entry: SessionEntry, request: Verify) -> Future[Verdict]:
        """Request a verdict. A session may have one request at a time."""
        job = Job(entry, request)
        with self._wake:
            if self._stopped:
                _refuse(job)
            else:
                self._submitted.append(job)
                self._wake.notify()
        return job.future

    def release(self, entry: SessionEntry) -> None:
        """Free the slot of a session that has ended, from the next step on."""
        with self._wake:
            self._closed.append(entry)
            self._wake.notify()

    @property
    def queued(self) -> int:
        """Return the number of requests without a slot."""
        return len(self._submitted) + sum(job.admitted is None for job in self._jobs)

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._running and not (self._submitted or self._closed or self._jobs):
                    self._wake.wait()
                if not self._running:
                    return
                arrived, self._submitted = self._submitted, []
                closed, self._closed = self._closed, []
            self._jobs += [job for job in arrived if job.future.set_running_or_notify_cancel()]
            self._attempt(list(self._jobs), self._tick, closed)  # an exception must not end the thread

    def _tick(self, closed: Seq[SessionEntry]) -> None:
        self._release_closed(closed)
        self._run_step()

    def _release_closed(self, closed: Seq[SessionEntry]) -> None:
        for entry in closed:
            for job in [job for job in self._jobs if job.entry is entry]:
                self._finish(job, FrameError(ErrorCode.UNKNOWN_SESSION, "this session has ended"))
            self.slot_pool.release(entry)

    # One step -----------------------------------------------------------------------------------------------

    def _run_step(self) -> None:
        self._engine_seconds.clear()
        for job in list(self._jobs):
            if job.plan is None:
                self._attempt([job], self._plan, job)
        self._admit_waiting()
        admitted = [job for job in self._jobs if job.admitted is not None]
        short = [job for job in admitted if self._remaining(job) <= SHORT_BLOCK_TOKENS]
        long = [job for job in admitted if job not in short]
        for group in group_by_width(
            limit_to_share(short, _identity, self._remaining, SHORT_BLOCK_TOKENS), self._remaining, self._max_batch
        ):
            self._attempt(group, self._forward, group, [self._remaining(job) for job in group])
        permitted = self._fair_share.permitted(_identities(long), _identities(short))
        long = [job for job in long if job.identity in permitted]
        if long:
            long = round_robin(long, _identity, {})[: max(1, self._chunk // SHORT_BLOCK_TOKENS)]
            self._attempt(long, self._prefill, long)
        self._fair_share.repay(self._engine_seconds)

    def _plan(self, job: Job) -> None:
        """Plan the tokens to read for a request, or answer a repeated one."""
        planned = job.entry.session.prepare(job.request)
        if isinstance(planned, Verdict):
            self._finish(job, planned)
        else:
            job.plan = planned

    def _admit_waiting(self) -> None:
        """Select as many jobs as there are slots, round-robin over identities. Sessions keep their slots."""
        admitted = [job for job in self._jobs if job.admitted is not None]
        waiting = [job for job in self._jobs if job.admitted is None]
        with_slot = [job for job in waiting if job.entry in self.slot_pool]
        permitted = self._fair_share.permitted(
            _identities(job for job in waiting if job not in with_slot), _identities([*admitted, *with_slot])
        )
        waiting = [job for job in waiting if job in with_slot or job.identity in permitted]
        waiting = round_robin(waiting, _identity, Counter(job.identity for job in admitted))
        room = max(0, self.slot_pool.total - len(admitted))
        selected, rest = waiting[:room], waiting[room:]
        if rest and not selected:
            selected = self._preempt(rest[0], admitted)
        busy = {job.entry for job in self._jobs if job.admitted is not None} | {job.entry for job in selected}
        for job in selected:
            self._attempt([job], self._admit, job, busy)

    def _preempt(self, job: Job, admitted: Seq[Job]) -> list[Job]:
        """Take a slot from the identity with the most, if it has at least two more than the job's identity.

        The latest of its long prefills returns to the queue and is recomputed later. Short requests are not preempted,
        because they release their slots within a step.
        """
        using = Counter(other.identity for other in admitted)
        name, limit = using.most_common(1)[0]
        victims = [
            other for other in admitted if other.identity == name and self._remaining(other) > SHORT_BLOCK_TOKENS
        ]
        if limit < using[job.identity] + 2 or not victims:
            return []
        victim = max(victims, key=lambda other: other.admitted or 0.0)
        victim.admitted = None
        self.slot_pool.evict(victim.entry)
        return [job]

    def _admit(self, job: Job, busy: set[SessionEntry]) -> None:
        """Give a request a slot, unless all slots belong to `busy` sessions."""
        started, is_new = time.perf_counter(), job.entry not in self.slot_pool
        if self.slot_pool.acquire(job.entry, busy):
            self._sequence(job).rollback_to(self._plan_of(job).start)
            job.admitted = time.perf_counter()
            self._metrics.observe_queue_wait(job.admitted - job.arrived)
        if is_new:
            self._account(job.identity, time.perf_counter() - started, heavy=True)

    def _account(self, identity: str, seconds: float, *, heavy: bool) -> None:
        self._engine_seconds[identity] += seconds
        if heavy:
            self._fair_share.charge(identity, seconds)

    def _prefill(self, jobs: Seq[Job]) -> None:
        self._forward(jobs, self._chunk_sizes(jobs), heavy=True)

    def _chunk_sizes(self, jobs: Seq[Job]) -> list[int]:
        """Return the tokens of each long prefill to read now. The last part contains all positions with logits."""
        share = max(1, self._chunk // len(jobs))
        return [next_chunk_size(self._remaining(job), share, self._plan_of(job).rows) for job in jobs]

    def _forward(self, jobs: Seq[Job], counts: Seq[int], *, heavy: bool = False) -> None:
        started = time.perf_counter()
        inputs = [self._next_input(job, count) for job, count in zip(jobs, counts, strict=True)]
        outputs = forward_or_sample(self._engine, inputs, [job.entry.session.sampling_policy for job in jobs])
        seconds = time.perf_counter() - started
        self._metrics.observe_batch(len(jobs), sum(counts), seconds)
        for job, count in zip(jobs, counts, strict=True):
            self._account(job.identity, seconds * count / sum(counts), heavy=heavy)
        for job, output in zip(jobs, outputs, strict=True):
            if not self._remaining(job):
                self._attempt([job], self._judge, job, output)

    def _next_input(self, job: Job, count: int) -> SequenceInput:
        plan, cached = self._plan_of(job), self._sequence(job).cached_len
        rows = plan.rows if count == self._remaining(job) else 1
        return SequenceInput(self._sequence(job).slot, plan.ids[cached : cached + count], rows)

    def _judge(self, job: Job, output: ForwardOutput) -> None:
        plan, session = self._plan_of(job), job.entry.session
        verdict = session.judge(plan, output)
        self._sequence(job).rollback_to(len(session.ids))
        now, admitted = time.perf_counter(), job.admitted or 0.0
        verdict = replace(verdict, queue_s=admitted - job.arrived, compute_s=now - admitted)
        self._metrics.observe_verdict(len(job.request.draft_ids), verdict.accepted, now - job.arrived)
        self._finish(job, verdict)

    def _finish(self, job: Job, outcome: Verdict | BaseException) -> None:
        self._jobs.remove(job)
        if isinstance(outcome, BaseException):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)

    def _attempt(self, jobs: Seq[Job], do: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
        """Run a function. If it raises, only these jobs fail."""
        try:
            do(*args, **named)
        except OutriderError as error:
            self._fail(jobs, error)
        except Exception as error:  # such as out of memory, or a bug: the service goes on
            log.exception("the engine failed")
            self._fail(jobs, error)

    def _fail(self, jobs: Seq[Job], error: BaseException) -> None:
        failed = [job for job in jobs if job in self._jobs]
        for job in failed:
            self._finish(job, error)
        for job in failed:
            if job.plan is not None:
                self.slot_pool.evict(job.entry)  # its KV cache is undefined after a failed forward

    def _remaining(self, job: Job) -> int:
        """Return the number of tokens that the job's KV cache lacks."""
        return len(self._plan_of(job).ids) - self._sequence(job).cached_len

    def _sequence(self, job: Job) -> CachedSequence:
        return self.slot_pool.sequence(job.entry)

    @staticmethod
    def _plan_of(job: Job) -> ForwardPlan:
        assert job.plan is not None  # planned
        return job.plan


def _identity(job: Job) -> str:
    return job.identity


def _identities(jobs: Iterable[Job]) -> set[str]:
    return {job.identity for job in jobs}


def _refuse(job: Job) -> None:
    """Refuse a job that was not started, unless it is cancelled."""
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(_draining_error())


def _draining_error() -> FrameError:
    return FrameError(ErrorCode.DRAINING, "this service is going down: connect again")
