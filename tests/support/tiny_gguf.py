"""Tiny random models as `.gguf` files in float32, and the same weights in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.tiny_text_models import VOCAB, model

EOS = 2
_SPECIALS = ["<pad>", "<s>", "</s>"]
_CHARACTERS = [chr(code) for code in range(33, 33 + VOCAB - len(_SPECIALS) - 4)]
_MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n")]
TOKENS = [*_SPECIALS, *_CHARACTERS, *("".join(pair) for pair in _MERGES)]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}</s>"

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_qwen2(path: Path, seed: int = 0, *, named: bool = True, eos: int | None = EOS) -> Path:
    """`tiny.model("qwen2", seed)`; with `has_vocabulary`, it has a byte-level vocabulary of VOCAB tokens."""
    made = model("qwen2", seed)
    config = made.config
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_vocabulary(writer, named, eos)
    for name, weight in made.state_dict().items():
        writer.add_tensor(_gguf_name(name), weight.numpy())
    return _written(writer, path)


def write_mamba(path: Path, width: int = 32, state: int = 4, rank: int = 2) -> Path:
    """A recurrent model: its state has no length."""
    writer = gguf.GGUFWriter(str(path), "mamba")
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(1)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(2 * width)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_vocabulary(writer, named=False, eos=None)
    inner = 2 * width
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ssm_in.weight": (2 * inner, width),
        "blk.0.ssm_conv1d.weight": (inner, 4),
        "blk.0.ssm_conv1d.bias": (inner,),
        "blk.0.ssm_x.weight": (rank + 2 * state, inner),
        "blk.0.ssm_dt.weight": (inner, rank),
        "blk.0.ssm_dt.bias": (inner,),
        "blk.0.ssm_a": (inner, state),
        "blk.0.ssm_d": (inner,),
        "blk.0.ssm_out.weight": (width, inner),
    }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = random.normal(0, 0.3, shape).astype(np.float32)
        writer.add_tensor(name, -np.abs(values) if name.endswith("ssm_a") else values)
    return _written(writer, path)


def _add_vocabulary(writer: Any, named: bool, eos: int | None) -> None:
    if not named:
        writer.add_vocab_size(VOCAB)
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(_SPECIALS) + [1] * (len(TOKENS) - len(_SPECIALS)))
    writer.add_token_merges([" ".join(pair) for pair in _MERGES])
    writer.add_chat_template(TEMPLATE)
    if eos is not None:
        writer.add_eos_token_id(eos)


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{_BLOCK[part]}.{kind}"


def _written(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
