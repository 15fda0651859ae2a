"""Patterns of schemas are those of ECMA 262, although llguidance reads Rust's."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema_rs
import pytest

from outrider.config import Grammar
from outrider.engines.grammars import compile_grammar
from outrider.engines.schema_patterns import translate
from outrider.errors import GrammarError
from tests.engines.test_grammars import EOS, accepts
from tests.support.tokenizers import byte_level

SPACES = "\t\n\f\r \xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
OTHERS = "\x85\u180e\u200b\u200d\u2060a_0é٣中😀"
SIGNS = "[]&~-^!+,.|:#"


def pattern(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": text, **more}


@cache
def grammar(text: str) -> Grammar:
    return Grammar.json_schema(pattern(text))


def matched(text: str, values: str) -> str:
    """The characters that are outputs of a pattern's grammar."""
    return "".join(each for each in values if accepts(grammar(text), json.dumps(each, ensure_ascii=False)))


@pytest.mark.parametrize("text", [r"^\s$", r"^[\s]$", r"^[^\S]$", r"^[\sx]$"])
def test_white_space_is_that_of_ecma(text: str) -> None:
    assert matched(text, SPACES + OTHERS) == SPACES


@pytest.mark.parametrize("text", [r"^\S$", r"^[\S]$", r"^[^\s]$", r"^[\S\u2000]$"])
def test_other_characters_are_those_of_ecma(text: str) -> None:
    assert matched(text, "\t \ufeff\u3000" + OTHERS) == OTHERS


def test_a_dot_is_no_line_break() -> None:
    assert matched("^.$", "\n\r\u2028\u2029\t\x85a😀") == "\t\x85a😀"


@pytest.mark.parametrize(
    ("text", "members"),
    [
        (r"^[a[b]$", "[ab"),
        (r"^[ab&&b~~]$", "&ab~"),
        (r"^[+--]$", "+,-"),
        (r"^[a-]$", "-a"),
        (r"^[\w-]$", "-_a"),
        (r"^[\]^]$", "]^"),
        (r"^[^^]$", "a-"),
        (r"^[\--a]$", "-._a[]^:"),
        (r"^[\x2b-\u002d]$", "+,-"),
        (r"^(a|[[.])$", ".[a"),
    ],
)
def test_a_character_class_has_no_operators(text: str, members: str) -> None:
    assert matched(text, members) == members
    assert all(jsonschema_rs.is_valid(pattern(text), each) for each in matched(text, SIGNS + "ab_zé"))


def test_a_bracket_ends_a_class_of_a_class() -> None:
    for text in ("^[[:alpha:]]$", "^[a-z&&[^b]]$", "^[a[bc]]$"):
        values = ["a", "b", "z", "]", "a]", ":]", "&]", "[]", "^]"]
        outputs = [each for each in values if accepts(grammar(text), json.dumps(each))]
        assert outputs == [each for each in values if jsonschema_rs.is_valid(pattern(text), each)], text


def test_empty_classes() -> None:
    assert matched("^[^]$", "a\n") == "a\n"
    assert translate("[]a") == r"[^\s\S]a"


def test_what_rust_reads_alike_stays() -> None:
    for text in (r"^\d{3}-\w+\.\[(?:a|b)*$", r"\\\\", r"^[a-z0-9_]+$", r"[\]\-x]", r"^\.\*$"):
        assert translate(text) == text


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": pattern(r"^\S$")}, "required": ["a"]},
        {"$defs": {"x": pattern(r"^\S$")}, "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]},
        {"properties": {"a": {"allOf": [pattern(r"^\S$")]}}, "required": ["a"]},
        {"patternProperties": {r"^\S$": {"type": "integer"}}, "additionalProperties": False},
    ],
)
def test_patterns_in_every_part_are_translated(schema: dict[str, Any]) -> None:
    for value in ({"a": "\ufeff"}, {"\ufeff": 1}, {"a": "x"}, {"a": 1}):
        schema = {"type": "object", **schema}
        text = json.dumps(value, ensure_ascii=False)
        assert accepts(Grammar.json_schema(schema), text) == jsonschema_rs.is_valid(schema, value)


def test_a_constant_that_looks_like_a_pattern_stays() -> None:
    schema = {"const": {"pattern": "[[a].", "patternProperties": {".": 1}}}
    assert accepts(Grammar.json_schema(schema), json.dumps(schema["const"]))


def test_patterns_that_become_equal_are_refused_and_not_merged() -> None:
    named = {".": {"type": "integer"}, r"[^\n\r\u2028\u2029]": {"enum": [5, "x"]}}
    with pytest.raises(GrammarError, match="are not disjoint"):
        accepts(Grammar.json_schema({"type": "object", "patternProperties": named}), "{}")


def test_the_place_of_an_error_is_that_of_the_given_schema() -> None:
    schema = {"type": "object", "patternProperties": {r"^\s": {"if": {}}}}
    with pytest.raises(GrammarError) as caught:
        accepts(Grammar.json_schema(schema), "{}")
    assert caught.value.place == r"patternProperties.^\s"


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("^a{1}{2}$", "{1}{2}"),
        ("^a**$", "**"),
        ("^a++$", "++"),
        ("^a+??$", "+??"),
        ("^(?x) a b$", "(?x"),
        ("^(?P<n>a)$", "(?P"),
        (r"^\Aa\z$", r"\A"),
        (r"[\z]", r"\z"),
    ],
)
@pytest.mark.parametrize("key", ["pattern", "patternProperties"])
def test_what_only_rust_reads_is_refused(key: str, pattern: str, named: str) -> None:
    schema = {key: pattern if key == "pattern" else {pattern: {}}}
    with pytest.raises(GrammarError, match=re.escape(f"{named} is no syntax of ECMA 262")) as caught:
        compile_grammar(Grammar.json_schema(schema), byte_level(), EOS)
    assert caught.value.place == key


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\<a\>$", ["<a>"], ["a"]),
        (r"^[\<]$", ["<"], ["\\"]),
        (r"^a+?b{2}?$", ["abb", "aabb"], ["ab"]),
        (r"^[*+]{2}$", ["*+", "++"], ["*"]),
        (r"^\*+$", ["*", "**"], [""]),
        (r"^\\A$", ["\\A"], ["A"]),
        ("^(?:a?)(?<n>b)$", ["b", "ab"], ["a"]),
    ],
)
def test_syntax_that_resembles_it_is_accepted(pattern: str, good: list[str], bad: list[str]) -> None:
    assert [accepts(grammar(pattern), json.dumps(text)) for text in (*good, *bad)] == [True] * len(good) + [
        False
    ] * len(bad)
