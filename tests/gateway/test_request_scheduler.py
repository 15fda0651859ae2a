"""Admission, turns, and what becomes of a generation whose client leaves."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from torch import Tensor

from benchmarks.link_thread import LinkThread
from outrider import CloudLost, PromptError, Result, SettingsError, StreamEvent
from outrider.edge.cancellation import Cancellation
from outrider.engines import scheduler as scheduling
from outrider.engines.base import SequenceInput
from outrider.engines.prefix_cache import MAX_KEPT
from outrider.errors import StateError
from outrider.gateway.decoder_pool import DecoderPool, RequestOptions
from outrider.gateway.errors import GenerationTimeout, QueueFull, ShuttingDown
from outrider.gateway.request_scheduler import GenerationTask, RequestScheduler
from outrider.netem.conditions import Conditions
from outrider.verifiers.connect import connect
from tests.support.cloud_server import Served, serving
from tests.support.fakes import HashRows, ScriptedEngine
from tests.support.gateway_pair import PROMPTS, demo_edge, reference_tokens, running_pool, serving_demo_cloud
from tests.support.processes import HANG_S, until

V = 32
ALONE = RequestOptions("edge-only")
DRIVERS: Any = ("sequential", "pipelined")
KINDS = ("provisional", "confirmed", "revised")


class Held(ScriptedEngine):
    """An engine that can be held before a forward, or takes its time for each."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(HashRows(1, V, memory=4), V)
        self.seconds = seconds
        self.entered, self.go = threading.Event(), threading.Event()
        self.go.set()

    def forward_many(self, feeds: Seq[SequenceInput]) -> list[Tensor]:
        self.entered.set()
        assert self.go.wait(HANG_S)
        time.sleep(self.seconds)  # scripted: the least time of a forward
        return super().forward_many(feeds)


def work(body: Callable[[], Awaitable[None]]) -> None:
    async def timed() -> None:
        await asyncio.wait_for(body(), 2 * HANG_S)

    asyncio.run(timed())


async def all_of(task: GenerationTask) -> list[StreamEvent]:
    return [event async for batch in task for event in batch]


async def answer(
    scheduler: RequestScheduler, prompt: Any, options: RequestOptions = ALONE, client: str = "me", **settings: Any
) -> Result:
    task = await scheduler.start(client, prompt, settings, options)
    await all_of(task)
    return task.result


def threads() -> int:
    return sum(thread.name.startswith("outrider-generation") for thread in threading.enumerate())


# The bundled pair -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_demo_cloud() as running:
        yield running


@pytest.mark.parametrize(
    "options", [RequestOptions(), RequestOptions(driver="pipelined", k="auto"), RequestOptions("edge-only")], ids=str
)
def test_32_concurrent_generations_equal_sequential_ones(served: Served, options: RequestOptions) -> None:
    prompts = PROMPTS * 4
    way = "cloud-only" if options.way == "speculative" else "edge-only"

    async def body() -> None:
        with running_pool(served) as pool:
            scheduler = RequestScheduler(pool, slots=8, queue=64)
            results = await asyncio.gather(
                *(
                    answer(scheduler, prompt, options, f"client {n % 5}", max_new_tokens=20)
                    for n, prompt in enumerate(prompts)
                )
            )
            assert [tuple(result.token_ids) for result in results] == [reference_tokens(way, p, 20) for p in prompts]
            assert {result.guarantee for result in results} == {"exact" if way == "cloud-only" else "edge-only"}
            assert (scheduler.active, scheduler.waiting) == (0, 0)
            await scheduler.close()

    work(body)
    assert demo_edge()._cache.in_use <= 2 * MAX_KEPT  # of the shared engine, and of generations before it was shared


def test_events_come_in_order_and_make_the_text(served: Served) -> None:
    async def body() -> None:
        with running_pool(served) as pool:
            scheduler = RequestScheduler(pool)
            task = await scheduler.start("me", "Hello there", {"max_new_tokens": 20}, RequestOptions(watch=True))
            with pytest.raises(StateError):
                task.result  # noqa: B018 - it still runs
            texts: list[str] = []
            for event in await all_of(task):
                if event.kind == "revised":
                    del texts[event.index :]
                texts[event.index : event.index + 1] = [event.text]
            assert "".join(texts[: len(task.result.token_ids)]) == task.result.text
            await scheduler.close()

    work(body)


@pytest.mark.parametrize("provisional", [False, True])
def test_drafted_tokens_are_sent_at_once_on_request(served: Served, provisional: bool) -> None:
    async def body() -> None:
        with running_pool(served) as pool:
            scheduler, options = RequestScheduler(pool), RequestOptions(net="rtt=50ms")
            task = await scheduler.start("me", "Hello there", {"max_new_tokens": 20}, options, provisional=provisional)
            first = await anext(task)
            assert {event.kind for event in first} <= ({"provisional"} if provisional else set(KINDS))
            # Drafts of the next block may have arrived since.
            assert provisional or any(event.kind != "provisional" for event in first)
            task.cancel()
            await scheduler.close()

    work(body)


# Refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_used_is_raised_from_start_and_computes_nothing() -> None:
    engine = Held()

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None))
        for prompt, settings, options, error in (
            ([], {}, ALONE, PromptError),
            ("text", {}, ALONE, PromptError),
            ([1], {"temperature": -1.0}, ALONE, SettingsError),
            ([1], {"tempersture": 1.0}, ALONE, SettingsError),
            ([1], {}, RequestOptions(), SettingsError),
        ):
            with pytest.raises(error):
                await scheduler.start("me", prompt, settings, options)
        assert scheduler.active == 0
        assert (engine.forwards, engine.opened) == (0, [])
        assert len((await answer(scheduler, [1], max_new_tokens=3)).token_ids) == 3
        await scheduler.close()

    work(body)


def test_an_unreachable_cloud_is_raised_from_start() -> None:
    async def body() -> None:
        pool = DecoderPool(Held(), lambda net: connect("grpc://127.0.0.1:9", patience=0.1, net=net))
        scheduler = RequestScheduler(pool)
        with pytest.raises(CloudLost):
            await scheduler.start("me", [1], {}, RequestOptions())
        assert scheduler.active == 0
        await scheduler.close()
        pool.close()

    work(body)


def test_an_error_during_generation_is_raised_by_the_iterator(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(Held):
        def forward_many(self, feeds: Seq[SequenceInput]) -> list[Tensor]:
            if self.forwards == 9:
                raise MemoryError("no more")
            return super().forward_many(feeds)

    engine = Breaks()

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None))
        task = await scheduler.start("me", [1], {"max_new_tokens": 30}, ALONE)
        with pytest.raises(MemoryError):
            await all_of(task)
        with pytest.raises(StateError):
            task.result  # noqa: B018 - it has none
        assert scheduler.active == 0
        assert not engine.open_slots
        await scheduler.close()

    work(body)
    assert "a generation failed" in caplog.text


# The queue --------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_busy_and_says_when_to_come_again() -> None:
    engine = Held()

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=2, queue=3)
        await asyncio.gather(*(answer(scheduler, [1], max_new_tokens=2) for _ in range(4)))
        engine.go.clear()
        running = [asyncio.create_task(answer(scheduler, [1], max_new_tokens=2)) for _ in range(5)]
        await until(lambda: (scheduler.active, scheduler.waiting) == (2, 3))
        with pytest.raises(QueueFull, match="2 requests are being answered, and 3 wait") as busy:
            await scheduler.start("me", [1], {}, ALONE)
        assert 0 < busy.value.retry_after_s < 1
        engine.go.set()
        await asyncio.gather(*running)
        assert (scheduler.active, scheduler.waiting) == (0, 0)
        assert (await answer(scheduler, [1], max_new_tokens=2)).token_ids
        await scheduler.close()

    work(body)


def test_a_client_that_fills_the_queue_keeps_no_other_out() -> None:
    engine = Held()

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=1, queue=4)
        engine.go.clear()
        greedy = [asyncio.create_task(answer(scheduler, [1], client="greedy", max_new_tokens=2)) for _ in range(5)]
        await until(lambda: (scheduler.active, scheduler.waiting) == (1, 4))
        with pytest.raises(QueueFull):
            await scheduler.start("greedy", [1], {}, ALONE)
        modest = [asyncio.create_task(answer(scheduler, [1], client="modest", max_new_tokens=2)) for _ in range(3)]
        await until(lambda: modest[2].done())
        assert isinstance(modest[2].exception(), QueueFull), "two each, and no more"
        ends = [task for task in greedy if task.done()]
        assert ends == greedy[3:], "its last ones made room"
        assert all(isinstance(task.exception(), QueueFull) for task in ends)
        third = asyncio.create_task(answer(scheduler, [1], client="third", max_new_tokens=2))
        await until(lambda: sum(task.done() for task in (*greedy, *modest)) == 4)
        engine.go.set()
        ends = await asyncio.gather(*greedy, *modest, third, return_exceptions=True)
        assert sum(isinstance(end, QueueFull) for end in ends) == 4
        assert (scheduler.active, scheduler.waiting, scheduler._free) == (0, 0, 1)
        await scheduler.close()

    work(body)


def test_a_slot_is_not_lost_where_no_thread_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(Held(), None), slots=1)

        def none(*_: Any) -> Any:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(scheduler._threads, "submit", none)
            with pytest.raises(QueueFull, match="no thread"):
                await scheduler.start("me", [1], {}, ALONE)
        assert (scheduler.active, scheduler._free) == (0, 1)
        assert (await answer(scheduler, [1], max_new_tokens=2)).token_ids
        await scheduler.close()

    work(body)


def test_how_long_to_wait_is_judged_by_how_long_generations_take() -> None:
    async def body() -> None:
        engine = Held(seconds=0.02)
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=2, queue=0)
        await answer(scheduler, [1], max_new_tokens=10, ignore_eos=True)
        ends = [asyncio.create_task(answer(scheduler, [1], max_new_tokens=10, ignore_eos=True)) for _ in range(2)]
        await until(lambda: scheduler.active == 2)
        with pytest.raises(QueueFull) as busy:
            await scheduler.start("me", [1], {}, ALONE)
        assert 0.1 <= busy.value.retry_after_s < 1.0, "half of what a generation takes: there are two slots"
        await asyncio.gather(*ends)
        await scheduler.close()

    work(body)


def test_clients_take_turns_however_much_one_of_them_asks() -> None:
    engine = Held()
    order: list[str] = []

    async def one(scheduler: RequestScheduler, client: str, n: int) -> None:
        task = await scheduler.start(client, [1], {"max_new_tokens": 2}, ALONE)
        order.append(f"{client}{n}")
        await all_of(task)

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=1)
        engine.go.clear()
        running = [asyncio.create_task(one(scheduler, "greedy", n)) for n in range(5)]
        await until(lambda: scheduler.waiting == 4)
        running += [asyncio.create_task(one(scheduler, "modest", n)) for n in range(2)]
        await until(lambda: scheduler.waiting == 6)
        engine.go.set()
        await asyncio.gather(*running)
        await scheduler.close()

    work(body)
    assert order == ["greedy0", "greedy1", "modest0", "greedy2", "modest1", "greedy3", "greedy4"]


@pytest.mark.parametrize("others", [1, 3])
def test_a_client_with_all_slots_makes_room_at_once_and_goes_on_later(others: int) -> None:
    """However long its generations are: they are paused between two tokens, and their texts stay the same."""

    async def body() -> None:
        engine = Held()
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=4, queue=8)
        plain = await answer(scheduler, [1], max_new_tokens=20, ignore_eos=True)
        engine.seconds = 0.01
        long = [
            asyncio.create_task(answer(scheduler, [1], client="greedy", max_new_tokens=200, ignore_eos=True))
            for _ in range(4)
        ]
        await until(lambda: scheduler.active == 4)
        late = [asyncio.create_task(answer(scheduler, [1], client="greedy", max_new_tokens=20)) for _ in range(3)]
        await until(lambda: scheduler.waiting == 3)
        called: list[str] = []
        tasks = [
            await scheduler.start(
                f"modest {n}", [1], {"max_new_tokens": 20, "ignore_eos": True}, ALONE, queued=lambda: called.append("")
            )
            for n in range(others)
        ]
        assert (scheduler.active, scheduler.waiting, called) == (4, 3, [])
        for task in tasks:
            await all_of(task)
            assert task.result.token_ids == plain.token_ids
        assert not any(task.done() for task in (*long, *late)), "none of them had to end for that"
        texts = await asyncio.gather(*long)
        assert len({tuple(result.token_ids) for result in texts}) == 1
        await asyncio.gather(*late)
        assert (scheduler.active, scheduler.waiting, scheduler._free, scheduler._queues) == (0, 0, 4, {})
        await scheduler.close()

    work(body)


@pytest.mark.parametrize("how", ["cancelled", "expired", "closed"])
def test_a_paused_generation_ends_as_any_other(how: str) -> None:
    async def body() -> None:
        engine = Held(0.005)
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=2)
        tasks = [
            await scheduler.start("greedy", [1], {"max_new_tokens": 5000, "ignore_eos": True}, ALONE) for _ in range(2)
        ]
        other = await scheduler.start("modest", [1], {"max_new_tokens": 5000, "ignore_eos": True}, ALONE)
        assert [task.paused for task in tasks] == [False, True]
        if how == "closed":
            await scheduler.close()
        elif how == "expired":
            tasks[1].expire(3)
            with pytest.raises(GenerationTimeout, match="3 s"):
                await all_of(tasks[1])
        else:
            tasks[1].cancel()
            await all_of(tasks[1])
        if how != "closed":
            assert (scheduler.active, scheduler._free, scheduler._queues["greedy"].paused) == (2, 0, deque())
            other.cancel()
            await until(lambda: scheduler.active == 1)
            assert scheduler._free == 1
            await scheduler.close()
        assert (scheduler.active, threads()) == (0, 0)

    work(body)


def test_live_generations_are_bounded_however_clients_come_and_go() -> None:
    async def body() -> None:
        engine = Held(0.005)
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=2, queue=64)
        tasks = []
        for n in range(12):
            tasks += [
                asyncio.create_task(answer(scheduler, [1], client=f"{n}", max_new_tokens=30, ignore_eos=True))
                for _ in range(3)
            ]
            await asyncio.sleep(0)
            assert scheduler.active <= 2
            assert len(scheduler._running) <= 4
        results = await asyncio.gather(*tasks)
        assert len({tuple(result.token_ids) for result in results}) == 1
        assert (scheduler.active, scheduler.waiting, scheduler._free, scheduler._queues) == (0, 0, 2, {})
        await scheduler.close()

    work(body)


def test_a_generation_s_time_is_limited() -> None:
    async def body() -> None:
        engine = Held(0.005)
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=1, seconds=0.2)
        with pytest.raises(GenerationTimeout):
            await all_of(await scheduler.start("me", [1], {"max_new_tokens": 100_000, "ignore_eos": True}, ALONE))
        await until(lambda: scheduler._free == 1)
        engine.go.clear()  # before its first token, too
        held = asyncio.create_task(scheduler.start("me", [1], {}, ALONE))
        await until(lambda: any(task._expired for task in scheduler._running))
        engine.go.set()
        with pytest.raises(GenerationTimeout):
            await all_of(await held)
        await scheduler.close()

    work(body)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_network_of_long_delays_holds_a_slot_no_longer_than_the_limit(served: Served, driver: Any) -> None:
    async def body() -> None:
        with running_pool(served) as pool:
            scheduler = RequestScheduler(pool, slots=1, seconds=0.5)
            options = RequestOptions(net="rtt=3600s", on_cloud_loss="wait", driver=driver)
            with pytest.raises(GenerationTimeout):
                await all_of(await scheduler.start("me", "Hello", {"max_new_tokens": 5}, options))
            scheduler._seconds = math.inf
            assert (await answer(scheduler, "Hello", client="you", max_new_tokens=5)).token_ids
            await scheduler.close()

    work(body)


def test_a_task_that_left_the_queue_is_never_started() -> None:
    engine = Held()

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=1)
        engine.go.clear()
        first = asyncio.create_task(answer(scheduler, [1], max_new_tokens=2))
        await until(lambda: scheduler.active == 1)
        second, third = (asyncio.create_task(answer(scheduler, [1], client=name, max_new_tokens=2)) for name in "bc")
        await until(lambda: scheduler.waiting == 2)
        second.cancel()
        await until(lambda: scheduler.waiting == 1)
        engine.go.set()
        await asyncio.gather(first, third)
        assert len(engine.opened) == 2
        assert scheduler._free == 1
        await scheduler.close()

    work(body)


def test_a_task_cancelled_while_starting_passes_its_slot_on() -> None:
    engine = Held()

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=1)
        await scheduler._admit("a")
        second, third = (asyncio.create_task(scheduler._admit(name)) for name in "bc")
        await until(lambda: scheduler.waiting == 2)
        scheduler._release()
        second.cancel()  # called, and not awake yet
        await third
        assert (scheduler._free, scheduler.waiting) == (0, 0)
        scheduler._release()
        await scheduler.close()

    work(body)


# Leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "task"])
def test_a_generation_that_is_cancelled_gives_its_slot_back_at_once(how: str) -> None:
    engine = Held(seconds=0.005)

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=1)
        task = await scheduler.start("me", [1], {"max_new_tokens": 100_000, "ignore_eos": True}, ALONE)
        reading = asyncio.create_task(all_of(task))
        await until(lambda: engine.forwards > 5)
        if how == "cancel":
            task.cancel()
            assert await reading
        else:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        await until(lambda: scheduler.active == 0)
        assert not engine.open_slots
        with pytest.raises(StateError):
            task.result  # noqa: B018 - it has none
        await scheduler.close()

    work(body)


def test_a_long_prompt_is_left_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "PREFILL_CHUNK", 4)
    engine = Held()
    engine.go.clear()

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=1)
        task = await scheduler.start("me", [1] * 4000, {"max_new_tokens": 5}, ALONE)
        await until(engine.entered.is_set)
        task.cancel()
        engine.go.set()
        await until(lambda: scheduler.active == 0)
        assert engine.fed == 4, "the part that was being read"
        await scheduler.close()

    work(body)


def test_a_hundred_cancelled_generations_leave_nothing_behind() -> None:
    engine = Held(seconds=0.0005)

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=4, queue=200)
        tasks = [
            asyncio.create_task(answer(scheduler, [1], client=str(n % 3), max_new_tokens=5000, ignore_eos=True))
            for n in range(100)
        ]
        for n, task in enumerate(tasks):
            before = engine.forwards
            if n % 4:
                await until(lambda before=before: engine.forwards > before)
            else:
                await asyncio.sleep(0)
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True)
        )
        await until(lambda: scheduler.active == 0)
        assert (scheduler._free, scheduler.waiting, threads() <= 8) == (4, 0, True)
        assert not engine.open_slots
        assert len((await answer(scheduler, [1], max_new_tokens=3)).token_ids) == 3
        await scheduler.close()

    work(body)
    assert threads() == 0


def test_closing_ends_what_runs_and_what_waits() -> None:
    engine = Held(seconds=0.002)

    async def body() -> None:
        scheduler = RequestScheduler(DecoderPool(engine, None), slots=2)
        task = await scheduler.start("me", [1], {"max_new_tokens": 100_000, "ignore_eos": True}, ALONE)
        tasks = [asyncio.create_task(answer(scheduler, [1], max_new_tokens=100_000, ignore_eos=True)) for _ in range(4)]
        await until(lambda: (scheduler.active, scheduler.waiting) == (2, 3))
        await scheduler.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [StateError, ShuttingDown, ShuttingDown, ShuttingDown], (
            "the one that ran was cancelled"
        )
        await all_of(task)
        with pytest.raises(ShuttingDown):
            await scheduler.start("me", [1], {}, ALONE)

    work(body)
    assert not engine.open_slots
    assert threads() == 0


# A cloud that does not answer -------------------------------------------------------------------------------------


class Quiet(Held):
    """The target, as a service's engine."""

    identity = "quiet"


@contextmanager
def stalling(cloud: Any) -> Iterator[tuple[DecoderPool, Served, LinkThread, ScriptedEngine]]:
    """A pool whose cloud is behind a link that can stall."""
    engine = ScriptedEngine(HashRows(2, V, memory=4), V)  # seldom right: there are many rounds
    with serving(cloud) as served, LinkThread("127.0.0.1", served.port) as link:
        pool = DecoderPool(
            engine,
            lambda net: connect(f"grpc://127.0.0.1:{link.port}", net=net, patience=2 * HANG_S, deadline=2 * HANG_S),
        )
        try:
            yield pool, served, link, engine
        finally:
            pool.close()


SILENT = Conditions(up=1.0, down=1.0)  # bit/s: even a ping's frame takes over 100 s


def waits_for_the_cloud(cancellation: Cancellation) -> bool:
    return cancellation._cancel_future is not None


STALLED = [
    *(RequestOptions(driver=driver) for driver in DRIVERS),
    RequestOptions("cloud-only"),
    RequestOptions(on_cloud_loss="wait"),
]


@pytest.mark.parametrize("options", STALLED, ids=str)
@pytest.mark.parametrize("again", [False, True], ids=["first", "later"])
def test_a_task_waiting_for_a_silent_cloud_is_cancelled_at_once(options: RequestOptions, again: bool) -> None:
    settings = {"max_new_tokens": 240, "ignore_eos": True}
    with stalling(Quiet(seconds=0.03)) as (pool, served, link, engine):

        async def body() -> None:
            scheduler = RequestScheduler(pool, slots=1)
            await answer(scheduler, [1, 2], options, max_new_tokens=2)  # so that it is known
            sessions = served.service.sessions
            await until(lambda: all(entry.unused for entry in sessions))
            if not again:
                link.conditions = SILENT
            cancellation = Cancellation()
            task = await scheduler.start("me", [1, 2], settings, options, cancellation=cancellation)
            if again:
                await anext(task)
                link.conditions = SILENT
            reading = asyncio.create_task(all_of(task))
            await until(lambda: waits_for_the_cloud(cancellation))
            assert scheduler.active == 1
            task.cancel()
            await until(lambda: scheduler.active == 0)
            assert not engine.open_slots
            await reading
            link.conditions = Conditions()  # the cloud is told of it all
            await until(lambda: all(entry.unused for entry in sessions))
            await scheduler.close()

        work(body)


@pytest.mark.parametrize("options", STALLED[:3], ids=str)
def test_the_cloud_session_ends_with_its_generation(options: RequestOptions) -> None:
    cloud = Quiet(seconds=0.03)
    with stalling(cloud) as (pool, served, _, engine):

        async def body() -> None:
            scheduler = RequestScheduler(pool, slots=4)
            tasks = [
                await scheduler.start("me", [1, 2], {"max_new_tokens": 200, "ignore_eos": True}, options)
                for _ in range(4)
            ]
            await until(lambda: cloud.forwards > 20)
            cloud.go.clear()
            before = cloud.forwards
            for task in tasks:
                task.cancel()
            await until(lambda: scheduler.active == 0)
            cloud.go.set()
            await until(lambda: all(entry.unused for entry in served.service.sessions))
            assert not engine.open_slots
            assert cloud.forwards - before <= 3 * len(tasks), "what it had begun, and not the rest of 200 tokens"
            await scheduler.close()

        work(body)


def test_a_cloud_without_a_handshake_is_given_up_at_once() -> None:
    with stalling(Quiet()) as (pool, _, link, _):

        async def body() -> None:
            scheduler = RequestScheduler(pool, slots=2)
            link.conditions = SILENT
            starting = [asyncio.create_task(scheduler.start("me", [1, 2], {}, RequestOptions())) for _ in range(2)]
            await until(lambda: sum(waits_for_the_cloud(task._cancellation) for task in scheduler._running) == 2)
            assert scheduler.active == 2
            starting[0].cancel()
            await until(lambda: scheduler.active == 1)
            link.conditions = Conditions()
            await all_of(await starting[1])
            await scheduler.close()

        work(body)
