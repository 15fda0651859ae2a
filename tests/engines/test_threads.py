"""One engine, many threads: every output is the one that a single thread gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from outrider import SpeculativeDecoder, load_engine, local
from outrider.engines.base import Prompt, SequenceInput
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.vocabulary import tokenize
from outrider.errors import StateError
from tests.support.tiny_text_models import model, tokens

THREADS = 8
PROMPTS = [tokens(count, seed=count) for count in (3, 9, 17, 40, 5, 28)]
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 1.3, "seed": 7}, {"repetition_penalty": 1.2}]


def engine(seed: int) -> TorchEngine:
    return TorchEngine(model("qwen2", seed), name=f"qwen2-{seed}")


def run_together(work: Callable[[int], Any]) -> list[Any]:
    """Results of `work(n)` of THREADS threads, all of which have begun before one continues."""
    barrier = threading.Barrier(THREADS)

    def begin(n: int) -> Any:
        barrier.wait()
        return work(n)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


DECODERS: dict[str, Callable[[TorchEngine, TorchEngine], SpeculativeDecoder]] = {
    "cloud-only": lambda draft, target: SpeculativeDecoder(None, local(target), reader=target),
    "edge-only": lambda draft, target: SpeculativeDecoder(draft, None),
    "speculative": lambda draft, target: SpeculativeDecoder(draft, local(target), k=3),
    "adaptive": lambda draft, target: SpeculativeDecoder(draft, local(target), k="auto"),
    "one engine for both sides": lambda draft, target: SpeculativeDecoder(target, local(target)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_of_many_threads_share_engines(name: str) -> None:
    draft, target = engine(0), engine(1)
    cases = [(prompt, settings) for prompt in PROMPTS for settings in SETTINGS]

    def outputs(decoder: SpeculativeDecoder, turn: int) -> list[list[int]]:
        order = cases[turn:] + cases[:turn]
        made = [decoder.generate(prompt, max_new_tokens=12, **settings).token_ids for prompt, settings in order]
        cut = len(cases) - turn
        return made[cut:] + made[:cut]

    expected = outputs(DECODERS[name](draft, target), 0)
    found = run_together(lambda n: outputs(DECODERS[name](draft, target), n))
    assert all(outcome == expected for outcome in found)


def test_one_decoder_in_many_threads_is_right_or_refuses() -> None:
    decoder = SpeculativeDecoder(engine(0), local(engine(1)), k="auto")
    expected = [decoder.generate(prompt, max_new_tokens=12).token_ids for prompt in PROMPTS]

    def attempt(prompt: list[int]) -> list[int] | None:
        try:
            return decoder.generate(prompt, max_new_tokens=12).token_ids
        except StateError:
            return None

    for outcome in run_together(lambda _: [attempt(prompt) for prompt in PROMPTS]):
        assert all(ids in (None, right) for ids, right in zip(outcome, expected, strict=True))


def test_two_engines_of_one_model_take_turns() -> None:
    shared = model("qwen2")
    engines = [TorchEngine(shared) for _ in range(2)]
    decoders = [SpeculativeDecoder(None, local(made), reader=made) for made in (engines[n % 2] for n in range(THREADS))]
    expected = [decoders[0].generate(prompt, max_new_tokens=8).token_ids for prompt in PROMPTS]
    found = run_together(lambda n: [decoders[n].generate(p, max_new_tokens=8).token_ids for p in PROMPTS])
    assert all(outcome == expected for outcome in found)


@pytest.mark.parametrize("second", ["forward", "forward_many", "open", "truncate", "close", "reserve"])
def test_an_operation_waits_for_the_forward_of_another_thread(second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(0)
    slots = [made.open(Prompt((1,))) for _ in range(3)]
    for slot in slots:
        made.forward(slot, tokens(4))
    inside, leave = threading.Event(), threading.Event()
    forward = made.model.forward

    def held(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        leave.wait()
        return forward(*args, **kwargs)

    operations: dict[str, Callable[[], Any]] = {
        "forward": lambda: made.forward(slots[1], [5]),
        "forward_many": lambda: made.forward_many([SequenceInput(slots[1], [5], 1)]),
        "open": lambda: made.open(Prompt((1,))),
        "truncate": lambda: made.truncate(slots[1], 2),
        "close": lambda: made.close(slots[2]),
        "reserve": lambda: made.reserve(2**20, 64),
    }
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(made.model, "forward", held)
        first = pool.submit(made.forward, slots[0], [3])
        inside.wait()
        monkeypatch.setattr(made.model, "forward", forward)
        other = pool.submit(operations[second])
        assert not wait([other], timeout=0.05).done
        leave.set()
        first.result()
        assert other.exception() is None or second == "reserve"  # which is refused while slots are open


def test_a_thread_that_loads_a_model_does_not_change_what_others_generate() -> None:
    """transformers sets torch's default dtype, which all threads share, for as long as it loads."""
    draft, target = engine(0), engine(1)
    settings: list[dict[str, Any]] = [*SETTINGS, {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.01}]

    def outputs() -> list[list[int]]:
        decoder = SpeculativeDecoder(draft, local(target), gate="entropy:1.0", accept="residual")
        return [decoder.generate(PROMPTS[0], max_new_tokens=12, **each).token_ids for each in settings]

    expected = outputs()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert outputs() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_checkpoint_is_loaded_by_many_threads() -> None:
    found = run_together(lambda n: load_engine("demo:edge" if n % 2 else "demo:cloud"))
    assert len({made.identity for made in found}) == 2


def test_options_of_one_thread_s_text_do_not_reach_another_s() -> None:
    tokenizer = load_engine("demo:edge").tokenizer
    text = f"a {tokenizer.all_special_tokens[0]} b"
    kinds = [{"split_special_tokens": False}, {"split_special_tokens": True}, {"truncation": True, "max_length": 2}]
    expected = [tokenize(tokenizer, text, **kind) for kind in kinds]
    assert len({tuple(ids) for ids in expected}) == 3
    found = run_together(lambda n: [tokenize(tokenizer, text, **kinds[n % 3]) for _ in range(400)])
    assert all(ids == expected[n % 3] for n, made in enumerate(found) for ids in made)


def test_both_sides_of_a_pair_may_be_one_tokenizer_in_many_threads() -> None:
    decoder = SpeculativeDecoder(load_engine("demo:edge"), None)
    texts = ["a dog barks", "一只狗在叫", "rain " * 20]
    expected = [decoder.encode(text).ids for text in texts]
    assert all(ids == expected for ids in run_together(lambda _: [decoder.encode(text).ids for text in texts]))
