"""Bounds of numbers that llguidance does not enforce.

llguidance treats a whole exclusive bound as inclusive if the opposite bound is less than 1 away: for numbers above 0
and up to 0.5 it allows 0. The opposite bound may be in another schema that applies to the same value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outrider.engines.schema_parts import CHOICES, CONSTRAINTS, Schema, SchemaParts, list_in, types_of
from outrider.numeric import is_number

_SIDES = (
    ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
    ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
)
_JOINING = ("$ref", *CHOICES)  # keywords whose schemas apply together with those beside them
_PATTERN_ONLY = {"pattern"}  # the keywords of a schema that `add_patterns` adds


def find_ignored_bound(parts: SchemaParts) -> tuple[Schema, str] | None:
    """Return an exclusive bound that llguidance would ignore, as its part and keyword, or None."""
    groups: list[Iterable[Schema]] = [[part] for part in parts]
    if any(map(_is_joined, parts)):  # any two parts may apply to the same value
        groups.append(parts)
    return next((found for group in groups for found in _ignored_bounds(group)), None)


def _is_joined(part: Schema) -> bool:
    """Return whether other schemas apply to a part's values together with its own keywords."""
    others = part.keys() & CONSTRAINTS - {"type", "format"}
    conjuncts = [each for each in list_in(part, "allOf") if isinstance(each, dict) and each.keys() != _PATTERN_ONLY]
    return bool(conjuncts) or any(key in others and len(others) > 1 for key in _JOINING)


def _ignored_bounds(group: Iterable[Schema]) -> Iterator[tuple[Schema, str]]:
    numbers = [part for part in group if "number" in types_of(part)]
    for key, opposite, sign in _SIDES:
        ends = [part[name] for part in numbers for name in opposite if is_number(part.get(name))]
        bounds = [(part, part[key]) for part in numbers if is_number(part.get(key)) and float(part[key]).is_integer()]
        yield from ((part, key) for part, bound in bounds if any(0 < sign * (end - bound) < 1 for end in ends))
