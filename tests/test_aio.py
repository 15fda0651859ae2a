"""Asyncio: the same results, and a cancelled task that leaves neither slot nor session behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest
from torch import Tensor

from outrider import BatchError, ContextError, PromptError, SettingsError, SpeculativeDecoder, StateError, local
from outrider.decoding.actions import Verify
from outrider.engines.torch.engine import TorchEngine
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.local import LocalVerifier
from tests.support.fakes import FarVerifier, HashRows, ScriptedEngine
from tests.support.processes import HANG_S
from tests.support.tiny_text_models import model, tokens

V = 24
TARGET, OTHER = HashRows(1, V), HashRows(2, V)
SETTINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 12, "temperature": 0.9, "seed": 7, "top_k": 20},
]


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of a coroutine. One that hangs fails."""

    async def bounded() -> Any:
        async with asyncio.timeout(HANG_S):
            return await work()

    return asyncio.run(bounded())


def tiny(**options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(TorchEngine(model("qwen2", 0)), local(TorchEngine(model("qwen2", 1))), **options)


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
def test_tasks_streams_and_batches_equal_single_generations(settings: dict[str, Any]) -> None:
    decoder, prompts = tiny(), [tokens(3 + n, seed=n) for n in range(6)]
    alone = [decoder.generate(prompt, **settings).token_ids for prompt in prompts]

    async def streamed(prompt: list[int]) -> list[int]:
        stream, seen = decoder.astream(prompt, **settings), []
        async for event in stream:
            del seen[event.index :]
            seen.append(event.token_id)
        result = stream.result
        assert seen[: len(result.token_ids)] == result.token_ids
        return result.token_ids

    async def all_at_once() -> list[list[list[int]]]:
        single = asyncio.gather(*(decoder.agenerate(prompt, **settings) for prompt in prompts))
        streams = asyncio.gather(*(streamed(prompt) for prompt in prompts))
        batch = decoder.agenerate(prompts, **settings)
        tasks, events, several = await asyncio.gather(single, streams, batch)
        return [[each.token_ids for each in tasks], events, [each.token_ids for each in several]]

    assert run(all_at_once) == [alone] * 3


def test_failures_reach_the_task() -> None:
    decoder = tiny()

    async def work() -> None:
        with pytest.raises(ContextError):
            await decoder.agenerate([1] * 600)
        with pytest.raises(SettingsError):
            await decoder.agenerate([1], temperature=-1)
        with pytest.raises(SettingsError):
            decoder.astream([1], temperature=-1)
        with pytest.raises(BatchError) as raised:
            await decoder.agenerate([[1, 2], [1] * 600], max_new_tokens=4)
        assert raised.value.results[0].token_ids == (await decoder.agenerate([1, 2], max_new_tokens=4)).token_ids
        stream = decoder.astream(["a", "b"])  # type: ignore[arg-type]
        with pytest.raises(PromptError, match="no stream"):
            await anext(stream)
        with pytest.raises(StateError, match="no result"):
            _ = stream.result

    run(work)


def test_a_decoder_with_an_unfinished_stream_refuses_tasks() -> None:
    decoder = tiny()
    stream = decoder.stream([1, 2], max_new_tokens=4)
    next(stream)
    with pytest.raises(StateError, match="its stream is closed"):
        run(lambda: decoder.agenerate([1, 2]))
    stream.close()


# Cancellation -----------------------------------------------------------------------------------------------


class Gated(ScriptedEngine):
    """An engine that announces its forward number `at`, and waits in it for `go`."""

    def __init__(self, rows: Any, at: int = 3) -> None:
        super().__init__(rows, V)
        self.at, self.entered, self.go = at, threading.Event(), threading.Event()

    def forward(self, slot: int, ids: Any, rows: int | None = None) -> Tensor:
        if self.forwards + 1 == self.at:
            self.entered.set()
            assert self.go.wait(HANG_S)
        return super().forward(slot, ids, rows)


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, HANG_S)


def test_a_task_cancelled_in_a_forward_ends_after_it_and_frees_its_slots() -> None:
    draft, target = Gated(OTHER), ScriptedEngine(TARGET, V)
    decoder = SpeculativeDecoder(draft, local(target))

    async def work() -> None:
        task = asyncio.create_task(decoder.agenerate([1, 2], max_new_tokens=1000))
        await reached(draft.entered)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        draft.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (draft.forwards, draft.open_slots, target.open_slots) == (3, [], [])
        assert len((await decoder.agenerate([1, 2], max_new_tokens=4)).token_ids) == 4

    run(work)


def test_a_waiting_task_is_cancelled_before_it_starts() -> None:
    draft = Gated(TARGET)
    decoder = SpeculativeDecoder(draft, slots=1)

    async def work() -> None:
        first = asyncio.create_task(decoder.agenerate([1, 2], max_new_tokens=4))
        await reached(draft.entered)
        second = asyncio.create_task(decoder.agenerate([3, 4], max_new_tokens=4))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        draft.go.set()
        await first
        assert [prompt.ids for prompt in draft.opened] == [(1, 2)]

    run(work)


class Silent(FarVerifier):
    """A cloud that gets a request and never answers it."""

    def __init__(self, inner: LocalVerifier) -> None:
        super().__init__(inner)
        self.asked = threading.Event()
        self.never: Future[Verdict] = Future()

    def submit(self, session: int, request: Verify) -> Any:
        self.asked.set()
        return self.never


@pytest.mark.parametrize("kind", ["agenerate", "astream"])
def test_a_task_cancelled_in_a_wait_for_the_cloud_ends_at_once_and_closes_its_session(kind: str) -> None:
    draft, target = ScriptedEngine(OTHER, V), ScriptedEngine(TARGET, V)
    cloud = Silent(LocalVerifier(target))
    decoder = SpeculativeDecoder(draft, cloud)

    async def drain() -> None:
        async for _ in decoder.astream([1, 2], max_new_tokens=8):
            pass

    async def work() -> None:
        task = asyncio.create_task(drain() if kind == "astream" else decoder.agenerate([1, 2], max_new_tokens=8))
        await reached(cloud.asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cloud.never.cancelled()
        assert (draft.open_slots, target.open_slots) == ([], [])

    run(work)


def test_a_cancelled_batch_cancels_all_its_generations() -> None:
    draft = Gated(TARGET)
    decoder = SpeculativeDecoder(draft, slots=2)

    async def work() -> None:
        task = asyncio.create_task(decoder.agenerate([[1], [2], [3]], max_new_tokens=1000))
        await reached(draft.entered)
        task.cancel()
        draft.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert draft.open_slots == []
        assert len(draft.opened) <= 2
        assert len(await decoder.agenerate([[1], [2]], max_new_tokens=4)) == 2

    run(work)


@pytest.mark.parametrize("way", ["aclose", "async with", "abandoned"])
def test_a_stream_that_is_left_frees_its_slot(way: str) -> None:
    draft = Gated(TARGET, at=3)
    decoder = SpeculativeDecoder(draft)

    async def read_one() -> None:
        stream = decoder.astream([1, 2], max_new_tokens=1000)
        if way == "async with":
            async with stream:
                async for _ in stream:
                    draft.go.set()
                    break
            return
        async for _ in stream:
            break
        draft.go.set()
        if way == "aclose":
            await stream.aclose()

    async def work() -> None:
        await read_one()
        gc.collect()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)  # of an abandoned stream, which asyncio closes
        assert (len(draft.opened), draft.open_slots) == (1, [])
        assert draft.forwards < 1000

    run(work)


def test_a_timeout_cancels_a_generation() -> None:
    cloud = Silent(LocalVerifier(ScriptedEngine(TARGET, V)))
    draft = ScriptedEngine(OTHER, V)
    decoder = SpeculativeDecoder(draft, cloud)

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await decoder.agenerate([1, 2])
        assert draft.open_slots == []

    run(work)
