"""Formats of strings: whatever a grammar allows is valid for a validator of the format."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import Grammar
from outrider.engines.grammars import compile_grammar
from outrider.engines.schema_formats import FORMAT_PATTERNS
from outrider.sampling.grammar import GrammarMask
from tests.engines.test_grammars import EOS, accepts
from tests.support.random_schemas import draw_output
from tests.support.tokenizers import byte_level

FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
LONGEST = 400  # characters
LETTERS = byte_level().convert_tokens_to_ids(list("-:@.aZ0259"))  # those on which formats depend


def schema_of(name: str) -> dict[str, Any]:
    return {"type": "string", "format": name}


def is_valid(name: str, value: str) -> bool:
    return jsonschema_rs.is_valid(schema_of(name), value, validate_formats=True)


def draw(name: str, seed: int) -> str | None:
    """Return a random string of a format's grammar, or None if it does not end."""
    mask = GrammarMask(compile_grammar(Grammar.json_schema(schema_of(name)), byte_level(), EOS))
    lengths = (5, 60, LONGEST)
    text = draw_output(mask, random.Random(seed), EOS[0], letters=LETTERS, lengths=lengths, longest=LONGEST)
    return text and json.loads(text)


@pytest.mark.parametrize("name", FORMATS)
@given(seed=st.integers(0, 2**32))
def test_every_output_of_a_format_is_valid(name: str, seed: int) -> None:
    value = draw(name, seed)
    assert value is None or is_valid(name, value), value


EDGES = {
    "date": ["2024-02-29", "2000-02-29", "1900-02-29", "2023-02-29", "2023-02-30", "2023-04-31", "2023-12-31",
             "2023-1-01"],
    "time": ["10:00:59Z", "10:00:60Z", "24:00:00Z", "10:00:00.123456+23:59", "10:00:00-24:00", "10:00:00", "23:59:59z"],
    "date-time": ["1931-09-30t00:59:59-11:26", "1931-09-30t00:59:60-11:26", "2023-02-29T10:00:00Z",
                  "2024-02-29T10:00:00Z"],
    "hostname": ["a", "a" * 63, "a" * 64, "a-b.c", "ab--c", "abc--d", "a--b", "x.ab--c", "-a", "a-", "a..b",
                 ".".join(["b" * 49] * 5), ".".join(["b" * 50] * 5)],
    "email": ["a@b", "a.b+c@d.e", "x" * 64 + "@b", "x" * 65 + "@b", "a@" + "b" * 63, "a@" + "b" * 64, "a@bc--d",
              "a@b--c", "a@" + ".".join(["b" * 49] * 5), "a@" + ".".join(["b" * 50] * 5), "a@", "@b", "a@b@c"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in EDGES.items() for value in values])
def test_a_grammar_accepts_what_a_validator_does(name: str, value: str) -> None:
    assert accepts(Grammar.json_schema(schema_of(name)), json.dumps(value)) == is_valid(name, value)


def test_every_pattern_is_tested() -> None:
    assert set(EDGES) == set(FORMAT_PATTERNS)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "date", "pattern": "^2"}, ["2024-02-29"], ["1999-01-01", "2023-02-29"]),
        ({"format": "date", "allOf": [{"pattern": "^2"}]}, ["2024-02-29"], ["1999-01-01", "2023-02-29"]),
        ({"format": "time", "anyOf": [{"pattern": "Z$"}, {"pattern": "z$"}]}, ["10:00:00z"], ["10:00:60z", "1:00"]),
        ({"format": "email", "pattern": "^[a-z]+@b[.]c$"}, ["a@b.c"], ["A@b.c", "a@b", "x" * 65 + "@b.c"]),
        ({"format": "email", "maxLength": 66}, ["x" * 64 + "@b"], ["x" * 64 + "@bb", "x" * 65]),
        ({"$defs": {"t": {"format": "time"}}, "$ref": "#/$defs/t"}, ["10:00:00Z"], ["10:00:60Z"]),
        ({"type": ["string", "null"], "format": "time"}, ["10:00:00Z", None], ["10:00:60Z"]),
        ({"properties": {"at": {"format": "time"}}, "required": ["at"]}, [{"at": "10:00:00Z"}], [{"at": "10:00:60Z"}]),
        ({"enum": ["10:00:00Z", "10:00:60Z"], "format": "time"}, ["10:00:00Z"], ["10:00:60Z"]),
    ],
)  # fmt: skip
def test_a_format_holds_beside_other_keywords(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    for value in (*good, *bad):
        assert accepts(
            Grammar.json_schema({"type": "string", **schema} if isinstance(value, str) else schema), json.dumps(value)
        ) == (value in good)
        assert jsonschema_rs.is_valid(schema, value, validate_formats=True) == (value in good)


def test_a_format_in_a_lark_grammar_holds_as_well() -> None:
    grammar = Grammar("lark", 'start: %json {"type": "string", "format": "time"}')
    assert [accepts(grammar, f'"10:00:{second}Z"') for second in (59, 60)] == [True, False]
