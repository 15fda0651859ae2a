"""Continuous batching of verification requests, with chunked prefill.

One thread owns the engine. Each step

    admit     new requests: repeats are answered, the rest is planned and waits for a slot
    read      all short blocks in as few forwards as their widths allow; then one chunk of the long prefills
    judge     the blocks that are read to the end

so a long prefill delays other verdicts by one chunk at most. Requests of one identity are served in order of arrival.
Between identities, slots and engine time are shared (shares.py).
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

from outrider.cloud.metrics import Metrics
from outrider.cloud.seats import Seats
from outrider.cloud.sessions import Record
from outrider.cloud.shares import Shares, round_robin, within_share
from outrider.core.acceptance import Verdict
from outrider.core.actions import Verify
from outrider.core.policy import Rows
from outrider.engines.base import Engine, Feed, Reader, read_many
from outrider.errors import OutriderError
from outrider.verifiers.session import Reading
from outrider.wire.messages import Code, Refusal

P = ParamSpec("P")
log = logging.getLogger(__name__)

SHORT = 96  # tokens; a block is read at once, anything longer in chunks
NARROW = 16  # tokens; padding up to here costs less than a second forward


@dataclass(eq=False)
class Job:
    """One request on its way. reading: what it must read, once it was looked at. admitted: when it got its slot."""

    record: Record
    request: Verify
    future: Future[Verdict] = field(default_factory=Future)
    arrived: float = field(default_factory=time.perf_counter)
    reading: Reading | None = None
    admitted: float | None = None

    @property
    def identity(self) -> str:
        return self.record.identity


class Batcher:
    """Owner of the engine's thread.

    chunk: tokens of long prefills per step, over all of them. max_batch: sessions in one forward.
    """

    def __init__(self, engine: Engine, slots: int, metrics: Metrics, *, chunk: int = 256, max_batch: int = 64) -> None:
        self._engine, self._metrics = engine, metrics
        self.seats = Seats(engine, slots, metrics)
        self._chunk, self._max_batch = chunk, max_batch
        self._wake = threading.Condition()
        self._inbox: list[Job] = []
        self._leavers: list[Record] = []
        self._running = self._ended = False
        self._jobs: list[Job] = []
        self._shares = Shares()
        self._used: defaultdict[str, float] = defaultdict(float)  # engine seconds of the present step, by identity
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        self._running = True
        self._thread.start()

    def stop(self) -> None:
        """Finish the step at hand, end the thread and give the slots back; what is left unanswered is refused."""
        with self._wake:
            self._running, self._ended = False, True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        for job in self._jobs:
            job.future.set_exception(_ended())
        for job in self._inbox:
            _refuse(job)
        self._jobs, self._inbox = [], []
        self.seats.clear()

    def submit(self, record: Record, request: Verify) -> Future[Verdict]:
        """Ask for a verdict; at most one at a time of each session."""
        job = Job(record, request)
        with self._wake:
            if self._ended:
                _refuse(job)
            else:
                self._inbox.append(job)
                self._wake.notify()
        return job.future

    def leave(self, record: Record) -> None:
        """The session is over: its slot is free from the next step on."""
        with self._wake:
            self._leavers.append(record)
            self._wake.notify()

    @property
    def queued(self) -> int:
        return len(self._inbox) + sum(job.admitted is None for job in self._jobs)

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._running and not (self._inbox or self._leavers or self._jobs):
                    self._wake.wait()
                if not self._running:
                    return
                arrived, self._inbox = self._inbox, []
                leavers, self._leavers = self._leavers, []
            self._jobs += [job for job in arrived if job.future.set_running_or_notify_cancel()]
            self._attempt(list(self._jobs), self._turn, leavers)  # without the thread, nobody is answered again

    def _turn(self, leavers: Seq[Record]) -> None:
        self._part(leavers)
        self._step()

    def _part(self, leavers: Seq[Record]) -> None:
        for record in leavers:
            for job in [job for job in self._jobs if job.record is record]:
                self._finish(job, Refusal(Code.UNKNOWN_SESSION, "this session has ended"))
            self.seats.leave(record)

    # One step -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._used.clear()
        for job in list(self._jobs):
            if job.reading is None:
                self._attempt([job], self._plan, job)
        self._admit_waiting()
        reading = [job for job in self._jobs if job.admitted is not None]
        short = [job for job in reading if self._left(job) <= SHORT]
        long = [job for job in reading if job not in short]
        for group in groups(within_share(short, _identity, self._left, SHORT), self._left, self._max_batch):
            self._attempt(group, self._read, group, [self._left(job) for job in group])
        permitted = self._shares.permitted(_identities(long), _identities(short))
        long = [job for job in long if job.identity in permitted]
        if long:
            long = round_robin(long, _identity, {})[: max(1, self._chunk // SHORT)]
            self._attempt(long, self._prefill, long)
        self._shares.repay(self._used)

    def _plan(self, job: Job) -> None:
        """What must be read for a request; a repeat is answered at once."""
        asked = job.record.session.ask(job.request)
        if isinstance(asked, Verdict):
            self._finish(job, asked)
        else:
            job.reading = asked

    def _admit_waiting(self) -> None:
        """Select as many jobs as there are slots, round-robin over identities; a session keeps its slot."""
        admitted = [job for job in self._jobs if job.admitted is not None]
        waiting = [job for job in self._jobs if job.admitted is None]
        seated = [job for job in waiting if job.record in self.seats]
        permitted = self._shares.permitted(
            _identities(job for job in waiting if job not in seated), _identities([*admitted, *seated])
        )
        waiting = [job for job in waiting if job in seated or job.identity in permitted]
        waiting = round_robin(waiting, _identity, Counter(job.identity for job in admitted))
        room = max(0, self.seats.total - len(admitted))
        chosen, rest = waiting[:room], waiting[room:]
        if rest and not chosen:
            chosen = self._preempt(rest[0], admitted)
        busy = {job.record for job in self._jobs if job.admitted is not None} | {job.record for job in chosen}
        for job in chosen:
            self._attempt([job], self._admit, job, busy)

    def _preempt(self, job: Job, admitted: Seq[Job]) -> list[Job]:
        """Preempt the identity that uses the most slots, if it uses at least two more than the job's.

        The latest of its long prefills returns to the queue and is recomputed; its other requests still make progress.
        Short requests release their slots within a step.
        """
        using = Counter(other.identity for other in admitted)
        name, most = using.most_common(1)[0]
        victims = [other for other in admitted if other.identity == name and self._left(other) > SHORT]
        if most < using[job.identity] + 2 or not victims:
            return []
        victim = max(victims, key=lambda other: other.admitted or 0.0)
        victim.admitted = None
        self.seats.vacate(victim.record)
        return [job]

    def _admit(self, job: Job, busy: set[Record]) -> None:
        """Give a request a slot, if there is one whose session is not `busy`."""
        started, fresh = time.perf_counter(), job.record not in self.seats
        if self.seats.take(job.record, busy):
            self._reader(job).settle(self._reading(job).start)
            job.admitted = time.perf_counter()
            self._metrics.queued(job.admitted - job.arrived)
        if fresh:
            self._spend(job.identity, time.perf_counter() - started, heavy=True)

    def _spend(self, identity: str, seconds: float, *, heavy: bool) -> None:
        self._used[identity] += seconds
        if heavy:
            self._shares.charge(identity, seconds)

    def _prefill(self, jobs: Seq[Job]) -> None:
        self._read(jobs, self._parts(jobs), heavy=True)

    def _parts(self, jobs: Seq[Job]) -> list[int]:
        """How many tokens of each long prefill to read now; the last part must hold all the rows that are wanted."""
        share = max(1, self._chunk // len(jobs))
        lefts = [(self._left(job), self._reading(job).rows) for job in jobs]
        return [left if left <= max(share, rows) else min(share, left - rows) for left, rows in lefts]

    def _read(self, jobs: Seq[Job], counts: Seq[int], *, heavy: bool = False) -> None:
        started = time.perf_counter()
        feeds = [self._feed(job, count) for job, count in zip(jobs, counts, strict=True)]
        rows = read_many(self._engine, feeds, [job.record.session.picks_by for job in jobs])
        seconds = time.perf_counter() - started
        self._metrics.batch(len(jobs), sum(counts), seconds)
        for job, count in zip(jobs, counts, strict=True):
            self._spend(job.identity, seconds * count / sum(counts), heavy=heavy)
        for job, its in zip(jobs, rows, strict=True):
            if not self._left(job):
                self._attempt([job], self._judge, job, its)

    def _feed(self, job: Job, count: int) -> Feed:
        reading, known = self._reading(job), self._reader(job).known
        rows = reading.rows if count == self._left(job) else 1
        return Feed(self._reader(job).slot, reading.ids[known : known + count], rows)

    def _judge(self, job: Job, rows: Rows) -> None:
        reading, session = self._reading(job), job.record.session
        verdict = session.judge(reading, rows)
        self._reader(job).settle(len(session.ids))
        now, admitted = time.perf_counter(), job.admitted or 0.0
        verdict = replace(verdict, queue_s=admitted - job.arrived, compute_s=now - admitted)
        self._metrics.verdict(len(job.request.draft_ids), verdict.accepted, now - job.arrived)
        self._finish(job, verdict)

    def _finish(self, job: Job, outcome: Verdict | BaseException) -> None:
        self._jobs.remove(job)
        if isinstance(outcome, BaseException):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)

    def _attempt(self, jobs: Seq[Job], do: Callable[P, None], *args: P.args, **named: P.kwargs) -> None:
        """Do it; if it fails, these jobs fail and nobody else's."""
        try:
            do(*args, **named)
        except OutriderError as error:
            self._fail(jobs, error)
        except Exception as error:  # out of memory, a bug: whatever it was, the service goes on
            log.exception("the engine failed")
            self._fail(jobs, error)

    def _fail(self, jobs: Seq[Job], error: BaseException) -> None:
        failed = [job for job in jobs if job in self._jobs]
        for job in failed:
            self._finish(job, error)
        for job in failed:
            if job.reading is not None:
                self.seats.vacate(job.record)  # its cache may hold anything

    def _left(self, job: Job) -> int:
        """Tokens that the job's cache lacks."""
        return len(self._reading(job).ids) - self._reader(job).known

    def _reader(self, job: Job) -> Reader:
        return self.seats.reader(job.record)

    @staticmethod
    def _reading(job: Job) -> Reading:
        assert job.reading is not None  # planned
        return job.reading


def _identity(job: Job) -> str:
    return job.identity


def _identities(jobs: Iterable[Job]) -> set[str]:
    return {job.identity for job in jobs}


def _refuse(job: Job) -> None:
    """End a job that nobody has looked at."""
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(_ended())


def _ended() -> Refusal:
    return Refusal(Code.DRAINING, "this service is going down: connect again")


def groups(jobs: Seq[Job], width: Callable[[Job], int], most: int) -> list[list[Job]]:
    """Jobs to read in one forward each: none is padded to more than twice its width, or NARROW tokens."""
    out: list[list[Job]] = []
    for job in sorted(jobs, key=width):
        first = width(out[-1][0]) if out else 0
        if out and len(out[-1]) < most and width(job) <= max(NARROW, 2 * first):
            out[-1].append(job)
        else:
            out.append([job])
    return out
