"""Tiny random models, made once per test process. Their weights are wide, so that no two logits nearly tie."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as tf

from outrider.engines.torch.engine import TorchEngine

VOCAB = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MIXED = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, Any] = {
    "qwen2": lambda: tf.Qwen2Config(**_COMMON),
    "qwen3": lambda: tf.Qwen3Config(**_COMMON, head_dim=8),
    "llama": lambda: tf.LlamaConfig(**_COMMON),
    "mistral": lambda: tf.MistralConfig(**_COMMON, sliding_window=8),
    "gemma3": lambda: tf.Gemma3TextConfig(**_COMMON, head_dim=8, sliding_window=8, layer_types=_MIXED),
    "gpt2": lambda: tf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=512),
    "mamba": lambda: tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
    "lfm2": lambda: tf.Lfm2Config(**_COMMON, layer_types=["conv", "full_attention"]),
}


def model(kind: str, seed: int = 0) -> Any:
    """A random float32 model of a family."""
    torch.manual_seed(seed)
    made = tf.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    return made


@cache
def engine(kind: str, seed: int = 0) -> TorchEngine:
    return TorchEngine(model(kind, seed), name=kind)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (count,), generator=generator).tolist()
