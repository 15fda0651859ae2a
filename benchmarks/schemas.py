"""JSON schemas for structured output: 200 of the kinds that the public JSON-Schema test suite covers, and 50 of tools.

All are made here from kinds. Lengths are bounded, so that a model of any quality reaches the end of an output.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def of_kinds(count: int = 200) -> list[Schema]:
    """Return `count` schemas, the kinds in turn."""
    return [KINDS[n % len(KINDS)](random.Random(n)) for n in range(count)]


def of_tools(count: int = 50) -> list[Schema]:
    """Return the schemas of `count` tool calls: an object with the tool's name and its arguments."""
    return [_tool(random.Random(1000 + n)) for n in range(count)]


def _object(properties: dict[str, Schema], required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


def _word(dice: random.Random) -> str:
    words = ("name", "size", "when", "état", "社区", "a b", "count", "x-y", "value", "ok", "😀", "left", '"q"', "n/a")
    return dice.choice(words)


def _scalar(dice: random.Random) -> Schema:
    return dice.choice((_string, _integer, _number, _boolean, _enum, _const, _pattern, _null))(dice)


def _string(dice: random.Random) -> Schema:
    least = dice.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + dice.randint(0, 6)}


def _integer(dice: random.Random) -> Schema:
    least = dice.randint(-150, 150)
    return {"type": "integer", "minimum": least, "maximum": least + dice.choice((0, 7, 99, 1234))}


def _number(dice: random.Random) -> Schema:
    return {"enum": [dice.randint(-9, 9) / 4 for _ in range(4)]} if dice.random() < 0.5 else _multiple(dice)


def _multiple(dice: random.Random) -> Schema:
    return {"type": "integer", "multipleOf": dice.choice((2, 3, 5, 7)), "minimum": 0, "maximum": 400}


def _exclusive(dice: random.Random) -> Schema:
    least = dice.randint(-9, 9)
    return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + dice.randint(2, 60)}


def _boolean(dice: random.Random) -> Schema:
    return {"type": "boolean"}


def _null(dice: random.Random) -> Schema:
    return {"type": "null"}


def _types(dice: random.Random) -> Schema:
    return {"type": ["boolean", "null", "integer"], "minimum": 0, "maximum": 20}


def _enum(dice: random.Random) -> Schema:
    values = [_word(dice), dice.randint(0, 99), None, True, {"k": [_word(dice), 1]}, [], dice.random() < 0.5]
    return {"enum": values[: dice.randint(1, len(values))]}


def _const(dice: random.Random) -> Schema:
    return {"const": dice.choice((_word(dice), 0, -1.5, None, [1, [2, "3"]], {"a": {"b": _word(dice)}}, "", {}))}


def _pattern(dice: random.Random) -> Schema:
    patterns = ("^[a-z]{1,4}$", "^(yes|no)$", r"^\d{3}-\d{2}$", '^[^"\\\\]{2}社?$', r"^v\d\.\d{1,2}$")
    return {"type": "string", "pattern": dice.choice(patterns)}


def _format(dice: random.Random) -> Schema:
    return {
        "type": "string",
        "format": dice.choice(("date", "time", "uuid", "ipv4", "date-time", "email", "hostname", "duration")),
        "maxLength": 40,
    }


def _items(dice: random.Random) -> Schema:
    least = dice.randint(0, 2)
    return {"type": "array", "items": _scalar(dice), "minItems": least, "maxItems": least + dice.randint(0, 2)}


def _prefix_items(dice: random.Random) -> Schema:
    parts = [_scalar(dice) for _ in range(dice.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": dice.randint(0, len(parts))}


def _properties(dice: random.Random) -> Schema:
    names = {_word(dice): _scalar(dice) for _ in range(dice.randint(1, 4))}
    return _object(names, [name for name in names if dice.random() < 0.6])


def _map(dice: random.Random) -> Schema:
    return {"type": "object", "additionalProperties": _integer(dice), "maxProperties": 0}


def _pattern_properties(dice: random.Random) -> Schema:
    inside = {"^[ab]{1,2}$": _boolean(dice)}
    return {"type": "object", "patternProperties": inside, "additionalProperties": False, "maxProperties": 0}


def _nested(dice: random.Random) -> Schema:
    return _object({"outer": _properties(dice), "list": _items(dice)})


def _any_of(dice: random.Random) -> Schema:
    return {"anyOf": [_scalar(dice), _properties(dice), _items(dice)][: dice.randint(2, 3)]}


def _one_of(dice: random.Random) -> Schema:
    return {"oneOf": [_string(dice), _integer(dice), _null(dice)]}


def _all_of(dice: random.Random) -> Schema:
    return {"allOf": [{"type": "integer", "minimum": dice.randint(0, 20)}, {"maximum": 120}]}


def _reference(dice: random.Random) -> Schema:
    shared = {"$ref": "#/$defs/shared"}
    return {"$defs": {"shared": _scalar(dice)}, **_object({"one": shared, "two": {"anyOf": [shared, _null(dice)]}})}


def _recursive(dice: random.Random) -> Schema:
    leaf = _object({"v": _boolean(dice)})
    node = _object({"v": _boolean(dice), "next": {"anyOf": [leaf, _null(dice)]}})
    return {"$defs": {"leaf": leaf, "node": node}, "$ref": "#/$defs/node"}


def _escaped(dice: random.Random) -> Schema:
    return _object({'say "hi"\n': _boolean(dice), "tab\there": _const(dice), "é\\社": _integer(dice)})


KINDS = (
    _string, _integer, _multiple, _exclusive, _boolean, _null, _types, _enum, _const, _pattern, _format, _items,
    _prefix_items, _properties, _map, _pattern_properties, _nested, _any_of, _one_of, _all_of, _reference, _recursive,
    _escaped, _number,
)  # fmt: skip

VERBS = ("get", "set", "list", "send", "create", "delete", "search", "open")
NOUNS = ("weather", "issue", "file", "message", "booking", "order", "user", "event", "page", "invoice")
PARAMETERS: dict[str, Schema] = {
    "city": {"type": "string", "maxLength": 10, "description": "The name of the city"},
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    "path": {"type": "string", "pattern": r"^/[a-z/]{1,12}$"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
    "dry_run": {"type": "boolean"},
    "labels": {"type": "array", "items": {"type": "string", "enum": ["bug", "docs", "wish"]}, "maxItems": 2},
    "at": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    "address": _object(
        {"zip": {"type": "string", "pattern": r"^\d{5}$"}, "no": {"type": "integer", "maximum": 99, "minimum": 1}}
    ),
    "mode": {"const": "safe"},
    "price": {"type": "integer", "minimum": 0, "maximum": 9999},
}


def _tool(dice: random.Random) -> Schema:
    name = f"{dice.choice(VERBS)}_{dice.choice(NOUNS)}"
    chosen = dice.sample(sorted(PARAMETERS), dice.randint(0, 4))
    arguments = _object({each: PARAMETERS[each] for each in chosen}, chosen[: dice.randint(0, len(chosen))])
    return _object({"name": {"const": name}, "arguments": arguments}, title=name, description=f"Call {name}.")
