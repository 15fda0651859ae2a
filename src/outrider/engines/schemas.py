"""JSON schemas of structured output: their texts for llguidance, and checks that it does not make.

Refused are schemas for which llguidance's grammar is not the schema's language: where repeated keys let an object look
larger than it is once parsed, and where the grammar can begin a value that never ends.
"""

from __future__ import annotations

import json
from typing import Any, Final

from outrider.engines.schema_endings import find_endless
from outrider.engines.schema_parts import ANNOTATIONS, Schema, SchemaParts, required_keys, types_of
from outrider.errors import GrammarError

# Between two JSON tokens. Without a limit, weak models generate nothing else.
WHITESPACE: Final = r"\x20|\n[\x20\t]{0,20}"
# Without \u: otherwise an additional key "\u0061" repeats the property "a", with a value of another schema.
ESCAPES: Final = {"json_allowed_escapes": 'nrbtf\\"'}
LAYOUT_OPTIONS: Final = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
# Those that constrain values, and those that llguidance refuses by name.
CONSTRAINTS: Final = frozenset({
    "$ref", "$dynamicRef", "$recursiveRef", "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then",
    "else", "properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties",
    "dependentSchemas", "dependentRequired", "dependencies", "required", "minProperties", "maxProperties", "items",
    "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems",
    "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
})  # fmt: skip


def read_schema(text: str) -> Schema:
    """Return the schema in a text, an object.

    Raises:
        GrammarError: the text is not JSON, or is not a schema.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}", "") from error
    if not isinstance(schema, (dict, bool)):
        raise GrammarError("a schema is an object, true or false", "")
    if schema is False:
        raise GrammarError("the schema false allows no output", "")
    return {} if schema is True else schema


def write_schema(schema: Schema) -> str:
    """Return a schema as JSON for llguidance."""
    given = schema.get("x-guidance", {})
    spaces = {} if "whitespace_flexible" in given else {"whitespace_pattern": WHITESPACE}
    options = {**ESCAPES, **spaces, **given}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False, separators=(",", ":"))


def check_schema(schema: Schema) -> None:
    """Refuse a schema of which llguidance's grammar is not exact.

    Raises:
        GrammarError: an output could match the grammar and not the schema, or never end. The error names the part.
    """
    _check_layout(schema.get("x-guidance", {}))
    try:
        write_schema(schema).encode()
    except UnicodeEncodeError:
        raise GrammarError("the schema holds half a surrogate pair (\\ud800 to \\udfff)", "") from None
    except RecursionError:
        raise GrammarError("it is nested too deeply", "") from None
    parts = SchemaParts(schema)
    has_references = any("$ref" in part for part in parts)
    for part in parts:
        if has_references:
            _check_references(part, parts.place(part))
        _check_repeated_keys(part, parts.place(part))
    endless = find_endless(parts)
    if endless is not None:
        raise GrammarError("no output matches it: each value needs another one, without end", parts.place(endless))


def find_unknown_keywords(schema: Schema) -> list[str]:
    """Return the paths of keywords that neither constrain nor describe values, such as `minLenght`."""
    parts = SchemaParts(schema)
    return [
        f"{parts.place(part)}.{key}".lstrip(".")
        for part in parts
        for key in part
        if key not in CONSTRAINTS and key not in ANNOTATIONS and not key.startswith("x-")
    ]


def _check_layout(options: Any) -> None:
    """Refuse llguidance's options that let an output break its schema, such as `lenient`."""
    unknown = sorted(set(options) - set(LAYOUT_OPTIONS)) if isinstance(options, dict) else [str(options)]
    if unknown:
        raise GrammarError(f"{', '.join(unknown)}: expected an object of {', '.join(LAYOUT_OPTIONS)}", "x-guidance")


def _check_references(part: Schema, place: str) -> None:
    """Refuse references that are not paths from the root, because the checks follow only those."""
    reference = part.get("$ref", "#")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        raise GrammarError('$ref is supported only as "#" or as a path, such as "#/$defs/name"', place)
    if place and any(isinstance(part.get(key), str) for key in ("$id", "id")):
        raise GrammarError("beside $ref, $id is supported only at the root: it would change what $ref means", place)


# Repeated keys ----------------------------------------------------------------------------------------------


def _check_repeated_keys(part: Schema, place: str) -> None:
    """Refuse a `minProperties` that repeated keys could reach.

    llguidance writes each of `properties` once, but it does not remember other keys, and parsers merge equal ones. One
    other key differs from those that are required.
    """
    least, sure = part.get("minProperties"), len(required_keys(part)) + 1
    has_others = part.get("additionalProperties") is not False or part.get("patternProperties")
    if isinstance(least, int) and least > sure and has_others and "object" in types_of(part):
        raise GrammarError(
            f"minProperties {least} is not supported here: keys that are not listed can repeat, and parsers merge "
            f"them: give at most {sure}, one more than `required` has keys",
            place,
        )
