"""Outrider: edge–cloud speculative decoding for language and audio-language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outrider.errors import (
    AudioError,
    BatchError,
    CloudError,
    CloudLost,
    CloudRefused,
    ContextError,
    DecodingError,
    GrammarError,
    InputError,
    ModelError,
    OutriderError,
    PromptError,
    SettingsError,
    StateError,
    VocabularyMismatch,
)

if TYPE_CHECKING:
    from outrider.api import AsyncStream as AsyncStream
    from outrider.api import Conversation as Conversation
    from outrider.api import SpeculativeDecoder as SpeculativeDecoder
    from outrider.api import StreamEvent as StreamEvent
    from outrider.api import local as local
    from outrider.config import GenerationSettings as GenerationSettings
    from outrider.config import Grammar as Grammar
    from outrider.decoding.gate_parsing import gate as gate
    from outrider.decoding.result import Result as Result
    from outrider.engines.load import load_engine as load_engine
    from outrider.engines.prompt_lookup import prompt_lookup as prompt_lookup
    from outrider.integrations.transformers.generation import for_transformers as for_transformers
    from outrider.prompts.audio import Audio as Audio
    from outrider.verifiers.connect import connect as connect

__version__ = "0.1.0"

_LAZY = {  # imported on first use: they import torch, and `outrider --help` must be fast
    "AsyncStream": "outrider.api",
    "Conversation": "outrider.api",
    "SpeculativeDecoder": "outrider.api",
    "StreamEvent": "outrider.api",
    "connect": "outrider.verifiers.connect",
    "local": "outrider.api",
    "GenerationSettings": "outrider.config",
    "Grammar": "outrider.config",
    "gate": "outrider.decoding.gate_parsing",
    "Result": "outrider.decoding.result",
    "load_engine": "outrider.engines.load",
    "prompt_lookup": "outrider.engines.prompt_lookup",
    "for_transformers": "outrider.integrations.transformers.generation",
    "Audio": "outrider.prompts.audio",
}

__all__ = [
    "AsyncStream",
    "Audio",
    "AudioError",
    "BatchError",
    "CloudError",
    "CloudLost",
    "CloudRefused",
    "ContextError",
    "Conversation",
    "DecodingError",
    "GenerationSettings",
    "Grammar",
    "GrammarError",
    "InputError",
    "ModelError",
    "OutriderError",
    "PromptError",
    "Result",
    "SettingsError",
    "SpeculativeDecoder",
    "StateError",
    "StreamEvent",
    "VocabularyMismatch",
    "connect",
    "for_transformers",
    "gate",
    "load_engine",
    "local",
    "prompt_lookup",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
