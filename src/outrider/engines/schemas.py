"""JSON schemas of structured output: their texts for llguidance, and checks that it does not make.

Refused are schemas for which llguidance's grammar is not the schema's language: where repeated keys let an object look
larger than it is once parsed, and where the grammar can begin a value that never ends.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from outrider.errors import GrammarError

Schema = dict[str, Any]

# Between two JSON tokens. Without a limit, weak models generate nothing else.
WHITESPACE: Final = r"\x20|\n[\x20\t]{0,20}"
# Without \u: otherwise an additional key "\u0061" repeats the property "a", with a value of another schema.
ESCAPES: Final = {"json_allowed_escapes": 'nrbtf\\"'}
LAYOUT_OPTIONS: Final = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
SUBSCHEMAS: Final = ("items", "additionalItems", "additionalProperties")
SUBSCHEMA_MAPS: Final = ("properties", "patternProperties")
DEFINITIONS: Final = ("$defs", "definitions")
CHOICES: Final = ("anyOf", "oneOf")
SUBSCHEMA_LISTS: Final = (*CHOICES, "allOf", "prefixItems", "items")
CONTAINERS: Final = frozenset({"object", "array"})
TYPES: Final = CONTAINERS | {"null", "boolean", "number", "integer", "string"}
MAX_CONJUNCTS: Final = 64  # schemas that are combined to find out whether a value of all of them ends
# Those that constrain values, and those that llguidance refuses by name.
CONSTRAINTS: Final = frozenset({
    "$ref", "$dynamicRef", "$recursiveRef", "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then",
    "else", "properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties",
    "dependentSchemas", "dependentRequired", "dependencies", "required", "minProperties", "maxProperties", "items",
    "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems",
    "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
})  # fmt: skip
ANNOTATIONS: Final = frozenset({
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "$defs",
    "definitions", "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml",
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
    parts = _Parts(schema)
    for part in parts:
        _check_references(part, parts.place(part))
        _check_repeated_keys(part, parts.place(part))
    endless = _find_endless(parts)
    if endless is not None:
        raise GrammarError("no output matches it: each value needs another one, without end", parts.place(endless))


def find_unknown_keywords(schema: Schema) -> list[str]:
    """Return the paths of keywords that neither constrain nor describe values, such as `minLenght`."""
    parts = _Parts(schema)
    return [
        f"{parts.place(part)}.{key}".lstrip(".")
        for part in parts
        for key in part
        if key not in CONSTRAINTS and key not in ANNOTATIONS and not key.startswith("x-")
    ]


def subschemas(part: Schema, keys: Iterable[str] = (*DEFINITIONS, *SUBSCHEMA_MAPS)) -> Iterator[tuple[str, Schema]]:
    """Yield the path and the value of each schema directly inside a schema. keys: of the maps of schemas."""
    for key, value in part.items():
        inside: Iterable[tuple[object, object]] = ()
        if key in SUBSCHEMAS and isinstance(value, dict):
            yield key, value
        elif key in keys and isinstance(value, dict):
            inside = value.items()
        elif key in SUBSCHEMA_LISTS and isinstance(value, list):
            inside = enumerate(value)
        yield from ((f"{key}.{name}", child) for name, child in inside if isinstance(child, dict))


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
        raise GrammarError("$id is supported only at the root of the schema: it would change what $ref means", place)


# Parts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """The place of a part. parent: the part of which `path` is relative, or None for the root."""

    parent: Schema | None
    path: str


class _Parts:
    """The schemas that apply to a value of the root or to a part of one, each once, the outer ones first."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._places: dict[int, _Place] = {}
        self._targets: dict[int, Schema] = {}
        self._parts: list[Schema] = []
        queue: deque[tuple[Schema, _Place]] = deque([(root, _Place(None, ""))])
        while queue:
            part, place = queue.popleft()
            if id(part) in self._places:
                continue
            self._places[id(part)] = place
            self._parts.append(part)
            queue += ((child, _Place(part, path)) for path, child in subschemas(part, SUBSCHEMA_MAPS))
            if (found := self._find(part.get("$ref"))) is not None:
                path, self._targets[id(part)] = found
                queue.append((self._targets[id(part)], _Place(None, path)))

    def __iter__(self) -> Iterator[Schema]:
        return iter(self._parts)

    def __contains__(self, part: object) -> bool:
        return id(part) in self._places

    def place(self, part: Schema) -> str:
        """Return the path of a part."""
        steps: list[str] = []
        current: Schema | None = part
        while current is not None:
            place = self._places[id(current)]
            steps.append(place.path)
            current = place.parent
        return ".".join(filter(None, reversed(steps)))

    def target(self, part: Schema) -> Schema | None:
        """Return the schema to which a part refers, or None."""
        return self._targets.get(id(part))

    def _find(self, reference: object) -> tuple[str, Schema] | None:
        """Return the path and the value of a reference within the schema. llguidance refuses others, and wrong ones."""
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            return None
        keys = [unquote(key).replace("~1", "/").replace("~0", "~") for key in reference.split("/")[1:]]
        value: Any = self._root
        for key in keys:
            if isinstance(value, list):
                value = next((item for number, item in enumerate(value) if str(number) == key), None)
            else:
                value = value.get(key) if isinstance(value, dict) else None
        return (".".join(keys), value) if isinstance(value, dict) else None


# Repeated keys ----------------------------------------------------------------------------------------------


def _check_repeated_keys(part: Schema, place: str) -> None:
    """Refuse a `minProperties` that repeated keys could reach.

    llguidance writes each of `properties` once, but it does not remember other keys, and parsers merge equal ones. One
    other key differs from those that are required.
    """
    least, sure = part.get("minProperties"), len(_names(part)) + 1
    has_others = part.get("additionalProperties") is not False or part.get("patternProperties")
    if isinstance(least, int) and least > sure and has_others and "object" in _types(part):
        raise GrammarError(
            f"minProperties {least} is not supported here: keys that are not listed can repeat, and parsers merge "
            f"them: give at most {sure}, one more than `required` has keys",
            place,
        )


def _names(part: Schema) -> set[str]:
    """Return the required keys."""
    return {name for name in _list(part, "required") if isinstance(name, str)}


def _types(part: Schema) -> frozenset[str]:
    given = part.get("type")
    if isinstance(given, str):
        return frozenset([given])
    return frozenset(each for each in _list(part, "type") if isinstance(each, str)) or TYPES


def _list(part: Schema, key: str) -> list[Any]:
    value = part.get(key)
    return value if isinstance(value, list) else []


def _dict(part: Schema, key: str) -> Schema:
    value = part.get(key)
    return value if isinstance(value, dict) else {}


# Endless values ---------------------------------------------------------------------------------------------

# A part has a value that ends if one of its clauses holds: everything that the clause needs has such a value. The least
# fixed point of the clauses takes linear time. What they leave out only makes a part look satisfiable.
_Clause = tuple[int, list[int]]  # the id of a part or of a list of choices, and the distinct ids of what it needs


def _find_endless(parts: _Parts) -> Schema | None:
    """Return a part of which no value ends, or None."""
    clauses = [(head, list(dict.fromkeys(needs))) for part in parts for head, needs in _clauses(part, parts)]
    ending = _fixed_point(clauses)
    by_id = {id(part): part for part in parts if id(part) not in ending}
    if not by_id:
        return None
    missing = {
        head: next(each for each in needs if each not in ending) for head, needs in clauses if head not in ending
    }
    at, seen = next(iter(by_id)), set[int]()
    while at not in seen or at not in by_id:  # in a circle that no value can leave
        seen.add(at)
        at = missing[at]
    return _follow(by_id[at], parts)


def _follow(part: Schema, parts: _Parts) -> Schema:
    """Return the schema to which a mere reference leads, or the last one before a circle of references."""
    seen = {id(part)}
    while (
        part.keys() <= {"$ref", *ANNOTATIONS} and (target := parts.target(part)) is not None and id(target) not in seen
    ):
        part = target
        seen.add(id(part))
    return part


def _fixed_point(clauses: list[_Clause]) -> set[int]:
    """Return the heads of all clauses that follow from those without needs."""
    missing = [len(needs) for _, needs in clauses]
    waiting: dict[int, list[int]] = defaultdict(list)
    for number, (_, needs) in enumerate(clauses):
        for each in needs:
            waiting[each].append(number)
    found: set[int] = set()
    queue = [head for head, needs in clauses if not needs]
    while queue:
        head = queue.pop()
        for number in [] if head in found else waiting[head]:
            missing[number] -= 1
            if not missing[number]:
                queue.append(clauses[number][0])
        found.add(head)
    return found


def _clauses(part: Schema, parts: _Parts) -> Iterator[tuple[int, Iterable[int]]]:
    conjuncts = _conjuncts(part, parts)
    choices = [choice for each in conjuncts for key in CHOICES if (choice := _list(each, key))]
    for choice in choices:
        yield from ((id(choice), [id(branch)] if branch in parts else []) for branch in choice)
    inner = [each for each in (parts.target(part), *_list(part, "allOf")) if each in parts]
    needs = [*map(id, choices), *map(id, inner)]
    types = frozenset.intersection(*map(_types, conjuncts))
    if not types or types - CONTAINERS or any("const" in each or "enum" in each for each in conjuncts):
        yield id(part), needs
        return
    if "object" in types:
        yield id(part), [*needs, *map(id, _required_values(conjuncts))]
    if "array" in types:
        yield id(part), [*needs, *map(id, _required_items(conjuncts))]


def _conjuncts(part: Schema, parts: _Parts) -> list[Schema]:
    """Return the schemas that a value of the part matches as well: those of `allOf` and `$ref`, and their own."""
    found: dict[int, Schema] = {}
    queue = [part]
    while queue and len(found) < MAX_CONJUNCTS:
        each = queue.pop()
        if id(each) not in found:
            found[id(each)] = each
            inner = [*_list(each, "allOf")[:MAX_CONJUNCTS], parts.target(each)]
            queue += (schema for schema in inner if isinstance(schema, dict))
    return list(found.values())


def _required_values(conjuncts: list[Schema]) -> Iterator[Schema]:
    names = set[str]().union(*map(_names, conjuncts))
    for each in conjuncts:
        properties, others = _dict(each, "properties"), each.get("additionalProperties")
        yield from (
            schema for name in sorted(names & properties.keys()) if isinstance(schema := properties[name], dict)
        )
        if isinstance(others, dict) and not each.get("patternProperties") and names - properties.keys():
            yield others


def _required_items(conjuncts: list[Schema]) -> Iterator[Schema]:
    least = max((count for each in conjuncts if isinstance(count := each.get("minItems"), int)), default=0)
    for each in conjuncts:
        first, others = _list(each, "prefixItems")[: max(least, 0)], each.get("items")
        yield from (schema for schema in first if isinstance(schema, dict))
        if isinstance(others, dict) and least > len(first):
            yield others
