"""The grammars of enforced calls: every text that they allow parses as calls, and no other text is allowed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from outrider.config import Grammar
from outrider.engines.grammars import compile_grammar
from outrider.gateway.tool_grammar import call_grammar
from outrider.gateway.tool_parsers import HERMES, LLAMA, MISTRAL, ToolSyntax
from outrider.sampling.grammar import GrammarMask
from tests.support.tokenizers import SPECIALS, byte_level, ids_of, with_added_tokens

EOS = SPECIALS.index("</s>")
BEFORE = {HERMES: "<tool_call>\n", LLAMA: "", MISTRAL: " "}
LIST: dict[str, Any] = {  # refers to its own root and to its own definitions
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/count"}, "next": {"$ref": "#"}, "$ref": {"const": {"$ref": "#"}}},
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer"}},
}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("weather", CITY), tool("list", LIST)]


def allows(grammar: Grammar, text: str) -> bool:
    """Whether the text is a whole output."""
    mask = GrammarMask(compile_grammar(grammar, byte_level(), (EOS,)))
    ids = ids_of(text, byte_level())
    return all(mask.allowed(ids[:at])[token] for at, token in enumerate([*ids, EOS]))


def call(syntax: ToolSyntax, name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, syntax.arguments: arguments}, ensure_ascii=False)


def joined(syntax: ToolSyntax, *calls: str) -> str:
    """The calls as the model's template writes them, behind what is part of the prompt."""
    if syntax is HERMES:
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls)
    return "; ".join(calls) if syntax is LLAMA else f" [{', '.join(calls)}]"


@pytest.mark.parametrize("syntax", BEFORE, ids=lambda syntax: syntax.name)
def test_calls_are_allowed_and_nothing_else(syntax: ToolSyntax) -> None:
    grammar = call_grammar(syntax, TOOLS, BEFORE[syntax], parallel=True)
    weather, numbers = call(syntax, "weather", city="Köln"), call(syntax, "list", value=1, next={"value": 2})
    assert allows(grammar, joined(syntax, weather))
    assert allows(grammar, joined(syntax, numbers))
    assert allows(grammar, joined(syntax, weather, numbers))
    for wrong in (
        "It is warm.",
        joined(syntax, call(syntax, "other", city="Köln")),
        joined(syntax, call(syntax, "weather")),
        joined(syntax, call(syntax, "list", value="1")),
        joined(syntax, call(syntax, "list", value=1, next={"value": "2"})),
        joined(syntax, weather) + " And so on.",
        joined(syntax, weather)[:-1],
    ):
        assert not allows(grammar, wrong), wrong


@pytest.mark.parametrize("syntax", BEFORE, ids=lambda syntax: syntax.name)
def test_without_parallel_calls_there_is_one(syntax: ToolSyntax) -> None:
    grammar = call_grammar(syntax, TOOLS[:1], BEFORE[syntax], parallel=False)
    weather = call(syntax, "weather", city="Rome")
    assert allows(grammar, joined(syntax, weather))
    assert not allows(grammar, joined(syntax, weather, weather))


def test_a_key_that_is_named_like_a_reference_is_kept() -> None:
    grammar = call_grammar(LLAMA, [tool("list", LIST)], "", parallel=False)
    assert allows(grammar, call(LLAMA, "list", value=1, **{"$ref": {"$ref": "#"}}))


# Added tokens -----------------------------------------------------------------------------------------------

MARKS = {HERMES: ("<tool_call>", "</tool_call>"), MISTRAL: ("[TOOL_CALLS]",)}
AFTER = {HERMES: "<tool_call>\n", MISTRAL: "[TOOL_CALLS] "}  # before a call where the template writes the opener


def spelt(tokenizer: Any, text: str, marks: Sequence[str]) -> list[int]:
    """Return the tokens of a text, with the tokenizer's added tokens for its marks."""
    for mark in marks:
        if mark in text:
            before, _, after = text.partition(mark)
            token = tokenizer.convert_tokens_to_ids(mark)
            return [*spelt(tokenizer, before, marks), token, *spelt(tokenizer, after, marks)]
    return ids_of(text, tokenizer)


def allows_ids(grammar: Grammar, tokenizer: Any, ids: list[int]) -> bool:
    mask = GrammarMask(compile_grammar(grammar, tokenizer, (EOS,)))
    return all(mask.allowed(ids[:at])[token] for at, token in enumerate([*ids, EOS]))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("syntax", MARKS, ids=lambda syntax: syntax.name)
def test_the_marks_of_a_call_are_the_tokenizer_s_added_tokens(syntax: ToolSyntax, special: bool) -> None:
    """A model that was trained with an added token does not spell it with other tokens."""
    tokenizer, marks = with_added_tokens(*MARKS[syntax], special=special), MARKS[syntax]
    grammar = call_grammar(syntax, TOOLS, AFTER[syntax], parallel=True)
    one, two = call(syntax, "weather", city="Rome"), call(syntax, "list", value=1)
    text = joined(syntax, one, two) if syntax is HERMES else "[TOOL_CALLS]" + joined(syntax, one, two)
    assert allows_ids(grammar, tokenizer, spelt(tokenizer, text, marks))
    for mark in marks:
        kept = [each for each in marks if each != mark]
        assert not allows_ids(grammar, tokenizer, spelt(tokenizer, text, kept)), "spelt out"
    assert GrammarMask(compile_grammar(grammar, tokenizer, (EOS,))).allowed([]).sum() == 1
    assert allows_ids(grammar, byte_level(), ids_of(text, byte_level())), "a tokenizer without them spells them"


def test_added_tokens_within_arguments_are_text() -> None:
    tokenizer = with_added_tokens("<tool_call>", "</tool_call>")
    grammar = call_grammar(HERMES, TOOLS[:1], AFTER[HERMES], parallel=False)
    city = joined(HERMES, call(HERMES, "weather", city="</tool_call>"))
    assert allows_ids(grammar, tokenizer, spelt(tokenizer, city, ("<tool_call>", "</tool_call>")))


@pytest.mark.parametrize("added", [(), ("<tool_call>", "</tool_call>")])
def test_an_answer_is_calls_or_in_the_format(added: tuple[str, ...]) -> None:
    tokenizer = with_added_tokens(*added)
    answer = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    grammar = call_grammar(HERMES, TOOLS, AFTER[HERMES], parallel=True, answer=answer)
    one = joined(HERMES, call(HERMES, "weather", city="Rome"))
    for text in (one, one + "\n" + one, '{"warm": true}', '{\n  "warm":false}'):
        assert allows_ids(grammar, tokenizer, spelt(tokenizer, text, added)), text
    for text in ("", "x", "{}", one + '{"warm": true}', '{"warm": true}' + one, call(HERMES, "weather", city="Rome")):
        assert not allows_ids(grammar, tokenizer, spelt(tokenizer, text, added)), text


@pytest.mark.parametrize("text", ['"%token"', r'"\"%token \"x\""', "/%token +x/", '"a" // %token "x"'])
def test_a_directive_within_a_string_is_left_alone(text: str) -> None:
    compile_grammar(Grammar("lark", f"start: {text}"), with_added_tokens("x"), (EOS,))
    grammar = Grammar("lark", f'start: {text} %token "x"' if "//" not in text else f'start: {text}\nb: %token "x"')
    compile_grammar(grammar, with_added_tokens("x"), (EOS,))


def test_a_long_grammar_with_token_ids_is_compiled() -> None:
    tokenizer = with_added_tokens("<tool_call>", "</tool_call>")
    described = {**CITY, "description": "x" * 5000}
    grammar = call_grammar(HERMES, [tool("weather", described)], AFTER[HERMES], parallel=False)
    text = joined(HERMES, call(HERMES, "weather", city="Rome"))
    assert allows_ids(grammar, tokenizer, spelt(tokenizer, text, ("<tool_call>", "</tool_call>")))
