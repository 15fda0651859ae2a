"""Search for infinite recursion in JSON schemas: parts that no finite value matches.

An example is an object that requires another object of the same schema.
"""

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

MAX_CONJUNCTS: Final = 64  # schemas whose keywords are combined, because one value must match all of them

# Horn clauses: (head, needs) states that a finite value matches `head` if finite values match all of `needs`. Their
# least fixed point takes linear time. Keywords without a clause can only make a part look finite.
_Clause = tuple[int, list[int]]  # id() of a part or of a list of choices, and the distinct id()s of what it needs


def find_infinite(parts: SchemaParts) -> Schema | None:
    """Return a part that no finite value matches, or None."""
    clauses = [(head, list(dict.fromkeys(needs))) for part in parts for head, needs in _clauses(part, parts)]
    finite = _fixed_point(clauses)
    by_id = {id(part): part for part in parts if id(part) not in finite}
    if not by_id:
        return None
    missing = {
        head: next(each for each in needs if each not in finite) for head, needs in clauses if head not in finite
    }
    at, seen = next(iter(by_id)), set[int]()
    while at not in seen or at not in by_id:  # until a part repeats, which is in a cycle of requirements
        seen.add(at)
        at = missing[at]
    return _follow(by_id[at], parts)


def _follow(part: Schema, parts: SchemaParts) -> Schema:
    """Return the schema to which a part without constraints of its own refers, directly or through other references."""
    seen = {id(part)}
    while (
        part.keys() <= {"$ref", *ANNOTATIONS} and (target := parts.target(part)) is not None and id(target) not in seen
    ):
        part = target
        seen.add(id(part))
    return part


def _fixed_point(clauses: list[_Clause]) -> set[int]:
    """Return the least fixed point: the heads that follow from the clauses without needs."""
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
    """Yield the clauses of a part, and of the `anyOf` and `oneOf` that apply to it."""
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
    """Return the part and the schemas that its values must match as well, by `allOf` and `$ref`, transitively."""
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
    """Yield the schemas of the values under required keys."""
    names = set[str]().union(*map(required_keys, conjuncts))
    for each in conjuncts:
        properties, others = dict_in(each, "properties"), each.get("additionalProperties")
        yield from (
            schema for name in sorted(names & properties.keys()) if isinstance(schema := properties[name], dict)
        )
        if isinstance(others, dict) and not each.get("patternProperties") and names - properties.keys():
            yield others


def _required_items(conjuncts: list[Schema]) -> Iterator[Schema]:
    """Yield the schemas of the items that `minItems` requires."""
    least = max((count for each in conjuncts if isinstance(count := each.get("minItems"), int)), default=0)
    for each in conjuncts:
        first, others = list_in(each, "prefixItems")[: max(least, 0)], each.get("items")
        yield from (schema for schema in first if isinstance(schema, dict))
        if isinstance(others, dict) and least > len(first):
            yield others
