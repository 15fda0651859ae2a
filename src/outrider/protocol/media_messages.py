"""What of a prompt is more than ids, on its way to the cloud: a recording, or the features that a model makes of it."""

from __future__ import annotations

from typing import Any

from outrider.engines.base import Prompt
from outrider.errors import PromptError
from outrider.prompts.media import pack_audio, pack_features, unpack_audio, unpack_features
from outrider.protocol import schema


def pack_media(prompt: Prompt, *, hides_audio: bool) -> tuple[int, bytes]:
    """The media kind of a prompt, and its bytes."""
    if prompt.audio is not None:
        return schema.AUDIO, pack_audio(prompt.audio)
    if prompt.features is not None:
        return schema.FEATURES, pack_features(prompt.features)
    return (schema.WITHHELD if hides_audio else schema.NONE), b""


def unpack_media(engine: Any, ids: tuple[int, ...], kind: int, data: bytes) -> Prompt:
    """The prompt as the engine takes it. Nothing in `data` is trusted.

    Raises:
        AudioError: not what its kind says, or longer than the model takes.
        PromptError: media for a model that takes none, or of a kind that this version does not know.
    """
    if kind in (schema.NONE, schema.WITHHELD):
        return Prompt(ids)
    audio_encoder = getattr(engine, "audio", None)
    if audio_encoder is None:
        raise PromptError(f"{engine.name} takes no audio, so it cannot verify what was heard")
    if kind == schema.AUDIO:
        return Prompt(ids, unpack_audio(data, audio_encoder.max_seconds))
    if kind == schema.FEATURES:
        return Prompt(ids, features=unpack_features(data, audio_encoder.mels, audio_encoder.max_frames))
    raise PromptError(f"media of kind {kind}: this version knows audio and features")
