"""Model families of transformers: how to compute logits, and how audio embeddings enter the prompt."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from outrider.engines.base import Prompt
from outrider.engines.torch.kv_cache import SlotKVCache
from outrider.errors import ModelError, PromptError

MaskLike = Tensor | dict[str, Tensor]
MaskedMedia = tuple[Tensor, Tensor]  # of a batch: their positions, bool [B, T], and [positions, hidden]


class TextModel:
    """A decoder-only causal language model: AutoModelForCausalLM."""

    audio: AudioInput | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        _require_lm_head(model)
        self.model = self.language = model
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = _cache_argument(parameters, model)
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self.decoder = model.base_model
        if "position_ids" not in parameters:
            raise ModelError(f"{type(model).__name__} takes no position_ids: its cache cannot be rolled back by slot")

    def logits(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: MaskLike,
        cache: SlotKVCache,
        columns: Tensor,
        media: MaskedMedia | None,
    ) -> Tensor:
        """Return the logits of some columns, [B, C, V], in the model's dtype.

        ids, positions: int64 [B, T]. columns: int64 [C].
        """
        kwargs: dict[str, Any] = {self._cache_argument: cache, "use_cache": True, "return_dict": True}
        if self._takes_logits_to_keep:
            kwargs["logits_to_keep"] = columns
        out = self.model(input_ids=ids, position_ids=positions, attention_mask=mask, **kwargs)
        return out.logits if self._takes_logits_to_keep else out.logits[:, columns]

    def forward_uncached(self, ids: Tensor) -> Tensor:
        """Return the logits of a plain forward without a cache, [B, T, V]."""
        return self.model(input_ids=ids, use_cache=False, return_dict=True).logits


class AudioModel(TextModel):
    """Qwen2.5-Omni Thinker and Qwen2-Audio: audio embeddings replace placeholder tokens at prefill.

    The language model is called below the multimodal wrapper, with explicit positions. The wrapper keeps rope_deltas
    on the shared module, where one session would contaminate another, and cannot skip unneeded logits.
    """

    def __init__(self, model: Any, extractor: Any) -> None:
        _require_lm_head(model)
        self.model = model
        self.language, tower = _find_audio_parts(model)
        self.decoder = self.language
        self._cache_argument = _cache_argument(inspect.signature(self.language.forward).parameters, model)
        self._has_mrope = "Omni" in type(model).__name__
        placeholder = _first_attribute(model.config, "audio_token_id", "audio_token_index")
        self.audio = AudioInput(model, tower, extractor, placeholder) if extractor is not None else None

    def logits(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: MaskLike,
        cache: SlotKVCache,
        columns: Tensor,
        media: MaskedMedia | None,
    ) -> Tensor:
        """Return the logits of some columns, [B, C, V], as `TextModel.logits` does."""
        embeds = self.model.get_input_embeddings()(ids)
        if media is not None:
            audio_mask, audio_embeds = media
            embeds = embeds.masked_scatter(audio_mask[..., None], audio_embeds.to(embeds.dtype))
        if self._has_mrope:  # time, height and width advance together for text and for audio
            positions = positions.expand(3, *positions.shape)
        kwargs: dict[str, Any] = {self._cache_argument: cache, "use_cache": True, "return_dict": True}
        out = self.language(inputs_embeds=embeds, position_ids=positions, attention_mask=mask, **kwargs)
        return self.model.lm_head(out.last_hidden_state[:, columns])

    def forward_uncached(self, ids: Tensor) -> Tensor:
        """Return the logits of a plain forward without a cache, [B, T, V]."""
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=True).logits


class AudioFeatures:
    """The part of an audio encoder that needs no weights: log-mel features of a waveform, and their placeholder tokens.

    Features are float32 [mels, frames], one frame per 10 ms begun. Qwen2-Audio's encoder takes its whole window of
    30 s, and the last valid frames attend to the padding after them. Its features therefore include `tail` frames of
    padding, the last of which is repeated up to the end of the window.
    """

    def __init__(self, extractor: Any, placeholder: int, *, whole_window: bool) -> None:
        self._extractor = extractor
        self.placeholder = placeholder
        self.sampling_rate = int(extractor.sampling_rate)
        self.mels = int(extractor.feature_size)
        self._whole_window = whole_window
        # Frames that the spectrum's window reaches into from the last sample, and one of padding only.
        self._tail = -(-extractor.n_fft // (2 * extractor.hop_length)) + 1 if self._whole_window else 0
        self._window = extractor.n_samples // extractor.hop_length

    @property
    def max_seconds(self) -> float:
        """Longest recording that the feature extractor takes. It would truncate a longer one silently."""
        return self._extractor.n_samples / self.sampling_rate

    @property
    def max_frames(self) -> int:
        """Number of frames in the longest recording's features."""
        return self._window + self._tail

    def token_count(self, samples: int) -> int:
        """Return the number of placeholders for a recording of `samples`."""
        return self.feature_tokens(-(-samples // self._extractor.hop_length) + self._tail)

    def feature_tokens(self, frames: int) -> int:
        """Return the number of placeholders for features of `frames`: a convolution and pooling halve it twice."""
        return (((frames - self._tail - 1) // 2 + 1) - 2) // 2 + 1

    def prompt_tokens(self, prompt: Prompt) -> int:
        """Return the number of placeholders for a prompt's recording or features.

        Raises:
            PromptError: features of another model, or of more frames than the model takes.
        """
        if prompt.audio is not None:
            return self.token_count(len(prompt.audio))
        return 0 if prompt.features is None else self.feature_tokens(self._check_features(prompt.features).shape[1])

    def features(self, waveform: np.ndarray) -> np.ndarray:
        """Return the features of a waveform: float32 [samples] → float32 [mels, frames].

        They equal those of the family's processor. Its own padding (300 s for Qwen2.5-Omni) would be slower.
        """
        extractor = self._extractor
        padded = -(-len(waveform) // extractor.hop_length) * extractor.hop_length + extractor.n_fft
        length = extractor.n_samples if self._whole_window else min(padded, extractor.n_samples)
        out = extractor(
            waveform,
            sampling_rate=self.sampling_rate,
            padding="max_length",
            max_length=length,
            return_attention_mask=True,
            return_tensors="np",
        )
        frames = int(out["attention_mask"].sum()) + self._tail
        return _fit_frames(out["input_features"][0].astype(np.float32), frames)

    def _check_features(self, features: np.ndarray) -> np.ndarray:
        if features.dtype != np.float32 or features.ndim != 2 or len(features) != self.mels:
            kind = f"{features.dtype} {list(features.shape)}"
            raise PromptError(f"features are float32 [{self.mels}, frames] for this model, not {kind}")
        frames = features.shape[1]
        if frames > self.max_frames or self.feature_tokens(frames) < 1:
            raise PromptError(
                f"features of {frames} frames: expected at most {self.max_frames}, and enough for one audio token"
            )
        return features


class AudioInput(AudioFeatures):
    """Audio encoder: from a waveform to features, and from features to embeddings for the placeholder tokens."""

    def __init__(self, model: Any, tower: nn.Module, extractor: Any, placeholder: int) -> None:
        super().__init__(extractor, placeholder, whole_window="Omni" not in type(model).__name__)
        self._model, self.tower = model, tower

    def embed(self, waveform: np.ndarray) -> Tensor:
        """Return the embeddings of a waveform: float32 [samples] → [token_count, hidden] in the model's dtype."""
        return self.embed_features(self.features(waveform))

    def embed_features(self, features: np.ndarray) -> Tensor:
        """Return the embeddings of features: float32 [mels, frames] → [feature_tokens, hidden] in the model's dtype."""
        weight = next(self.tower.parameters())
        valid = features.shape[1] - self._tail
        encoder_input = _fit_frames(features, self._window) if self._whole_window else features
        batch = torch.from_numpy(np.ascontiguousarray(encoder_input))[None].to(weight.device, weight.dtype)
        if self._whole_window:
            return self._embed_window(batch, torch.tensor([valid], device=weight.device))
        mask = torch.ones(1, valid, dtype=torch.long, device=weight.device)
        out = self._model.get_audio_features(batch, feature_attention_mask=mask)
        hidden = getattr(out, "last_hidden_state", out)
        return hidden if isinstance(hidden, Tensor) else torch.cat(list(hidden))

    def _embed_window(self, features: Tensor, valid: Tensor) -> Tensor:
        """Return Qwen2-Audio's embeddings of a whole window, with the padding masked out of the attention."""
        input_lengths, output_lengths = self.tower._get_feat_extract_output_lengths(valid)  # type: ignore[operator]
        size = (features.shape[-1] - 2) // 2 + 1
        hidden = torch.arange(size, device=features.device)[None, None, None, :] >= input_lengths[:, None, None, None]
        additive = torch.zeros(1, 1, size, size, dtype=features.dtype, device=features.device)
        additive = additive.masked_fill(hidden, torch.finfo(features.dtype).min)
        out = self.tower(features, attention_mask=additive).last_hidden_state
        inner_model = getattr(self._model, "model", self._model)
        return inner_model.multi_modal_projector(out)[0, : int(output_lengths[0])]


def audio_features(config: PretrainedConfig, extractor: Any) -> AudioFeatures:
    """Return the weightless part of the audio encoder of an audio family's configuration."""
    placeholder = _first_attribute(config, "audio_token_id", "audio_token_index")
    return AudioFeatures(extractor, placeholder, whole_window=config.model_type == "qwen2_audio")


def is_audio_model(model: object) -> bool:
    """Return whether a model belongs to one of the audio families."""
    return type(model).__name__ in ("Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2AudioForConditionalGeneration")


def find_decoder(model: Any) -> Any:
    """Return the language model without its output layer."""
    return _find_audio_parts(model)[0] if is_audio_model(model) else model.base_model


def read_max_length(config: PretrainedConfig) -> int | None:
    """Return the number of positions that the model was made for.

    LongRoPE changes its factors past the original length, for cached positions too and for every slot in a batch.
    Such a model is used up to its original length.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", limit
        )
    return limit


def _fit_frames(features: np.ndarray, frames: int) -> np.ndarray:
    """Return the first `frames` of [mels, …], with the last one repeated if there are fewer."""
    missing = max(0, frames - features.shape[1])
    return np.pad(features[:, :frames], ((0, 0), (0, missing)), mode="edge")


def _find_audio_parts(model: Any) -> tuple[Any, nn.Module]:
    """Return the language model and the audio tower. Versions of transformers keep them in different places."""
    holders: list[Any] = [model.model, model]
    for holder in holders:
        if hasattr(holder, "language_model"):
            return holder.language_model, holder.audio_tower
    return model.model, model.audio_tower


def _require_lm_head(model: PreTrainedModel) -> None:
    if model.get_output_embeddings() is None:
        raise ModelError(f"{type(model).__name__} has no language-model head: load it with AutoModelForCausalLM")


def _cache_argument(parameters: Collection[str], model: object) -> str:
    """Return the name of the forward's cache argument. transformers 5.24 renamed past_key_values to cache."""
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ModelError(f"{type(model).__name__} takes no KV cache: outrider needs one that can be truncated")


def _first_attribute(config: PretrainedConfig, *names: str) -> int:
    return next(getattr(config, name) for name in names if hasattr(config, name))
