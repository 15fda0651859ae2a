"""The exceptions of outrider.

OutriderError
├── InputError            an input cannot be used, and no model has run (exit code 2)
│   ├── SettingsError     a setting is out of range, unknown, or contradicts another
│   │   └── GrammarError  a grammar or a JSON schema cannot be compiled
│   ├── PromptError       a prompt is empty, too long, or of a kind that the model does not take
│   │   └── ContextError  the prompt, or prompt and output together, exceed a model's context
│   ├── AudioError        a recording is unreadable, empty, too short, too long, or not finite
│   ├── DataError         a manifest, trace, gate or result file is invalid
│   └── ModelError        a checkpoint is missing, unreadable or unsuitable
│       └── VocabularyMismatch   the models do not share a vocabulary
├── BatchError            a prompt of a batch failed; the results of the others are attached
├── DecodingError         no token can be chosen: NaN logits, or every token is banned
├── CloudError            the cloud failed or refused
│   ├── CloudLost         the cloud is unreachable or timed out, and a retry may help
│   └── CloudRefused      the cloud refused for identity, a limit or another model, and a retry does not help
└── StateError            tokens and KV cache, or the two sides of a session, disagree: a bug or a faulty peer
    └── OutOfSync         a request does not match the verifier's state of the sequence
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from typing import Any

# C0 except newline and tab, DEL, C1, line separators, and characters that reorder or hide text.
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
CONTROLS = f"\x7f-\x9f\u2028\u2029\ufeff{_BIDI}\U000e0000-\U000e007f"
_UNSAFE = re.compile(f"[\x00-\x08\x0b-\x1f{CONTROLS}\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Escape control characters as Python does (`\\x1b`). Keep newlines, tabs and all scripts."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


MAX_QUOTED = 100  # characters of a value in a message


class _Shortened(reprlib.Repr):
    """A `repr` that abbreviates long integers, because Python converts at most 4,300 digits to text."""

    def repr_int(self, x: int, level: int) -> str:
        """Return the digits of an integer, or how many they are, from `MAX_QUOTED` on."""
        size = int(abs(x).bit_length() * math.log10(2))
        return repr(x) if size < MAX_QUOTED else f"<integer of some {size} digits>"


def quote(value: Any) -> str:
    """Return the `repr` of a value for a message, in at most `MAX_QUOTED` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = _Shortened().repr(value)
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"


class OutriderError(Exception):
    """The base of all exceptions of outrider.

    As text, control characters are escaped, because a message may quote a chat template, a checkpoint or a cloud.
    """

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class InputError(OutriderError):
    """An input cannot be used. Raised before a model runs."""


class SettingsError(InputError):
    """A setting is out of range, unknown, or contradicts another one."""


class GrammarError(SettingsError):
    """A grammar cannot be compiled.

    place: the path of the failing part of a JSON schema, such as "properties.a", or "" for the whole grammar.
    """

    def __init__(self, reason: str, place: str | None = None) -> None:
        super().__init__(reason, place)
        self.reason, self.place = reason, place

    def __str__(self) -> str:
        where = "" if self.place is None else f"grammar.{self.place}: " if self.place else "grammar: "
        return escape_controls(where + self.reason)


class PromptError(InputError):
    """A prompt is empty, too long, or of a kind that the model does not take.

    place: the path of the field at fault in a chat, such as "messages.0.content" or "tools.1.function.description", or
    None for the whole prompt.
    """

    def __init__(self, message: str = "", *, place: str | None = None) -> None:
        super().__init__(message)
        self.place = place


class ContextError(PromptError):
    """The prompt, or prompt and output together, exceed a model's context."""


class AudioError(InputError):
    """A recording is unreadable, empty, too short, too long, or holds samples that are not finite."""


class DataError(InputError):
    """A manifest, trace, gate or result file is invalid. The message names file and item."""


class ModelError(InputError):
    """A checkpoint is missing, unreadable or unsuitable. The message names it."""


class VocabularyMismatch(ModelError):
    """Drafter and target do not share a vocabulary. The message names the first token that differs."""


class DecodingError(OutriderError):
    """No token can be chosen: the logits are NaN, or every token is banned."""


class BatchError(OutriderError):
    """One or more prompts of a batch failed.

    results: in the order of the prompts, a `Result` or the exception of a failed prompt.
    """

    def __init__(self, message: str, results: Sequence[Any] = ()) -> None:
        super().__init__(message, results)
        self.results = list(results)

    def __str__(self) -> str:
        return escape_controls(str(self.args[0]))


class CloudError(OutriderError):
    """The cloud failed or refused."""


class CloudLost(CloudError):
    """The cloud was unreachable or timed out in all retries. Another attempt later may help."""


class CloudRefused(CloudError):
    """The cloud refused the request for identity, a limit or another model. A retry does not help."""


class StateError(OutriderError):
    """Tokens and KV cache, or edge and verifier, disagree on a sequence."""


class OutOfSync(StateError):
    """A request does not match the verifier's state of the sequence. The message names both lengths."""
