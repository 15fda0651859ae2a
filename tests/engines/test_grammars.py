"""Compilation of grammars: which are refused, where the fault is, and how much one can cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from outrider.config import MAX_GRAMMAR_BYTES, GenerationSettings, Grammar
from outrider.engines import grammars
from outrider.engines.grammars import compile_grammar
from outrider.errors import DecodingError, GrammarError, SettingsError
from outrider.sampling.grammar import GrammarMask
from tests.support.tokenizers import ALL, BYTES, byte_level, ids_of

EOS = (1,)


def accepts(grammar: Grammar, text: str, kind: str = "byte level") -> bool:
    """Whether a text is a complete output."""
    tokenizer = BYTES[kind]()
    mask, ids = GrammarMask(compile_grammar(grammar, tokenizer, EOS)), ids_of(text, tokenizer)
    return all(mask.allowed(ids[:n])[token] for n, token in enumerate([*ids, EOS[0]]))


# Kinds ------------------------------------------------------------------------------------------------------

PAIR = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), ("{}", '{"a": [1, "é社"]}', '{\n  "a": null\n}'), ("[]", "1", "{", "{}x", " {}")),
        (Grammar.json_schema(PAIR), ('{"a":1}', '{"a": -20}'), ("{}", '{"a":"1"}', '{"a":1,"b":2}')),
        (Grammar.json_schema(True), ("[]", "1", '"x"'), ("", "x")),
        (Grammar("regex", "a/b|[é社]+"), ("a/b", "é社"), ("a", "a/bb", "")),
        (Grammar("lark", 'start: "a" start "b" | "社"'), ("社", "aa社bb"), ("a社", "aa社b")),
        (Grammar("lark", f'start: "<t>" value "</t>"\nvalue: %json {json.dumps(PAIR)}'),
         ('<t>{"a":1}</t>',), ('{"a":1}', '<t>{"a":1}</t><t>{"a":1}</t>', '<t>{"a":  1}</t>')),
        (Grammar("lark", 'start: call (", " call)*\ncall: "\\"\\\\" %json {"const":"é\\""}'),
         ('"\\"é\\""', '"\\"é\\"", "\\"é\\""'), ('"\\é',)),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)  # fmt: skip
def test_what_a_grammar_accepts(kind: str, grammar: Grammar, good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    assert [text for text in good if not accepts(grammar, text, kind)] == []
    assert [text for text in bad if accepts(grammar, text, kind)] == []


def test_white_space_between_json_tokens_is_limited() -> None:
    grammar = Grammar("json_object")
    assert accepts(grammar, '{ "a": 1,\n\t\t"b": 2\n}')
    for space in ("  ", "\n\n", "\n" + 21 * " "):
        assert not accepts(grammar, f'{{{space}"a": 1}}')


@pytest.mark.parametrize("kind", ["plain", "metaspace", "wordpiece"])
def test_a_tokenizer_without_bytes_is_refused(kind: str) -> None:
    with pytest.raises(SettingsError, match="needs a tokenizer whose tokens are bytes"):
        compile_grammar(Grammar("json_object"), ALL[kind](), EOS)


def test_a_model_without_tokenizer_or_eos_is_refused() -> None:
    with pytest.raises(SettingsError, match="needs a tokenizer, and the model came without one"):
        compile_grammar(Grammar("json_object"), None, EOS)
    with pytest.raises(SettingsError, match="the model has none"):
        compile_grammar(Grammar("json_object"), byte_level(), ())


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar("regex", "compiled once")
    first = compile_grammar(grammar, byte_level(), EOS)
    monkeypatch.setattr(grammars, "_first_failure", lambda *_: pytest.fail("compiled again"))
    assert compile_grammar(Grammar("regex", "compiled once"), byte_level(), EOS) is first


EMPTY = [
    Grammar("json_schema", '{"$ref":"#"}'),
    Grammar("json_schema", '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'),
    Grammar("regex", r"a[^\s\S]"),
    Grammar("lark", "start: start"),
    Grammar("lark", "start: X\nX: /a/ & /b/"),
]


@pytest.mark.parametrize("grammar", EMPTY, ids=lambda grammar: grammar.text)
def test_a_grammar_that_no_output_matches_is_refused(grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match=r"no (finite value|output) matches it"):
        compile_grammar(grammar, byte_level(), EOS)


def test_a_dead_end_is_an_error_at_every_attempt() -> None:
    """The mask of an earlier prefix is never returned for one that nothing can follow."""
    mask = GrammarMask(compile_grammar(Grammar("lark", 'start: "q" X\nX: /a/ & /b/'), byte_level(), EOS))
    (token,) = np.flatnonzero(mask.allowed([]))
    for _ in range(2):
        with pytest.raises(DecodingError, match="no token can follow"):
            mask.allowed([int(token)])


# Refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"properties": {"a": {"properties": {"b": {"if": {}}}}}}, "properties.a.properties.b", "not supported: if"),
        ({"anyOf": [{"type": "string"}, {"items": {"pattern": "("}}]}, "anyOf.1.items", "unclosed group"),
        ({"prefixItems": [{}, {"type": "foo"}]}, "prefixItems.1", "Invalid type: foo"),
        ({"additionalProperties": {"pattern": "(?=a)"}}, "additionalProperties", "look-around"),
        ({"$defs": {"x": {"contains": {}}}, "properties": {"q": {"$ref": "#/$defs/x"}}}, "$defs.x", "contains"),
        ({"properties": {"q": {"$ref": "#/$defs/y"}}}, "properties.q", "does not exist"),
        ({"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 1}, "minItems": 1}, "items", "than"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "", "use anyOf"),
        (
            {"anyOf": [{"type": "string", "format": "email", "pattern": "@b[.]c$"}]},
            "anyOf.0",
            "too complex together",
        ),
        ({"type": "foo"}, "", "Invalid type"),
        (
            {"anyOf": [{"type": "string", "format": "date", "pattern": "^x"}]},
            "anyOf.0",
            ": no text matches its format, pattern and lengths together$",
        ),
        (
            {"type": "object", "properties": {"a": {}}, "minProperties": 1, "maxProperties": 3},
            "",
            "only if all keys of properties are required",
        ),
        ({"type": "string", "pattern": r"\bcat\b"}, "", r"look-around and \\b are not supported$"),
        ({"type": "string", "pattern": r"\p{Lu}"}, "pattern", r"\\p{…} and \\u{…}, which may stand for them"),
        (
            {"x-guidance": {"lenient": True}, "if": {}},
            "x-guidance",
            "lenient: expected an object with the keys whitespace",
        ),
        ({"x-guidance": 3}, "x-guidance", "3: expected an object"),
        (False, "", "allows no output"),
    ],
)
def test_a_schema_is_refused_with_the_place(schema: Any, place: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as refused:
        compile_grammar(Grammar.json_schema(schema), byte_level(), EOS)
    assert refused.value.place == place
    assert str(refused.value).startswith(f"grammar.{place}: " if place else "grammar: ")


def test_the_place_in_a_long_schema_is_found_in_a_child_process() -> None:
    properties: dict[str, Any] = {f"p{n}": {"type": "string", "description": "x" * 50} for n in range(120)}
    properties["p77"] = {"items": {"format": "nothing"}}
    with pytest.raises(GrammarError, match="Unknown format") as refused:
        compile_grammar(Grammar.json_schema({"properties": properties}), byte_level(), EOS)
    assert refused.value.place == "properties.p77.items"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[" * 50_000, "not valid JSON"),
        ("json_schema", "5", "a schema is an object"),
        ("json_schema", '{"minimum": NaN}', "NaN is no JSON"),
        ("json_schema", '{"minimum": -Infinity}', "-Infinity is no JSON"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)", "look-around"),
        ("lark", "start: x", "unknown name"),
        ("lark", "nothing", "Expected token"),
        ("lark", 'start: %json {"if": {}}', "not supported: if"),
    ],
)
def test_other_texts_are_refused_with_the_reason(kind: Any, text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        compile_grammar(Grammar(kind, text), byte_level(), EOS)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kind": "xml"}, "expected one of"),
        ({"kind": "regex"}, "needs a text"),
        ({"kind": "json_object", "text": "{}"}, "takes no text"),
        ({"kind": "regex", "text": 5}, "is a text"),
        ({"kind": "regex", "text": "\ud800"}, "surrogate"),
        ({"kind": "regex", "text": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "at most"),
        ({"text": "a"}, "kind and text"),
        ({"kind": "regex", "text": "a", "flags": "i"}, "kind and text"),
        (5, "is a Grammar"),
    ],
)
def test_settings_refuse_what_is_no_grammar(values: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        GenerationSettings.build({"grammar": values})


def test_settings_refuse_a_grammar_without_an_end() -> None:
    with pytest.raises(SettingsError, match="leave out ignore_eos"):
        GenerationSettings(grammar=Grammar("json_object"), ignore_eos=True)
    for value in (object(), float("nan"), float("inf")):
        with pytest.raises(SettingsError, match="not JSON"):
            Grammar.json_schema({"const": value})


# Bombs ------------------------------------------------------------------------------------------------------


def chained(n: int, link: Callable[[str], Any]) -> Grammar:
    """A chain of `n` definitions, each inside the one before."""
    definitions = {str(i): link(f"#/$defs/{i + 1}") for i in range(n)}
    return Grammar.json_schema({"$defs": {**definitions, str(n): {"type": "string"}}, "$ref": "#/$defs/0"})


def nested(n: int, key: str) -> Grammar:
    return Grammar("json_schema", f'{{"{key}":' * n + "true" + "}" * n)


BOMBS: dict[str, Grammar] = {
    "a deep schema": nested(5_000, "items"),
    "a deep constant": Grammar("json_schema", '{"const":' + "[" * 800 + "]" * 800 + "}"),
    "references, one after another": chained(1_500, lambda ref: {"$ref": ref}),
    "references in properties": chained(1_000, lambda ref: {"properties": {"a": {"$ref": ref}}}),
    "references in patterns": chained(900, lambda ref: {"patternProperties": {"^a": {"$ref": ref}}}),
    "references, twice each": chained(60, lambda ref: {"properties": {"a": {"$ref": ref}, "b": {"$ref": ref}}}),
    "choices, multiplied": Grammar.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{n}": {"const": c}}} for c in (1, 2)]} for n in range(40)]}
    ),
    "a huge enumeration": Grammar.json_schema({"enum": [f"value {n}" for n in range(4_000)]}),
    "many properties": Grammar.json_schema({"properties": {f"p{n}": {"type": "integer"} for n in range(1_500)}}),
    "an exponential expression": Grammar("regex", "(a|b)*a(a|b){30000}"),
    "repetitions of repetitions": Grammar("regex", "((a{1000}){1000}){1000}"),
    "groups, one after another": Grammar("regex", "(a?)" * 16_000),
    "deep groups": Grammar("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "a repeated pattern": Grammar.json_schema({"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}),
    "rules, one after another": Grammar(
        "lark", "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(4_000)) + 'r4000: "x"'
    ),
    "terminals, twice each": Grammar(
        "lark", "start: R0\n" + "".join(f"R{n}: R{n + 1} R{n + 1}\n" for n in range(40)) + 'R40: "x"'
    ),
    "rules, twice each": Grammar(
        "lark", "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(40)) + 'r40: "x"'
    ),
    "an ambiguous grammar": Grammar("lark", 'start: s\ns: s s s | s s | "a" |'),
    "itself": Grammar.json_schema({"$ref": "#"}),
    "itself and more": Grammar.json_schema({"allOf": [{"$ref": "#"}, {"properties": {"a": {"$ref": "#"}}}]}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_little_time(name: str) -> None:
    """Each is refused, or compiled and stepped through, in processor time that the limits bound."""
    started = time.process_time()
    try:
        mask = GrammarMask(compile_grammar(BOMBS[name], byte_level(), EOS))
    except GrammarError:
        pass
    else:
        output: list[int] = []
        for _ in range(10):
            try:
                there = mask.allowed(output)
            except DecodingError:
                break
            output.append(int(there.nonzero()[0][-1]))
    assert time.process_time() - started < 20


def test_a_recursive_schema_works() -> None:
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}, "required": ["kids"]}
    assert accepts(Grammar.json_schema(tree), json.dumps({"kids": [{"kids": []}, {"kids": [{"kids": []}]}]}))
    assert not accepts(Grammar.json_schema(tree), json.dumps({"kids": [{"kids": [{}]}]}))
