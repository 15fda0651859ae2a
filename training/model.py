"""The two architectures, and a forward pass for training that handles all audio of a batch in one go."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

from training import tokenizer as tokens
from training.features import CHUNK, extractor


@dataclass(frozen=True)
class Size:
    """Widths and depths of one checkpoint."""

    audio_layers: int
    audio_width: int
    audio_heads: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int


SIZES: Final = {
    "edge": Size(audio_layers=2, audio_width=96, audio_heads=3, layers=2, width=128, heads=4, kv_heads=2, hidden=384),
    "cloud": Size(
        audio_layers=4, audio_width=256, audio_heads=4, layers=4, width=256, heads=4, kv_heads=2, hidden=1024
    ),
}


def config(size: Size, tokenizer: Tokenizer) -> Any:
    """A Qwen2.5-Omni Thinker of this size over this tokenizer; the vision tower is there only for the layout."""
    ids = {token: tokenizer.token_to_id(token) for token in tokens.SPECIALS}
    half = size.width // size.heads // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    made = Qwen2_5OmniThinkerConfig(
        outrider_tasks=["caption"],  # nothing else: the engine warns where it is given a text
        audio_config={
            "num_mel_bins": 128,
            "encoder_layers": size.audio_layers,
            "encoder_attention_heads": size.audio_heads,
            "encoder_ffn_dim": size.audio_width * 4,
            "d_model": size.audio_width,
            "output_dim": size.width,
            "n_window": CHUNK // 2,
            "max_source_positions": 1500,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 1,
            "out_hidden_size": size.width,
            "fullatt_block_indexes": [0],
        },
        text_config={
            "vocab_size": -(-tokenizer.get_vocab_size() // 64) * 64,
            "hidden_size": size.width,
            "intermediate_size": size.hidden,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section},
            "bos_token_id": None,
            "eos_token_id": ids[tokens.IM_END],
            "pad_token_id": ids[tokens.ENDOFTEXT],
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        audio_token_index=ids[tokens.AUDIO],
        image_token_index=ids["<|IMAGE|>"],
        video_token_index=ids["<|VIDEO|>"],
        audio_start_token_id=ids["<|audio_bos|>"],
        audio_end_token_id=ids["<|audio_eos|>"],
        user_token_id=tokenizer.encode("user").ids[0],
        tie_word_embeddings=True,
    )
    made.vision_start_token_id = ids["<|vision_bos|>"]
    made.vision_end_token_id = ids["<|vision_eos|>"]
    made.pad_token_id = ids[tokens.ENDOFTEXT]
    made.eos_token_id = ids[tokens.IM_END]
    return made


def create(size: Size, tokenizer: Tokenizer, seed: int) -> Any:
    """A model with fresh weights."""
    torch.manual_seed(seed)
    return Qwen2_5OmniThinkerForConditionalGeneration(config(size, tokenizer))


def load(directory: Path | str, dtype: torch.dtype, device: str) -> Any:
    """A saved checkpoint, ready to generate."""
    model: Any = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(
        str(directory), dtype=dtype, trust_remote_code=False, use_safetensors=True
    )
    return model.to(device).eval()


def save(model: Any, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a checkpoint in the standard layout, in bfloat16, with all that its processor needs."""
    directory.mkdir(parents=True, exist_ok=True)
    ends = [tokenizer.token_to_id(tokens.IM_END), tokenizer.token_to_id(tokens.ENDOFTEXT)]
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.token_to_id(tokens.ENDOFTEXT)
    )
    dtype = model.dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to(torch.bfloat16).save_pretrained(str(directory))
    model.to(dtype)
    tokens.save(tokenizer, directory)
    front_end = {**extractor().to_dict(), **_IMAGES, "return_attention_mask": True}
    front_end = {key: value for key, value in front_end.items() if key != "mel_filters"}
    (directory / "preprocessor_config.json").write_text(json.dumps(front_end, indent=2) + "\n")


_IMAGES: Final = {  # unused; there so that the family's processor can be built from the directory
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5OmniProcessor",
    "merge_size": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "min_pixels": 3136,
    "max_pixels": 12845056,
}


def parts(model: Any) -> tuple[Any, Any]:
    """The audio tower and the text model, wherever this version of transformers keeps them."""
    inner = model.model
    if hasattr(model, "audio_tower"):
        return model.audio_tower, inner
    return inner.audio_tower, inner.language_model


def parameters(model: nn.Module) -> int:
    """How many weights the model has (tied ones once)."""
    return sum(p.numel() for p in model.parameters())


def hear(tower: Any, mels: Tensor, frames: Tensor) -> Tensor:
    """The audio tower over a batch, equal to its own forward but without a loop over clips.

    Args:
        mels: float [B, 128, T], T a multiple of 200, zero beyond each clip's end.
        frames: int [B], the frames of each clip.

    Returns:
        float [B, T // 4, width]; of each row the first `audio_tokens(frames)` are valid.
    """
    batch, bins, total = mels.shape
    chunks = total // CHUNK
    x = mels.reshape(batch, bins, chunks, CHUNK).transpose(1, 2).reshape(-1, bins, CHUNK)
    lengths = (frames[:, None] - torch.arange(chunks, device=mels.device) * CHUNK).clamp(0, CHUNK).flatten()
    inside = (torch.arange(CHUNK, device=mels.device) < lengths[:, None])[:, None]
    x = functional.gelu(tower.conv1(x)) * inside
    x = functional.gelu(tower.conv2(x)).transpose(1, 2)
    x = x + tower.positional_embedding.positional_embedding[: x.shape[1]].to(x.dtype)
    steps = torch.arange(x.shape[1], device=mels.device)
    visible = (steps < ((lengths[:, None] - 1) // 2 + 1)) | (steps == 0)  # step 0: an empty chunk must see something
    for layer in tower.layers:
        x = _audio_layer(layer, x, visible[:, None, None])
    x = x.reshape(batch, -1, 2, x.shape[-1]).mean(2)
    return tower.proj(tower.ln_post(x))


def _audio_layer(layer: Any, x: Tensor, visible: Tensor) -> Tensor:
    attention, y = layer.self_attn, layer.self_attn_layer_norm(x)
    heads = attention.num_heads
    q, k, v = (
        p(y).unflatten(-1, (heads, -1)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    x = x + attention.out_proj(mixed.transpose(1, 2).flatten(2))
    y = layer.final_layer_norm(x)
    out: Tensor = x + layer.fc2(functional.gelu(layer.fc1(y)))
    return out


def logits(model: Any, audio_id: int, ids: Tensor, mels: Tensor, frames: Tensor, last: int | None = None) -> Tensor:
    """Logits of right-padded sequences, one recording each: float [B, S, V], or [B, last, V] of the last positions."""
    tower, text = parts(model)
    heard = hear(tower, mels, frames)
    embeds = text.embed_tokens(ids)
    place = ids == audio_id
    index = (place.cumsum(1) - 1).clamp(0, heard.shape[1] - 1)
    spread = heard.gather(1, index[:, :, None].expand(-1, -1, heard.shape[2])).to(embeds.dtype)
    embeds = torch.where(place[:, :, None], spread, embeds)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(3, ids.shape[0], -1)
    out = text(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
    return model.lm_head(out if last is None else out[:, -last:])
