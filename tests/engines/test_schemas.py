"""Checks of JSON schemas: parsed outputs of a grammar are valid, and schemas without a finite value are refused."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.config import Grammar
from outrider.engines.grammars import compile_grammar
from outrider.engines.schemas import check_schema, find_unknown_keywords
from outrider.errors import GrammarError
from tests.engines.test_grammars import EOS, accepts
from tests.support.tokenizers import byte_level

INTEGER = {"type": "integer"}
NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}


def refused(schema: Any) -> GrammarError:
    with pytest.raises(GrammarError) as found:
        compile_grammar(Grammar.json_schema(schema), byte_level(), EOS)
    return found.value


# Repeated keys ----------------------------------------------------------------------------------------------

KEYS = ("a", "b", "ab", "é", "c\n")
SPELLINGS = ('"a"', '"b"', '"ab"', '"é"', '"c\\n"', '"\\u0061"', '"a\\u0062"', '"\\u00e9"', '"\\u00E9"', '"c\\u000a"')
VALUES = ("1", '"x"', "{}", '"\\u0031"')
keys = st.sampled_from(KEYS)
plain = st.sampled_from([INTEGER, {"type": "string"}, {}, {"const": 1}, {"type": "object"}])
objects = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={
        "properties": st.dictionaries(keys, plain, max_size=3),
        "required": st.lists(keys, max_size=3, unique=True),
        "additionalProperties": st.booleans() | plain,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$", "^é"]), plain, max_size=1),
        "minProperties": st.integers(0, 4),
        "maxProperties": st.integers(0, 4),
    },
)
schemas = objects | st.builds(lambda *both: {"anyOf": [*both]}, objects, objects)
schemas |= st.builds(lambda *both: {"allOf": [*both]}, objects, objects)
texts = st.lists(st.tuples(st.sampled_from(SPELLINGS), st.sampled_from(VALUES)), max_size=4).map(
    lambda pairs: "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}"
)


@given(schemas, st.lists(texts, min_size=4, max_size=8))
def test_what_a_grammar_accepts_is_valid_once_it_is_parsed(schema: Any, outputs: list[str]) -> None:
    grammar = Grammar.json_schema(schema)
    try:
        compile_grammar(grammar, byte_level(), EOS)
    except GrammarError:
        assume(False)
    for text in outputs:
        if accepts(grammar, text):
            jsonschema_rs.validate(schema, json.loads(text))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": INTEGER}, "required": ["a"]}, '{"a":1,"\\u0061":"x"}'),
        ({"properties": {"c\n": INTEGER}}, '{"c\\n":1,"c\\u000a":"x"}'),
        ({"properties": {"é": INTEGER}}, '{"\\u00e9":"x"}'),
        ({"patternProperties": {"^a": INTEGER}}, '{"\\u0061b":"x"}'),
        ({"type": "object", "properties": {"a": INTEGER}}, '{"a":1,"a":"x"}'),
    ],
)
def test_a_key_has_one_spelling(schema: Any, text: str) -> None:
    """With a second spelling, an additional key could repeat a property with a value of another schema."""
    assert not accepts(Grammar.json_schema(schema), text)
    rule = f"start: value\nvalue: %json {json.dumps(schema)}"
    assert not accepts(Grammar("lark", rule), text)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "minProperties": 2}, ""),
        ({"patternProperties": {"^a": INTEGER}, "additionalProperties": False, "minProperties": 2}, ""),
        ({"properties": {"a": {"required": ["b"], "minProperties": 3}}}, "properties.a"),
        ({"anyOf": [{"type": "string"}, {"type": "object", "minProperties": 2}]}, "anyOf.1"),
        ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"minProperties": 9}}}, "$defs.x"),
    ],
)
def test_a_minimum_that_repeated_keys_could_reach_is_refused(schema: Any, place: str) -> None:
    error = refused(schema)
    assert error.place == place
    assert "can repeat" in error.reason


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"b":2}', '{"a":1}'),
        (
            {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": False,
             "minProperties": 2, "type": "object"}, '{"a":1,"b":2}', '{"a":1}',
        ),
        ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
        ({"type": "array", "minProperties": 5}, "[]", "{}"),
    ],
)  # fmt: skip
def test_other_numbers_of_keys_are_enforced(schema: Any, good: str, bad: str) -> None:
    assert accepts(Grammar.json_schema(schema), good)
    assert not accepts(Grammar.json_schema(schema), bad)


LARGE_OBJECT = {"type": "object", "minProperties": 3}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$id": "https://x.y/z", "$ref": "https://x.y/z#/$defs/a", "$defs": {"a": LARGE_OBJECT}}, ""),
        ({"$id": "https://x.y/z", "items": {"$ref": "z#/$defs/a"}, "$defs": {"a": LARGE_OBJECT}}, "items"),
        ({"$ref": "#a", "$defs": {"a": {**LARGE_OBJECT, "$anchor": "a"}}}, ""),
        ({"$ref": "a.json", "$defs": {"a": {**LARGE_OBJECT, "$id": "a.json"}}}, ""),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "x", "$ref": "#/$defs/b", "$defs": {"b": LARGE_OBJECT}},
                                         "b": {}}}, "$defs.a"),
        ({"$ref": "#/%24defs/a", "$defs": {"a": LARGE_OBJECT}}, "$defs.a"),
        ({"$ref": "#/other/a", "other": {"a": LARGE_OBJECT}}, "other.a"),
        ({"items": [LARGE_OBJECT]}, "items.0"),
    ],
)  # fmt: skip
def test_references_do_not_bypass_the_checks(schema: Any, place: str) -> None:
    assert refused(schema).place == place


# Infinite recursion ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (NODE, ""),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {**NODE, "properties": {
            "next": {"$ref": "#/$defs/x", "description": "the next"}}}}}, "$defs.x"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ""),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, ""),
        ({"type": ["array", "object"], "items": {"$ref": "#"}, "minItems": 1, "required": ["a"],
          "additionalProperties": {"$ref": "#"}}, ""),
        ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, NODE]}}, "required": ["a"]}, ""),
        ({"$ref": "#/$defs/a", "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}, "$defs.a"),
        ({"$ref": "#/$defs/a", "properties": {"n": {"$ref": "#"}}, "required": ["n"],
          "$defs": {"a": {"type": "object"}}}, ""),
        ({"allOf": [{"type": "object"}, {"properties": {"n": {"$ref": "#"}}}, {"required": ["n"]}]}, ""),
        ({"properties": {"tilde/x": {**NODE, "properties": {"next": {"$ref": "#/properties/tilde~1x"}}}}},
         "properties.tilde/x"),
    ],
)  # fmt: skip
def test_a_schema_that_no_finite_value_matches_is_refused(schema: Any, place: str) -> None:
    error = refused(schema)
    assert (error.reason.partition(":")[0], error.place) == ("no finite value matches it", place)


@pytest.mark.parametrize(
    "schema",
    [
        {**NODE, "required": []},
        {**NODE, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {**NODE, "type": ["object", "null"]},
        {**NODE, "properties": {"next": {"type": "array", "items": {"$ref": "#"}}}},
        {"$defs": {"unused": {**NODE, "properties": {"next": {"$ref": "#/$defs/unused"}}}}},
        {"const": {"next": 1}},
        {"properties": {"a": {"$id": "#/properties/a", "type": "string"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}},
    ],
)
def test_a_recursive_schema_that_a_finite_value_matches_is_compiled(schema: Any) -> None:
    compile_grammar(Grammar.json_schema(schema), byte_level(), EOS)


REFERENCES = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in "abc"])


def inner(child: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.builds(lambda value, required: {"type": "object", "properties": {"k": value}, "required": required},
                  child, st.sampled_from([[], ["k"]]))
        | st.builds(lambda value, least: {"type": "array", "items": value, "minItems": least}, child, st.integers(0, 2))
        | st.builds(lambda first, second: {"anyOf": [first, second]}, child, child)
    )  # fmt: skip


parts = st.recursive(st.just({"type": "null"}) | REFERENCES, inner, max_leaves=4)
recursive = st.fixed_dictionaries(dict.fromkeys("abc", parts))


def finite_names(definitions: Any) -> set[str]:
    """Return the definitions that a finite value matches, by the depth of the smallest: 1, 2 and so on."""
    found: set[str] = set()
    for _ in definitions:
        found = {name for name, part in definitions.items() if is_finite(part, found)}
    return found


def is_finite(part: Any, names: set[str]) -> bool:
    """Return whether a finite value matches a part, if finite values match the definitions `names`."""
    if "$ref" in part:
        return part["$ref"][-1] in names
    if "anyOf" in part:
        return any(is_finite(each, names) for each in part["anyOf"])
    if part["type"] == "object":
        return not part["required"] or is_finite(part["properties"]["k"], names)
    return part["type"] == "null" or not part["minItems"] or is_finite(part["items"], names)


def used(part: Any, definitions: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions to which a part refers, directly or not."""
    for name in [name for name in definitions if f"#/$defs/{name}" in json.dumps(part) and name not in found]:
        found[name] = definitions[name]
        used(definitions[name], definitions, found)
    return found


@given(recursive)
def test_infinite_parts_are_found_exactly(definitions: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": definitions}
    every, names = used(schema["properties"], definitions, {}), finite_names(definitions)

    def is_infinite(part: Any) -> bool:
        if not isinstance(part, dict):
            return isinstance(part, list) and any(map(is_infinite, part))
        is_schema = "$ref" in part or "anyOf" in part or "type" in part
        return (is_schema and not is_finite(part, names)) or any(map(is_infinite, part.values()))

    if any(map(is_infinite, every.values())):
        with pytest.raises(GrammarError, match="no finite value matches it") as error:
            check_schema(schema)
        assert str(error.value.place).startswith("$defs.")
    else:
        check_schema(schema)


LARGE: dict[str, Any] = {
    "required keys that refer to each other": {
        "$defs": {str(n): {"type": "object", "required": [str(m) for m in range(90)], "properties": {
            str(m): {"$ref": f"#/$defs/{m}"} for m in range(90)}} for n in range(90)}, "$ref": "#/$defs/0"},
    "a long circle": {
        "$defs": {str(n): {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/{(n + 1) % 3000}"}}
                  for n in range(3000)}, "$ref": "#/$defs/0"},
    "many conjuncts, often": {
        "$defs": {"all": {"allOf": [{} for _ in range(8000)]}}, "anyOf": [{"$ref": "#/$defs/all"}] * 3000},
    "many keys, often": {
        "$defs": {"all": {"type": "object", "required": [str(n) for n in range(4000)]}},
        "anyOf": [{"$ref": "#/$defs/all"} for _ in range(3000)]},
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_check_takes_little_time(name: str) -> None:
    started = time.process_time()
    with suppress(GrammarError):
        check_schema(LARGE[name])
    find_unknown_keywords(LARGE[name])
    assert time.process_time() - started < 20


@pytest.mark.parametrize("depth", [940, 960, 980])
def test_a_schema_that_is_nested_as_deeply_as_python_reads_it_is_refused(depth: int) -> None:
    with pytest.raises(GrammarError):
        compile_grammar(Grammar("json_schema", '{"items":' * depth + "{}" + "}" * depth), byte_level(), EOS)


# Texts and keywords -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"const":"\\ud800"}'),
        ("json_schema", '{"properties":{"\\udfff":{}}}'),
        ("json_schema", '{"pattern":"\\ud800"}'),
        ("lark", 'start: %json {"enum":["\\ud800"]}'),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_name(kind: Any, text: str) -> None:
    with pytest.raises(GrammarError, match="half a surrogate pair"):
        compile_grammar(Grammar(kind, text), byte_level(), EOS)


def test_unknown_keywords_are_found_where_they_are() -> None:
    schema = {
        "title": "t",
        "properties": {"minLenght": {"type": "string", "minLenght": 3, "x-order": 1}, "b": {"$ref": "#/$defs/c"}},
        "$defs": {"c": {"nullable": True}, "unused": {"nullable": True}},
        "default": {"maximun": 1},
        "Required": ["b"],
    }
    assert find_unknown_keywords(schema) == ["Required", "properties.minLenght.minLenght", "$defs.c.nullable"]
    assert find_unknown_keywords({"$schema": "s", "type": "object", "x-guidance": {}}) == []


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False},
        {"not": False},
        {"propertyNames": True, "unevaluatedProperties": True, "unevaluatedItems": {}},
        {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    ],
)
def test_a_keyword_that_constrains_nothing_is_accepted(keywords: Any) -> None:
    """Here and in all kinds of parts. In a value, the same keys are data."""
    part = {"type": "array", "items": INTEGER, **keywords}
    for schema in (
        {"type": "object", "properties": {"a": part}, "required": ["a"], **keywords},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"], "$defs": {"a": part}},
        {"type": "object", "properties": {"a": {"anyOf": [part, {"type": "null"}]}}, "required": ["a"]},
        {"const": {"a": [1, 1]}, **keywords},
    ):
        for grammar in (Grammar.json_schema(schema), Grammar("lark", f"start: %json {json.dumps(schema)}")):
            assert accepts(grammar, '{"a":[1,1]}')
            assert not accepts(grammar, '{"a":["x"]}')
    assert accepts(Grammar.json_schema({"const": {"uniqueItems": False}}), '{"uniqueItems":false}')


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": True},
        {"uniqueItems": 0},
        {"not": {}},
        {"contains": {}, "minContains": 0},
        {"if": {}, "then": {}},
        {"dependentRequired": {"a": ["b"]}},
        {"unevaluatedProperties": False},
    ],
)
def test_keywords_that_constrain_are_named(keywords: Any) -> None:
    schema = {"properties": {"fine": {"uniqueItems": False}, "bad": keywords}}
    error = refused(schema)
    assert (error.place, error.reason) == ("properties.bad", f"not supported: {', '.join(keywords)}")


COUNTED = {"Length": '"{}"', "Items": "[{}]", "Properties": "{{{}}}"}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("number", [2, 2.0])
def test_an_integer_may_be_written_with_a_zero_fraction(name: str, number: float) -> None:
    grammar = Grammar.json_schema({"required": ["a"], f"max{name}": number, f"min{name}": number})
    lark = Grammar("lark", f"start: %json {json.dumps({'allOf': [json.loads(grammar.text)]})}")
    for count in (1, 2, 3):
        parts = {"Length": "abc"[:count], "Items": ",".join("123"[:count])}
        parts["Properties"] = ",".join(f'"{key}":1' for key in "abc"[:count])
        for each in (grammar, lark):
            assert accepts(each, COUNTED[name].format(parts[name])) == (count == 2)


def test_a_number_with_a_fraction_is_no_count() -> None:
    error = refused({"properties": {"a": {"minLength": 2.0}, "b": {"minLength": 2.5}}})
    assert (error.place, error.reason) == ("properties.b", "Expected positive integer for 'minLength', got 2.5")
    assert refused({"required": ["a"], "minProperties": 9.0}).reason.startswith("minProperties 9 is not supported")


# Values -----------------------------------------------------------------------------------------------------

TOO_LARGE = 2**53 + 1


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": TOO_LARGE}, "const"),
        ({"const": -TOO_LARGE}, "const"),
        ({"enum": [1, {"id": [TOO_LARGE]}]}, "enum"),
        ({"type": "integer", "minimum": TOO_LARGE, "maximum": TOO_LARGE + 2}, "minimum"),
        ({"type": "integer", "maximum": 1e30}, "maximum"),
        ({"type": "integer", "exclusiveMinimum": -TOO_LARGE}, "exclusiveMinimum"),
        ({"type": "object", "properties": {"a": {"const": TOO_LARGE}}}, "properties.a.const"),
        ({"const": "a\u0001b"}, "const"),
        ({"const": "a\u007f"}, "const"),
        ({"enum": [{"k\u0000": 1}]}, "enum"),
        ({"type": "string", "pattern": "^a\\x01b$"}, "pattern"),
        ({"type": "string", "pattern": "^a\\u0001b$"}, "pattern"),
        ({"type": "string", "pattern": "^a\x01b$"}, "pattern"),
        ({"type": "object", "patternProperties": {"^a\\x1f$": {}}, "additionalProperties": False}, "patternProperties"),
    ],
)
def test_a_value_that_the_grammar_would_replace_is_refused(schema: Any, place: str) -> None:
    assert refused(schema).place == place


@given(st.integers(-(2**53), 2**53))
def test_other_integers_are_enforced(value: int) -> None:
    grammar = Grammar.json_schema({"const": value})
    assert accepts(grammar, str(value))
    assert not accepts(grammar, str(value + 1))


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t\r\b\f"), max_size=8))
def test_other_texts_are_enforced(text: str) -> None:
    grammar = Grammar.json_schema({"const": text})
    assert accepts(grammar, json.dumps(text, ensure_ascii=False))
    assert not accepts(grammar, json.dumps(text + "x", ensure_ascii=False))


@pytest.mark.parametrize("count", [700, 2000])
def test_an_object_may_have_as_many_optional_keys_as_a_schema_can_hold(count: int) -> None:
    grammar = Grammar.json_schema({"properties": {f"k{n}": INTEGER for n in range(count)}, "type": "object"})
    assert accepts(grammar, '{"k0":1,"k5":2}')
    assert not accepts(grammar, '{"k5":"x"}')
