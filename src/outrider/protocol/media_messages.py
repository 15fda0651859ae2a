"""The media of a prompt on the wire: a recording, or the input features that a model computes from it."""

from __future__ import annotations

from outrider.engines.base import Engine, Prompt
from outrider.errors import PromptError
from outrider.prompts.media import pack_audio, pack_features, unpack_audio, unpack_features
from outrider.protocol import schema


def pack_media(prompt: Prompt, *, hides_audio: bool) -> tuple[int, bytes]:
    """Return the media kind of a prompt, and its bytes."""
    if prompt.audio is not None:
        return schema.AUDIO, pack_audio(prompt.audio)
    if prompt.features is not None:
        return schema.FEATURES, pack_features(prompt.features)
    return (schema.WITHHELD if hides_audio else schema.NONE), b""


def unpack_media(engine: Engine, ids: tuple[int, ...], kind: int, data: bytes) -> Prompt:
    """Return the prompt with its media for the engine, after validating `data`.

    Raises:
        AudioError: the data does not have the format of its kind, or is longer than the model's limit.
        PromptError: the model takes no media, or this version does not know the kind.
    """
    if kind in (schema.NONE, schema.WITHHELD):
        return Prompt(ids)
    audio_encoder = getattr(engine, "audio", None)
    if audio_encoder is None:
        raise PromptError(f"{engine.name} takes no audio, so it cannot verify drafts about a recording")
    if kind == schema.AUDIO:
        return Prompt(ids, unpack_audio(data, audio_encoder.max_seconds))
    if kind == schema.FEATURES:
        return Prompt(ids, features=unpack_features(data, audio_encoder.mels, audio_encoder.max_frames))
    raise PromptError(f"media of kind {kind}: this version knows audio and features")
