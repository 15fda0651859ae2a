"""Memory that nothing has written yet never reaches an output: it is filled with NaN here, or with huge numbers."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from outrider import SpeculativeDecoder, load_engine, local
from outrider.engines.base import Prompt, SequenceInput
from outrider.engines.torch.engine import TorchEngine
from tests.support.tiny_text_models import VOCAB, model, tokens

FLOATS = (float("nan"), float("inf"), 3e38)


def poison(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Fill whatever torch hands out unwritten."""

    def filled(made: torch.Tensor) -> torch.Tensor:
        if made.is_floating_point():
            return made.fill_(value if abs(value) <= torch.finfo(made.dtype).max or value != value else torch.inf)
        return made if made.dtype == torch.bool or made.is_complex() else made.fill_(torch.iinfo(made.dtype).max)

    def patch(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: filled(original(*args, **kwargs)))

    for name in ("empty", "empty_like", "empty_strided"):
        patch(torch, name)
    for name in ("new_empty", "new_empty_strided"):
        patch(torch.Tensor, name)


@pytest.fixture(params=FLOATS, ids=str)
def poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, request.param)


def test_the_allocator_is_poisoned(poisoned: None) -> None:
    assert not bool((torch.empty(3).abs() < 1e38).any())
    assert not bool((torch.zeros(2).new_empty(3).abs() < 1e38).any())


def rows_of(engine: Any, size: int) -> list[torch.Tensor]:
    """Ragged batches, roll-backs, growth of the cache, a slot that is used again."""
    one, two, three = ([token % size for token in tokens(count, seed=count)] for count in (300, 7, 40))
    a, b = (engine.open(Prompt((1,))) for _ in range(2))
    found = [*engine.forward_many([SequenceInput(a, one, 2), SequenceInput(b, two, 7)])]
    engine.truncate(a, 5)
    found += engine.forward_many([SequenceInput(a, three, 40), SequenceInput(b, three[:1], 1)])
    engine.close(a)
    c = engine.open(Prompt((1,)))
    found += engine.forward_many([SequenceInput(c, two[:2], 2), SequenceInput(b, three[:3], 3)])
    return [each.clone() for each in found]


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral", "gemma3", "gpt2"])
def test_rows_do_not_depend_on_memory_that_nothing_wrote(kind: str) -> None:
    expected = rows_of(TorchEngine(model(kind)), VOCAB)
    made = model(kind)
    for value in FLOATS:
        with pytest.MonkeyPatch.context() as patched:
            poison(patched, value)
            found = rows_of(TorchEngine(made), VOCAB)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gpt2"])
def test_a_sequence_does_not_see_what_an_earlier_one_left_in_the_cache(kind: str) -> None:
    expected = rows_of(TorchEngine(model(kind)), VOCAB)
    engine = TorchEngine(model(kind))
    for slot in [engine.open(Prompt((1,))) for _ in range(2)]:
        engine.forward(slot, tokens(320), 1)
        for buffer in engine._cache.buffers:  # as if it had overflowed
            with torch.inference_mode():
                buffer.fill_(float("nan"))
    for slot in (0, 1):
        engine.close(slot)
    found = rows_of(engine, VOCAB)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_fused_rows_and_choices_do_not_depend_on_it_either(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.config import GenerationSettings
    from outrider.sampling.policy import Policy
    from tests.support import triton_interpreter

    def work() -> list[Any]:
        engine = triton_interpreter.fused(triton_interpreter.model(kind), monkeypatch)
        slots = [engine.open(Prompt((1,))) for _ in range(2)]
        ids = [token % triton_interpreter.VOCAB for token in tokens(60)]
        found: list[Any] = [
            each.clone()
            for each in engine.forward_many(
                [SequenceInput(slots[0], ids[:44], 3), SequenceInput(slots[1], ids[44:49], 5)]
            )
        ]
        for settings in ({}, {"repetition_penalty": 1.3, "temperature": 0.9, "top_k": 5}):
            policy = Policy.build(GenerationSettings.build(settings), (), triton_interpreter.VOCAB, 1)
            found.append(
                [(p.token, p.signals) for p in engine.draft(slots[0], ids[49:51], 3, policy, with_signals=True)]
            )
            picked = engine.sample_many(
                [SequenceInput(slots[0], ids[51:53], 2), SequenceInput(slots[1], ids[53:54], 1)], [policy] * 2
            )
            found.append([[pick.token for pick in each] for each in picked])
        return found

    expected = work()
    for value in FLOATS:
        with pytest.MonkeyPatch.context() as patched:
            poison(patched, value)
            found = work()
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# The allocator of the system ------------------------------------------------------------------------------------------

M_PERTURB = -6  # of <malloc.h>


@contextmanager
def perturbed(value: int) -> Iterator[None]:
    """Make glibc overwrite memory on allocation and release, as MALLOC_PERTURB_ does. value 0 turns it off."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_PERTURB, value)
    try:
        yield
    finally:
        libc.mallopt(M_PERTURB, 0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_outputs_do_not_depend_on_the_allocator_of_the_system() -> None:
    found = []
    for value in (0, 85, 255):
        with perturbed(value):
            assert not value or set(torch.empty(10_000, dtype=torch.uint8).tolist()) == {value ^ 0xFF}
            decoder = SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud")))
            settings = ({}, {"temperature": 1.0})
            found.append([decoder.generate("This voice is", max_new_tokens=16, **each).token_ids for each in settings])
    assert found[0] == found[1] == found[2]
