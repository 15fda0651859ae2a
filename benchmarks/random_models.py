"""Random models of real sizes: speed does not depend on what the weights are.

A plainly random model has flat logits, whose order a forward of 6 tokens and one of 1 token round differently: its
output cannot be compared. `counting` gives one an opinion: what it reads outweighs what its layers add, and the output
layer is the embedding moved by one row, so that after token t comes t + 1, by a wide margin, at the usual cost.
"""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 152_064
SIZES = {  # Qwen2.5's
    "0.5B": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
        "tie_word_embeddings": False,
    },
}


@torch.no_grad()
def counting(model: Any) -> Any:
    """The model, changed in place; its output layer must be its own."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding *= 100
    scale = embedding.norm(dim=-1, keepdim=True).clamp(min=1.0)  # the padding's row is zero
    head.copy_((embedding / scale).roll(1, 0))
    return model


def random_model(size: str, device: str = "cuda", seed: int = 0) -> Any:
    """A bfloat16 Qwen2 model of a size, made where it will live."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
        **SIZES[size],
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return transformers.Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
