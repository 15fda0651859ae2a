"""The decoder layers of a Llama-shaped model (Llama, Mistral, Qwen2, Qwen3, Qwen2.5-Omni's Thinker), fused for a GPU.

transformers' own forward launches some 15 kernels a layer. This one launches 7 for one or two tokens, otherwise 10, on
flat batches without padding, and reads only the occupied part of the cache. The engine's self-test proves at load that
it computes the same logits:

    x  →  norm · qkv  →  rotate, store  →  attend, combine  →  + out  →  norm · gate, up  →  + down  →  x

The projections of queries, keys and values are merged into one weight, and so are gate and up. The model's parameters
become views of the merged weights, so that memory is held once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from outrider.engines.base import SequenceInput
from outrider.engines.torch.kv_cache import SlotKVCache

MODEL_TYPES = ("qwen2", "llama", "mistral", "qwen3", "qwen2_5_omni_text")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")
MAX_CAPTURED_TOKENS = 1024  # a forward of more tokens takes longer than the launches of its kernels
MAX_TOKENS = 2048  # of one forward: a longer prefill is computed in parts, as its activations take memory
FUSED_PREFILL_CHUNK = (
    512  # takes 1.5 times as long as a round of 32 blocks on an H200: smaller ones cost more per token
)
OVERLAP_TOKENS = 256  # of a forward bound by arithmetic, whose halves take little longer together
TARGET_PROGRAMS = 132  # one on each multiprocessor of a large GPU
HEADS_PER_PROGRAM = 4  # of `rotate_and_store`
MIN_SPAN, MIN_CHUNK = 256, 64
LOG2E = 1.4426950408889634


def unsupported_reason(model: PreTrainedModel, language: Any, head: object, config: PretrainedConfig) -> str | None:
    """Return the reason why `FusedModel` cannot run a model, or None if it can."""
    if config.model_type not in MODEL_TYPES:
        return f"it is a {config.model_type}"
    checks = {
        f"its weights are {model.dtype}, not bfloat16": model.dtype == torch.bfloat16,
        "it has sliding windows": set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and not (config.model_type == "mistral" and config.sliding_window),
        "its layers are not on one device": len({p.device for p in model.parameters()}) == 1,
        "its projections are not plain": all(type(part) is nn.Linear for part in _linear_layers(language)),
        "its output or MLP projections have biases": all(
            part.bias is None
            for layer in language.layers
            for part in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        ),
        f"its activation is {config.hidden_act}": config.hidden_act == "silu",
        "it has forward hooks": not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()),
        "its output layer is not plain": type(head) is nn.Linear and head.bias is None,
        "its rotary embedding changes with length": getattr(language.rotary_emb, "rope_type", "") in STATIC_ROPES,
        "its rotary embedding is partial, or its heads are no power of two": (
            2 * len(language.rotary_emb.inv_freq) == _head_dim(config) in (32, 64, 128, 256)
        ),
    }
    return next((reason for reason, holds in checks.items() if not holds), None)


def missing_requirement(device: torch.device) -> str | None:
    """Return the requirement of `FusedModel` that the machine does not meet, or None."""
    if torch.version.hip is not None:
        return "its kernels were written for CUDA"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return None


def _linear_layers(language: Any) -> list[nn.Module]:
    return [
        getattr(owner, f"{name}_proj")
        for layer in language.layers
        for owner, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down")))
        for name in names
    ]


def _head_dim(config: PretrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True)
class BatchShape:
    """Sizes that one captured graph serves, each rounded up.

    tokens, sequences: of the batch. longest: new tokens of the longest sequence. rows: positions with logits.
    span: positions that the longest cache holds afterwards.
    """

    tokens: int
    sequences: int
    longest: int
    rows: int
    span: int

    @classmethod
    def of(cls, counts: Seq[int], rows: int, span: int) -> BatchShape:
        """Return the smallest shape that holds a batch. counts: new tokens of each sequence."""
        return cls(
            _round_size(sum(counts)),
            _next_power_of_two(len(counts)),
            _next_power_of_two(max(counts)),
            _round_size(rows),
            max(MIN_SPAN, _next_power_of_two(span)),
        )

    @property
    def num_entries(self) -> int:
        """Number of int32 entries that describe a batch of this shape (`Batch`)."""
        return 3 * self.tokens + 4 * self.sequences + self.rows


@dataclass(frozen=True)
class Batch:
    """A batch as the kernels read it: views of one int32 tensor, so that one copy brings it to the device.

    ids, positions, token_bases: [tokens]. firsts, counts, starts, bases: [sequences]. kept: [rows], indices of the
    tokens with logits to keep. A base is the index of a sequence's first position in the cache's buffers.
    """

    shape: BatchShape
    all: Tensor
    ids: Tensor
    positions: Tensor
    token_bases: Tensor
    firsts: Tensor
    counts: Tensor
    starts: Tensor
    bases: Tensor
    kept: Tensor

    @classmethod
    def allocate(cls, device: torch.device, shape: BatchShape) -> Batch:
        """Return a batch of zeros on the device."""
        entries = torch.zeros(shape.num_entries, dtype=torch.int32, device=device)
        sizes = [shape.tokens] * 3 + [shape.sequences] * 4 + [shape.rows]
        return cls(shape, entries, *torch.split(entries, sizes))


@dataclass(frozen=True)
class Media:
    """Embeddings of recordings, [P, hidden], and the indices of their tokens in the flat batch, int64 [P]."""

    indices: Tensor
    embeds: Tensor


def pack_batch(shape: BatchShape, inputs: Seq[SequenceInput], starts: Seq[int], bases: Seq[int]) -> Tensor:
    """Return the entries of a `Batch`, int32 [shape.num_entries], on the host. Padding has base −1 and no tokens."""
    tokens, sequences = shape.tokens, shape.sequences
    entries = np.zeros(shape.num_entries, dtype=np.int32)
    entries[2 * tokens : 3 * tokens] = -1
    if inputs:
        ids = [token for seq_input in inputs for token in seq_input.ids]
        counts = np.array([len(seq_input.ids) for seq_input in inputs])
        kept = np.array([seq_input.logits_to_keep for seq_input in inputs])
        places = np.array(bases)
        ends, first_positions = counts.cumsum(), np.array(starts)
        index = np.arange(len(ids))
        parts = (
            (0, ids),
            (tokens, index + np.repeat(first_positions - ends + counts, counts)),
            (2 * tokens, np.repeat(places, counts)),
            (3 * tokens, ends - counts),
            (3 * tokens + sequences, counts),
            (3 * tokens + 2 * sequences, first_positions),
            (3 * tokens + 3 * sequences, places),
            (3 * tokens + 4 * sequences, index[: kept.sum()] + np.repeat(ends - kept.cumsum(), kept)),
        )
        for offset, part in parts:
            entries[offset : offset + len(part)] = part
    return torch.from_numpy(entries)


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _num_splits(programs: int, span: int) -> int:
    """Return the number of chunks of keys, a power of two, that keeps the GPU busy."""
    return min(_next_power_of_two(max(1, TARGET_PROGRAMS // programs) + 1) // 2, span // MIN_CHUNK)


def _round_size(size: int) -> int:
    """Round up to a power of two, then a multiple of 16, or of 64, so that few graphs serve all sizes."""
    if size <= 16:
        return _next_power_of_two(size)
    step = 64 if 256 < size <= MAX_CAPTURED_TOKENS else 16
    return -(-size // step) * step


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer. qkv: [(heads + 2 KV heads) · dim, hidden]. gate_up: [2 inner, hidden]."""

    input_norm: Tensor
    qkv: Tensor
    bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [part.bias for part in qkv]
        return cls(
            layer.input_layernorm.weight,
            _merge_weights([part.weight for part in qkv]),
            None if biases[0] is None else _merge_weights(biases),
            attention.q_norm.weight if hasattr(attention, "q_norm") else None,
            attention.k_norm.weight if hasattr(attention, "k_norm") else None,
            attention.o_proj.weight.data,
            layer.post_attention_layernorm.weight,
            _merge_weights([mlp.gate_proj.weight, mlp.up_proj.weight]),
            mlp.down_proj.weight.data,
        )


def _merge_weights(weights: list[nn.Parameter]) -> Tensor:
    """Merge several parameters into one tensor, of which they become views: a change to one changes it."""
    merged = torch.cat([weight.data for weight in weights])
    for weight, view in zip(weights, torch.split(merged, [len(weight) for weight in weights]), strict=True):
        weight.data = view
    return merged


class FusedModel:
    """The decoder, from token ids to logits. It writes keys and values into a cache, and moves no lengths."""

    def __init__(self, language: Any, head: nn.Linear, config: PretrainedConfig) -> None:
        from outrider.engines.torch import kernels  # needs Triton, which a machine without a GPU may lack

        self._kernels = kernels
        self.row_count = int(config.vocab_size)
        device = head.weight.device
        early_launch = (
            kernels.HAS_EARLY_LAUNCH and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        )
        self._launch_options = {"EARLY": early_launch, "launch_pdl": True} if early_launch else {"EARLY": False}
        self._config, self._rotary = config, language.rotary_emb
        self.heads, self.dim = int(config.num_attention_heads), _head_dim(config)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.heads)
        self._eps = float(config.rms_norm_eps)
        self._embedding, self._head = language.embed_tokens.weight, head.weight
        self._layers = [_Layer.of(layer) for layer in language.layers]
        self._norm = language.norm.weight
        self._hidden, self._inner = int(config.hidden_size), int(config.intermediate_size)
        self._tables: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def prepare(self, cache: SlotKVCache) -> tuple[Tensor | None, ...]:
        """Allocate the cache's buffers and the rotary tables. A captured forward cannot.

        Returns the tensors that forwards read at fixed addresses.
        """
        cache.ensure_capacity(self.kv_heads, self.dim, self._embedding)
        if self._tables is None or len(self._tables[0]) < cache.capacity:
            device = self._embedding.device
            positions = torch.arange(cache.capacity, device=device)[None]
            if "omni" in self._config.model_type:  # multimodal RoPE has three axes
                positions = positions.expand(3, 1, -1)
            cosines, sines = self._rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)
            half = self.dim // 2
            self._tables = tuple(
                table.reshape(-1, cache.capacity, self.dim)[0, :, :half].float().contiguous()
                for table in (cosines, sines)
            )
        return cache.addresses, cache.tokens, *self._tables

    def forward(self, batch: Batch, cache: SlotKVCache, media: Media | None = None) -> Tensor:
        """Return the logits after the kept tokens, [shape.rows, V] in the model's dtype.

        media: embeddings that replace those of some tokens.
        """
        kernels, n = self._kernels, batch.shape.tokens
        x = torch.empty(n, self._hidden, dtype=self._embedding.dtype, device=self._embedding.device)
        assert cache.tokens is not None
        assert cache.addresses is not None
        kernels.embed[(n,)](
            batch.ids, self._embedding, x, batch.positions, batch.token_bases, cache.tokens, self._hidden,
            _next_power_of_two(self._hidden), **self._launch_options,
        )  # fmt: skip
        if media is not None:
            x.index_copy_(0, media.indices, media.embeds.to(x.dtype))
        for layer, buffers in zip(self._layers, cache.addresses, strict=True):
            attended = self._attention(layer, x, buffers, batch)
            self._add_projection(x, attended, layer.out)
            self._add_projection(x, self._gated_mlp(layer, x), layer.down)
        kept = x if n == batch.shape.rows == 1 else x.index_select(0, batch.kept)
        return self._norm_linear(kept, self._norm, self._head, None)

    # Attention ----------------------------------------------------------------------------------------------

    def _attention(self, layer: _Layer, x: Tensor, buffers: Tensor, batch: Batch) -> Tensor:
        """Return the attention's output before the output projection, [N, heads · dim]."""
        kernels, n = self._kernels, batch.shape.tokens
        assert self._tables is not None
        qkv = self._norm_linear(x, layer.input_norm, layer.qkv, layer.bias)
        kernels.rotate_and_store[(n, -(-(self.heads + 2 * self.kv_heads) // HEADS_PER_PROGRAM))](
            qkv, *self._tables, layer.query_norm, layer.key_norm, buffers, batch.positions, batch.token_bases,
            self._eps, self.heads, self.kv_heads, self.dim, layer.query_norm is not None,
            HEADS_PER_PROGRAM, num_warps=2, **self._launch_options,
        )  # fmt: skip
        rows, groups = batch.shape.longest * (self.heads // self.kv_heads), batch.shape.sequences * self.kv_heads
        tile, step, warps, stages = kernels.attend_tiling(rows, groups)
        blocks = -(-rows // tile)
        splits = _num_splits(groups * blocks, batch.shape.span)
        out = x.new_empty(n, self.heads * self.dim)
        partial = x.new_empty(n, self.heads, splits if splits > 1 else 0, self.dim, dtype=torch.float32)
        maxima, sums = x.new_empty(2, n, self.heads, splits, dtype=torch.float32)
        kernels.attend[(groups, splits, blocks)](
            qkv, buffers, out, partial, maxima, sums, batch.firsts, batch.counts, batch.starts, batch.bases,
            batch.shape.span // splits, LOG2E * self.dim**-0.5, self.heads, self.kv_heads, self.dim, splits,
            tile, step, num_warps=warps, num_stages=stages, **self._launch_options,
        )  # fmt: skip
        if splits > 1:
            kernels.combine[(n * self.heads,)](
                partial, maxima, sums, batch.token_bases, out, self.heads, self.dim, splits, **self._launch_options
            )
        return out

    def top2(self, rows: Tensor) -> Tensor:
        """Return float64 [R, 3] for logits [R, V]: index of the largest entry, the entry, and its top-2 margin."""
        count, width = rows.shape
        splits = max(1, min(128, _next_power_of_two(8 * TARGET_PROGRAMS // count)))
        parts = torch.empty(count, 3, splits, dtype=torch.float32, device=rows.device)
        out = torch.empty(count, 3, dtype=torch.float64, device=rows.device)
        self._kernels.partial_top2[(count, splits)](
            rows, parts, width, rows.stride(0), -(-width // splits), splits, 2048
        )
        self._kernels.merge_top2[(count,)](parts, out, splits, num_warps=1)
        return out

    # Matrix products ----------------------------------------------------------------------------------------

    def _norm_linear(self, x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) <= self._kernels.SKINNY_TOKENS:
            return self._skinny_linear(x, weight, bias=bias, norm=norm)
        return nn.functional.linear(self._rms_norm(x, norm), weight, bias)

    def _gated_mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        """Return silu(gate) × up, [N, inner]."""
        if len(x) <= self._kernels.SKINNY_TOKENS:
            return self._skinny_linear(x, layer.gate_up, norm=layer.post_attention_norm, gated=True)
        gate_up = nn.functional.linear(self._rms_norm(x, layer.post_attention_norm), layer.gate_up)
        out = x.new_empty(len(x), self._inner)
        self._kernels.silu_and_mul[(len(x), -(-self._inner // 1024))](
            gate_up, out, self._inner, 1024, **self._launch_options
        )
        return out

    def _add_projection(self, x: Tensor, part: Tensor, weight: Tensor) -> None:
        """Compute x += part @ weightᵀ, in place."""
        if len(x) <= self._kernels.SKINNY_TOKENS:
            self._skinny_linear(part, weight, add_to=x)
        else:
            torch.addmm(x, part, weight.t(), out=x)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._kernels.rms_norm[(len(x),)](
            x, weight, out, self._eps, self._hidden, _next_power_of_two(self._hidden), **self._launch_options
        )
        return out

    def _skinny_linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        norm: Tensor | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
    ) -> Tensor:
        size, width = weight.shape[1], len(weight) // (2 if gated else 1)
        out = x.new_empty(len(x), width) if add_to is None else add_to
        stripe, depth, warps, stages = self._kernels.skinny_tiling(len(x), width, size, gated)
        self._kernels.skinny_linear[(-(-width // stripe),)](
            x, weight, bias, norm, out, size, width, self._eps, bias is not None, norm is not None, gated,
            add_to is not None, len(x), stripe, depth, stages, num_warps=warps, **self._launch_options,
        )  # fmt: skip
        return out
