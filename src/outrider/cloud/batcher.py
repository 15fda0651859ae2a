"""Continuous batching of verification requests: one thread owns the engine, and runs the scheduler's steps.

    plan        answers repeated requests, and plans the forward of the new ones
    admit       gives slots to as many requests as fit
    launch      all short blocks in as few forwards as their widths allow, then one chunk of the long prefills
    collect     waits for the oldest forward, and judges the blocks whose last token it has read
    deliver     passes the verdicts of one forward on, all at once

A GPU computes while the host plans, judges and delivers. A generation's next forward is launched before the last one is
read back, and requests that arrived during a forward are launched before its verdicts are judged.

Requests of one identity are served in order of arrival. Between identities, slots and engine time are shared
(engines/scheduler.py, engines/fair_share.py). A failed forward fails the requests in it, and evicts their sessions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec

from outrider.cloud.jobs import Generation, Job
from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.cloud.slot_pool import SlotPool
from outrider.decoding.actions import Verify
from outrider.engines.base import Engine, PendingOutputs, launch
from outrider.engines.scheduler import MAX_BATCH, Batch, Scheduler, overlap_tokens, prefill_chunk
from outrider.errors import OutriderError
from outrider.protocol.messages import ErrorCode, FrameError
from outrider.sampling.acceptance import Verdict
from outrider.sampling.policy import ForwardOutput

P = ParamSpec("P")
Outcomes = Seq[Callable[[], object]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Flight:
    """A launched forward. judged: for each job, whether the output holds the rows of its verdict."""

    batch: Batch[Job]
    judged: Seq[bool]
    outputs: PendingOutputs
    launched: float


def call_each(outcomes: Outcomes) -> None:
    """Call each function, in order."""
    for outcome in outcomes:
        outcome()


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
        self._scheduler: Scheduler[Job] = Scheduler(
            chunk=chunk or prefill_chunk(engine), max_batch=max_batch, overlap_tokens=overlap_tokens(engine)
        )
        self._wake = threading.Condition()
        self._submitted: list[Job] = []
        self._closed: list[SessionEntry] = []
        self._parked: set[Generation] = set()  # generations that wait for a grant, without a claim to their slot
        self._in_flight: deque[_Flight] = deque()
        self._completed: list[tuple[_Flight, Seq[ForwardOutput], float]] = []  # to be judged after the next launch
        self._last_completion = 0.0
        self._queue_waits: list[float] = []
        self._judged: list[tuple[int, int, float]] = []  # of one forward: drafts, accepted, seconds since the request
        self._is_crowded = False  # requests waited for a slot when the present forward was judged
        self._outcomes: list[Callable[[], object]] = []
        self._call: Callable[[Outcomes], object] = call_each
        self._running = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self, call: Callable[[Outcomes], object] = call_each) -> None:
        """Start the engine's thread. call: calls functions that resolve futures, in the thread that awaits those."""
        self._call = call
        self._running = True
        self._thread.start()

    def stop(self) -> None:
        """Finish the present step, end the thread and free the slots. Unanswered requests are refused."""
        with self._wake:
            self._running, self._stopped = False, True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        for job in (*self._scheduler.requests, *self._parked):
            self._outcomes.append(partial(job.future.set_exception, _draining_error()))
        self._outcomes += [partial(_refuse, job) for job in self._submitted]
        self._deliver()
        self._scheduler.requests, self._submitted = [], []
        self._parked.clear()
        self._in_flight.clear()
        self.slot_pool.clear()

    def submit(self, entry: SessionEntry, request: Verify) -> Future[Verdict]:
        """Request a verdict. A session may have one request at a time."""
        job = Job(entry, request)
        self._submit(job)
        return job.future

    def generate(
        self,
        entry: SessionEntry,
        request: Verify,
        limit: int,
        end_ids: Collection[int],
        on_verdict: Callable[[Verdict], None],
    ) -> Generation:
        """Request the target's own tokens, the first by `request`, up to `limit` or one of `end_ids`.

        None is computed until `grant` allows it. on_verdict is called with each verdict, before the future is done.
        """
        job = Generation(entry, request, limit=limit, end_ids=end_ids, on_verdict=on_verdict)
        with self._wake:
            if not self._stopped and job.future.set_running_or_notify_cancel():
                self._park(job)
                return job
        _refuse(job)
        return job

    def grant(self, job: Generation, tokens: int) -> None:
        """Allow a generation to compute so many more tokens."""
        with self._wake:
            job.granted += tokens
            self._unpark(job)

    def cancel(self, job: Generation) -> None:
        """End a generation. Tokens that were not delivered yet are dropped."""
        with self._wake:
            job.cancelled = True
            self._unpark(job)

    def _submit(self, job: Job) -> None:
        with self._wake:
            if self._stopped:
                _refuse(job)
            else:
                self._submitted.append(job)
                self._wake.notify()

    def _park(self, job: Generation) -> None:
        self._parked.add(job)
        job.entry.awaits_client = True

    def _unpark(self, job: Generation) -> None:
        if job in self._parked:
            self._parked.remove(job)
            job.entry.awaits_client = False
            self._submitted.append(job)
            self._wake.notify()

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
                while self._running and not self._has_work:
                    self._wake.wait()
                if not self._running:
                    return
                arrived, self._submitted = self._submitted, []
                closed, self._closed = self._closed, []
            self._scheduler.requests += [job for job in arrived if job.begin()]
            # An exception must not end the thread.
            self._attempt(list(self._scheduler.requests), self._run_step, closed)
            self._deliver()

    @property
    def _has_work(self) -> bool:
        return bool(self._submitted or self._closed or self._scheduler.requests or self._in_flight or self._completed)

    # One step -----------------------------------------------------------------------------------------------

    def _run_step(self, closed: Seq[SessionEntry]) -> None:
        self._end_jobs(closed)
        for job in [job for job in self._scheduler.requests if job.plan is None]:
            self._attempt([job], self._plan, job)
        self._admit_waiting()
        batches = self._scheduler.plan_step()
        for batch in batches:
            self._attempt(batch.requests, self._launch, batch)
            self._judge_completed()
            self._collect(keep=len(self._in_flight))
        self._judge_completed()
        self._collect(keep=1 if batches else 0)
        self._scheduler.end_step()

    def _end_jobs(self, closed: Seq[SessionEntry]) -> None:
        """End the jobs of sessions that have ended, and the cancelled ones."""
        for entry in closed:
            with self._wake:
                parked = [job for job in self._parked if job.entry is entry]
                self._parked.difference_update(parked)
            self._scheduler.requests += parked
            for job in [job for job in self._scheduler.requests if job.entry is entry]:
                self._fail_job(job, FrameError(ErrorCode.UNKNOWN_SESSION, "this session has ended"))
            self.slot_pool.release(entry)
        for job in [job for job in self._scheduler.requests if job.cancelled]:
            self._finish(job)

    def _plan(self, job: Job) -> None:
        """Plan the tokens to read for a request, or answer a repeated one."""
        planned = job.entry.session.prepare(job.request)
        if isinstance(planned, Verdict):
            self._advance(job, planned)
        else:
            job.plan, job.length, job.logits_to_keep = planned, len(planned), planned.rows

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
            if not job.entry.session.rounds:
                job.cached = job.sequence.cached_len
                self._metrics.count_prefix(job.cached, job.length)
            job.admitted = time.perf_counter()
            self._queue_waits.append(job.admitted - job.arrived)
        if is_new:
            self._scheduler.record(job.identity, time.perf_counter() - started, heavy=True)

    def _launch(self, batch: Batch[Job]) -> None:
        started = time.perf_counter()
        policies = [job.entry.session.sampling_policy for job in batch.requests]
        outputs = launch(self._engine, batch.inputs, policies)
        self._in_flight.append(_Flight(batch, [job.on_launched() for job in batch.requests], outputs, started))
        for seconds in self._queue_waits:  # while the device is busy
            self._metrics.observe_queue_wait(seconds)
        self._queue_waits.clear()

    def _judge_completed(self) -> None:
        completed, self._completed = self._completed, []
        for flight in completed:
            self._attempt(flight[0].batch.requests, self._judge_flight, *flight)

    def _collect(self, keep: int) -> None:
        """Read back launched forwards, the oldest first, until `keep` are left that have not ended by themselves.

        If the last of them had to be waited for, its verdicts follow the next launch, for which the device is waiting.
        """
        while self._in_flight and (len(self._in_flight) > keep or self._in_flight[0].outputs.ready()):
            self._attempt(self._in_flight[0].batch.requests, self._read_back, self._in_flight.popleft())

    def _read_back(self, flight: _Flight) -> None:
        was_ready = flight.outputs.ready()
        outputs = flight.outputs.result()
        now = time.perf_counter()
        seconds = now - max(flight.launched, self._last_completion)
        self._last_completion = now
        if was_ready or self._in_flight:
            self._judge_flight(flight, outputs, seconds)
        else:
            self._completed.append((flight, outputs, seconds))

    def _judge_flight(self, flight: _Flight, outputs: Seq[ForwardOutput], seconds: float) -> None:
        batch = flight.batch
        self._is_crowded = bool(self._scheduler.waiting)
        for job, is_judged, output in zip(batch.requests, flight.judged, outputs, strict=True):
            job.in_flight -= 1
            if is_judged and not job.ended:
                self._attempt([job], self._judge, job, output)
        self._metrics.observe_batch(len(batch.requests), sum(batch.counts), seconds)
        if self._judged:
            drafts, accepted, waits = zip(*self._judged, strict=True)
            self._metrics.observe_verdicts(sum(drafts), sum(accepted), waits)
            self._judged.clear()
        self._scheduler.record_batch(batch, seconds)
        self._deliver()

    def _judge(self, job: Job, output: ForwardOutput) -> None:
        if job.cancelled:
            self._finish(job)
            return
        assert job.plan is not None
        now, admitted = time.perf_counter(), job.admitted or 0.0
        verdict = job.entry.session.judge(job.plan, output, admitted - job.arrived, now - admitted)
        if job.cached:
            verdict, job.cached = replace(verdict, cached=job.cached), 0
        self._judged.append((len(job.request.draft_ids), verdict.accepted, now - job.arrived))
        self._advance(job, verdict)

    def _advance(self, job: Job, verdict: Verdict) -> None:
        """Pass a verdict on, and finish the job, or go on to its next request."""
        self._outcomes.append(partial(job.deliver, verdict))
        request = job.next_request(verdict)
        if request is None:
            self._finish(job)
            return
        job.request, job.plan = request, None
        job.arrived = time.perf_counter()
        self._plan(job)
        if job.admitted is not None:
            job.admitted = job.arrived
        if isinstance(job, Generation) and not job.in_flight:
            self._requeue(job)

    def _requeue(self, job: Generation) -> None:
        """Let others have the slot if they wait for one, and park a generation that may not go on."""
        with self._wake:
            if job.stalled and not job.cancelled:
                self._park(job)
                self._scheduler.requests.remove(job)
                job.admitted = None
                return
        if self._is_crowded:
            self._scheduler.requests.remove(job)
            self._scheduler.requests.append(job)
            job.admitted = None

    def _finish(self, job: Job) -> None:
        """End a job whose verdicts were passed on."""
        self._end(job)
        if job.admitted is not None:
            job.sequence.rollback_to(len(job.entry.session.ids))
        if isinstance(job, Generation):
            self._outcomes.append(partial(job.future.set_result, None))

    def _fail_job(self, job: Job, error: BaseException) -> None:
        self._end(job)
        self._outcomes.append(partial(job.future.set_exception, error))

    def _end(self, job: Job) -> None:
        self._scheduler.requests.remove(job)
        job.ended = True

    def _deliver(self) -> None:
        """Resolve the futures of all outcomes since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        if outcomes:
            self._call(outcomes)

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
        failed = [job for job in jobs if not job.ended and job in self._scheduler.requests]
        for job in failed:
            self._fail_job(job, error)
        for job in failed:
            if job.plan is not None:
                self.slot_pool.evict(job.entry)  # its KV cache is undefined after a failed forward


def _refuse(job: Job) -> None:
    """Refuse a job that was not started, unless it is cancelled."""
    if job.begin():
        job.future.set_exception(_draining_error())


def _draining_error() -> FrameError:
    return FrameError(ErrorCode.DRAINING, "this service is going down: connect again")
