"""The transformers engine: which models it takes, which it refuses by name, and that rows are transformers' own."""

import subprocess
import sys

import pytest
import torch
import transformers as tf

from outrider import load_engine
from outrider.engines.base import CachedSequence, Prompt
from outrider.engines.torch.engine import TorchEngine
from outrider.errors import ModelError, PromptError, StateError
from tests.support.tiny_text_models import engine, model, tokens


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral", "gemma3", "gpt2"])
def test_rows_equal_a_plain_forward(kind: str) -> None:
    made = engine(kind)
    ids = tokens(30)
    slot = made.open(Prompt(tuple(ids)))
    rows = torch.cat([made.forward(slot, ids[:13]), made.forward(slot, ids[13:14]), made.forward(slot, ids[14:])])
    with torch.inference_mode():
        plain = made.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mamba", "bloom", "lfm2"])
def test_a_model_that_cannot_truncate_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=r"(?i)" + kind):
        TorchEngine(model(kind))


def test_a_cache_that_ignores_roll_backs_is_caught_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engines.torch.kv_cache.SlotKVCache.truncate", lambda self, slot, length: None)
    with pytest.raises(ModelError, match="cannot be truncated"):
        TorchEngine(model("qwen2"))


def test_eager_attention_gives_the_same_rows() -> None:
    eager = model("llama")
    eager.set_attn_implementation("eager")
    made, ids = TorchEngine(eager), tokens(10)
    rows = made.forward(made.open(Prompt(tuple(ids))), ids)
    other = engine("llama")
    torch.testing.assert_close(rows, other.forward(other.open(Prompt(tuple(ids))), ids), rtol=1e-4, atol=1e-4)


def test_only_the_rows_that_are_wanted_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine("qwen2")
    seen: list[int] = []
    head = made.model.lm_head
    hook = head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    made.forward(made.open(Prompt((1,))), tokens(40), 3)
    hook.remove()
    assert seen == [3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_is_measured_in_short_formats_and_zero_in_float32(dtype: torch.dtype) -> None:
    assert engine("qwen2").noise == 0.0
    assert 0.0 < TorchEngine(model("qwen2").to(dtype)).noise < 1.0


def test_audio_for_a_text_model_is_refused() -> None:
    import numpy as np

    with pytest.raises(PromptError, match="takes no audio"):
        engine("qwen2").open(Prompt((1,), np.zeros(16000, np.float32)))


def test_a_reader_feeds_what_the_cache_lacks_and_nothing_twice() -> None:
    made = engine("qwen2")
    ids = tokens(10)
    reader = CachedSequence(made, Prompt(tuple(ids)), "test")
    first = reader.extend(ids, 1)
    with pytest.raises(StateError, match="0 tokens are new"):
        reader.extend(ids, 1)
    reader.rollback_to(len(ids))
    torch.testing.assert_close(reader.extend(ids, 1), first)


def test_longrope_is_used_only_where_its_factors_do_not_change() -> None:
    config = tf.Phi3Config(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 32,
        },
    )
    assert TorchEngine(tf.Phi3ForCausalLM(config)).max_length == 32


def test_a_model_that_mixes_slots_up_in_a_batch_is_refused() -> None:
    torch.manual_seed(0)
    config = tf.GPTNeoConfig(
        vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    made = tf.GPTNeoForCausalLM(config).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    with pytest.raises(ModelError, match="local"):
        TorchEngine(made)


def test_a_cache_that_mixes_slots_up_in_a_batch_is_caught_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = TorchEngine._mask
    monkeypatch.setattr(TorchEngine, "_mask", lambda self, at: mask(self, at.max(0, keepdim=True).values.expand_as(at)))
    with pytest.raises(ModelError, match="beside another slot"):
        TorchEngine(model("qwen2"))


def test_identity_tells_checkpoints_apart_and_is_the_same_everywhere() -> None:
    first = engine("qwen2").identity
    assert len(first) == 16
    assert TorchEngine(model("qwen2")).identity == first
    assert len({first, engine("qwen2", 1).identity, engine("llama").identity}) == 3
    assert TorchEngine(model("qwen2").to(torch.bfloat16)).identity != first
    tuned = model("qwen2")
    tuned.model.layers[1].mlp.down_proj.weight.data += 1e-3
    assert TorchEngine(tuned).identity != first


@pytest.mark.network
def test_identity_is_the_same_in_another_process() -> None:
    script = "from outrider import load_engine; print(load_engine('demo:edge').identity)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == load_engine("demo:edge").identity != load_engine("demo:cloud").identity
