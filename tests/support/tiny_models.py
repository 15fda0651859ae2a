"""Tiny random models of the supported families, tokenizers for them, and plain `generate` as the reference.

Weights are drawn with a large spread, so that outputs are varied and the best logit leads the second by far more
than float32 noise; vocabularies are small, so that EOS, repeats and stop strings happen within a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from outrider.engines.torch.engine import TorchEngine

VOCAB = 96
AUDIO, AUDIO_START, AUDIO_END = 1, 4, 7  # token ids of the audio models
CLIP_SECONDS = 2
STD = 0.4

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_GEMMA = {**_TEXT, "num_hidden_layers": 2, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 6}
_MIXED = ["sliding_attention", "full_attention"]


def _config(family: str, vocab: int) -> Any:
    text = {**_TEXT, "vocab_size": vocab}
    match family:
        case "qwen2":
            return transformers.Qwen2Config(**text)
        case "qwen2-mixed":
            window = {"use_sliding_window": True, "sliding_window": 6, "num_hidden_layers": 2, "layer_types": _MIXED}
            return transformers.Qwen2Config(**{**text, **window})
        case "llama":
            return transformers.LlamaConfig(**text)
        case "phi":
            return transformers.PhiConfig(**text)
        case "mistral":
            return transformers.MistralConfig(**{**text, "num_hidden_layers": 2}, sliding_window=6)
        case "gemma2":
            return transformers.Gemma2Config(**{**_GEMMA, "vocab_size": vocab}, layer_types=_MIXED)
        case "gemma3":
            return transformers.Gemma3TextConfig(**{**_GEMMA, "vocab_size": vocab}, layer_types=_MIXED)
        case "omni":
            return omni_config(text)
        case "qwen2-audio":
            return _qwen2_audio(text)
    raise ValueError(family)


def omni_config(text: dict[str, Any]) -> Any:
    """Return the configuration of a tiny thinker around a language model of these sizes."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniThinkerConfig

    hidden, head = text["hidden_size"], text["hidden_size"] // text["num_attention_heads"]
    sections = [head // 2 - 2 * (head // 6), head // 6, head // 6]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    config = Qwen2_5OmniThinkerConfig(
        audio_config={
            "num_mel_bins": 128,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 16,
            "output_dim": hidden,
            "n_window": 50,
            "max_source_positions": 200,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "fullatt_block_indexes": [0],
        },
        text_config={**text, "num_hidden_layers": 2, "rope_parameters": rope},
        audio_token_index=AUDIO,
        image_token_index=5,
        video_token_index=6,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
    )
    config.vision_start_token_id, config.vision_end_token_id = 8, 9
    return config


def _qwen2_audio(text: dict[str, Any]) -> Any:
    return transformers.Qwen2AudioConfig(
        audio_config={
            "num_mel_bins": 128,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 16,
            "max_source_positions": 50 * CLIP_SECONDS,
        },
        text_config={"model_type": "qwen2", **text},
        audio_token_index=AUDIO,
    )


_CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen2-mixed": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi": "PhiForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen2-audio": "Qwen2AudioForConditionalGeneration",
}


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # inference tensors have no gradient, in whichever test a model is first needed
def tiny_model(
    family: str, seed: int = 0, *, drift: float = 0.0, vocab: int = VOCAB, dtype: torch.dtype = torch.float32
) -> Any:
    """A random model; with `drift`, the weights of that seed with noise on them: a drafter that is often right.

    Equal arguments give the same object: treat it as read-only.
    """
    torch.manual_seed(seed)
    model = getattr(transformers, _CLASSES[family])(_config(family, vocab))
    generator = torch.Generator().manual_seed(1000 + seed)
    noise = torch.Generator().manual_seed(2000 + seed)
    for name, weight in model.named_parameters():
        scale = STD if weight.dim() > 1 else 0.0 if "norm" in name else 0.1
        if scale:
            weight.data = torch.randn(weight.shape, generator=generator) * scale
            weight.data += torch.randn(weight.shape, generator=noise) * scale * drift
    if family == "phi":  # all its logits are negative, as in many real models: penalties must know the sign
        model.lm_head.bias.data -= 15.0
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model.eval().to(dtype)


@lru_cache(maxsize=256)
def tiny_engine(
    family: str,
    seed: int = 0,
    *,
    eos: tuple[int, ...] = (),
    tokenizer: Any = None,
    drift: float = 0.0,
    vocab: int = VOCAB,
    dtype: torch.dtype = torch.float32,
) -> TorchEngine:
    """An engine of that model, shared between tests. A test that needs all slots takes `new_engine`."""
    model = tiny_model(family, seed, drift=drift, vocab=vocab, dtype=dtype)
    model.generation_config.eos_token_id = list(eos) or None
    extractor = feature_extractor(family) if family in ("omni", "qwen2-audio") else None
    engine = TorchEngine(model, tokenizer, extractor, name=f"tiny {family} {seed}")
    model.generation_config.eos_token_id = None  # the reference gets its EOS ids as an argument
    return engine


def new_engine(family: str) -> TorchEngine:
    """Return an engine that no other test shares."""
    return tiny_engine.__wrapped__(family)


@torch.inference_mode()
def reference(model: Any, prompt: Seq[int], *, max_new_tokens: int = 16, **settings: Any) -> list[int]:
    """What transformers' own greedy `generate` adds to the prompt, with its own cache and its own rules."""
    ids = torch.tensor([list(prompt)])
    settings = {name: value for name, value in settings.items() if isinstance(value, torch.Tensor) or value}
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        **settings,
    )
    return out[0, len(prompt) :].tolist()


# Tokenizers -------------------------------------------------------------------------------------------------

SPECIALS = [
    f"<{name}>" for name in ("pad", "audio", "bos", "eos", "audio_start", "image", "video", "audio_end", "vs", "ve")
]
_CHARACTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", *".,!?"]  # Ġ and Ċ: space and newline in byte-level spelling
_PAIRED = "thheineranreonatenndtiesorteofedisitalarsttontngsehaasouiolevecomedehiriroicneearacelichllbemasiomur"
_PAIRS = [_PAIRED[n : n + 2] for n in range(0, len(_PAIRED), 2)]
_TRIPLES = {"the": ("th", "e"), "ing": ("in", "g"), "and": ("an", "d"), "ion": ("io", "n")}
_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'audio' %}<audio_start><audio><audio_end>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}<bos>"
)


@lru_cache
def subword_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly 96 tokens: specials, letters, common pairs and a few triples."""
    tokens = [*SPECIALS, *_CHARACTERS, *_PAIRS, *_TRIPLES]
    merges = [*((pair[0], pair[1]) for pair in _PAIRS), *_TRIPLES.values()]
    return _bpe({token: n for n, token in enumerate(tokens)}, merges)


@lru_cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (ids 10 to 265), after the specials: every character beyond ASCII takes several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _bpe({token: n for n, token in enumerate([*SPECIALS, *letters])}, [])


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, additional_special_tokens=SPECIALS, chat_template=_TEMPLATE, pad_token="<pad>"
    )


# Recordings -------------------------------------------------------------------------------------------------


@lru_cache
def feature_extractor(family: str) -> WhisperFeatureExtractor:
    """As in the family's checkpoints, but for clips of at most two seconds (Qwen2-Audio) or ten (Omni)."""
    return WhisperFeatureExtractor(feature_size=128, chunk_length=10 if family == "omni" else CLIP_SECONDS)


def clip(seconds: float, seed: int = 0) -> np.ndarray:
    """float32 [samples] at 16 kHz: a warbling tone in noise."""
    time = np.arange(int(seconds * 16_000)) / 16_000
    noise = np.random.default_rng(seed).normal(size=len(time))
    return (0.3 * np.sin(2 * np.pi * (200 + 50 * seed + 80 * time) * time) + 0.05 * noise).astype(np.float32)


def reference_audio(model: Any, prompt: Seq[int], family: str, waveform: np.ndarray, **settings: Any) -> list[int]:
    """`reference` for an expanded prompt with a recording, prepared as the family's own processor does."""
    features = feature_extractor(family)(
        waveform, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    inputs = {"input_features": features["input_features"], "feature_attention_mask": features["attention_mask"]}
    return reference(model, prompt, **inputs, **settings)
