"""The GPU path without a GPU: Triton's interpreter runs the kernels, and graphs are what they would have captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
import transformers as tf

pytest.importorskip("triton", reason="the kernels' interpreter is in the package triton, which is made for Linux only")
from outrider.engines.torch import fused_model as stack
from outrider.engines.torch.cuda_graphs import CudaGraphCache, Run
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.torch.fused_model import FusedModel
from outrider.engines.torch.model_runner import ModelRunner
from tests.support.tiny_models import feature_extractor, omni_config

VOCAB = 48
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = {"qwen2": tf.Qwen2Config, "qwen3": tf.Qwen3Config, "llama": tf.LlamaConfig}


class Eager(CudaGraphCache):
    """Runs at once what would be captured. As with a graph, whatever was there before is run once with no harm done."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Run] = {}

    def clear(self) -> None:
        self.found.clear()

    def get_or_capture(self, key: Hashable, forward: Callable[[], Run]) -> Run:
        if key not in self.found:
            self.found[key] = forward()
            self.found[key]()
        return self.found[key]


def model(kind: str = "qwen2", seed: int = 0, disturbed: float = 0.0) -> Any:
    """A random float32 model whose logits do not nearly tie; `disturbed` makes it a drafter of the one that is not."""
    torch.manual_seed(seed)
    made = tf.AutoModelForCausalLM.from_config(CONFIGS[kind](**_SIZES)).eval()
    for weight in made.parameters():
        weight.data = torch.randn_like(weight) * (0.3 if weight.dim() > 1 else 0.1) + (weight.dim() == 1) * weight.data
    for weight in made.parameters():
        weight.data += disturbed * torch.randn_like(weight) if weight.dim() > 1 else 0.0
    return made


def audio_engine() -> TorchEngine:
    """An engine of a random float32 thinker, whose heads are of a size that the kernels take."""
    torch.manual_seed(0)
    text = {**_SIZES, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB}
    made = tf.Qwen2_5OmniThinkerForConditionalGeneration(omni_config(text)).eval()
    for weight in made.parameters():
        weight.data = torch.randn_like(weight) * (0.3 if weight.dim() > 1 else 0.1) + (weight.dim() == 1) * weight.data
    return TorchEngine(made, None, feature_extractor("omni"), name="thinker")


def fused(made: Any, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """An engine that runs a model as on a GPU."""
    engine = TorchEngine(made, name="fused")
    fuse(engine, monkeypatch)
    return engine


def fuse(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine run its model as on a GPU. Small spans and few programs: each takes the interpreter ms."""
    monkeypatch.setattr(stack, "MIN_SPAN", 32)
    monkeypatch.setattr(stack, "MIN_CHUNK", 16)
    monkeypatch.setattr(stack, "TARGET_PROGRAMS", 4)
    head = engine.model.get_output_embeddings()
    fused_model = FusedModel(engine._family.decoder, head, engine._text_config)
    engine._runner = ModelRunner(fused_model, engine.device, Eager())
