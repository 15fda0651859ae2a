"""The grammars of enforced calls: every text that they allow parses as calls, and no other text is allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.config import Grammar
from outrider.engines.grammars import compile_grammar
from outrider.gateway.tool_grammar import call_grammar
from outrider.gateway.tool_parsers import HERMES, LLAMA, MISTRAL, ToolSyntax
from outrider.sampling.grammar import GrammarMask
from tests.support.tokenizers import SPECIALS, byte_level, ids_of

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
