"""Continuous batching of verification requests: one thread owns the engine, and runs the scheduler's steps.

    plan        answers repeated requests, and plans the forward of the new ones
    admit       gives slots to as many requests as fit
    forward     all short blocks in as few forwards as their widths allow, then one chunk of the long prefills
    judge       computes the verdicts of the blocks whose last token is in the cache

Requests of one identity are served in order of arrival. Between identities, slots and engine time are shared
(engines/scheduler.py, engines/fair_share.py). A failed forward fails the requests in it, and evicts their sessions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import ParamSpec

from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.cloud.slot_pool import SlotPool
from outrider.decoding.actions import Verify
from outrider.engines.base import CachedSequence, Engine, forward_or_sample
from outrider.engines.scheduler import MAX_BATCH, Batch, Request, Scheduler, prefill_chunk
from outrider.errors import OutriderError
from outrider.protocol.messages import ErrorCode, FrameError
from outrider.sampling.acceptance import Verdict
from outrider.sampling.policy import ForwardOutput
from outrider.verifiers.session import ForwardPlan

P = ParamSpec("P")
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Job(Request):
    """One request. plan: its forward, once planned. sequence: its KV cache, once admitted."""

    entry: SessionEntry
    request: Verify
    future: Future[Verdict] = field(default_factory=Future)
    arrived: float = field(default_factory=time.perf_counter)
    plan: ForwardPlan | None = None
    sequence: CachedSequence = field(init=False)

    def __post_init__(self) -> None:
        self.identity = self.entry.identity

    @property
    def remaining(self) -> int:
        """Return how many of the ids the KV cache lacks, once the job is admitted."""
        return len(self.ids) - self.sequence.cached_len


class Batcher:
    """Owner of the engine's thread.

    chunk: tokens of long prefills per step, over all of them, by default those of the engine. max_batch: sessions in
    one forward.
    """

    def __init__(
        self, engine: Engine, slots: int, metrics: Metrics, *, chunk: int | None = None, max_batch: int = MAX_BATCH
    ) -> None:
        self._engine, self._metrics = engine, metrics
        self.slot_pool = SlotPool(engine, slots, metrics)
        self._scheduler: Scheduler[Job] = Scheduler(chunk=chunk or prefill_chunk(engine), max_batch=max_batch)
        self._wake = threading.Condition()
        self._submitted: list[Job] = []
        self._closed: list[SessionEntry] = []
        self._running = self._stopped = False
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
        for job in self._scheduler.requests:
            job.future.set_exception(_draining_error())
        for job in self._submitted:
            _refuse(job)
        self._scheduler.requests, self._submitted = [], []
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
        return len(self._submitted) + len(self._scheduler.waiting)

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._running and not (self._submitted or self._closed or self._scheduler.requests):
                    self._wake.wait()
                if not self._running:
                    return
                arrived, self._submitted = self._submitted, []
                closed, self._closed = self._closed, []
            self._scheduler.requests += [job for job in arrived if job.future.set_running_or_notify_cancel()]
            # An exception must not end the thread.
            self._attempt(list(self._scheduler.requests), self._run_step, closed)

    # One step -----------------------------------------------------------------------------------------------

    def _run_step(self, closed: Seq[SessionEntry]) -> None:
        for entry in closed:
            for job in [job for job in self._scheduler.requests if job.entry is entry]:
                self._finish(job, FrameError(ErrorCode.UNKNOWN_SESSION, "this session has ended"))
            self.slot_pool.release(entry)
        for job in [job for job in self._scheduler.requests if job.plan is None]:
            self._attempt([job], self._plan, job)
        self._admit_waiting()
        for batch in self._scheduler.plan_step():
            self._attempt(batch.requests, self._forward, batch)
        self._scheduler.end_step()

    def _plan(self, job: Job) -> None:
        """Plan the tokens to read for a request, or answer a repeated one."""
        planned = job.entry.session.prepare(job.request)
        if isinstance(planned, Verdict):
            self._finish(job, planned)
        else:
            job.plan, job.ids, job.logits_to_keep = planned, planned.ids, planned.rows

    def _admit_waiting(self) -> None:
        """Give slots to the jobs that the scheduler selects. Sessions keep their slots."""
        cached = [job for job in self._scheduler.waiting if job.entry in self.slot_pool]
        selected, preempted = self._scheduler.admit(self.slot_pool.total, cached)
        if preempted is not None:
            self.slot_pool.evict(preempted.entry)
        busy = {job.entry for job in [*self._scheduler.running, *selected]}
        for job in selected:
            self._attempt([job], self._admit, job, busy)

    def _admit(self, job: Job, busy: set[SessionEntry]) -> None:
        """Give a request a slot, unless all slots belong to `busy` sessions."""
        started, is_new = time.perf_counter(), job.entry not in self.slot_pool
        if self.slot_pool.acquire(job.entry, busy):
            job.sequence = self.slot_pool.sequence(job.entry)
            job.slot = job.sequence.slot
            assert job.plan is not None
            job.sequence.rollback_to(job.plan.start)
            job.admitted = time.perf_counter()
            self._metrics.observe_queue_wait(job.admitted - job.arrived)
        if is_new:
            self._scheduler.record(job.identity, time.perf_counter() - started, heavy=True)

    def _forward(self, batch: Batch[Job]) -> None:
        started = time.perf_counter()
        policies = [job.entry.session.sampling_policy for job in batch.requests]
        outputs = forward_or_sample(self._engine, batch.inputs, policies)
        seconds = time.perf_counter() - started
        self._metrics.observe_batch(len(batch.requests), sum(batch.counts), seconds)
        self._scheduler.record_batch(batch, seconds)
        for job, output in zip(batch.requests, outputs, strict=True):
            if not job.remaining:
                self._attempt([job], self._judge, job, output)

    def _judge(self, job: Job, output: ForwardOutput) -> None:
        session = job.entry.session
        assert job.plan is not None
        verdict = session.judge(job.plan, output)
        job.sequence.rollback_to(len(session.ids))
        now, admitted = time.perf_counter(), job.admitted or 0.0
        verdict = replace(verdict, queue_s=admitted - job.arrived, compute_s=now - admitted)
        self._metrics.observe_verdict(len(job.request.draft_ids), verdict.accepted, now - job.arrived)
        self._finish(job, verdict)

    def _finish(self, job: Job, outcome: Verdict | BaseException) -> None:
        self._scheduler.requests.remove(job)
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
        failed = [job for job in jobs if job in self._scheduler.requests]
        for job in failed:
            self._finish(job, error)
        for job in failed:
            if job.plan is not None:
                self.slot_pool.evict(job.entry)  # its KV cache is undefined after a failed forward


def _refuse(job: Job) -> None:
    """Refuse a job that was not started, unless it is cancelled."""
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(_draining_error())


def _draining_error() -> FrameError:
    return FrameError(ErrorCode.DRAINING, "this service is going down: connect again")
