"""Bounds of numbers that llguidance's grammars do not keep.

Between a whole bound and the next whole number, llguidance ignores that the bound is exclusive: above 0 and up to 0.5,
it allows 0. Schemas that apply to one value together give their strictest bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outrider.engines.schema_parts import ANNOTATIONS, CHOICES, Schema, SchemaParts, list_in, types_of
from outrider.numeric import is_number

_SIDES = (
    ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
    ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
)
_JOINING = ("$ref", *CHOICES)  # keywords whose schemas apply together with those beside them
_FORMAT = {"pattern"}  # keywords of the schemas that formats add


def find_ignored_bound(parts: SchemaParts) -> tuple[Schema, str] | None:
    """Return a part and its keyword of an exclusive bound that a grammar would ignore, or None."""
    groups: list[Iterable[Schema]] = [[part] for part in parts]
    if any(map(_is_joined, parts)):  # any two parts may apply to the same value
        groups.append(parts)
    return next((found for group in groups for found in _ignored_bounds(group)), None)


def _is_joined(part: Schema) -> bool:
    """Return whether other schemas apply to a part's values together with its own keywords."""
    others = part.keys() - {"type", "format"} - ANNOTATIONS
    conjuncts = [each for each in list_in(part, "allOf") if not (isinstance(each, dict) and each.keys() == _FORMAT)]
    return bool(conjuncts) or any(key in others and len(others) > 1 for key in _JOINING)


def _ignored_bounds(group: Iterable[Schema]) -> Iterator[tuple[Schema, str]]:
    numbers = [part for part in group if "number" in types_of(part)]
    for key, opposite, sign in _SIDES:
        ends = [part[name] for part in numbers for name in opposite if is_number(part.get(name))]
        bounds = [(part, part[key]) for part in numbers if is_number(part.get(key)) and float(part[key]).is_integer()]
        yield from ((part, key) for part, bound in bounds if any(0 < sign * (end - bound) < 1 for end in ends))
