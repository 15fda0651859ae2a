"""The parts of a JSON schema: its subschemas, and the schemas to which `$ref` points."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

Schema = dict[str, Any]

SUBSCHEMAS: Final = ("items", "additionalItems", "additionalProperties")
SUBSCHEMA_MAPS: Final = ("properties", "patternProperties")
DEFINITIONS: Final = ("$defs", "definitions")
CHOICES: Final = ("anyOf", "oneOf")
SUBSCHEMA_LISTS: Final = (*CHOICES, "allOf", "prefixItems", "items")
CONTAINERS: Final = frozenset({"object", "array"})
TYPES: Final = CONTAINERS | {"null", "boolean", "number", "integer", "string"}
# Keywords that constrain values. llguidance refuses some of them by name.
CONSTRAINTS: Final = frozenset({
    "$ref", "$dynamicRef", "$recursiveRef", "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then",
    "else", "properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties",
    "dependentSchemas", "dependentRequired", "dependencies", "required", "minProperties", "maxProperties", "items",
    "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems",
    "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
})  # fmt: skip
# Keywords that do not constrain values.
ANNOTATIONS: Final = frozenset({
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "$defs",
    "definitions", "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml",
})  # fmt: skip


def subschemas(part: Schema, keys: Iterable[str] = (*DEFINITIONS, *SUBSCHEMA_MAPS)) -> Iterator[tuple[str, Schema]]:
    """Yield the path and the value of each direct subschema. keys: the keywords that map names to schemas."""
    for key, value in part.items():
        inside: Iterable[tuple[object, object]] = ()
        if key in SUBSCHEMAS and isinstance(value, dict):
            yield key, value
        elif key in keys and isinstance(value, dict):
            inside = value.items()
        elif key in SUBSCHEMA_LISTS and isinstance(value, list):
            inside = enumerate(value)
        yield from ((f"{key}.{name}", child) for name, child in inside if isinstance(child, dict))


def required_keys(part: Schema) -> set[str]:
    """Return the required keys."""
    return {name for name in list_in(part, "required") if isinstance(name, str)}


def types_of(part: Schema) -> frozenset[str]:
    """Return the types in `type`, or all types."""
    given = part.get("type")
    if isinstance(given, str):
        return frozenset([given])
    return frozenset(each for each in list_in(part, "type") if isinstance(each, str)) or TYPES


def list_in(part: Schema, key: str) -> list[Any]:
    """Return the list under a key, or an empty one."""
    value = part.get(key)
    return value if isinstance(value, list) else []


def dict_in(part: Schema, key: str) -> Schema:
    """Return the object under a key, or an empty one."""
    value = part.get(key)
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class _Place:
    """The place of a part. path: relative to `parent`, or to the root if that is None."""

    parent: Schema | None
    path: str


class SchemaParts:
    """The schemas that apply to a value of the root schema or to a part of that value, each once, breadth first."""

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
        """Return the path of a part from the root, such as "properties.a"."""
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
        """Return the path and the schema of a reference within the root, or None. llguidance refuses all others."""
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
