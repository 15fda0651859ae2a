"""Defaults of requests, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.gateway.decoder_pool import RequestOptions, Settings
from outrider.gateway.tools import ToolSupport


@dataclass(frozen=True)
class Defaults:
    """Defaults of requests, from the command line.

    settings: fields of GenerationSettings. audio_seconds: the longest recording, 0 for a model without audio. text:
    False for a model that only takes recordings. tools: the edge's support of tools, or the reason why there is none.
    decode: returns the text of token ids, None without a tokenizer.
    """

    options: RequestOptions = field(default_factory=RequestOptions)
    settings: Settings = field(default_factory=dict)
    audio_seconds: float = 0.0
    text: bool = True
    edge: str = "the edge model"
    tools: ToolSupport | str = "tools: the model's chat template does not support tools"
    decode: Callable[[list[int]], str] | None = None

    @property
    def audio_refusal(self) -> str:
        """The message of an error about a recording, for models without audio."""
        if self.edge == "none":
            return "recordings are not supported without an edge model: give an audio-language model as --edge"
        return f"{self.edge} takes no audio: give an audio-language model as --edge"
