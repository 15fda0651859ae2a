"""Weight-only int8: a quantised target is another model, and its output is exact with respect to itself.

The references are transformers' own `generate`, of the quantised model and of a dense model with the rounded weights.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from outrider import Audio, ModelError, SettingsError, SpeculativeDecoder, connect, load_engine, local
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.torch.fused_model import unsupported_reason
from outrider.engines.torch.quantization import Int8Linear, find_quantization, quantize
from outrider.evals.store import difference
from outrider.planning.provenance import describe_engine
from outrider.verifiers.local import describe
from tests.support.tiny_models import (
    clip,
    feature_extractor,
    reference,
    reference_audio,
    subword_tokenizer,
    tiny_engine,
    tiny_model,
)

FAMILIES = ("qwen2", "llama", "phi", "gemma2", "omni", "qwen2-audio")
PROMPTS = ((17,), (2, 33, 44, 55), (40, 41, 42, 40, 41, 42, 40, 41), tuple(range(20, 60)))


def fresh(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a copy of the family's tiny model, to be changed."""
    source = tiny_model(family, dtype=dtype)
    model = type(source)(source.config).to(dtype).eval()
    model.load_state_dict(source.state_dict())
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model


@lru_cache
def quantized(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model = fresh(family, dtype)
    quantize(model, family)
    return model


@lru_cache
def engine(family: str, dtype: torch.dtype = torch.float32, *, tokenizer: bool = False) -> TorchEngine:
    extractor = feature_extractor(family) if family in ("omni", "qwen2-audio") else None
    return TorchEngine(quantized(family, dtype), subword_tokenizer() if tokenizer else None, extractor, family)


@lru_cache
def rounded(family: str) -> Any:
    """Return a dense model that has the weights of the quantised one, as float32."""
    model = fresh(family)
    for name, layer in quantized(family).named_modules():
        if isinstance(layer, Int8Linear):
            weight = layer.weight.float() * layer.scale[:, None]
            model.get_submodule(name).weight.data = weight
    return model


# The model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_linear_weight_is_rounded_to_one_of_255_steps_of_its_row(family: str) -> None:
    before, after = tiny_model(family), quantized(family)
    layers = {name: layer for name, layer in after.named_modules() if isinstance(layer, Int8Linear)}
    assert len(layers) >= 7 - (family == "phi")
    for name, layer in layers.items():
        weight = before.get_submodule(name).weight
        step = weight.abs().amax(1, keepdim=True) / 127
        assert layer.weight.dtype == torch.int8
        restored = layer.weight.float() * layer.scale[:, None]
        assert bool(((restored - weight).abs() <= 0.501 * step).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_output_layer_and_audio_encoder_are_kept(family: str) -> None:
    model = quantized(family)
    assert type(model.get_output_embeddings()) is nn.Linear
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    towers = [tower for name, tower in model.named_modules() if name.endswith("audio_tower")]
    assert len(towers) == (family in ("omni", "qwen2-audio"))
    assert all(find_quantization(tower) is None for tower in towers)


def test_a_row_of_zeros_stays_zero_and_a_bias_is_kept() -> None:
    linear = nn.Linear(4, 3)
    linear.weight.data[1] = 0
    out = Int8Linear(linear)(torch.ones(2, 4))
    torch.testing.assert_close(out[:, 1], linear.bias[1].expand(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_overflow_only_where_those_of_the_dense_layer_do(dtype: torch.dtype) -> None:
    linear = nn.Linear(512, 2, bias=False, dtype=dtype)
    linear.weight.data = torch.full_like(linear.weight, 0.01)
    x = torch.full((1, 512), 1000.0, dtype=dtype)  # times 127 steps it exceeds float16's 65504
    torch.testing.assert_close(Int8Linear(linear)(x), linear(x), rtol=0.02, atol=0)


# Output -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 5, "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_quantized_target_s_own(family: str, k: int | str) -> None:
    """The drafter is the unquantised model, which is often right."""
    decoder = SpeculativeDecoder(tiny_engine(family), local(engine(family)), k=k)
    for prompt in PROMPTS:
        out = decoder.generate(list(prompt), max_new_tokens=24)
        assert out.guarantee == "exact"
        assert out.token_ids == reference(quantized(family), prompt, max_new_tokens=24)
        assert out.token_ids == reference(rounded(family), prompt, max_new_tokens=24)


@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
def test_output_about_a_recording_is_the_quantized_target_s_own(family: str) -> None:
    waveform = clip(0.777, seed=3)
    verifier = local(engine(family, tokenizer=True))
    prompt = Audio(waveform, instruction="tell the emotion.")
    ids = SpeculativeDecoder(None, verifier).encode(prompt).ids
    drafter = tiny_engine(family, tokenizer=subword_tokenizer())
    out = SpeculativeDecoder(drafter, verifier, k=4).generate(prompt, max_new_tokens=16)
    assert out.token_ids == reference_audio(quantized(family), ids, family, waveform)


def test_some_output_differs_from_the_unquantized_target_s() -> None:
    """Otherwise the tests above would pass without quantisation."""
    pairs = [(quantized(family), tiny_model(family), prompt) for family in FAMILIES for prompt in PROMPTS]
    assert any(reference(one, prompt) != reference(other, prompt) for one, other, prompt in pairs)


@pytest.mark.parametrize("family", ["qwen2", "omni"])
def test_a_quantized_drafter_changes_no_output(family: str) -> None:
    decoder = SpeculativeDecoder(engine(family), local(tiny_engine(family)), k=4)
    for prompt in PROMPTS:
        out = decoder.generate(list(prompt), max_new_tokens=24)
        assert out.token_ids == reference(tiny_model(family), prompt, max_new_tokens=24)
        assert out.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_formats_pass_the_self_test(dtype: torch.dtype) -> None:
    assert engine("qwen2", dtype).noise > 0


# Identity -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_a_quantized_model_is_another_model(checkpoint: str) -> None:
    plain, one, same = load_engine(checkpoint), *(load_engine(checkpoint, quantization="int8") for _ in "12")
    assert isinstance(one, TorchEngine)
    assert (plain.name, plain.fingerprint) == (one.name, one.fingerprint)
    assert one.identity == same.identity != plain.identity
    assert (describe(plain).quantization, describe(one).quantization) == (None, "int8")
    assert describe(one).label == f"{checkpoint} (int8)"
    assert describe_engine(one) == {**describe_engine(plain), "identity": one.identity, "quantization": "int8"}
    assert difference(describe_engine(plain), describe_engine(one)) == ("quantization", None, "int8"), "before its hash"
    assert sum(p.nbytes for p in one.model.parameters()) < sum(p.nbytes for p in plain.model.parameters())
    assert "(float32, int8, cpu)" in SpeculativeDecoder(plain, local(one)).summary()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_quantized_as_its_model_is(checkpoint: str, dtype: str) -> None:
    """The steps are chosen in float32, whatever the weights are loaded as."""
    loaded = load_engine(checkpoint, dtype=dtype, quantization="int8")
    assert isinstance(loaded, TorchEngine)
    model = fresh("llama").to(getattr(torch, dtype))
    quantize(model, "llama")
    for (name, ours), (_, theirs) in zip(loaded.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "quantization", "named"),
    [
        ("demo:edge", "int4", "quantization 'int4': expected one of None, int8"),
        ("demo:edge", "", "quantization ''"),
        ("some.gguf", "int8", "some.gguf has a quantisation of its own"),
    ],
)
def test_what_cannot_be_quantized_is_refused_before_it_is_looked_for(model: str, quantization: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        load_engine(model, quantization=quantization)


@pytest.mark.parametrize("option", ["dtype", "device", "quantization", "kv_cache_dtype"])
@pytest.mark.parametrize("value", [np.array(["int8", "fp8"]), torch.zeros(2), ["auto"], 8, torch.int8])
def test_an_option_of_loading_of_another_type_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"^{option} .*expected"):
        load_engine("demo:edge", **{option: value})


def test_a_loaded_model_is_not_quantized_behind_the_caller_s_back() -> None:
    with pytest.raises(SettingsError, match="quantization are for models given by name"):
        load_engine(tiny_model("qwen2"), quantization="int8")


SMALL = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (transformers.GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2), r"c_attn.weight belongs to a Conv1D"),
        (
            transformers.MixtralConfig(**SMALL, intermediate_size=32, num_key_value_heads=1, num_local_experts=2),
            r"layers.0.mlp.* belongs to a Mixtral",
        ),
    ],
)
def test_layers_that_are_not_linear_are_named(tmp_path: Path, config: Any, named: str) -> None:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=f"other cannot be quantised to int8, .*{named}"):
        load_engine(str(tmp_path / "other"), quantization="int8")


def test_a_model_is_quantized_once() -> None:
    model = fresh("qwen2")
    quantize(model, "tiny")
    with pytest.raises(ModelError, match=r"tiny cannot be quantised to int8, .* belongs to a Int8Linear"):
        quantize(model, "tiny")


@pytest.mark.parametrize("family", ["qwen2", "omni"])
def test_a_quantized_checkpoint_is_not_quantized_again(family: str) -> None:
    model = fresh(family)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ModelError, match="its checkpoint is quantised already"):
        quantize(model, "tiny")


def test_the_fused_path_takes_no_quantized_model() -> None:
    model = quantized("qwen2", torch.bfloat16)
    reason = unsupported_reason(model, model.base_model, model.get_output_embeddings(), model.config)
    assert reason == "its projections are not plain"


def test_a_gpu_runs_a_quantized_model_without_the_fused_path_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fp8 = TorchEngine(tiny_model("qwen2"), fp8_cache=True)
    for made, reason in ((engine("qwen2"), "it has int8"), (fp8, "it has fp8 KV cache")):
        monkeypatch.setattr(made, "device", torch.device("cuda"))
        assert made._make_runner() is None
        assert caplog.messages[-1].endswith(f"runs without CUDA graphs, which is slower: {reason}")


@pytest.mark.parametrize("scheme", ["vllm", "sglang", "grpc"])
def test_a_cloud_across_a_network_is_not_quantized_from_here(scheme: str) -> None:
    with pytest.raises(SettingsError, match="takes no quantization"):
        connect(f"{scheme}://127.0.0.1:1", quantization="int8")
