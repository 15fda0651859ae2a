"""Engines of the models in a `generate` call: made once for a model, seen by each call in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from transformers import WhisperFeatureExtractor

from outrider.engines.base import Prompt
from outrider.engines.load import load_engine
from outrider.errors import ModelError

_ENGINE_ATTRIBUTE = "_outrider"
OMNI_SECONDS = 300  # as its processor: its encoder has no window
POSITIONS_PER_SECOND = 50  # of Whisper's encoder


_engine_lock = RLock()  # making an engine may fuse the model's weights: once


class _EngineHolder:
    """An engine, kept on its model, so that both go together; a copy or a pickle of the model leaves it behind."""

    def __init__(self, engine: Any = None) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _EngineHolder, ()


def get_engine(model: Any, tokenizer: Any = None) -> Any:
    """Return the model's engine. It is cached, and made again if the model has changed or has another tokenizer.

    Raises:
        ModelError: an encoder-decoder, or a model whose cache cannot be truncated.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__} is an encoder-decoder; outrider takes decoder-only models")
    with _engine_lock:
        holder = getattr(model, "__dict__", {}).get(_ENGINE_ATTRIBUTE)
        engine = holder.engine if holder is not None else None
        if engine is None or not _is_current(engine, model, tokenizer):
            engine = load_engine(model, tokenizer=tokenizer, extractor=_feature_extractor(model))
            setattr(model, _ENGINE_ATTRIBUTE, _EngineHolder(engine))
    return engine


def _is_current(engine: Any, model: Any, tokenizer: Any) -> bool:
    return engine.tokenizer is tokenizer and engine.model is model and engine.changed_part() is None


def _feature_extractor(model: Any) -> Any:
    """The shape of a model's recordings. Features come ready-made here: only their sizes are asked for."""
    audio = getattr(getattr(model, "config", None), "audio_config", None)
    if audio is None:
        return None
    omni = "Omni" in type(model).__name__
    seconds = OMNI_SECONDS if omni else audio.max_source_positions // POSITIONS_PER_SECOND
    return WhisperFeatureExtractor(feature_size=audio.num_mel_bins, chunk_length=seconds)


@contextmanager
def eval_mode(*models: Any) -> Iterator[None]:
    """Models are in evaluation mode meanwhile, without dropout. Afterwards each module returns to its earlier mode."""
    modules = [module for model in models if hasattr(model, "modules") for module in model.modules()]
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


class EngineView:
    """An engine as one call sees it: with the EOS ids of that call, and deaf where it cannot read the recording."""

    def __init__(self, engine: Any, eos_ids: tuple[int, ...], *, reads_audio: bool = True) -> None:
        self._engine, self.eos_ids, self._reads_audio = engine, eos_ids, reads_audio

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open(self, prompt: Prompt) -> int:
        return int(self._engine.open(prompt if self._reads_audio else Prompt(prompt.ids)))


_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@contextmanager
def exclusive(*engines: Any) -> Iterator[None]:
    """No other call uses these engines meanwhile: their caches belong to one thread at a time."""
    with ExitStack() as stack:
        for engine in sorted(set(engines), key=id):  # one order for all, or two calls could wait for each other
            stack.enter_context(_locks.setdefault(engine, RLock()))
        yield
