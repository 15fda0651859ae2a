"""Where requests come in: who is next, what becomes of a generation, and what becomes of it when its client leaves.

Everything here belongs to the event loop, but for `Ticket.work`: that runs in a thread of a bounded pool, one for each
generation. Events cross over in batches: those of one block come together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from outrider.api import StreamEvent
from outrider.core.outcome import Result
from outrider.edge.cancellation import Cancellation
from outrider.errors import OutriderError, StateError
from outrider.gateway.pool import Choice, Pool
from outrider.prompts.chat import PromptLike

log = logging.getLogger(__name__)

RECENT = 32  # generations by which it is judged how long one takes
BURST_S = 0.001  # what comes within it is told together
UNKNOWN_S = 1.0  # what one is taken to last before any has ended


class Busy(OutriderError):
    """Too much is waiting already. retry_after_s: when a place in the queue is likely to be free."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class GoingDown(OutriderError):
    """This desk is being closed."""

    def __init__(self) -> None:
        super().__init__("the gateway is going down")


class Ticket:
    """One generation. Iterating gives batches of events: whatever has come since the last one.

    `cancel` ends it: its engine slot and its cloud session are given back within moments, and iterating ends. Whoever
    takes a ticket either reads it to its end or cancels it. A task that is cancelled while it reads cancels the ticket.
    provisional: whether drafted tokens are told at once; else they come with the next ones that are confirmed.

    Raises (iterating): what the generation raised.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, provisional: bool = False) -> None:
        self.started = loop.create_future()  # its prompt and settings can be used
        self._loop, self._cancellation, self._provisional = loop, Cancellation(), provisional
        self._events: deque[StreamEvent] = deque()
        self._news = asyncio.Event()
        self._telling = False  # the loop was told of events, and has not looked yet
        self._shown = False  # it has looked at some
        self._outcome: Future[Result] | None = None

    # In a thread of its own ---------------------------------------------------------------------------------

    def work(self, pool: Pool, prompt: PromptLike, settings: dict[str, Any], choice: Choice) -> Result:
        """Generate."""
        self._cancellation.check()
        with pool.lent(choice) as decoder:
            stream = decoder.stream(prompt, cancellation=self._cancellation, **settings)
            self._call(self._begin)
            try:
                while True:
                    self._push(next(stream))
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

    # In the loop --------------------------------------------------------------------------------------------

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
        self._cancellation.cancel()

    def end(self, outcome: Future[Result]) -> None:
        """It has ended, one way or another."""
        self._outcome = outcome
        self._news.set()
        error = outcome.exception()
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
        assert self._outcome is not None
        error = self._outcome.exception()
        if error is None or isinstance(error, CancelledError):
            raise StopAsyncIteration
        raise error

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


class Desk:
    """Admits generations: at most `slots` run, and at most `queue` wait.

    Clients take turns for what gets free, however much each of them asks; a client's own requests keep their order. Who
    comes to a full queue takes the last place of whoever has the most, if that still leaves them as many.
    """

    def __init__(self, pool: Pool, *, slots: int = 8, queue: int = 64) -> None:
        self._pool, self._slots, self._queue = pool, slots, queue
        self._threads = ThreadPoolExecutor(slots, "outrider-generation")
        self._free = slots
        self._lines: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # whose turn it is comes first
        self._running: set[Ticket] = set()
        self._durations: deque[float] = deque(maxlen=RECENT)  # s
        self._closed = False
        self._ended = asyncio.Event()

    @property
    def active(self) -> int:
        """Generations that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return sum(map(len, self._lines.values()))

    @property
    def room(self) -> int:
        """Requests that may be here at once, running or waiting."""
        return self._slots + self._queue

    async def start(
        self, client: str, prompt: PromptLike, settings: dict[str, Any], choice: Choice, *, provisional: bool = False
    ) -> Ticket:
        """Wait for a slot, and begin. Being cancelled leaves the queue, or ends what has begun.

        Raises:
            Busy: the queue is full, or was filled up meanwhile by clients who have fewer requests in it.
            GoingDown: this desk is being closed.
            InputError: the prompt, a setting or the choice cannot be used; nothing was computed.
            CloudError: the cloud is not there, and that was not to be got over, or it says no.
        """
        await self._admission(client)
        ticket = Ticket(asyncio.get_running_loop(), provisional=provisional)
        self._run(ticket, prompt, settings, choice)
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
        for place in [place for line in lines.values() for place in line if not place.done()]:
            place.set_exception(GoingDown())
        for ticket in self._running:
            ticket.cancel()
        while self._running:
            self._ended.clear()
            await self._ended.wait()
        await asyncio.to_thread(self._threads.shutdown)

    # Slots --------------------------------------------------------------------------------------------------

    async def _admission(self, client: str) -> None:
        """Take a slot, at once or when it is this client's turn."""
        if not self._free and not self._closed:
            await self._queued(client)
        else:
            self._free -= 1
        if self._closed:
            self._release()
            raise GoingDown

    async def _queued(self, client: str) -> None:
        if self.waiting >= self._queue and not self._displaced(client):
            raise self._full()
        place = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.exception() is None:  # it was called a moment ago
                self._release()
            self._leave(client, place)
            raise

    def _displaced(self, client: str) -> bool:
        """Turn away the last of the longest line for this client; not if that made it the shorter one."""
        longest = max(self._lines, key=lambda each: len(self._lines[each]), default=client)
        if len(self._lines.get(longest, ())) < len(self._lines.get(client, ())) + 2:
            return False
        place = self._lines[longest].pop()
        if not place.done():
            place.set_exception(self._full())
        return True

    def _leave(self, client: str, place: asyncio.Future[None]) -> None:
        line = self._lines.get(client)
        if line is not None and place in line:
            line.remove(place)
            if not line:
                del self._lines[client]

    def _release(self) -> None:
        """A slot is free: for the next client's next request."""
        self._free += 1
        while self._free and self._lines:
            client, line = self._lines.popitem(last=False)
            place = line.popleft()
            if line:
                self._lines[client] = line
            if not place.done():
                self._free -= 1
                place.set_result(None)

    def _full(self) -> Busy:
        return self._busy(f"{self.active} requests are being answered, and {self.waiting} wait: try again later")

    def _busy(self, reason: str) -> Busy:
        usual = sum(self._durations) / len(self._durations) if self._durations else UNKNOWN_S
        return Busy(reason, usual / self._slots)

    # Running ------------------------------------------------------------------------------------------------

    def _run(self, ticket: Ticket, prompt: PromptLike, settings: dict[str, Any], choice: Choice) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            outcome = self._threads.submit(ticket.work, self._pool, prompt, settings, choice)
        except RuntimeError as error:  # there is no further thread to be had; what stands in the pool's queue may stay
            ticket.cancel()
            self._release()
            raise self._busy("this machine has no thread for another request: try again later") from error
        self._running.add(ticket)
        outcome.add_done_callback(lambda done: loop.call_soon_threadsafe(self._end, ticket, done, began))

    def _end(self, ticket: Ticket, outcome: Future[Result], began: float) -> None:
        self._durations.append(asyncio.get_running_loop().time() - began)
        self._running.discard(ticket)
        ticket.end(outcome)
        self._release()
        self._ended.set()
