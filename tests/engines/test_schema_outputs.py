"""Outputs of JSON schemas: whatever a grammar allows is valid for a validator."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from decimal import Decimal
from typing import Any

import jsonschema_rs
import pytest

from outrider.config import Grammar
from outrider.engines.grammars import compile_grammar
from outrider.errors import DecodingError, GrammarError
from outrider.sampling.grammar import GrammarMask
from tests.engines.test_grammars import EOS, accepts
from tests.support.random_schemas import SchemaGenerator, draw_output
from tests.support.tokenizers import byte_level

SCHEMAS, OUTPUTS = 600, 6
FOUND = (878, 908, 973, 995, 1764, 2651, 2791, 2836, 4995, 7394, 12100)  # seeds whose grammars once allowed more
INEXACT = re.compile(r"[0-9]{15}|[0-9][eE]")  # numbers that a validator's floats may round


def outputs(schema: dict[str, Any], seed: int) -> list[str]:
    """Random outputs of a schema, none if it is refused, or if the grammar ends nowhere."""
    try:
        mask = GrammarMask(compile_grammar(Grammar.json_schema(schema), byte_level(), EOS))
    except GrammarError:
        return []
    dice, found = random.Random(seed), list[str | None]()
    with suppress(DecodingError):
        found += [draw_output(mask, dice, EOS[0]) for _ in range(OUTPUTS)]
    return [each for each in found if each is not None and not INEXACT.search(each)]


def check(seed: int) -> int:
    """Check random outputs of a random schema, and return their number."""
    schema = SchemaGenerator(seed).root()
    try:
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    except (ValueError, jsonschema_rs.ReferencingError):
        return 0
    found = outputs(schema, seed)
    for text in found:
        assert validator.is_valid(json.loads(text)), f"seed {seed}: {json.dumps(schema)} => {text}"
    return len(found)


def test_every_output_is_valid() -> None:
    assert sum(map(check, range(SCHEMAS))) > SCHEMAS // 2


@pytest.mark.parametrize("seed", FOUND)
def test_earlier_findings_stay_fixed(seed: int) -> None:
    check(seed)


# Numbers ----------------------------------------------------------------------------------------------------


EXCLUSIVE_SIDES = (("Minimum", "-"), ("Maximum", ""))


def in_bounds(text: str, schema: dict[str, Any]) -> bool:
    """Whether a number is valid, without the rounding of floats."""
    value = Decimal(text)
    low, high = (Decimal(str(schema.get(key, default))) for key, default in (("minimum", "-Inf"), ("maximum", "Inf")))
    over, under = (Decimal(str(schema.get(f"exclusive{key}", f"{sign}Inf"))) for key, sign in EXCLUSIVE_SIDES)
    return low <= value <= high and over < value < under


WHOLE = (0, 1, -1, 3, -3, 10, -10, 99, -100)


@pytest.mark.parametrize("distance", [0.001, 0.5, 0.999, 1, 1.5, 9])
@pytest.mark.parametrize("bound", WHOLE)
@pytest.mark.parametrize("other", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_an_exclusive_bound_is_exclusive_or_refused(bound: int, other: str, distance: float) -> None:
    key, sign = ("exclusiveMaximum", -1) if other.lower().endswith("minimum") else ("exclusiveMinimum", 1)
    schema = {"type": "number", key: bound, other: bound + sign * distance}
    if distance < 1:
        with pytest.raises(GrammarError, match=f"{key}: {key} cannot be enforced"):
            accepts(Grammar.json_schema(schema), "0")
        return
    steps = [Decimal(step) for step in ("0", "0.1", "-0.1", "0.9", "1", "-1", str(sign * distance))]
    texts = {text for step in steps for text in (f"{bound + step}", f"{bound + step:.3f}", f"-{abs(bound + step)}")}
    found = {text for text in texts if accepts(Grammar.json_schema(schema), text)}
    assert found == {text for text in found if in_bounds(text, schema)}
    assert found


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "allOf.0.exclusiveMinimum"),
        ({"maximum": 0.5, "allOf": [{"exclusiveMinimum": 0}]}, "allOf.0.exclusiveMinimum"),
        ({"exclusiveMaximum": 2, "anyOf": [{"minimum": 1.5}, {"minimum": 0}]}, "exclusiveMaximum"),
        ({"$defs": {"a": {"maximum": 0.5}}, "$ref": "#/$defs/a", "exclusiveMinimum": 0}, "exclusiveMinimum"),
        (
            {"properties": {"a": {"maximum": 0.5}}, "allOf": [{"properties": {"a": {"exclusiveMinimum": 0}}}]},
            "allOf.0.properties.a.exclusiveMinimum",
        ),
        ({"type": ["number", "null"], "exclusiveMinimum": 0.0, "exclusiveMaximum": 0.1}, "exclusiveMinimum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum"),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, "exclusiveMaximum"),
    ],
)
def test_an_exclusive_bound_that_would_be_ignored_is_refused(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(GrammarError, match="cannot be enforced") as caught:
        accepts(Grammar.json_schema(schema), "0")
    assert caught.value.place == place


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 1.5},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.75},
        {"properties": {"price": {"exclusiveMinimum": 0}, "share": {"maximum": 0.5}}},
        {"properties": {"price": {"exclusiveMinimum": 0}, "day": {"format": "date"}, "share": {"maximum": 0.5}}},
        {"type": "object", "anyOf": [{"properties": {"a": {"exclusiveMinimum": 0}}}, {"maximum": 0.5}]},
        {
            "properties": {
                "price": {"anyOf": [{"exclusiveMinimum": 0}, {"type": "null"}], "default": None, "title": "Price"},
                "share": {"maximum": 0.5},
            }
        },
        {
            "$defs": {"above": {"exclusiveMinimum": 0}},
            "properties": {"price": {"$ref": "#/$defs/above", "description": "x"}, "share": {"maximum": 0.5}},
        },
        {
            "properties": {
                "price": {"exclusiveMinimum": 0},
                "share": {"maximum": 0.5},
                "x": {"anyOf": [{}], "x-order": 1},
            }
        },
        {"type": "integer", "exclusiveMinimum": 2**53 - 1, "maximum": 2**53},
    ],
)
def test_other_exclusive_bounds_are_enforced(schema: dict[str, Any]) -> None:
    compile_grammar(Grammar.json_schema(schema), byte_level(), EOS)
