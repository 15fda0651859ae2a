"""Escape control sequences in text from outside: peers, models, file names. Importing this costs nothing."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

# C0 except newline and tab, DEL, C1, line separators, and what reorders or hides text.
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_CONTROLS = f"\x7f-\x9f\u2028\u2029\ufeff{_BIDI}\U000e0000-\U000e007f"
_UNSAFE = re.compile(f"[\x00-\x08\x0b-\x1f{_CONTROLS}\ud800-\udfff]")
_UNSAFE_IN_JSON = re.compile(f"[{_CONTROLS}\ud800-\udfff]")  # json.dumps escapes those below a space


def visible(text: str) -> str:
    """Escape control characters as Python does (`\\x1b`); newlines, tabs and all scripts stay."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def one_line(text: str) -> str:
    """Escape control characters, newlines and tabs included: a name cannot forge a second line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def to_json(value: Any) -> str:
    """Return equivalent JSON in which control characters are escaped."""
    return _UNSAFE_IN_JSON.sub(_json_escape, json.dumps(value, ensure_ascii=False))


def _json_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def complain(message: str) -> None:
    """Print an error to stderr, without rich: this also works while the program ends."""
    text = visible(f"outrider: {message}").replace("\n", "\n  ")
    print(text.encode(sys.stderr.encoding or "utf-8", "backslashreplace").decode(errors="replace"), file=sys.stderr)  # noqa: T201
