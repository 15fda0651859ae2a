"""Models of real sizes for vLLM without files of weights: the load format `counting` and the files that it needs.

vLLM's own `dummy` weights are nearly zero, so the largest logits are decided by rounding, and no draft is right twice.
`counting` replaces the embedding and the output layer: after token t comes t + 1, by a wide margin, at the usual cost
(as `random_models.counting`). The format is a vLLM plugin, found through an entry point that `plugin` writes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.random_models import SIZES, VOCAB

ROOT = Path(__file__).parents[1]
SEED = 17
TINY = {  # for a test on a CPU
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "tie_word_embeddings": False,
    "vocab_size": 4096,
}


def register() -> None:
    """Register the load format. vLLM calls this in each of its processes."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class CountingLoader(DummyModelLoader):
        @torch.no_grad()
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            for name, weight in model.named_parameters():
                if name.endswith("norm.weight"):
                    weight.fill_(1.0)
            embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
            generator = torch.Generator(embedding.device).manual_seed(SEED)
            embedding.normal_(generator=generator)
            scale = embedding.norm(dim=-1, keepdim=True).to(head.dtype)
            head.copy_((embedding / scale).roll(1, 0))

    register_model_loader("counting")(CountingLoader)


def vocabulary(size: str) -> int:
    """Tokens of a model."""
    return int(TINY["vocab_size"]) if size == "tiny" else VOCAB


def write_model(folder: Path, size: str) -> Path:
    """Write the configuration and a tokenizer with one word per token."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "max_position_embeddings": 16_384,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        **(TINY if size == "tiny" else SIZES[size]),
    }
    words = {f"t{n}": n for n in range(vocabulary(size))}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
    splitter = {"type": "WhitespaceSplit"}
    tokenizer: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    tokenizer |= {
        "decoder": {"type": "Fuse"},
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": splitter,
        "model": model,
    }
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 16_384},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def plugin(folder: Path) -> dict[str, str]:
    """Write the plugin's entry point, and return the environment in which vLLM finds it."""
    info = folder / "outrider_counting-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outrider-counting\nVersion: 1\n", encoding="utf-8")
    points = "[vllm.general_plugins]\ncounting = benchmarks.vllm_model:register\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
