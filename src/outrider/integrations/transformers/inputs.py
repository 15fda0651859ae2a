"""Prompt of a `generate` call: its ids, and optionally one recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from outrider.engines.base import Engine, Prompt
from outrider.errors import PromptError

if TYPE_CHECKING:
    from outrider.engines.torch.model_families import AudioInput

_IGNORED_INPUTS = ("use_cache", "logits_to_keep", "cache_position")  # they do not change the output
_CACHES = ("cache", "past_key_values")
_USED_INPUTS = ("attention_mask", "position_ids", "input_features", "feature_attention_mask")
FRAMES_PER_SECOND = 100
ModelInputs = dict[str, Any]  # by name: tensors, caches, flags


def check_inputs(ids: Tensor, given: ModelInputs) -> None:
    """Check the inputs of a call. ids: int64 [1, T]. given: the model's other inputs by name.

    Raises:
        PromptError: a batch, padding, the caller's own positions or cache, or an unsupported input.
    """
    for name, value in given.items():
        is_empty = isinstance(value, dict) and not value  # as mm_encoder_outputs without media
        absent = value is None or value is False or is_empty
        if not absent and name not in (*_IGNORED_INPUTS, *_CACHES, *_USED_INPUTS):
            raise PromptError(f"{name}: not supported: Outrider takes token ids, and one recording as input_features")
    if ids.shape[0] != 1:
        raise PromptError(f"a batch of {ids.shape[0]} sequences: Outrider decodes one at a time")
    if not ids.shape[1]:
        raise PromptError("the prompt is empty: it has no tokens")
    for name in _CACHES:
        cache = given.get(name)
        if cache is not None and cache.get_seq_length():
            raise PromptError(f"{name}: Outrider keeps its own cache, and cannot continue from this one: leave it out")
    mask = given.get("attention_mask")
    if mask is not None and (mask.shape != ids.shape or not bool((mask == 1).all())):
        raise PromptError("attention_mask hides tokens: give the prompt without padding")
    _check_positions(given.get("position_ids"), ids)
    _check_features(given.get("input_features"), given.get("feature_attention_mask"))


def read_prompt(ids: Tensor, given: ModelInputs, audio_encoder: AudioInput | None) -> Prompt:
    """Return the prompt from checked inputs. audio_encoder: the target's `AudioInput`, or None.

    Raises:
        PromptError: a recording for a model that takes none.
    """
    return Prompt(tuple(ids[0].tolist()), features=_features(given, audio_encoder))


def _check_positions(positions: Tensor | None, ids: Tensor) -> None:
    """Raise PromptError unless positions are 0, 1, 2 … on every axis, as in all supported families."""
    if positions is None:
        return
    plain = torch.arange(ids.shape[1], device=positions.device)
    if positions.shape[-1] != len(plain) or not bool((positions == plain).all()):
        raise PromptError("position_ids: Outrider counts positions from 0, one for each token")


def _check_features(batch: Tensor | None, mask: Tensor | None) -> None:
    if batch is None:
        return
    if batch.ndim != 3 or batch.shape[0] != 1:
        raise PromptError(f"input_features {list(batch.shape)}: expected those of one recording, [1, mels, frames]")
    if mask is None:
        raise PromptError("input_features come without their feature_attention_mask")
    if mask.shape != (1, batch.shape[2]) or not bool(mask[0, : int(mask.sum())].all()):
        raise PromptError(f"feature_attention_mask {list(mask.shape)}: expected a one for each valid frame, then zeros")


def _features(given: ModelInputs, audio_encoder: AudioInput | None) -> np.ndarray | None:
    """Return the features as the engine takes them, float32 [mels, frames]: valid frames, and `tail` of padding."""
    batch = given.get("input_features")
    if batch is None:
        return None
    if audio_encoder is None:
        raise PromptError("input_features: the model takes no audio that Outrider can pass on")
    frames = int(given["feature_attention_mask"].sum()) + tail(audio_encoder)
    found = batch[0, :, :frames].float().cpu().numpy()
    return np.pad(found, ((0, 0), (0, frames - found.shape[1])), mode="edge")


def tail(audio_encoder: AudioInput) -> int:
    """Return the number of padding frames behind the valid ones that the model's encoder attends to."""
    return int(audio_encoder.max_frames) - round(audio_encoder.max_seconds * FRAMES_PER_SECOND)


def accepts_features(engine: Engine, audio_encoder: AudioInput | None, prompt: Prompt) -> bool:
    """Return whether an engine reads the prompt's features as the target does. audio_encoder: the target's."""
    own = getattr(engine, "audio", None)
    if prompt.features is None or own is None or audio_encoder is None:
        return False
    if (own.placeholder, own.mels, tail(own)) != (audio_encoder.placeholder, audio_encoder.mels, tail(audio_encoder)):
        return False
    frames = prompt.features.shape[1]
    return bool(frames <= own.max_frames and own.feature_tokens(frames) == prompt.ids.count(own.placeholder))
