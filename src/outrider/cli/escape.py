"""Escape control sequences in text from outside: peers, models, file names. Importing this costs nothing."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from outrider.errors import CONTROLS
from outrider.errors import escape_controls as escape_controls

_UNSAFE_IN_JSON = re.compile(f"[{CONTROLS}\ud800-\udfff]")  # json.dumps escapes those below a space


def one_line(text: str) -> str:
    """Escape control characters, newlines and tabs included: a name cannot forge a second line."""
    return escape_controls(text).replace("\n", "\\n").replace("\t", "\\t")


def to_json(value: Any) -> str:
    """Return equivalent JSON in which control characters are escaped."""
    return _UNSAFE_IN_JSON.sub(_json_escape, json.dumps(value, ensure_ascii=False))


def _json_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def print_error(message: str) -> None:
    """Print an error to stderr, without rich: this also works while the program ends."""
    text = escape_controls(f"outrider: {message}").replace("\n", "\n  ")
    print(text.encode(sys.stderr.encoding or "utf-8", "backslashreplace").decode(errors="replace"), file=sys.stderr)  # noqa: T201
