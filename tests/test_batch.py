"""Batches: the results of single calls, in order, and a failure that loses no other result."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from outrider import (
    Audio,
    BatchError,
    ContextError,
    PromptError,
    SettingsError,
    SpeculativeDecoder,
    StateError,
    load_engine,
    local,
)
from outrider.batch import as_batch, run_batch
from outrider.decoding.result import Result
from outrider.edge.cancellation import Cancellation
from outrider.engines.prefix_cache import MAX_KEPT
from outrider.engines.shared_engine import share
from outrider.engines.torch.engine import TorchEngine
from tests.support.fakes import HashRows, ReusableEngine, ScriptedEngine
from tests.support.processes import HANG_S
from tests.support.tiny_text_models import engine, model, tokens

SETTINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 12, "temperature": 0.9, "seed": 7, "top_p": 0.95},
]
V = 24
TARGET, OTHER = HashRows(1, V), HashRows(2, V)


@cache
def demo() -> SpeculativeDecoder:
    return SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud")))


def tiny(**options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(TorchEngine(model("qwen2", 0)), local(TorchEngine(model("qwen2", 1))), **options)


def outputs(results: list[Result]) -> list[list[int]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, {"k": "auto"}, {"slots": 1}, {"accept": "residual"}], ids=str)
def test_a_batch_equals_single_generations(options: dict[str, Any], settings: dict[str, Any]) -> None:
    decoder, prompts = tiny(**options), [tokens(3 + 40 * (n % 2), seed=n) for n in range(10)]
    alone = [decoder.generate(prompt, **settings) for prompt in prompts]
    batch = decoder.generate(prompts, **settings)
    assert outputs(batch) == outputs(alone)
    assert [result.guarantee for result in batch] == ["exact"] * len(prompts)


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
def test_a_batch_of_the_bundled_pair_mixes_kinds_of_prompts(settings: dict[str, Any]) -> None:
    prompts: list[Any] = ["Hello", [5, 6, 7], [{"role": "user", "content": "Hello"}], "Goodbye"]
    alone = [demo().generate(prompt, **settings) for prompt in prompts]
    batch = demo().generate(prompts, **settings)
    assert [(each.text, each.token_ids) for each in batch] == [(each.text, each.token_ids) for each in alone]


def test_sides_alone_take_batches() -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    for decoder in (SpeculativeDecoder(engine("qwen2")), SpeculativeDecoder(None, local(engine("qwen2")))):
        alone = [decoder.generate(prompt, max_new_tokens=6) for prompt in prompts]
        assert outputs(decoder.generate(prompts, max_new_tokens=6)) == outputs(alone)


# What is a batch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "a text",
        [1, 2, 3],
        (1, 2, 3),
        range(3),
        [],
        [{"role": "user", "content": "a"}],
        Audio("a.wav"),
        [1, "a text"],
        [{"role": "user", "content": "a"}, "a text"],
    ],
)
def test_one_prompt_is_not_a_batch(prompt: Any) -> None:
    assert as_batch(prompt) is None


@pytest.mark.parametrize(
    "prompts",
    [["a"], ("a", "b"), [[1]], [[1], (2,)], [[{"role": "user", "content": "a"}]], [Audio("a.wav"), "a"], [[], "a"]],
)
def test_a_list_of_prompts_is_a_batch(prompts: Any) -> None:
    assert as_batch(prompts) is prompts


@pytest.mark.parametrize("stray", [1, {"role": "user", "content": "a"}, None, 1.5, b"a"])
def test_a_batch_with_something_else_in_it_is_refused_by_name(stray: Any) -> None:
    with pytest.raises(PromptError, match=rf"prompts\[1\] is {type(stray).__name__}"):
        tiny().generate(["a", stray])


@pytest.mark.parametrize(
    ("mixed", "name"),
    [([1, "a"], "a token id is a whole number, not 'a'"), ([1, [2]], "not"), ([{"role": "user"}, "a"], "dictionaries")],
)
def test_a_prompt_with_a_prompt_in_it_is_refused_by_name(mixed: Any, name: str) -> None:
    with pytest.raises(PromptError, match=name):
        demo().generate(mixed)


def test_an_empty_list_and_a_stream_of_a_batch_are_refused() -> None:
    with pytest.raises(PromptError, match="the prompt is empty"):
        tiny().generate([])
    with pytest.raises(PromptError, match="a batch of prompts has no stream"):
        tiny().stream(["a", "b"])  # type: ignore[arg-type]


@pytest.mark.parametrize("slots", [0, -1, 1.5, True, "8"])
def test_slots_are_a_positive_number(slots: Any) -> None:
    with pytest.raises(SettingsError, match="slots is a whole number"):
        tiny(slots=slots)


# Failures ---------------------------------------------------------------------------------------------------


def test_a_setting_is_refused_before_any_work() -> None:
    draft = ScriptedEngine(TARGET, V)
    with pytest.raises(SettingsError):
        SpeculativeDecoder(draft).generate([[1], [2]], temperature=-1)
    assert draft.opened == []


def test_a_failed_prompt_loses_no_other_result() -> None:
    decoder = tiny()
    with pytest.raises(BatchError, match=r"1 of 3 prompts failed, first prompts\[1\]: .*600 tokens") as raised:
        decoder.generate([[1, 2], [3] * 600, [4, 5]], max_new_tokens=5)
    first, failed, last = raised.value.results
    assert isinstance(failed, ContextError)
    assert raised.value.__cause__ is failed
    assert [first.token_ids, last.token_ids] == outputs(decoder.generate([[1, 2], [4, 5]], max_new_tokens=5))


class Failing(ScriptedEngine):
    """An engine that fails on a token."""

    def forward(self, slot: int, ids: Any, rows: int | None = None) -> Tensor:
        if 23 in ids:
            raise RuntimeError("a fault of the engine")
        return super().forward(slot, ids, rows)


def test_a_failed_forward_frees_its_slot_and_loses_no_other_result() -> None:
    draft, target = ScriptedEngine(OTHER, V), Failing(TARGET, V)
    prompts = [[1, 2], [23, 1], [3, 4]]
    with pytest.raises(BatchError, match="a fault of the engine") as raised:
        SpeculativeDecoder(draft, local(target)).generate(prompts, max_new_tokens=6, suppress_tokens=[23])
    kinds = [type(each) for each in raised.value.results]
    assert kinds == [Result, RuntimeError, Result]
    assert (draft.open_slots, target.open_slots) == ([], [])


def test_a_batch_waits_for_no_unfinished_stream() -> None:
    decoder = tiny()
    stream = decoder.stream([1, 2], max_new_tokens=4)
    next(stream)
    with pytest.raises(StateError, match="its stream is closed"):
        decoder.generate([[1, 2], [3, 4]], max_new_tokens=4)
    stream.close()
    assert len(decoder.generate([[1, 2], [3, 4]], max_new_tokens=4)) == 2


def test_an_interruption_cancels_all_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two run when the waiting thread is interrupted, and the third is never started."""
    started, ended = threading.Barrier(3), []

    class Interrupted:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, futures: Any) -> None:
            self.calls += 1
            if self.calls == 1:
                started.wait(HANG_S)
                raise KeyboardInterrupt
            wait(futures)

    def generate(prompt: Any, cancellation: Cancellation) -> Any:
        started.wait(HANG_S)
        assert cancellation._cancelled.wait(HANG_S)
        ended.append(prompt)
        cancellation.check()

    monkeypatch.setattr("outrider.batch.wait", Interrupted())
    with ThreadPoolExecutor(2) as executor, pytest.raises(KeyboardInterrupt):
        run_batch(executor, generate, ["a", "b", "c"])
    assert sorted(ended) == ["a", "b"]


# Sharing ----------------------------------------------------------------------------------------------------


def test_no_more_generations_than_slots_run_at_a_time() -> None:
    class Counting(ScriptedEngine):
        most = 0

        def open(self, prompt: Any) -> int:
            slot = super().open(prompt)
            self.most = max(self.most, len(self.slots))
            return slot

    draft = Counting(TARGET, V)
    SpeculativeDecoder(draft, slots=2).generate([[n] for n in range(1, 9)], max_new_tokens=4)
    assert (len(draft.opened), draft.open_slots) == (8, [])
    assert 1 <= draft.most <= 2


def test_an_engine_on_both_sides_is_shared_as_one() -> None:
    both = ScriptedEngine(TARGET, V)
    decoder = SpeculativeDecoder(both, local(both))
    results = decoder.generate([[1], [2], [3]], max_new_tokens=6)
    assert [result.stats.acceptance_rate for result in results] == [1.0] * 3
    assert both.open_slots == []
    assert share(both) is share(share(both))


def test_kept_caches_do_not_add_up_over_decoders_and_ways_to_call_them() -> None:
    draft = ReusableEngine(TARGET, V)
    for _ in range(3):
        decoder = SpeculativeDecoder(draft)
        decoder.generate([1, 2], max_new_tokens=4)
        decoder.generate([[1, 2, n] for n in range(3, 9)], max_new_tokens=4)
        decoder.generate([5, 6], max_new_tokens=4)
    assert len(draft.open_slots) <= 2 * MAX_KEPT


def test_the_threads_of_a_decoder_end_with_it() -> None:
    before = set(threading.enumerate())
    decoder = SpeculativeDecoder(ScriptedEngine(TARGET, V))
    assert set(threading.enumerate()) == before
    decoder.generate([[1], [2]], max_new_tokens=4)
    started = set(threading.enumerate()) - before
    assert started
    del decoder
    gc.collect()
    for thread in started:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in started)
