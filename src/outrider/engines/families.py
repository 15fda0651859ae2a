"""The few ways in which transformers models differ for us: where logits come from, and where audio goes in."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.errors import ModelError

MaskLike = Tensor | dict[str, Tensor]


class Text:
    """A decoder-only causal language model: AutoModelForCausalLM."""

    audio: AudioInput | None = None

    def __init__(self, model: Any) -> None:
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = _cache_name(parameters, model)
        self._keeps_rows = "logits_to_keep" in parameters
        if "position_ids" not in parameters:
            raise ModelError(f"{type(model).__name__} takes no position_ids: its cache cannot be rolled back by slot")

    def logits(
        self, ids: Tensor, positions: Tensor, mask: MaskLike, cache: Any, rows: int, media: Any = None
    ) -> Tensor:
        """Logits of the last `rows` positions, [B, rows, V], in the model's dtype. ids, positions: int64 [B, T]."""
        kwargs: dict[str, Any] = {self._cache_name: cache, "use_cache": True, "return_dict": True}
        if self._keeps_rows:
            kwargs["logits_to_keep"] = rows
        out = self.model(input_ids=ids, position_ids=positions, attention_mask=mask, **kwargs)
        return out.logits[:, -rows:]

    def reference(self, ids: Tensor) -> Tensor:
        """Logits of a plain forward without any cache, [B, T, V]."""
        return self.model(input_ids=ids, use_cache=False, return_dict=True).logits


class AudioLanguage(Text):
    """Qwen2.5-Omni Thinker and Qwen2-Audio: audio embeddings take the place of placeholder tokens at prefill.

    The language model is called below the multimodal wrapper, with explicit positions: the wrapper keeps rope_deltas
    on the shared module, where one session would contaminate another, and has no way to skip unneeded logits.
    """

    def __init__(self, model: Any, extractor: Any) -> None:
        self.model = model
        self.language, tower = _parts(model)
        self._cache_name = _cache_name(inspect.signature(self.language.forward).parameters, model)
        self._three_axes = "Omni" in type(model).__name__
        placeholder = _first(model.config, "audio_token_id", "audio_token_index")
        self.audio = AudioInput(model, tower, extractor, int(placeholder)) if extractor is not None else None

    def logits(
        self, ids: Tensor, positions: Tensor, mask: MaskLike, cache: Any, rows: int, media: Any = None
    ) -> Tensor:
        embeds = self.model.get_input_embeddings()(ids)
        if media is not None:
            embeds = embeds.masked_scatter(media.at[..., None], media.embeds.to(embeds.dtype))
        if self._three_axes:  # time, height and width advance together for text and for audio
            positions = positions.expand(3, *positions.shape)
        kwargs: dict[str, Any] = {self._cache_name: cache, "use_cache": True, "return_dict": True}
        out = self.language(inputs_embeds=embeds, position_ids=positions, attention_mask=mask, **kwargs)
        return self.model.lm_head(out.last_hidden_state[:, -rows:])

    def reference(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=True).logits


class AudioInput:
    """From a waveform to the embeddings that replace the placeholder tokens."""

    def __init__(self, model: Any, tower: nn.Module, extractor: Any, placeholder: int) -> None:
        self._model, self._tower, self._extractor = model, tower, extractor
        self.placeholder = placeholder
        self.sampling_rate = int(extractor.sampling_rate)
        self._whole_window = "Omni" not in type(model).__name__  # Qwen2-Audio's encoder takes 30 s, padded

    @property
    def max_seconds(self) -> float:
        """What the feature extractor holds; it would cut longer audio silently."""
        return self._extractor.n_samples / self.sampling_rate

    def token_count(self, samples: int) -> int:
        """Placeholders for a recording of `samples`: frames of 10 ms, halved by a convolution and by pooling."""
        frames = -(-samples // self._extractor.hop_length)
        return (((frames - 1) // 2 + 1) - 2) // 2 + 1

    def embed(self, waveform: np.ndarray) -> Tensor:
        """float32 [samples] → [token_count, hidden] in the model's dtype."""
        features, mask = self._features(waveform)
        if self._whole_window:
            return self._embed_window(features, mask)
        out = self._model.get_audio_features(features, feature_attention_mask=mask)
        hidden = getattr(out, "last_hidden_state", out)
        return hidden if isinstance(hidden, Tensor) else torch.cat(list(hidden))

    def _features(self, waveform: np.ndarray) -> tuple[Tensor, Tensor]:
        """Log-mel features [1, mels, frames] and their mask [1, frames], as the family's processor makes them.

        Padding shorter than the processor's (30 or 300 s) gives the same frames where the mask is 1, and is faster.
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
            return_tensors="pt",
        )
        weight = next(self._tower.parameters())
        return out["input_features"].to(weight.device, weight.dtype), out["attention_mask"].to(weight.device)

    def _embed_window(self, features: Tensor, mask: Tensor) -> Tensor:
        """Qwen2-Audio: the encoder sees the whole window, the padding masked out of its attention."""
        seen, wanted = self._tower._get_feat_extract_output_lengths(mask.sum(-1))  # type: ignore[operator]
        size = (features.shape[-1] - 2) // 2 + 1
        hidden = torch.arange(size, device=features.device)[None, None, None, :] >= seen[:, None, None, None]
        additive = torch.zeros(1, 1, size, size, dtype=features.dtype, device=features.device)
        additive = additive.masked_fill(hidden, torch.finfo(features.dtype).min)
        out = self._tower(features, attention_mask=additive).last_hidden_state
        core = getattr(self._model, "model", self._model)
        return core.multi_modal_projector(out)[0, : int(wanted[0])]


def _parts(model: Any) -> tuple[Any, nn.Module]:
    """The language model and the audio tower, wherever this version of transformers keeps them."""
    holders: list[Any] = [model.model, model]
    for holder in holders:
        if hasattr(holder, "language_model"):
            return holder.language_model, holder.audio_tower
    return model.model, model.audio_tower


def _cache_name(parameters: Any, model: Any) -> str:
    """5.24 renamed past_key_values to cache; the old name still works there, with a warning."""
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ModelError(f"{type(model).__name__} takes no KV cache: outrider needs one that can be truncated")


def _first(config: Any, *names: str) -> Any:
    return next(getattr(config, name) for name in names if hasattr(config, name))
