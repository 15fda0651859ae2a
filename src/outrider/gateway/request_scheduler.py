"""The request scheduler: a fair queue, slots for generations, and their cancellation.

Everything here belongs to the event loop, except for `GenerationTask.run`. It runs in a thread of a bounded pool, one
for each generation. Its events reach the loop in batches, so that those of one block come together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from outrider.api import StreamEvent
from outrider.decoding.result import Result
from outrider.edge.cancellation import Cancellation
from outrider.errors import OutriderError, StateError
from outrider.gateway.decoder_pool import DecoderPool, RequestOptions, Settings
from outrider.gateway.errors import GenerationTimeout, QueueFull, ShuttingDown
from outrider.prompts.chat import PromptLike

log = logging.getLogger(__name__)

DURATION_WINDOW = 32  # generations in the mean duration, which predicts the next one's
BATCH_DELAY_S = 0.001  # events within it form a batch
DEFAULT_DURATION_S = 1.0  # predicted duration of a generation before any has ended
MAX_TASKS_PER_SLOT = 2  # generations for each slot, paused ones included


class GenerationTask:
    """One generation. Iteration yields batches of events.

    `cancel` ends it, releases its engine slot and its cloud session, and ends the iteration. The caller either iterates
    to the end or cancels. A coroutine that is cancelled while it iterates cancels the generation.

    cache_salt: only generations with the same one share KV caches. provisional: yield drafted tokens at once, and not
    with the next confirmed ones.

    Raises (iteration): the exception of the generation.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        cache_salt: str = "",
        provisional: bool = False,
        cancellation: Cancellation | None = None,
    ) -> None:
        self.started = loop.create_future()  # the prompt and the settings are valid
        self._loop, self._cache_salt, self._provisional = loop, cache_salt, provisional
        self._cancellation = cancellation or Cancellation()
        self._events: deque[StreamEvent] = deque()
        self._wakeup = asyncio.Event()
        self._notified = False  # a flush is scheduled
        self._flushed_once = False
        self._outcome: Future[Result] | None = None
        self._may_run = threading.Event()
        self._may_run.set()
        self._expired: GenerationTimeout | None = None
        self._cancelled = False
        self.paused = False  # another generation has its slot

    def run(self, pool: DecoderPool, prompt: PromptLike, settings: Settings, options: RequestOptions) -> Result:
        """Generate, in a thread of its own."""
        self._cancellation.check()
        with pool.checkout(options) as decoder:
            stream = decoder.stream(prompt, cancellation=self._cancellation, cache_salt=self._cache_salt, **settings)
            self._loop.call_soon_threadsafe(self._set_started)
            try:
                while True:
                    self._emit(next(stream))
                    self._may_run.wait()
                    self._cancellation.check()
            except StopIteration as end:
                result: Result = end.value
                return result
            finally:
                stream.close()

    def _emit(self, event: StreamEvent) -> None:
        self._events.append(event)
        if not self._notified and (self._provisional or event.kind != "provisional"):
            self._notified = True
            self._loop.call_soon_threadsafe(self._notify)

    @property
    def result(self) -> Result:
        """Return the result, after the iteration has ended.

        Raises:
            StateError: the generation still runs, failed, or was cancelled.
        """
        if self._outcome is None or self._outcome.cancelled() or self._outcome.exception() is not None:
            raise StateError("this generation has no result: it still runs, failed, or was cancelled")
        return self._outcome.result()

    def cancel(self) -> None:
        """End the generation. After its end this does nothing."""
        self._cancelled = True
        self._cancellation.cancel()
        self._may_run.set()

    def expire(self, seconds: float) -> None:
        """End the generation at its time limit. The iteration then raises GenerationTimeout."""
        self._expired = GenerationTimeout(f"the generation exceeded {seconds:g} s, this gateway's time limit")
        self.cancel()

    def pause(self) -> None:
        """Stop before the next token, until `resume` or `cancel`."""
        self.paused = True
        if not self._cancelled:
            self._may_run.clear()

    def resume(self) -> None:
        """Continue after `pause`."""
        self.paused = False
        self._may_run.set()

    def end(self, outcome: Future[Result]) -> None:
        """Record the outcome of the generation, and end the iteration."""
        self._outcome = outcome
        self._wakeup.set()
        error = self._error()
        if error is not None and not isinstance(error, (OutriderError, CancelledError)):
            log.error("a generation failed", exc_info=error)
        if error is not None and not self.started.done():
            self.started.set_exception(error)

    def __aiter__(self) -> GenerationTask:
        return self

    async def __anext__(self) -> list[StreamEvent]:
        await self._wait()
        while not self._events and self._outcome is None:
            await self._wait()
        if self._events:
            return [self._events.popleft() for _ in range(len(self._events))]
        error = self._error()
        if error is None or isinstance(error, CancelledError):
            raise StopAsyncIteration
        raise error

    def _error(self) -> BaseException | None:
        """Return the exception of the ended generation, if it raised one."""
        assert self._outcome is not None
        error = self._outcome.exception()
        return self._expired if isinstance(error, CancelledError) and self._expired is not None else error

    async def _wait(self) -> None:
        """Wait for visible events or the end of the generation."""
        if self._outcome is None:
            try:
                await self._wakeup.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
            self._wakeup.clear()

    def _set_started(self) -> None:
        if not self.started.done():
            self.started.set_result(None)

    def _notify(self) -> None:
        """Schedule a flush: woken at each event, the loop would delay the other events of a block."""
        if self._flushed_once:
            self._loop.call_later(BATCH_DELAY_S, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        self._notified, self._flushed_once = False, True
        self._wakeup.set()


@dataclass
class _ClientQueue:
    """A client's waiting work: places in the queue, and generations paused for other clients."""

    places: deque[asyncio.Future[None]] = field(default_factory=deque)
    paused: deque[GenerationTask] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.places or self.paused)


class RequestScheduler:
    """Scheduler of generations: at most `slots` run, and at most `queue` requests wait.

    Slots go round-robin to the clients that wait. A client's own requests keep their order. Preemption: if all slots
    are taken, and a client has at least two more than the client of a new request, the newest generation of the client
    with the most is paused before its next token, and the new request gets its slot at once. Paused generations resume
    in their client's turn. So a lone client may use all slots, and no client waits for another's long generations. If
    the queue is full, the newest request of the client with the longest queue is evicted, unless the newcomer's queue
    would then be longer.

    seconds: the time limit of a generation, from its slot to its end.
    """

    def __init__(self, pool: DecoderPool, *, slots: int = 8, queue: int = 64, seconds: float = math.inf) -> None:
        self._pool, self._slots, self._queue, self._seconds = pool, slots, queue, seconds
        self._threads = ThreadPoolExecutor(MAX_TASKS_PER_SLOT * slots, "outrider-generation")
        self._free = slots
        self._queues: OrderedDict[str, _ClientQueue] = OrderedDict()  # in order of turns
        self._running: dict[GenerationTask, str] = {}  # the client of each, paused ones included; the oldest first
        self._durations: deque[float] = deque(maxlen=DURATION_WINDOW)  # s
        self._closed = False
        self._ended = asyncio.Event()

    @property
    def active(self) -> int:
        """Return the number of generations that run."""
        return sum(not task.paused for task in self._running)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for their first slot."""
        return sum(len(client_queue.places) for client_queue in self._queues.values())

    @property
    def room(self) -> int:
        """Return the most requests that may run or wait at once."""
        return self._slots + self._queue

    async def start(
        self,
        client: str,
        prompt: PromptLike,
        settings: Settings,
        options: RequestOptions,
        *,
        cache_salt: str = "",
        provisional: bool = False,
        queued: Callable[[], None] = lambda: None,
        cancellation: Cancellation | None = None,
    ) -> GenerationTask:
        """Wait for a slot, and start a generation. Cancelling the wait leaves the queue, or ends the generation.

        cache_salt: the client's generations share KV caches with those of its own that have the same one.
        queued: called if there is no slot at once. cancellation: of the generation, for a caller that may disconnect it
        from the cloud.

        Raises:
            QueueFull: the queue is full, or this request was evicted from it for a client with fewer requests.
            ShuttingDown: the gateway is shutting down.
            InputError: the prompt, a setting or an option is invalid. Nothing was computed.
            CloudError: the cloud is unreachable and on_cloud_loss is "fail", or it refuses.
            GenerationTimeout: the time limit passed before the first token.
        """
        await self._admit(client, queued)
        loop = asyncio.get_running_loop()
        salt = f"{client}\n{cache_salt}"
        task = GenerationTask(loop, cache_salt=salt, provisional=provisional, cancellation=cancellation)
        self._run(task, client, prompt, settings, options)
        try:
            await task.started
        except asyncio.CancelledError:
            task.cancel()
            raise
        except CancelledError:
            raise ShuttingDown from None
        return task

    async def close(self) -> None:
        """Cancel all generations and waiting requests, and wait for their end."""
        self._closed = True
        queues, self._queues = self._queues, OrderedDict()
        for place in [place for client_queue in queues.values() for place in client_queue.places if not place.done()]:
            place.set_exception(ShuttingDown())
        for task in self._running:
            task.cancel()
        while self._running:
            self._ended.clear()
            await self._ended.wait()
        await asyncio.to_thread(self._threads.shutdown)

    async def _admit(self, client: str, queued: Callable[[], None] = lambda: None) -> None:
        """Take a slot, at once or in this client's turn."""
        if not self._free and not self._closed:
            if not self._preempt(client):
                await self._enqueue(client, queued)
        else:
            self._free -= 1
        if self._closed:
            self._release()
            raise ShuttingDown

    def _preempt(self, client: str) -> bool:
        """Pause a generation of the client with the most slots, unless it would then have fewer than this client."""
        if self._queues.get(client) or len(self._running) >= MAX_TASKS_PER_SLOT * self._slots:
            return False
        active = Counter(name for task, name in self._running.items() if not task.paused)
        busiest = max(active, key=lambda name: active[name], default=client)
        if active[busiest] < active[client] + 2:
            return False
        newest = [task for task, name in self._running.items() if name == busiest and not task.paused][-1]
        newest.pause()
        self._queues.setdefault(busiest, _ClientQueue()).paused.appendleft(newest)
        return True

    async def _enqueue(self, client: str, queued: Callable[[], None]) -> None:
        if self.waiting >= self._queue and not self._evict_longest(client):
            raise self._queue_full_error()
        place = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, _ClientQueue()).places.append(place)
        queued()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:  # it has just got the slot
                self._release()
            self._remove(client, place)
            raise

    def _evict_longest(self, client: str) -> bool:
        """Evict the newest request of the longest queue, unless that queue would then be shorter than this client's."""
        lengths = {name: len(client_queue.places) for name, client_queue in self._queues.items()}
        longest = max(lengths, key=lambda name: lengths[name], default=client)
        if lengths.get(longest, 0) < lengths.get(client, 0) + 2:
            return False
        place = self._queues[longest].places.pop()
        if not place.done():
            place.set_exception(self._queue_full_error())
        return True

    def _remove(self, client: str, place: asyncio.Future[None]) -> None:
        client_queue = self._queues.get(client)
        if client_queue is not None and place in client_queue.places:
            client_queue.places.remove(place)
            if not client_queue:
                del self._queues[client]

    def _release(self) -> None:
        """Give a free slot to the next client's next generation."""
        self._free += 1
        while self._free and self._queues:
            client, client_queue = self._queues.popitem(last=False)
            if client_queue.paused:
                self._free -= 1
                client_queue.paused.popleft().resume()
            elif client_queue.places and not (place := client_queue.places.popleft()).done():
                self._free -= 1
                place.set_result(None)
            if client_queue:
                self._queues[client] = client_queue

    def _queue_full_error(self) -> QueueFull:
        return self._busy_error(f"{self.active} requests are being answered, and {self.waiting} wait: try again later")

    def _busy_error(self, reason: str) -> QueueFull:
        mean = sum(self._durations) / len(self._durations) if self._durations else DEFAULT_DURATION_S
        return QueueFull(reason, mean / self._slots)

    def _run(
        self, task: GenerationTask, client: str, prompt: PromptLike, settings: Settings, options: RequestOptions
    ) -> None:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        try:
            outcome = self._threads.submit(task.run, self._pool, prompt, settings, options)
        except RuntimeError as error:  # the system starts no further thread
            task.cancel()
            self._release()
            raise self._busy_error("this machine has no thread for another request: try again later") from error
        self._running[task] = client
        timer = loop.call_later(self._seconds, task.expire, self._seconds) if self._seconds < math.inf else None
        outcome.add_done_callback(lambda done: loop.call_soon_threadsafe(self._end, task, done, started_at, timer))

    def _end(
        self, task: GenerationTask, outcome: Future[Result], started_at: float, timer: asyncio.TimerHandle | None
    ) -> None:
        if timer is not None:
            timer.cancel()
        self._durations.append(asyncio.get_running_loop().time() - started_at)
        client_queue = self._queues.get(self._running.pop(task))
        task.end(outcome)
        if client_queue is not None and task in client_queue.paused:  # another generation has its slot
            client_queue.paused.remove(task)
        else:
            self._release()
        self._ended.set()
