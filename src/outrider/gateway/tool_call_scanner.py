"""Incremental scanning of one tool call, a JSON object with a name and arguments."""

from __future__ import annotations

import json
import math
from typing import Any, Final

_BARE: Final = frozenset(' \t\r\n:,"{}[]0123456789+-.eEtrufalsn')  # characters of JSON outside of strings
_CLOSING: Final = {"}": "{", "]": "["}
MAX_DEPTH: Final = 256


class CallScanner:
    """Scans a JSON object that arrives in pieces, and records the extent of each key's value.

    is_complete: the object has ended. has_failed: the last character cannot be part of a call in JSON. The scanner only
    follows strings, brackets and keys, so `value` decides whether a complete object is valid.
    """

    def __init__(self, arguments_key: str) -> None:
        self.arguments_key = arguments_key
        self._known = {"name", arguments_key, "id", "type"}
        self.raw = ""
        self.is_complete = self.has_failed = False
        self._stack: list[str] = []
        self._in_string = self._is_escaped = False
        self._string_start = 0
        self._key: str | None = None  # the key of the next value
        self._expects_key = True
        self._values: dict[str, tuple[int, int | None]] = {}  # the extent of each key's value in `raw`
        self._taken = 0  # number of returned characters of the arguments

    def feed(self, text: str) -> int:
        """Process a piece, and return the number of its characters up to the end of the object, or to a failure."""
        base, before = len(self.raw), self.raw
        self.raw = before + text
        for number, letter in enumerate(text):
            self._step(letter, base + number)
            if self.has_failed or self.is_complete:
                used = number + self.is_complete
                self.raw = before + text[:used]
                return used
        return len(text)

    def _step(self, letter: str, at: int) -> None:
        if self._in_string:
            self._step_string(letter, at)
        elif letter == '"':
            self._in_string, self._string_start = True, at
        elif letter in "{[":
            self._stack.append(letter)
            self.has_failed = len(self._stack) > MAX_DEPTH
        elif letter in "}]":
            self._close(letter, at)
        elif letter not in _BARE:
            self.has_failed = True
        elif len(self._stack) == 1 and letter in ":,":
            self._separate(letter, at)

    def _step_string(self, letter: str, at: int) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif letter == "\\":
            self._is_escaped = True
        elif letter == '"':
            self._in_string = False
            if len(self._stack) == 1 and self._expects_key:
                self._key = load_json(self.raw[self._string_start : at + 1])

    def _close(self, letter: str, at: int) -> None:
        if self._stack.pop() != _CLOSING[letter]:
            self.has_failed = True
        elif len(self._stack) == 1:
            self._end_value(at + 1)
        elif not self._stack:
            self._end_value(at)
            self.is_complete = True

    def _separate(self, letter: str, at: int) -> None:
        if letter == ",":
            self._end_value(at)
            self._key, self._expects_key = None, True
        elif isinstance(self._key, str):
            self._expects_key = False
            self.has_failed = self._key in self._values or self._key not in self._known
            self._values.setdefault(self._key, (at + 1, None))

    def _end_value(self, end: int) -> None:
        if self._key in self._values and self._values[self._key][1] is None:
            self._values[self._key] = (self._values[self._key][0], end)

    # Values -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """Return the name, once it is complete."""
        start, end = self._values.get("name", (0, None))
        name = None if end is None else load_json(self.raw[start:end])
        return name if isinstance(name, str) else None

    @property
    def arguments_begin_object(self) -> bool:
        """Return whether the arguments have begun, as an object."""
        start, _ = self._values.get(self.arguments_key, (len(self.raw), None))
        return self.raw[start:].lstrip().startswith("{")

    @property
    def arguments(self) -> str:
        """Return the received part of the arguments, verbatim."""
        start, end = self._values.get(self.arguments_key, (len(self.raw), None))
        return self.raw[start:end].strip()

    def take_arguments(self) -> str:
        """Return the part of the arguments since the last call."""
        start, end = self._values[self.arguments_key]
        if not self._taken:
            self._taken = len(self.raw[start:]) - len(self.raw[start:].lstrip())
        text = self.raw[start + self._taken : end]
        self._taken += len(text)
        return text

    def value(self) -> dict[str, Any] | None:
        """Return the object, or None if it is not valid JSON. The last bracket after the arguments may be missing."""
        has_arguments = self._values.get(self.arguments_key, (0, None))[1] is not None
        value = load_json(self.raw + "}" * (has_arguments and not self.is_complete))
        return value if isinstance(value, dict) else None


def load_json(text: str) -> Any:
    """Return a JSON value, or None if the text is not valid JSON."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    """Return a number. Raise ValueError for NaN and infinity, which are no JSON, and for 1e999."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value
