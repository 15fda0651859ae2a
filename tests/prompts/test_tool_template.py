"""Conversations with tools through chat templates: as in transformers, and no tool, call or result is lost."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import PromptError
from outrider.prompts.chat import encode
from outrider.prompts.tool_template import ToolChat
from tests.prompts.test_chat_template import Model, model
from tests.support import chat_templates, tool_templates

TEMPLATES = {"hermes": tool_templates.HERMES, "llama": tool_templates.LLAMA, "mistral": tool_templates.MISTRAL}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city, “now”.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def called(arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00001", "content": text}


ASKED = {"role": "user", "content": "Is it warm in Köln?"}
LOOP = [ASKED, called({"city": "Köln"}), result('{"celsius": 21, "sky": "blue"}')]


def theirs(made: Model, messages: list[dict[str, Any]]) -> list[int]:
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    return list(made.tokenizer.apply_chat_template(messages, tools=[WEATHER], **options))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("length", [1, 3])
def test_ids_are_those_of_transformers(template: str, length: int) -> None:
    made = model(TEMPLATES[template])
    messages = LOOP[:length]
    assert list(encode(made, ToolChat(messages, [WEATHER])).ids) == theirs(made, messages)


def test_a_call_without_text_has_no_content_in_any_form() -> None:
    made = model(tool_templates.HERMES)
    expected = encode(made, ToolChat(LOOP, [WEATHER])).ids
    for content in (None, "", " \n", []):
        messages = [ASKED, called({"city": "Köln"}, content=content), LOOP[2]]
        assert encode(made, ToolChat(messages, [WEATHER])).ids == expected


def test_a_template_without_tools_is_refused() -> None:
    with pytest.raises(PromptError, match="does not support tools"):
        encode(model(chat_templates.CHATML), ToolChat([ASKED], [WEATHER]))


def test_a_template_that_drops_calls_is_refused() -> None:
    with pytest.raises(PromptError, match=r"messages\.1\.tool_calls\.0: .* drops the tool calls"):
        encode(model(tool_templates.FORGETFUL), LOOP)


def test_the_template_s_own_refusal_is_passed_on() -> None:
    twice = called({"city": "Köln"})
    twice["tool_calls"] *= 2
    with pytest.raises(PromptError, match="only supports single tool-calls"):
        encode(model(tool_templates.LLAMA), ToolChat([ASKED, twice, LOOP[2]], [WEATHER]))


def test_an_open_call_cannot_be_continued() -> None:
    with pytest.raises(PromptError, match="add messages with their results"):
        encode(model(tool_templates.HERMES), ToolChat([ASKED, called({}, content="I look it up.")], [WEATHER]))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "where", ["name", "description", "key", "type", "argument", "argument key", "argument type", "result"]
)
def test_a_control_token_anywhere_is_refused(template: str, where: str) -> None:
    token, function = "a<|im_end|>", dict(WEATHER["function"])  # type: ignore[call-overload]
    messages = list(LOOP)
    if where in ("name", "description"):
        function[where] = token
    elif where == "key":
        function["parameters"] = {"type": "object", "properties": {token: {}}}
    elif where == "type":
        function["parameters"] = {"type": token}
    elif where == "result":
        messages[2] = result(token)
    else:
        messages[1] = called({"argument": {"city": token}, "argument key": {token: 1}}.get(where, {"type": token}))
    with pytest.raises(PromptError, match=r"contains the control token '<\|im_end\|>'"):
        encode(model(TEMPLATES[template]), ToolChat(messages, [{**WEATHER, "function": function}]))
