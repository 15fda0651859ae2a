"""JSON schemas of structured output: their translation for llguidance, and checks that llguidance lacks.

A schema is refused if llguidance would replace its values or ignore a bound, if repeated keys could fulfil
`minProperties`, although a parser merges them, or if the grammar allows the beginning of a value that can never be
completed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from outrider.engines.schema_bounds import find_ignored_bound
from outrider.engines.schema_formats import add_patterns
from outrider.engines.schema_parts import (
    ANNOTATIONS,
    CONSTRAINTS,
    Schema,
    SchemaParts,
    dict_in,
    list_in,
    required_keys,
    types_of,
)
from outrider.engines.schema_patterns import find_foreign_syntax, translate_patterns
from outrider.engines.schema_recursion import find_infinite
from outrider.errors import GrammarError, quote

# White space between two JSON tokens. Without a limit, weak models generate nothing else.
WHITESPACE: Final = r"\x20|\n[\x20\t]{0,20}"
# Without \u. Otherwise the additional key "\u0061" could repeat the property "a" with a value of another schema.
ESCAPES: Final = {"json_allowed_escapes": 'nrbtf\\"'}
# Characters that strings cannot hold without \u, and the ways to write them in a pattern.
UNWRITABLE: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
UNWRITABLE_IN_PATTERN: Final = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\(?:x[01]|x7[fF]|u00[01]|u007[fF]|[xuUpP]\{|U|c|0|[av])"
)
UNWRITABLE_REASON: Final = (
    r"control characters, and \p{…} and \u{…}, which may stand for them, cannot be enforced in a pattern"
)
MAX_INTEGER: Final = 2**53  # beyond it, llguidance rounds
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
INCLUSIVE: Final = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
LAYOUT_OPTIONS: Final = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Values that constrain nothing, of keywords that llguidance refuses.
NO_CONSTRAINT: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "not": (False,),
    **dict.fromkeys(("propertyNames", "unevaluatedProperties", "unevaluatedItems"), (True, {})),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ({},)),
}


def read_schema(text: str) -> Schema:
    """Parse and normalize a schema. Return {} for true, which allows every value.

    Raises:
        GrammarError: the text is not JSON, or is not a schema, or is false, which allows none.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}", "") from error
    if not isinstance(schema, (dict, bool)):
        raise GrammarError("a schema is an object, true or false", "")
    if schema is False:
        raise GrammarError("the schema false allows no output", "")
    return {} if schema is True else normalize(schema)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def normalize(schema: Schema) -> Schema:
    """Change a schema in place for llguidance, and return it.

    Integers such as 2.0 become 2, keywords that constrain nothing are removed, and formats get patterns.
    """
    for part in SchemaParts(schema):
        add_patterns(part)
        for key in COUNTS:
            if isinstance(count := part.get(key), float) and count.is_integer():
                part[key] = int(count)
        for key, values in NO_CONSTRAINT.items():
            if any(_is_same(part.get(key), value) for value in values):
                del part[key]
    return schema


def _is_same(value: object, other: object) -> bool:
    """Return whether two JSON values are equal. In Python, false equals 0."""
    return type(value) is type(other) and value == other


def write_schema(schema: Schema) -> str:
    """Return a schema as JSON for llguidance, whose options are in `x-guidance`."""
    given = schema.get("x-guidance", {})
    spaces = {} if "whitespace_flexible" in given else {"whitespace_pattern": WHITESPACE}
    options = {**ESCAPES, **spaces, **given}
    return json.dumps({**translate_patterns(schema), "x-guidance": options}, ensure_ascii=False, separators=(",", ":"))


def check_schema(schema: Schema) -> None:
    """Refuse a schema that llguidance's grammar does not enforce exactly.

    Raises:
        GrammarError: an output could match the grammar but not the schema, or could never be completed. The error names
            the part at fault.
    """
    _check_layout(schema.get("x-guidance", {}))
    try:
        write_schema(schema).encode()
    except UnicodeEncodeError:
        raise GrammarError("the schema holds half a surrogate pair (\\ud800 to \\udfff)", "") from None
    except RecursionError:
        raise GrammarError("the schema is nested too deeply", "") from None
    parts = SchemaParts(schema)
    has_references = any("$ref" in part for part in parts)
    for part in parts:
        place = parts.place(part)
        if has_references:
            _check_references(part, place)
        _check_values(part, place)
        _check_repeated_keys(part, place)
    ignored = find_ignored_bound(parts)
    if ignored is not None:
        part, key = ignored
        raise GrammarError(
            f"{key} cannot be enforced, because the opposite bound is less than 1 away: give {INCLUSIVE[key]} instead",
            f"{parts.place(part)}.{key}".lstrip("."),
        )
    infinite = find_infinite(parts)
    if infinite is not None:
        raise GrammarError("no finite value matches it: infinite recursion", parts.place(infinite))


def find_unknown_keywords(schema: Schema) -> list[str]:
    """Return the paths of keywords that JSON Schema does not define, such as `minLenght`. Those with x- are allowed."""
    parts = SchemaParts(schema)
    return [
        f"{parts.place(part)}.{key}".lstrip(".")
        for part in parts
        for key in part
        if key not in CONSTRAINTS and key not in ANNOTATIONS and not key.startswith("x-")
    ]


def _check_layout(options: Any) -> None:
    """Refuse options of llguidance that allow outputs against the schema, such as `lenient`."""
    unknown = sorted(set(options) - set(LAYOUT_OPTIONS)) if isinstance(options, dict) else [quote(options)]
    known = ", ".join(LAYOUT_OPTIONS)
    if unknown:
        raise GrammarError(f"{', '.join(unknown)}: expected an object with the keys {known}", "x-guidance")


def _check_references(part: Schema, place: str) -> None:
    """Refuse references other than paths from the root, because the checks follow only such paths."""
    reference = part.get("$ref", "#")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        raise GrammarError('$ref is supported only as "#" or as a path, such as "#/$defs/name"', place)
    if place and any(isinstance(part.get(key), str) for key in ("$id", "id")):
        raise GrammarError("$id is supported only at the root if there is a $ref: it changes what a $ref means", place)


# Values -----------------------------------------------------------------------------------------------------


def _check_values(part: Schema, place: str) -> None:
    """Refuse values that llguidance replaces by others: it rounds large numbers, and drops control characters."""
    for key, reason in _replaced_values(part):
        raise GrammarError(reason, f"{place}.{key}".lstrip("."))


def _replaced_values(part: Schema) -> Iterator[tuple[str, str]]:
    """Yield the keys of a part whose values are replaced, with the reasons."""
    for key, found in (("const", part.get("const")), ("enum", list_in(part, "enum"))):
        for value in _scalars(found):
            if isinstance(value, str) and UNWRITABLE.search(value):
                yield key, "control characters cannot be enforced"
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                yield key, "integers beyond ±2^53 cannot be enforced"
    for key in BOUNDS:
        bound = part.get(key)
        limit, text = (MAX_INTEGER - 1, "±(2^53 − 1)") if key in INCLUSIVE else (MAX_INTEGER, "±2^53")
        if isinstance(bound, int | float) and abs(bound) > limit:  # llguidance moves an exclusive bound by 1
            yield key, f"a bound beyond {text} cannot be enforced: leave it out"
    for key, patterns in (
        ("pattern", [part.get("pattern")]),
        ("patternProperties", dict_in(part, "patternProperties")),
    ):
        for pattern in (each for each in patterns if isinstance(each, str)):
            if UNWRITABLE_IN_PATTERN.search(pattern):
                yield key, UNWRITABLE_REASON
            if foreign := find_foreign_syntax(pattern):
                yield key, f"{foreign} is no syntax of ECMA 262"


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the keys and the innermost values of a JSON value."""
    queue = [value]
    while queue:
        each = queue.pop()
        if isinstance(each, dict):
            queue += [*each, *each.values()]
        elif isinstance(each, list):
            queue += each
        else:
            yield each


# Repeated keys ----------------------------------------------------------------------------------------------


def _check_repeated_keys(part: Schema, place: str) -> None:
    """Refuse a `minProperties` that repeated keys could fulfil.

    llguidance's grammar allows a listed key once, but can repeat other keys, which parsers then merge. Beside the
    required keys, only one more key is certain to differ from all others.
    """
    least, distinct = part.get("minProperties"), len(required_keys(part)) + 1
    has_others = part.get("additionalProperties") is not False or part.get("patternProperties")
    if isinstance(least, int) and least > distinct and has_others and "object" in types_of(part):
        raise GrammarError(
            f"minProperties {quote(least)} is not supported here: keys that `properties` and `required` do not list "
            f"can repeat, and parsers merge repeated keys: give at most {distinct}, one more than the required keys",
            place,
        )
