"""Weight-only int8 and int4: a quantised target is another model, and its output is exact with respect to itself.

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
from outrider.engines.torch.quantization import (
    QUANTIZED_LAYERS,
    Int4Linear,
    QuantizedLinear,
    find_quantization,
    quantize,
)
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
def quantized(family: str, kind: str = "int8", dtype: torch.dtype = torch.float32) -> Any:
    model = fresh(family, dtype)
    quantize(model, family, kind)
    return model


@lru_cache
def engine(
    family: str, kind: str = "int8", dtype: torch.dtype = torch.float32, *, tokenizer: bool = False
) -> TorchEngine:
    extractor = feature_extractor(family) if family in ("omni", "qwen2-audio") else None
    return TorchEngine(quantized(family, kind, dtype), subword_tokenizer() if tokenizer else None, extractor, family)


@lru_cache
def rounded(family: str, kind: str) -> Any:
    """Return a dense model that has the weights of the quantised one, as float32."""
    model = fresh(family)
    for name, layer in quantized(family, kind).named_modules():
        if isinstance(layer, QuantizedLinear):
            model.get_submodule(name).weight.data = layer.dequantize(torch.float32)
    return model


def layers_of(family: str, kind: str) -> list[tuple[QuantizedLinear, torch.Tensor]]:
    """Return the quantised layers of a model, each with the weights that it had."""
    before, layers = tiny_model(family), quantized(family, kind).named_modules()
    return [
        (layer, before.get_submodule(name).weight)
        for name, layer in layers
        if isinstance(layer, QUANTIZED_LAYERS[kind])
    ]


# The model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_linear_weight_is_rounded_to_one_of_255_steps_of_its_row(family: str) -> None:
    layers = layers_of(family, "int8")
    assert len(layers) >= 7 - (family == "phi")
    for layer, weight in layers:
        step = weight.abs().amax(1, keepdim=True) / 127
        assert layer.weight.dtype == torch.int8
        assert bool(((layer.dequantize(torch.float32) - weight).abs() <= 0.501 * step).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_each_linear_weight_is_rounded_to_one_of_16_steps_of_its_group(family: str) -> None:
    layers = layers_of(family, "int4")
    assert len(layers) >= 7 - (family == "phi")
    for layer, weight in layers:
        restored = layer.dequantize(torch.float32)
        assert restored.shape == weight.shape
        assert layer.weight.numel() == weight.shape[0] * -(-weight.shape[1] // 32) * 16
        for got, wanted in zip(restored.split(32, 1), weight.split(32, 1), strict=True):
            furthest = wanted.gather(1, wanted.abs().argmax(1, keepdim=True))
            step = furthest / -8
            nearest = wanted.clamp(torch.minimum(furthest, 7 * step), torch.maximum(furthest, 7 * step))
            assert bool(((got - nearest).abs() <= 0.55 * step.abs()).all()), "0.5, and bfloat16's error of the step"
            assert all(row.unique().numel() <= 16 for row in got)


@pytest.mark.parametrize("kind", QUANTIZED_LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_output_layer_and_audio_encoder_are_kept(family: str, kind: str) -> None:
    model = quantized(family, kind)
    assert type(model.get_output_embeddings()) is nn.Linear
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    towers = [tower for name, tower in model.named_modules() if name.endswith("audio_tower")]
    assert len(towers) == (family in ("omni", "qwen2-audio"))
    assert all(find_quantization(tower) is None for tower in towers)


@pytest.mark.parametrize("kind", QUANTIZED_LAYERS)
def test_a_row_of_zeros_stays_zero_and_a_bias_is_kept(kind: str) -> None:
    linear = nn.Linear(4, 3)
    linear.weight.data[1] = 0
    out = QUANTIZED_LAYERS[kind](linear)(torch.ones(2, 4))
    torch.testing.assert_close(out[:, 1], linear.bias[1].expand(2))


@pytest.mark.parametrize("kind", QUANTIZED_LAYERS)
@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_makes_its_output_nan(kind: str, weight: float) -> None:
    linear = nn.Linear(40, 2)
    linear.weight.data[0, 35] = weight
    assert QUANTIZED_LAYERS[kind](linear)(torch.ones(1, 40)).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("steps", [-8.0, 8.0])
def test_int4_has_a_value_for_each_of_16_steps(steps: float) -> None:
    """The weight that is furthest from 0 keeps its value, on either side."""
    linear = nn.Linear(64, 1, bias=False)
    row = torch.arange(-7, 8.0).repeat(5)[:64] * -steps / 8
    row[0] = row[33] = steps
    linear.weight.data = row[None]
    assert torch.equal(Int4Linear(linear).dequantize(torch.float32), row[None])


@pytest.mark.parametrize("kind", QUANTIZED_LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_overflow_only_where_those_of_the_dense_layer_do(dtype: torch.dtype, kind: str) -> None:
    linear = nn.Linear(512, 2, bias=False, dtype=dtype)
    linear.weight.data = torch.full_like(linear.weight, 0.01)
    x = torch.full((1, 512), 1000.0, dtype=dtype)  # times 127 steps it exceeds float16's 65504
    torch.testing.assert_close(QUANTIZED_LAYERS[kind](linear)(x), linear(x), rtol=0.02, atol=0)


# Output -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "k"), [("int8", 1), ("int8", 3), ("int8", 5), ("int8", "auto"), ("int4", 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_quantized_target_s_own(family: str, kind: str, k: int | str) -> None:
    """The drafter is the unquantised model, which is often right."""
    decoder = SpeculativeDecoder(tiny_engine(family), local(engine(family, kind)), k=k)
    for prompt in PROMPTS:
        out = decoder.generate(list(prompt), max_new_tokens=24)
        assert out.guarantee == "exact"
        assert out.token_ids == reference(quantized(family, kind), prompt, max_new_tokens=24)
        assert out.token_ids == reference(rounded(family, kind), prompt, max_new_tokens=24)


@pytest.mark.parametrize("family", ["omni", "qwen2-audio"])
def test_output_about_a_recording_is_the_quantized_target_s_own(family: str) -> None:
    waveform = clip(0.777, seed=3)
    verifier = local(engine(family, tokenizer=True))
    prompt = Audio(waveform, instruction="tell the emotion.")
    ids = SpeculativeDecoder(None, verifier).encode(prompt).ids
    drafter = tiny_engine(family, tokenizer=subword_tokenizer())
    out = SpeculativeDecoder(drafter, verifier, k=4).generate(prompt, max_new_tokens=16)
    assert out.token_ids == reference_audio(quantized(family), ids, family, waveform)


@pytest.mark.parametrize("kind", QUANTIZED_LAYERS)
def test_some_output_differs_from_the_unquantized_target_s(kind: str) -> None:
    """Otherwise the tests above would pass without quantisation."""
    pairs = [(quantized(family, kind), tiny_model(family), prompt) for family in FAMILIES for prompt in PROMPTS]
    assert any(reference(one, prompt) != reference(other, prompt) for one, other, prompt in pairs)


@pytest.mark.parametrize("kind", QUANTIZED_LAYERS)
@pytest.mark.parametrize("family", ["qwen2", "omni"])
def test_a_quantized_drafter_changes_no_output(family: str, kind: str) -> None:
    decoder = SpeculativeDecoder(engine(family, kind), local(tiny_engine(family)), k=4)
    for prompt in PROMPTS:
        out = decoder.generate(list(prompt), max_new_tokens=24)
        assert out.token_ids == reference(tiny_model(family), prompt, max_new_tokens=24)
        assert out.stats.accepted > 0


@pytest.mark.parametrize("kind", QUANTIZED_LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_formats_pass_the_self_test(dtype: torch.dtype, kind: str) -> None:
    assert engine("qwen2", kind, dtype).noise > 0


# Identity -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.mark.parametrize("kind", QUANTIZED_LAYERS)
def test_a_quantized_model_is_another_model(checkpoint: str, kind: str) -> None:
    plain, one, same = load_engine(checkpoint), *(load_engine(checkpoint, quantization=kind) for _ in "12")
    assert isinstance(one, TorchEngine)
    assert (plain.name, plain.fingerprint) == (one.name, one.fingerprint)
    assert one.identity == same.identity != plain.identity
    assert (describe(plain).quantization, describe(one).quantization) == (None, kind)
    assert describe(one).label == f"{checkpoint} ({kind})"
    assert describe_engine(one) == {**describe_engine(plain), "identity": one.identity, "quantization": kind}
    assert difference(describe_engine(plain), describe_engine(one)) == ("quantization", None, kind), "before its hash"
    assert sum(p.nbytes for p in one.model.parameters()) < sum(p.nbytes for p in plain.model.parameters())
    assert f"(float32, {kind}, cpu)" in SpeculativeDecoder(plain, local(one)).summary()


@pytest.mark.parametrize("kind", QUANTIZED_LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_quantized_as_its_model_is(checkpoint: str, dtype: str, kind: str) -> None:
    """The steps are chosen in float32, whatever the weights are loaded as."""
    loaded = load_engine(checkpoint, dtype=dtype, quantization=kind)
    assert isinstance(loaded, TorchEngine)
    model = fresh("llama").to(getattr(torch, dtype))
    quantize(model, "llama", kind)
    for (name, ours), (_, theirs) in zip(loaded.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "quantization", "named"),
    [
        ("demo:edge", "int2", "quantization 'int2': expected one of None, int8, int4"),
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


@pytest.mark.parametrize(("first", "second"), [("int8", "int8"), ("int4", "int8"), ("int8", "int4")])
def test_a_model_is_quantized_once(first: str, second: str) -> None:
    model = fresh("qwen2")
    quantize(model, "tiny", first)
    with pytest.raises(
        ModelError, match=rf"tiny cannot be quantised to {second}, .* belongs to a {first.title()}Linear"
    ):
        quantize(model, "tiny", second)


@pytest.mark.parametrize("family", ["qwen2", "omni"])
def test_a_quantized_checkpoint_is_not_quantized_again(family: str) -> None:
    model = fresh(family)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ModelError, match="its checkpoint is quantised already"):
        quantize(model, "tiny", "int8")


def test_the_fused_path_takes_no_quantized_model() -> None:
    model = quantized("qwen2", dtype=torch.bfloat16)
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
