"""Attention over the KV cache without copies of it.

Where several query heads share one key/value head, transformers' own path (`sdpa`, with a mask) first repeats keys and
values for each query head, which copies the whole cache, per layer and per forward. Here the query heads of a group
become further query rows instead:

    query [B, groups × H, T, D]  →  [B, H, groups × T, D]
    keys, values [B, H, span, D]    as they lie in the cache

On a CPU, the rows of a batch are attended to one by one, each over a view of its own sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.errors import ModelError

ATTENTION_NAME = "outrider_grouped"
BY_ROW_TYPES = ("qwen2", "llama", "mistral", "qwen3", "qwen2_5_omni_text")  # they pass keys and values on untouched
WINDOWED_NAME = "outrider_flash_windows"  # transformers passes the windows to implementations with "flash" in the name
MAX_FOLDED_TOKENS = 64  # per sequence: folding repeats the mask, which in a long prefill outgrows the saved copy


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | list[Tensor],
    value: Tensor | list[Tensor],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' `sdpa` does, folded for few tokens with grouped heads and an additive mask.

    query [B, heads, T, D], key and value [B, KV heads, span, D], attention_mask [B, 1, T, span] → [B, T, heads, D]
    key and value may be lists of each row's own, [1, KV heads, ≤ span, D].
    """
    if isinstance(key, list) or isinstance(value, list):
        assert attention_mask is not None
        rows = [
            grouped_attention(
                module, query[n : n + 1], own, other, attention_mask[n : n + 1, ..., : own.shape[2]], **kwargs
            )
            for n, (own, other) in enumerate(zip(key, value, strict=True))
        ]
        return torch.cat([out for out, _ in rows]), None
    if not _can_fold(query, key, attention_mask, kwargs):
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    assert attention_mask is not None
    batch, heads, tokens, dim = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * tokens, dim)
    mask = attention_mask.to(query.dtype).repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, mask, scale=kwargs.get("scaling"))
    return out.reshape(batch, heads, tokens, value.shape[-1]).transpose(1, 2).contiguous(), None


def windowed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    max_length_q: int,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention within windows of `max_length_q` positions, of which the last may be shorter, as one batch.

    For each window and layer, transformers' own path calls an attention function, and waits for the GPU.

    query, key, value [1, heads, T, D] → [1, T, heads, D]
    """
    _, heads, total, dim = query.shape
    whole = total - total % max_length_q
    parts = []
    for begin, end, width in ((0, whole, max_length_q), (whole, total, total - whole)):
        if begin < end:
            q, k, v = (
                each[0, :, begin:end].reshape(heads, -1, width, dim).transpose(0, 1) for each in (query, key, value)
            )
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling)
            parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[None], None


def _can_fold(query: Tensor, key: Tensor, mask: Tensor | None, kwargs: Mapping[str, object]) -> bool:
    """Return whether folding applies. Only this engine's forwards have an additive mask.

    Other changes of the scores, such as a soft cap, are left to transformers.
    """
    if mask is None or not mask.is_floating_point() or mask.shape[1] != 1:
        return False
    if any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux")):
        return False
    return query.shape[1] > key.shape[1] and query.shape[2] <= MAX_FOLDED_TOKENS


def configure_attention(model: PreTrainedModel, language: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Make the model accept 4-D masks, and grouped heads without a copy. Return whether its masks are additive."""
    current = getattr(model.config, "_attn_implementation", "eager")
    if current == "eager":
        return True
    if current != "sdpa":
        model.set_attn_implementation("sdpa")
    grouped = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) < config.num_attention_heads
    if grouped:
        language.set_attn_implementation(ATTENTION_NAME)
    return grouped


def batch_audio_windows(model: PreTrainedModel, tower: nn.Module) -> None:
    """Let the audio encoder of Qwen2.5-Omni compute its windows as one batch, if its attention is `sdpa`."""
    config: Any = tower.config
    if "Omni" in type(model).__name__ and config._attn_implementation == "sdpa":
        config._attn_implementation = WINDOWED_NAME


def visible_keys(
    positions: Tensor, span: int, windows: Mapping[str, int | None], additive: torch.dtype | None
) -> dict[str, Tensor]:
    """Return the mask of visible keys for queries at `positions` [B, T], [B, 1, T, span], per kind of attention layer.

    additive: dtype of an additive mask. None: the mask is boolean.
    """
    keys, queries = torch.arange(span, device=positions.device), positions[:, None, :, None]
    masks = {}
    for kind, window in windows.items():
        visible = keys <= queries
        if window is not None:
            visible = visible & (keys > queries - window)
        if additive is not None:
            zeros = torch.zeros(visible.shape, dtype=additive, device=positions.device)
            visible = zeros.masked_fill(~visible, torch.finfo(additive).min)
        masks[kind] = visible
    return masks


def attention_windows(config: PretrainedConfig, name: str) -> dict[str, int | None]:
    """Return the attention kinds of the layers, with their sliding windows.

    Raises:
        ModelError: a layer of another kind, as its state cannot be rolled back.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    kinds |= set(getattr(config, "attention_layers", ())) & {"local"}  # GPT-Neo masks by buffer offset, not by slot
    unsupported = kinds - {"full_attention", "sliding_attention"}
    if unsupported:
        raise ModelError(f"{name}: layers of kind {', '.join(sorted(unsupported))} cannot be rolled back slot by slot")
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, grouped_attention)
ALL_ATTENTION_FUNCTIONS.register(WINDOWED_NAME, windowed_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
