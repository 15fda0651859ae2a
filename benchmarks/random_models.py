"""Random models of real sizes: speed does not depend on what the weights are.

A plainly random model has flat logits, whose order a forward of 6 tokens and one of 1 token round differently: its
output cannot be compared. `counting` gives one an opinion: what it reads outweighs what its layers add, and the output
layer is the embedding moved by one row, so that after token t comes t + 1, by a wide margin, at the usual cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

VOCAB = 152_064
PLACEHOLDER = 151_646  # of the thinker's audio
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


@contextmanager
def made_on(device: str) -> Iterator[None]:
    """Let models be made in bfloat16 where they will live."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def random_model(size: str, device: str = "cuda", seed: int = 0) -> Any:
    """Return a bfloat16 Qwen2 model of a size."""
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
    with made_on(device):
        return transformers.Qwen2ForCausalLM(config).eval()


def random_thinker(size: str, device: str = "cuda") -> tuple[Any, Any]:
    """Return a bfloat16 thinker of Qwen2.5-Omni around a language model of a size, and its feature extractor."""
    import transformers
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    hidden = SIZES[size]["hidden_size"]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {"vocab_size": VOCAB, "max_position_embeddings": 32_768, "rope_parameters": rope, "pad_token_id": 0}
    config = Qwen2_5OmniThinkerConfig(
        audio_config={
            "num_mel_bins": 128,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "d_model": 1280,
            "output_dim": hidden,
            "n_window": 100,
            "max_source_positions": 1500,
        },
        vision_config={  # not used
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "fullatt_block_indexes": [0],
        },
        text_config={**text, "bos_token_id": None, "eos_token_id": None, **SIZES[size]},
        audio_token_index=PLACEHOLDER,
        image_token_index=151_655,
        video_token_index=151_656,
        audio_start_token_id=151_647,
        audio_end_token_id=151_648,
    )
    config.vision_start_token_id, config.vision_end_token_id = 151_652, 151_653
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=128, sampling_rate=16_000, hop_length=160, chunk_length=300, n_fft=400
    )
    with made_on(device):
        return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config).eval(), extractor
