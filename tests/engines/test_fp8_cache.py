"""A KV cache of float8: its target is another model, which decodes alone as it verifies.

The reference is transformers' own `generate` over a cache that rounds what it stores with torch's conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from outrider import Audio, SettingsError, SpeculativeDecoder, connect, load_engine, local
from outrider.engines.base import Prompt
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.torch.fp8 import from_fp8, to_fp8
from outrider.evals.baselines import unsupported_reason
from outrider.verifiers.local import describe
from tests.support.tiny_models import (
    clip,
    feature_extractor,
    reference,
    subword_tokenizer,
    tiny_engine,
    tiny_model,
)

FAMILIES = ("qwen2", "llama", "phi", "mistral", "gemma2", "omni", "qwen2-audio")
PROMPTS = ((17,), (2, 33, 44, 55), (40, 41, 42, 40, 41, 42, 40, 41), tuple(range(20, 60)))
CODES = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)  # the rest are NaN


class RoundingCache(DynamicCache):
    """transformers' cache, with every entry rounded to float8 before it is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        rounded = (each.to(torch.float8_e4m3fn).to(each.dtype) for each in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


@lru_cache
def engine(family: str, dtype: torch.dtype = torch.float32) -> TorchEngine:
    extractor = feature_extractor(family) if family in ("omni", "qwen2-audio") else None
    return TorchEngine(tiny_model(family, dtype=dtype), subword_tokenizer(), extractor, family, fp8_cache=True)


def rounding_reference(family: str, prompt: Sequence[int], **settings: Any) -> list[int]:
    """What transformers' greedy `generate` adds to the prompt over a `RoundingCache`."""
    model, ids = tiny_model(family), torch.tensor([list(prompt)])
    cache = RoundingCache(config=model.config.get_text_config())
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, cache=cache, **settings
        )
    return out[0, len(prompt) :].tolist()


# The format ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_number_of_the_format_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    numbers = from_fp8(CODES, dtype)
    assert numbers.dtype == dtype
    assert torch.equal(numbers, CODES.view(torch.float8_e4m3fn).to(dtype))
    assert torch.equal(to_fp8(numbers), CODES)


def test_larger_numbers_are_stored_as_the_largest() -> None:
    stored = to_fp8(torch.tensor([449.0, 1e30, -1e30, float("inf"), 0.0009]))
    assert from_fp8(stored, torch.float32).tolist() == [448, 448, -448, 448, 0]


def test_a_view_of_a_buffer_is_read() -> None:
    view = CODES[:240].view(4, 6, 10)[:, 1:4, :].transpose(0, 1)
    assert torch.equal(from_fp8(view, torch.float32), view.contiguous().view(torch.float8_e4m3fn).float())


# Output -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_that_of_the_target_over_a_rounding_cache(family: str) -> None:
    """Alone and with drafts, which are those of the same model without rounding."""
    alone = SpeculativeDecoder(None, local(engine(family)))
    for prompt in PROMPTS:
        ids = list(prompt)
        expected = alone.generate(ids, max_new_tokens=24).token_ids
        assert expected == rounding_reference(family, prompt, max_new_tokens=24)
        for k in (1, 3, 5, "auto"):
            decoder = SpeculativeDecoder(tiny_engine(family, tokenizer=subword_tokenizer()), local(engine(family)), k=k)
            out = decoder.generate(ids, max_new_tokens=24)
            assert (out.token_ids, out.guarantee) == (expected, "exact")


@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
def test_output_about_a_recording_is_the_same_alone_and_with_drafts(family: str) -> None:
    prompt = Audio(clip(0.777, seed=3), instruction="tell the emotion.")
    expected = SpeculativeDecoder(None, local(engine(family))).generate(prompt, max_new_tokens=16)
    drafter = tiny_engine(family, tokenizer=subword_tokenizer())
    out = SpeculativeDecoder(drafter, local(engine(family)), k=4).generate(prompt, max_new_tokens=16)
    assert out.token_ids == expected.token_ids


def test_some_output_differs_from_that_over_a_plain_cache() -> None:
    """Otherwise the tests above would pass without rounding."""
    pairs = [(family, prompt) for family in FAMILIES for prompt in PROMPTS]
    assert any(
        rounding_reference(family, prompt, max_new_tokens=24)
        != reference(tiny_model(family), prompt, max_new_tokens=24)
        for family, prompt in pairs
    )


def test_long_sequences_beside_each_other_are_decoded_as_each_alone() -> None:
    """Extents grow and move, and rows of different lengths share forwards."""
    prompts = [[*range(20, 20 + n)] * 3 for n in (3, 17, 40)]
    drafter = tiny_engine("qwen2", drift=0.05)
    plain = engine("qwen2")
    target = TorchEngine(tiny_model("qwen2"), None, None, "qwen2", fp8_cache=True)
    together = SpeculativeDecoder(drafter, local(target), k=3).generate(prompts, max_new_tokens=200)
    for prompt, out in zip(prompts, together, strict=True):
        alone = SpeculativeDecoder(None, local(plain)).generate(prompt, max_new_tokens=200)
        assert out.token_ids == alone.token_ids
        assert out.token_ids == rounding_reference("qwen2", prompt, max_new_tokens=200)


def test_a_drafter_with_such_a_cache_changes_no_output() -> None:
    decoder = SpeculativeDecoder(engine("qwen2"), local(tiny_engine("qwen2", tokenizer=subword_tokenizer())), k=4)
    for prompt in PROMPTS:
        out = decoder.generate(list(prompt), max_new_tokens=24)
        assert out.token_ids == reference(tiny_model("qwen2"), prompt, max_new_tokens=24)


# Noise --------------------------------------------------------------------------------------------------------------


def test_a_step_of_an_entry_is_within_the_noise() -> None:
    """In float32, forwards of other sizes differ by rounding alone, which can move an entry by one step of float8."""
    made, ids = engine("qwen2"), [*range(20, 60)]
    slot = made.open(Prompt(tuple(ids)))
    made.forward(slot, ids[:-1], 1)
    before = made.forward(slot, ids[-1:])
    made.truncate(slot, len(ids) - 1)
    for buffer in made._cache.buffers:
        with torch.inference_mode():
            buffer[:, made._cache.base(slot) + 5, 3] ^= 1
    after = made.forward(slot, ids[-1:])
    made.close(slot)
    assert 0 < float((after - before).abs().max()) < made.noise


def test_near_ties_are_reported() -> None:
    assert engine("llama").noise > tiny_engine("llama").noise == 0


# Memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_budget_holds_more_sequences(dtype: torch.dtype, share: int) -> None:
    plain = TorchEngine(tiny_model("qwen2", dtype=dtype))
    small = TorchEngine(tiny_model("qwen2", dtype=dtype), fp8_cache=True)
    assert plain.position_bytes == share * small.position_bytes
    budget = 8 * 64 * plain.position_bytes
    assert small.reserve(budget, 64) == share * plain.reserve(budget, 64)
    slot = small.open(Prompt((5, 6, 7)))
    small.forward(slot, (5, 6, 7))
    assert all(buffer.dtype == torch.uint8 for buffer in small._cache.buffers)
    assert small.cache_bytes <= budget


# Identity and refusals ----------------------------------------------------------------------------------------------


def test_a_target_with_such_a_cache_is_another_model() -> None:
    plain = tiny_engine("qwen2")
    assert engine("qwen2").identity != plain.identity
    assert describe(engine("qwen2")).quantization == "fp8 KV cache"
    both = load_engine("demo:edge", quantization="int8", kv_cache_dtype="fp8")
    assert isinstance(both, TorchEngine)
    assert describe(both).label == "demo:edge (int8, fp8 KV cache)"
    assert len({both.identity, *(load_engine("demo:edge", quantization=name).identity for name in (None, "int8"))}) == 3


def test_a_loaded_model_may_have_such_a_cache() -> None:
    assert load_engine(tiny_model("qwen2"), kv_cache_dtype="fp8").quantization == "fp8 KV cache"


def test_a_gguf_file_in_llama_cpp_has_none() -> None:
    with pytest.raises(SettingsError, match=r"kv_cache_dtype fp8: some\.gguf runs in llama\.cpp"):
        load_engine("some.gguf", kv_cache_dtype="fp8")


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(SettingsError, match="kv_cache_dtype 'fp4': expected one of auto, fp8"):
        load_engine("demo:edge", kv_cache_dtype="fp4")


def test_a_cloud_across_a_network_has_an_option_of_its_own() -> None:
    with pytest.raises(SettingsError, match="takes no kv_cache_dtype"):
        connect("vllm://127.0.0.1:1", kv_cache_dtype="fp8")


def test_transformers_is_no_baseline_for_such_a_target() -> None:
    plain, small = tiny_engine("qwen2"), engine("qwen2")
    assert "no fp8 KV cache" in str(unsupported_reason("plain", plain, small))
    assert "no fp8 KV cache" in str(unsupported_reason("assisted", small, plain))
    assert unsupported_reason("plain", small, plain) is None
