"""Engines of the models in a `generate` call, cached on the models, and a view of an engine per call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase, WhisperFeatureExtractor

from outrider.engines.base import Engine, Prompt
from outrider.engines.load import load_engine
from outrider.errors import ModelError

if TYPE_CHECKING:
    from outrider.engines.llama_cpp.engine import GgufEngine
    from outrider.engines.torch.engine import TorchEngine

LoadedEngine: TypeAlias = "TorchEngine | GgufEngine"
_ENGINE_ATTRIBUTE = "_outrider"
OMNI_SECONDS = 300  # as in its processor, since its encoder has no window
POSITIONS_PER_SECOND = 50  # of Whisper's encoder
_engine_lock = RLock()  # making an engine may fuse the model's weights, which must happen once


class _EngineHolder:
    """Holder of an engine on its model, so that both are freed together. Copies and pickles of the model lack it."""

    def __init__(self, engine: LoadedEngine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _EngineHolder, ()


def get_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> LoadedEngine:
    """Return the model's engine from the cache, or a new one if the model or its tokenizer changed.

    Raises:
        ModelError: an encoder-decoder, or a model with a cache that cannot be truncated.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__} is an encoder-decoder; outrider takes decoder-only models")
    with _engine_lock:
        holder = getattr(model, "__dict__", {}).get(_ENGINE_ATTRIBUTE)
        engine = holder.engine if holder is not None else None
        is_same = engine is not None and engine.tokenizer is tokenizer and engine.model is model
        if engine is None or not is_same or engine.changed_part() is not None:
            engine = load_engine(model, tokenizer=tokenizer, extractor=_feature_extractor(model))
            setattr(model, _ENGINE_ATTRIBUTE, _EngineHolder(engine))
    return engine


def _feature_extractor(model: PreTrainedModel) -> WhisperFeatureExtractor | None:
    """Return a feature extractor with the model's sizes, or None. It computes nothing, as calls bring features."""
    audio = getattr(getattr(model, "config", None), "audio_config", None)
    if audio is None:
        return None
    omni = "Omni" in type(model).__name__
    seconds = OMNI_SECONDS if omni else audio.max_source_positions // POSITIONS_PER_SECOND
    return WhisperFeatureExtractor(feature_size=audio.num_mel_bins, chunk_length=seconds)


@contextmanager
def eval_mode(*models: object) -> Iterator[None]:
    """Put models into evaluation mode, without dropout, and restore each module's mode afterwards."""
    modules = [module for model in models if isinstance(model, Module) for module in model.modules()]
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


class EngineView:
    """View of an engine for one call, with that call's EOS ids.

    reads_audio: False drops the recording, for a drafter that cannot read it.
    """

    prefix_cache = None  # `generate` returns with no slot in use

    def __init__(self, engine: Engine, eos_ids: tuple[int, ...], *, reads_audio: bool = True) -> None:
        self._engine, self.eos_ids, self._reads_audio = engine, eos_ids, reads_audio

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open(self, prompt: Prompt) -> int:
        """Return a free slot for the prompt, without its recording unless the engine reads audio."""
        return int(self._engine.open(prompt if self._reads_audio else Prompt(prompt.ids)))


_locks: WeakKeyDictionary[Engine, RLock] = WeakKeyDictionary()


@contextmanager
def exclusive(*engines: Engine) -> Iterator[None]:
    """Lock engines for one call, as their caches belong to one thread at a time."""
    with ExitStack() as stack:
        for engine in sorted(set(engines), key=id):  # the same order in all calls, so that none deadlock
            stack.enter_context(_locks.setdefault(engine, RLock()))
        yield
