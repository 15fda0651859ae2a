"""What `generate` was given and does not hand on to the function that decodes for it."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from transformers import GenerationMixin


def recover_generate_kwargs(*names: str) -> dict[str, Any]:
    """The arguments of these names of the `generate` call that we run in, as far as they were given.

    transformers (5.17 to 5.24) drops the streamer and the tokenizer where `custom_generate` is a function: it hands on
    only what `_sample` has no parameter for (`_extract_generation_mode_kwargs`). By then the prompt is in the streamer,
    so whoever reads from that would wait for ever. Both are still in the frames of `generate` and of its decorators,
    the only ones that are looked at. Empty outside of any `generate`.
    """
    innermost, *outer = _generate_code_objects()
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not innermost:
        frame = frame.f_back  # type: ignore[assignment]
    found: dict[str, Any] = {}
    while frame is not None and frame.f_code in (innermost, *outer):
        variables = {**frame.f_locals.get("kwargs", {}), **frame.f_locals}
        found = {name: variables[name] for name in names if variables.get(name) is not None} | found
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _generate_code_objects() -> list[CodeType]:
    """The code of `generate`, then of what decorates it, from the inside out."""
    layers: list[CodeType] = []
    function = GenerationMixin.generate
    while function is not None:
        layers.insert(0, function.__code__)
        function = getattr(function, "__wrapped__", None)
    return layers
