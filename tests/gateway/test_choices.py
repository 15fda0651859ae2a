"""Several choices of one request: their order, their errors, and a queue that is shorter than the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from outrider.gateway.choices import ChoiceStarts, merge
from outrider.gateway.errors import QueueFull


class Recorded:
    """Sources of numbers, each of which waits for its turn. closed: the sources that were closed."""

    def __init__(self, turns: str) -> None:
        self.turns, self.closed = turns, ""
        self.changed = asyncio.Condition()

    async def source(self, name: str, *, fails: bool = False) -> AsyncGenerator[str]:
        try:
            while name in self.turns:
                async with self.changed:
                    await self.changed.wait_for(lambda: self.turns.startswith(name))
                    self.turns = self.turns[1:]
                    self.changed.notify_all()
                if fails:
                    raise OSError(name)
                yield name
        finally:
            self.closed += name


@pytest.mark.parametrize("turns", ["", "aab", "abcabc", "ccbbaa", "bcaacb"])
def test_items_come_in_their_order_with_their_index(turns: str) -> None:
    async def run() -> tuple[str, str]:
        recorded = Recorded(turns)
        found = [item async for item in merge([recorded.source(name) for name in "abc"])]
        assert all("abc"[index] == name for index, name in found)
        return "".join(name for _, name in found), recorded.closed

    said, closed = asyncio.run(run())
    assert sorted(said) == sorted(turns)
    assert sorted(closed) == ["a", "b", "c"]


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_ends_all_and_is_raised(count: int) -> None:
    async def run() -> str:
        names = "abc"[:count]
        recorded = Recorded(names * 9)
        sources = [recorded.source(name, fails=name == names[-1]) for name in names]
        with pytest.raises(OSError, match=names[-1]):
            _ = [item async for item in merge(sources)]
        return recorded.closed

    assert sorted(asyncio.run(run())) == [*"abc"[:count]]


@pytest.mark.parametrize("names", ["a", "abc"])
def test_leaving_early_closes_all(names: str) -> None:
    async def run() -> str:
        recorded = Recorded(names * 100)
        async with aclosing(merge([recorded.source(name) for name in names])) as items:
            async for _ in items:
                break
        return recorded.closed

    assert sorted(asyncio.run(run())) == [*names]


def test_a_cancelled_wait_closes_all() -> None:
    async def run() -> str:
        recorded = Recorded("xabc")  # no source's turn

        async def read() -> None:
            async with aclosing(merge([recorded.source(name) for name in "abc"])) as items:
                async for _ in items:
                    pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return recorded.closed

    assert sorted(asyncio.run(run())) == ["a", "b", "c"]


@pytest.mark.parametrize("room", [1, 2, 3])
def test_more_choices_than_the_queue_has_places_take_turns(room: int) -> None:
    async def run() -> tuple[list[int], int]:
        starts, running, most, done = ChoiceStarts(), 0, 0, []

        async def begin() -> None:
            nonlocal running, most
            if running == room:
                raise QueueFull("full", 1.0)
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)

        async def choose(index: int) -> None:
            nonlocal running
            async with starts.start(begin):
                await asyncio.sleep(0)
                running -= 1
            done.append(index)

        await asyncio.gather(*(choose(index) for index in range(7)))
        return sorted(done), most

    assert asyncio.run(run()) == ([*range(7)], room)


def test_a_queue_that_others_fill_is_full() -> None:
    async def run() -> list[BaseException | None]:
        starts = ChoiceStarts()

        async def begin() -> None:
            await asyncio.sleep(0)
            raise QueueFull("full", 1.0)

        async def choose() -> None:
            async with starts.start(begin):
                raise AssertionError("it was refused")

        tasks = [asyncio.create_task(choose()) for _ in range(3)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in asyncio.run(run())].count(QueueFull) == 1
