"""Several generations of one request: admission to the queue, and one merged stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from outrider.gateway.errors import QueueFull

T = TypeVar("T")


class ChoiceStarts:
    """Starts the generations of one request.

    If the scheduler's queue is full, a generation waits for the end of another one of the request. A request may thus
    have more choices than the queue has places.
    """

    def __init__(self) -> None:
        self._open = 0  # generations that wait for a slot or run
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def start(self, begin: Callable[[], Awaitable[T]]) -> AsyncIterator[T]:
        """Yield the result of `begin`, retried while the queue is full. The generation must end within the block.

        Raises:
            QueueFull: the queue is full, and no other generation of the request waits or runs.
        """
        while True:
            self._open += 1
            try:
                begun = await begin()
                break
            except QueueFull:
                self._open -= 1
                if not self._open:
                    raise
            except BaseException:
                self._end()
                raise
            self._ended.clear()
            await self._ended.wait()
        try:
            yield begun
        finally:
            self._end()

    def _end(self) -> None:
        self._open -= 1
        self._ended.set()


async def merge(sources: Seq[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of all sources as they come, with the index of their source.

    The first error ends the iteration. All sources are closed at its end.
    """
    if len(sources) == 1:  # one source needs no task per item
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    pending = {asyncio.ensure_future(anext(source)): index for index, source in enumerate(sources)}
    try:
        while pending:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in [future for future in pending if future.done()]:
                index = pending.pop(future)
                try:
                    item = future.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(sources[index]))] = index
                yield index, item
    finally:
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for source in sources:
            await source.aclose()
