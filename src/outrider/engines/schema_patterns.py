"""Translation of patterns in JSON schemas from ECMA 262 to Rust's syntax, which llguidance reads.

llguidance reads `\\d` and `\\w` as ASCII, like ECMA 262. Translated are `.`, `\\s`, `\\S` and character classes, in
which Rust reads `[`, `&&`, `--` and `~~` as operators.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from string import ascii_letters
from typing import Final

from outrider.engines.schema_parts import Schema, SchemaParts, dict_in

# ECMA 262, 12.2 and 12.3. A vertical tab is missing, because strings cannot hold it.
_SPACES: Final = r"\t\n\f\r\x20\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_PLAIN: Final = {r"\<": "<", r"\>": ">"}  # Rust reads them as the beginning and the end of a word
_OUTSIDE: Final = {".": r"[^\n\r\u2028\u2029]", r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]", **_PLAIN}
_INSIDE: Final = {r"\s": _SPACES, r"\S": f"[^{_SPACES}]", **_PLAIN, **{sign: f"\\{sign}" for sign in "[&~-^"}}
_EMPTY: Final = {"": r"[^\s\S]", "^": r"[\s\S]"}  # the classes [] and [^]
_PIECE: Final = re.compile(r"\[(?P<negation>\^?)(?P<members>(?:\\.|[^\]\\])*)\]|\\.|\.", re.S)
_ATOM: Final = r"(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xup]\{[^}]*\}|.)|[^\\])"
_MEMBER: Final = re.compile(rf"(?P<low>{_ATOM})-(?P<high>{_ATOM})|{_ATOM}", re.S)
_QUANTIFIER: Final = r"(?:[*+?]|\{\d+(?:,\d*)?\})"
# What Rust reads and ECMA 262 does not: a quantifier behind another, (?P<name>…), and flags such as (?x).
_FOREIGN: Final = re.compile(rf"{_QUANTIFIER}(?:\?{_QUANTIFIER}|[*+]|\{{\d+(?:,\d*)?\}})|\(\?(?:P|[a-zA-Z-]*[xUR])")
_ESCAPE: Final = re.compile(r"\\.", re.S)
_FOREIGN_LETTERS: Final = frozenset(ascii_letters) - set("bBcdDfknpPrsStuvwWx")
_SETS: Final = re.compile(r"\\[dDsSwWpP]")


def translate_patterns(schema: Schema) -> Schema:
    """Return a copy of a schema with the patterns of all its parts in Rust's syntax.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    copy: Schema = json.loads(json.dumps(schema))  # deepcopy would overflow the stack at half the depth
    for part in SchemaParts(copy):
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = translate(pattern)
        if named := dict_in(part, "patternProperties"):
            part["patternProperties"] = dict(_translate_keys(named))
    return copy


def translate(pattern: str) -> str:
    """Return an expression of ECMA 262 in Rust's syntax."""
    return _PIECE.sub(_translate_piece, pattern)


def find_foreign_syntax(pattern: str) -> str | None:
    """Return a part of a pattern that is no syntax of ECMA 262 and would mean something to llguidance, or None."""
    escapes = (escape for escape in _ESCAPE.findall(pattern) if escape[1] in _FOREIGN_LETTERS)
    outside = _FOREIGN.search(_PIECE.sub("_", pattern))
    return next(escapes, outside and outside[0])


def _translate_keys(named: Schema) -> Iterator[tuple[str, object]]:
    """Yield pairs of translated patterns and their values.

    Equal patterns get different spellings, so that no value is lost.
    """
    found: set[str] = set()
    for pattern, value in named.items():
        key = translate(pattern)
        while key in found:
            key += "(?:)"
        found.add(key)
        yield key, value


def _translate_piece(piece: re.Match[str]) -> str:
    if piece["members"] is None:
        return _OUTSIDE.get(piece[0], piece[0])
    members = "".join(map(_translate_member, _MEMBER.finditer(piece["members"])))
    return f"[{piece['negation']}{members}]" if members else _EMPTY[piece["negation"]]


def _translate_member(member: re.Match[str]) -> str:
    """Return a character, a set of characters or a range. Beside a set, a hyphen is a character."""
    if member["low"] is None:
        return _INSIDE.get(member[0], member[0])
    low, high = (_INSIDE.get(end, end) for end in (member["low"], member["high"]))
    hyphen = r"\-" if _SETS.match(member["low"]) or _SETS.match(member["high"]) else "-"
    return f"{low}{hyphen}{high}"
