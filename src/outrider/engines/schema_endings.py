"""A search for a part of a JSON schema of which no value ends, as an object that requires another one of its kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

from outrider.engines.schema_parts import (
    ANNOTATIONS,
    CHOICES,
    CONTAINERS,
    Schema,
    SchemaParts,
    dict_in,
    list_in,
    required_keys,
    types_of,
)

MAX_CONJUNCTS: Final = 64  # schemas that are combined to find out whether a value of all of them ends

# A part has a value that ends if one of its clauses holds: everything that the clause needs has such a value. The least
# fixed point of the clauses takes linear time. What they leave out only makes a part look satisfiable.
_Clause = tuple[int, list[int]]  # the id of a part or of a list of choices, and the distinct ids of what it needs


def find_endless(parts: SchemaParts) -> Schema | None:
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


def _follow(part: Schema, parts: SchemaParts) -> Schema:
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


def _clauses(part: Schema, parts: SchemaParts) -> Iterator[tuple[int, Iterable[int]]]:
    conjuncts = _conjuncts(part, parts)
    choices = [choice for each in conjuncts for key in CHOICES if (choice := list_in(each, key))]
    for choice in choices:
        yield from ((id(choice), [id(branch)] if branch in parts else []) for branch in choice)
    inner = [each for each in (parts.target(part), *list_in(part, "allOf")) if each in parts]
    needs = [*map(id, choices), *map(id, inner)]
    types = frozenset.intersection(*map(types_of, conjuncts))
    if not types or types - CONTAINERS or any("const" in each or "enum" in each for each in conjuncts):
        yield id(part), needs
        return
    if "object" in types:
        yield id(part), [*needs, *map(id, _required_values(conjuncts))]
    if "array" in types:
        yield id(part), [*needs, *map(id, _required_items(conjuncts))]


def _conjuncts(part: Schema, parts: SchemaParts) -> list[Schema]:
    """Return the schemas that a value of the part matches as well: those of `allOf` and `$ref`, and their own."""
    found: dict[int, Schema] = {}
    queue = [part]
    while queue and len(found) < MAX_CONJUNCTS:
        each = queue.pop()
        if id(each) not in found:
            found[id(each)] = each
            inner = [*list_in(each, "allOf")[:MAX_CONJUNCTS], parts.target(each)]
            queue += (schema for schema in inner if isinstance(schema, dict))
    return list(found.values())


def _required_values(conjuncts: list[Schema]) -> Iterator[Schema]:
    names = set[str]().union(*map(required_keys, conjuncts))
    for each in conjuncts:
        properties, others = dict_in(each, "properties"), each.get("additionalProperties")
        yield from (
            schema for name in sorted(names & properties.keys()) if isinstance(schema := properties[name], dict)
        )
        if isinstance(others, dict) and not each.get("patternProperties") and names - properties.keys():
            yield others


def _required_items(conjuncts: list[Schema]) -> Iterator[Schema]:
    least = max((count for each in conjuncts if isinstance(count := each.get("minItems"), int)), default=0)
    for each in conjuncts:
        first, others = list_in(each, "prefixItems")[: max(least, 0)], each.get("items")
        yield from (schema for schema in first if isinstance(schema, dict))
        if isinstance(others, dict) and least > len(first):
            yield others
