"""Where requests come in: who is next, what becomes of a generation, and what becomes of it when its client leaves.

Everything here belongs to the event loop, but for `Ticket.work`: that runs in a thread of a bounded pool, one for each
generation. Events cross over in batches: those of one block come together.
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
from typing import Any

from outrider.api import StreamEvent
from outrider.core.outcome import Result
from outrider.edge.cancellation import Cancellation
from outrider.errors import OutriderError, StateError
from outrider.gateway.pool import Pool, RequestOptions
from outrider.prompts.chat import PromptLike

log = logging.getLogger(__name__)

RECENT = 32  # generations by which it is judged how long one takes
BURST_S = 0.001  # what comes within it is told together
UNKNOWN_S = 1.0  # what one is taken to last before any has ended
LIVE = 2  # generations for each slot, paused ones included


class Busy(OutriderError):
    """Too much is waiting already. retry_after_s: when a place in the queue is likely to be free."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class GoingDown(OutriderError):
    """This desk is being closed."""

    def __init__(self) -> None:
        super().__init__("the gateway is going down")


class TimeLimit(OutriderError):
    """A generation took longer than a gateway allows."""


class Ticket:
    """One generation. Iterating gives batches of events: whatever has come since the last one.

    `cancel` ends it: its engine slot and its cloud session are given back within moments, and iterating ends. Whoever
    takes a ticket either reads it to its end or cancels it. A task that is cancelled while it reads cancels the ticket.
    provisional: whether drafted tokens are told at once; else they come with the next ones that are confirmed.

    Raises (iterating): what the generation raised.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        provisional: bool = False,
        cancellation: Cancellation | None = None,
    ) -> None:
        self.started = loop.create_future()  # its prompt and settings can be used
        self._loop, self._provisional = loop, provisional
        self._cancellation = cancellation or Cancellation()
        self._events: deque[StreamEvent] = deque()
        self._news = asyncio.Event()
        self._telling = False  # the loop was told of events, and has not looked yet
        self._shown = False  # it has looked at some
        self._outcome: Future[Result] | None = None
        self._may_run = threading.Event()
        self._may_run.set()
        self._expired: TimeLimit | None = None
        self._cancelled = False
        self.paused = False  # another generation has its slot

    # In a thread of its own ---------------------------------------------------------------------------------

    def work(self, pool: Pool, prompt: PromptLike, settings: dict[str, Any], choice: RequestOptions) -> Result:
        """Generate."""
        self._cancellation.check()
        with pool.lent(choice) as decoder:
            stream = decoder.stream(prompt, cancellation=self._cancellation, **settings)
            self._call(self._begin)
            try:
                while True:
                    self._push(next(stream))
                    self._may_run.wait()
                    self._cancellation.check()
            except StopIteration as end:
                result: Result = end.value
                return result
            finally:
                stream.close()

    def _push(self, event: StreamEvent) -> None:
        self._events.append(event)
        if not self._telling and (self._provisional or event.kind != "provisional"):
            self._telling = True
            self._call(self._tell)

    def _call(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    @property
    def result(self) -> Result:
        """Once iterating has ended.

        Raises:
            StateError: it has not, or was cancelled.
        """
        if self._outcome is None or self._outcome.cancelled() or self._outcome.exception() is not None:
            raise StateError("this generation has no result: it still runs, failed, or was cancelled")
        return self._outcome.result()

    def cancel(self) -> None:
        """At any time; after the end it changes nothing."""
        self._cancelled = True
        self._cancellation.cancel()
        self._may_run.set()

    def expire(self, seconds: float) -> None:
        """End the generation at its time limit; iterating then raises TimeLimit."""
        self._expired = TimeLimit(f"the generation was ended after {seconds:g} s, the most that this gateway allows")
        self.cancel()

    def pause(self) -> None:
        """Stop before the next token, until `resume` or `cancel`."""
        self.paused = True
        if not self._cancelled:
            self._may_run.clear()

    def resume(self) -> None:
        self.paused = False
        self._may_run.set()

    def end(self, outcome: Future[Result]) -> None:
        """It has ended, one way or another."""
        self._outcome = outcome
        self._news.set()
        error = self._error()
        if error is not None and not isinstance(error, (OutriderError, CancelledError)):
            log.error("a generation failed", exc_info=error)
        if error is not None and not self.started.done():
            self.started.set_exception(error)

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> list[StreamEvent]:
        await self._told()
        while not self._events and self._outcome is None:
            await self._told()
        if self._events:
            return [self._events.popleft() for _ in range(len(self._events))]
        error = self._error()
        if error is None or isinstance(error, CancelledError):
            raise StopAsyncIteration
        raise error

    def _error(self) -> BaseException | None:
        """The generation's error, once it has ended."""
        assert self._outcome is not None
        error = self._outcome.exception()
        return self._expired if isinstance(error, CancelledError) and self._expired is not None else error

    async def _told(self) -> None:
        """Wait until there is something to tell, which drafts may not be, or all has been told."""
        if self._outcome is None:
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                self.cancel()
                raise
            self._news.clear()

    def _begin(self) -> None:
        if not self.started.done():
            self.started.set_result(None)

    def _tell(self) -> None:
        """Let a burst come to its end: woken by its first event, the loop would keep the others from coming.

        The very first events are waited for, and shown at once.
        """
        if self._shown:
            self._loop.call_later(BURST_S, self._show)
        else:
            self._show()

    def _show(self) -> None:
        self._telling, self._shown = False, True
        self._news.set()


@dataclass
class _Line:
    """A client's waiting work: places in the queue, and generations paused for other clients."""

    places: deque[asyncio.Future[None]] = field(default_factory=deque)
    paused: deque[Ticket] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.places or self.paused)


class Desk:
    """Schedules generations: at most `slots` run, and at most `queue` requests wait.

    Slots go round-robin to the clients that wait; a client's own requests keep their order. When all slots are taken,
    and a client has at least two more of them than the client of a new request, the newest generation of the client
    with the most is paused before its next token, and the new request gets its slot at once. Paused generations go on
    in their client's turn. So a lone client has all slots, and no client waits for another's long generations. When the
    queue is full, the newest request of the client with the longest queue is evicted, unless the newcomer's would then
    be the longer one.

    seconds: the time limit of a generation, from getting its slot to its end.
    """

    def __init__(self, pool: Pool, *, slots: int = 8, queue: int = 64, seconds: float = math.inf) -> None:
        self._pool, self._slots, self._queue, self._seconds = pool, slots, queue, seconds
        self._threads = ThreadPoolExecutor(LIVE * slots, "outrider-generation")
        self._free = slots
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # in order of turns
        self._running: dict[Ticket, str] = {}  # the client of each, paused ones included; the oldest first
        self._durations: deque[float] = deque(maxlen=RECENT)  # s
        self._closed = False
        self._ended = asyncio.Event()

    @property
    def active(self) -> int:
        """Generations that run."""
        return sum(not ticket.paused for ticket in self._running)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return sum(len(line.places) for line in self._lines.values())

    @property
    def room(self) -> int:
        """Requests that may be here at once, running or waiting."""
        return self._slots + self._queue

    async def start(
        self,
        client: str,
        prompt: PromptLike,
        settings: dict[str, Any],
        choice: RequestOptions,
        *,
        provisional: bool = False,
        queued: Callable[[], None] = lambda: None,
        cancellation: Cancellation | None = None,
    ) -> Ticket:
        """Wait for a slot, and begin. Cancellation leaves the queue, or ends the generation.

        queued: called if there is no slot at once. cancellation: the generation's, for a caller that may disconnect it.

        Raises:
            Busy: the queue is full, or this request was evicted from it for a client with fewer requests.
            GoingDown: the gateway is shutting down.
            InputError: the prompt, a setting or the choice cannot be used; nothing was computed.
            CloudError: the cloud is unreachable and on_cloud_loss is "fail", or it refuses.
            TimeLimit: the time limit passed before the first token.
        """
        await self._admission(client, queued)
        ticket = Ticket(asyncio.get_running_loop(), provisional=provisional, cancellation=cancellation)
        self._run(ticket, client, prompt, settings, choice)
        try:
            await ticket.started
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        except CancelledError:
            raise GoingDown from None
        return ticket

    async def close(self) -> None:
        """End all, and wait until they have ended."""
        self._closed = True
        lines, self._lines = self._lines, OrderedDict()
        for place in [place for line in lines.values() for place in line.places if not place.done()]:
            place.set_exception(GoingDown())
        for ticket in self._running:
            ticket.cancel()
        while self._running:
            self._ended.clear()
            await self._ended.wait()
        await asyncio.to_thread(self._threads.shutdown)

    async def _admission(self, client: str, queued: Callable[[], None] = lambda: None) -> None:
        """Take a slot, at once or when it is this client's turn."""
        if not self._free and not self._closed:
            if not self._make_room(client):
                await self._queued(client, queued)
        else:
            self._free -= 1
        if self._closed:
            self._release()
            raise GoingDown

    def _make_room(self, client: str) -> bool:
        """Preempt the client with the most slots, unless it would then have fewer than this client."""
        if self._lines.get(client) or len(self._running) >= LIVE * self._slots:
            return False
        active = Counter(each for ticket, each in self._running.items() if not ticket.paused)
        most = max(active, key=lambda each: active[each], default=client)
        if active[most] < active[client] + 2:
            return False
        newest = [ticket for ticket, each in self._running.items() if each == most and not ticket.paused][-1]
        newest.pause()
        self._lines.setdefault(most, _Line()).paused.appendleft(newest)
        return True

    async def _queued(self, client: str, queued: Callable[[], None]) -> None:
        if self.waiting >= self._queue and not self._displaced(client):
            raise self._full()
        place = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, _Line()).places.append(place)
        queued()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:  # it was called a moment ago
                self._release()
            self._leave(client, place)
            raise

    def _displaced(self, client: str) -> bool:
        """Evict the newest request of the longest queue, unless that queue would then be shorter than this client's."""
        lengths = {each: len(line.places) for each, line in self._lines.items()}
        longest = max(lengths, key=lambda each: lengths[each], default=client)
        if lengths.get(longest, 0) < lengths.get(client, 0) + 2:
            return False
        place = self._lines[longest].places.pop()
        if not place.done():
            place.set_exception(self._full())
        return True

    def _leave(self, client: str, place: asyncio.Future[None]) -> None:
        line = self._lines.get(client)
        if line is not None and place in line.places:
            line.places.remove(place)
            if not line:
                del self._lines[client]

    def _release(self) -> None:
        """Give a free slot to the next client's next generation."""
        self._free += 1
        while self._free and self._lines:
            client, line = self._lines.popitem(last=False)
            if line.paused:
                self._free -= 1
                line.paused.popleft().resume()
            elif line.places and not (place := line.places.popleft()).done():
                self._free -= 1
                place.set_result(None)
            if line:
                self._lines[client] = line

    def _full(self) -> Busy:
        return self._busy(f"{self.active} requests are being answered, and {self.waiting} wait: try again later")

    def _busy(self, reason: str) -> Busy:
        usual = sum(self._durations) / len(self._durations) if self._durations else UNKNOWN_S
        return Busy(reason, usual / self._slots)

    def _run(
        self, ticket: Ticket, client: str, prompt: PromptLike, settings: dict[str, Any], choice: RequestOptions
    ) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            outcome = self._threads.submit(ticket.work, self._pool, prompt, settings, choice)
        except RuntimeError as error:  # there is no further thread to be had; what stands in the pool's queue may stay
            ticket.cancel()
            self._release()
            raise self._busy("this machine has no thread for another request: try again later") from error
        self._running[ticket] = client
        timer = loop.call_later(self._seconds, ticket.expire, self._seconds) if self._seconds < math.inf else None
        outcome.add_done_callback(lambda done: loop.call_soon_threadsafe(self._end, ticket, done, began, timer))

    def _end(self, ticket: Ticket, outcome: Future[Result], began: float, timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
        self._durations.append(asyncio.get_running_loop().time() - began)
        line = self._lines.get(self._running.pop(ticket))
        ticket.end(outcome)
        if line is not None and ticket in line.paused:  # another generation has its slot
            line.paused.remove(ticket)
        else:
            self._release()
        self._ended.set()
