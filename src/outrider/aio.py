"""Generations for asyncio: each runs in a thread of an executor, and the cancellation of a task cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Executor
from contextlib import closing
from types import TracebackType
from typing import Self, TypeVar

from outrider.decoding.events import StreamEvent
from outrider.decoding.result import Result
from outrider.edge.cancellation import Cancellation
from outrider.errors import StateError

T = TypeVar("T")
Stream = Generator[StreamEvent, None, Result]


async def run_in_executor(executor: Executor, work: Callable[[Cancellation], T]) -> T:
    """Return the result of `work`, which runs in a thread.

    If the awaiting task is cancelled, the cancellation passed to `work` is cancelled. CancelledError is then raised
    when `work` has ended, so its slot and session are free.
    """
    cancellation = Cancellation()
    future = executor.submit(work, cancellation)
    ended = asyncio.wrap_future(future)
    try:
        await asyncio.wait([ended])  # a cancellation of this task leaves `ended` pending
    except asyncio.CancelledError:
        cancellation.cancel()
        future.cancel()
        await asyncio.wait([ended])
        if not ended.cancelled():
            ended.exception()  # marks it as retrieved
        raise
    return ended.result()


class AsyncStream:
    """The events of one generation, as an asynchronous iterator that ends with a `Result`.

    The generation starts with the iteration, and runs at its own speed in a thread. It is cancelled when the iterating
    task is cancelled, by `aclose`, and at the end of an `async with` block. These wait until its slot is free.

    Raises (iteration): the exception of the generation.
    """

    def __init__(self, executor: Executor, start: Callable[[Cancellation], Stream]) -> None:
        self._results: list[Result] = []
        self._events = _iterate(executor, start, self._results)

    @property
    def result(self) -> Result:
        """The result. Raises StateError before the iteration has reached the end."""
        if not self._results:
            raise StateError("this stream has no result: it was not iterated to its end")
        return self._results[0]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Cancel the generation unless it has ended, and wait until its slot is free."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


async def _iterate(
    executor: Executor, start: Callable[[Cancellation], Stream], results: list[Result]
) -> AsyncGenerator[StreamEvent, None]:
    """Yield the events of a generation, and put its result into `results`.

    It holds no reference to the AsyncStream: asyncio closes the generator of an abandoned stream.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[StreamEvent | None]()

    def run(cancellation: Cancellation) -> Result:
        with closing(start(cancellation)) as stream:
            while True:
                try:
                    event = next(stream)
                except StopIteration as end:
                    return end.value
                loop.call_soon_threadsafe(queue.put_nowait, event)

    task = asyncio.create_task(run_in_executor(executor, run))
    task.add_done_callback(lambda _: queue.put_nowait(None))  # behind all events, which were scheduled before the end
    try:
        while (event := await queue.get()) is not None:
            yield event
        results.append(task.result())
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
