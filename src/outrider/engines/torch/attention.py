"""Attention over grouped key/value heads that does not copy the cache.

Where several query heads share one key/value head, transformers' own path (`sdpa`, with a mask) first repeats keys and
values for each query head: a copy of all that is cached, per layer and per forward. Here the query heads of a group
become further query rows instead:

    query [B, groups × H, T, D]  →  [B, H, groups × T, D];  keys, values [B, H, span, D] as they lie in the cache
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "outrider_grouped"
MAX_FOLDED_TOKENS = 64  # of a row: folding repeats the mask, which in a long prefill outgrows what it saves


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' `sdpa`, which it calls for all but few tokens, grouped heads and our additive mask.

    query [B, heads, T, D], key and value [B, shared heads, span, D], attention_mask [B, 1, T, span] → [B, T, heads, D]
    """
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


def _can_fold(query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Only our own forwards bring an additive mask; what changes the scores otherwise is left to transformers."""
    if mask is None or not mask.is_floating_point() or mask.shape[1] != 1:
        return False
    if any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux")):
        return False
    return query.shape[1] > key.shape[1] and query.shape[2] <= MAX_FOLDED_TOKENS


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
