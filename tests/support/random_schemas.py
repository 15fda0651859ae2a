"""Random JSON schemas, and random outputs of their grammars."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.sampling.grammar import GrammarMask
from tests.support.tokenizers import byte_level

Schema = dict[str, Any]

BOUNDS = (0, 1, -1, 2, 5, 7, 10, 100, -3, 0.5, 0.1, 0.25, 1.5, -2.5, 3.14, 0.01, 12.75, 99.99, -0.5, 2.0, 0.3)
MULTIPLES = (0.1, 0.5, 2, 3, 0.25, 0.01, 1, 5, 1.5, 7, 0.3, 10, 100)
PATTERNS = (
    r"^\d+$", r"\d", r"^\w+$", r"^\s$", r"^\s*a$", "a$", "^a.b$", "^[^a]$", r"^\S+$", r"^\W$", r"^\D$", "(?i)^abc$",
    "^(a|b)*$", "^a{2,3}$", "a|^b$", "^.{2}$", r"^[\/]$", "^(?:ab)+$", "^(?<n>a)$", r"^[\u4e00-\u9fff]$", "^[😀]{2}$",
    "^[[:alpha:]]$", "^[a-z&&[^b]]$", "^[a~~b]$", r"^[\w-]+$", r"^[^\d\s]$", r"[0-9]{3}-[0-9]{4}", r"^[\S\n]$", "", "$",
)  # fmt: skip
FORMATS = ("date", "time", "email", "ipv4", "uuid", "hostname", "duration", "uri")
VALUES = (0, 1, -1, 1.0, 1.5, "a", "1", True, False, None, [], [1], {}, {"a": 1}, "😀", "é", 0.1, {"b": 2, "a": 1})
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
KEYS, KEY_PATTERNS = ("a", "b", "ab", "c"), ("^a", "b$", "^x-", "", r"^\w$", "a|b", r"^\S")
LETTERS = byte_level().convert_tokens_to_ids(list("-0123456789.eE+abAZ_ \\n"))
CLOSING = byte_level().convert_tokens_to_ids(list(']}"'))


class SchemaGenerator:
    """Draws schemas of up to some depth."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def root(self) -> Schema:
        """A schema, with the definition to which it may refer."""
        schema = self.schema(2)
        return {**schema, "$defs": {"x": self.schema(1)}} if '"$ref"' in json.dumps(schema) else schema

    def schema(self, depth: int) -> Schema:
        """A schema. Some have keywords of another kind beside their own."""
        kinds: list[Callable[[int], Schema]] = [self.number, self.number, self.string, self.string, self.value]
        if depth > 0:
            kinds += [self.object, self.object, self.array, self.choice, self.choice, self.reference]
        schema = self.dice.choice(kinds)(depth)
        return {**self.schema(0), **schema} if self.chance(0.25) else schema

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def some(self, keywords: dict[str, Callable[[], Any]], share: float = 0.35) -> Schema:
        """Some of the keywords, with values."""
        return {key: value() for key, value in keywords.items() if self.chance(share)}

    def number(self, _: int) -> Schema:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        bounds = self.some({name: lambda: self.dice.choice(BOUNDS) for name in names})
        multiple = self.some({"multipleOf": lambda: self.dice.choice(MULTIPLES)})
        return {"type": self.dice.choice(("number", "integer")), **bounds, **multiple}

    def string(self, _: int) -> Schema:
        lengths = self.some({name: lambda: self.dice.randrange(4) for name in ("minLength", "maxLength")})
        content = self.dice.choice(({}, {"pattern": self.dice.choice(PATTERNS)}, {"format": self.dice.choice(FORMATS)}))
        return {"type": "string", **lengths, **content}

    def value(self, _: int) -> Schema:
        kinds = ({"const": self.dice.choice(VALUES)}, {"type": self.dice.sample(TYPES, 2)})
        return self.dice.choice((*kinds, {"enum": self.dice.sample(VALUES, 3)}))

    def object(self, depth: int) -> Schema:
        def named(names: tuple[str, ...]) -> Schema:
            return {name: self.schema(depth - 1) for name in self.dice.sample(names, 2)}

        keywords = {
            "properties": lambda: named(KEYS),
            "patternProperties": lambda: named(KEY_PATTERNS),
            "required": lambda: self.dice.sample(KEYS, 2),
            "additionalProperties": lambda: self.dice.choice((False, True, self.schema(depth - 1))),
            "minProperties": lambda: self.dice.randrange(3),
            "maxProperties": lambda: self.dice.randrange(4),
        }
        return {"type": "object", **self.some(keywords, 0.5)}

    def array(self, depth: int) -> Schema:
        keywords = {
            "items": lambda: self.dice.choice((False, True, self.schema(depth - 1))),
            "prefixItems": lambda: [self.schema(depth - 1) for _ in range(2)],
            "minItems": lambda: self.dice.randrange(4),
            "maxItems": lambda: self.dice.randrange(4),
        }
        return {"type": "array", **self.some(keywords, 0.5)}

    def choice(self, depth: int) -> Schema:
        return {self.dice.choice(("anyOf", "allOf", "oneOf")): [self.schema(depth - 1) for _ in range(2)]}

    def reference(self, _: int) -> Schema:
        return {"$ref": "#/$defs/x"}


def draw_output(
    mask: GrammarMask,
    dice: random.Random,
    eos: int,
    *,
    letters: Sequence[int] = LETTERS,
    lengths: Sequence[int] = (0, 3, 12, 40),
    longest: int = 120,
) -> str | None:
    """A random output of a grammar, or None if it does not end. It often closes strings, arrays and objects.

    letters: the tokens that are drawn most often. lengths: from one of them on, the output ends as soon as it can.
    """
    ids: list[int] = []
    ends = dice.choice(lengths)
    while len(ids) < longest:
        allowed = set(np.flatnonzero(mask.allowed(ids)).tolist())
        if eos in allowed and (len(ids) >= ends or allowed == {eos}):
            return str(byte_level().decode(ids))
        ids.append(_pick(allowed - {eos}, dice, letters, closes=len(ids) >= ends))
    return None


def _pick(allowed: set[int], dice: random.Random, letters: Sequence[int], *, closes: bool) -> int:
    closing, favoured = sorted(allowed & set(CLOSING)), sorted(allowed & set(letters))
    if closing and closes and dice.random() < 0.8:
        return dice.choice(closing)
    return dice.choice(favoured if favoured and dice.random() < 0.6 else sorted(allowed))
