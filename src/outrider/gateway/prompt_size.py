"""Approximate memory of waiting prompts."""

from __future__ import annotations

import sys
from typing import Final

from outrider.prompts.audio import Audio
from outrider.prompts.chat import PromptLike
from outrider.prompts.tool_template import ToolChat

INT_BYTES: Final = 36  # bytes of an int in a list


def measure_prompt(prompt: PromptLike) -> int:
    """Return the approximate memory of a prompt, in bytes."""
    if isinstance(prompt, Audio):
        return int(getattr(prompt.source, "nbytes", 0))
    if isinstance(prompt, str):
        return sys.getsizeof(prompt)
    if isinstance(prompt, ToolChat):
        return _measure(list(prompt.messages)) + _measure(list(prompt.tools))
    return sum(INT_BYTES if isinstance(each, int) else _measure(each) for each in prompt)


def _measure(value: object) -> int:
    """Return the approximate memory of a JSON value, in bytes."""
    inner = [*value.values(), *value] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sys.getsizeof(value) + sum(map(_measure, inner))
