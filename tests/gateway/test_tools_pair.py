"""Enforced calls of the bundled pair, with a chat template that has tools, through the real gateway."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from outrider.engines.load import BUNDLED
from tests.gateway.test_tools import TOOLS, assembled
from tests.support import tool_templates
from tests.support.gateway_process import running_gateway

pytestmark = pytest.mark.network

ASK: dict[str, Any] = {"model": "outrider", "messages": [{"role": "user", "content": "Is it warm?"}], "max_tokens": 120}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FORCED: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {**SCHEMA, "additionalProperties": False}}}
    for name in ("weather", "time")
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("pair")
    for side in ("edge", "cloud"):
        shutil.copytree(BUNDLED / side, folder / side)
        (folder / side / "chat_template.jinja").write_text(tool_templates.HERMES)
    with (
        running_gateway("--edge", str(folder / "edge"), "--cloud", f"local:{folder / 'cloud'}") as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield api


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        assert name in ("weather", "time")
        assert json.loads(arguments)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("choice", ["required", "time"])
def test_an_enforced_answer_is_a_call(client: openai.OpenAI, temperature: float, choice: str) -> None:
    named = {"type": "function", "function": {"name": choice}}
    fields: dict[str, Any] = {**ASK, "tools": FORCED, "parallel_tool_calls": False, "temperature": temperature}
    fields["tool_choice"] = choice if choice == "required" else named
    reply = client.chat.completions.create(**fields)
    found = reply.choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content is None
    calls = [(call.function.name, call.function.arguments) for call in found.message.tool_calls]
    assert len(calls) == 1
    check(calls)
    if choice != "required":
        assert calls[0][0] == choice
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert assembled([chunk.choices[0].delta for chunk in chunks]) == ("", calls)
    assert reply.outrider["guarantee"] == "exact"


def test_a_result_is_answered(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**ASK, tools=FORCED, tool_choice="required", parallel_tool_calls=False)
    message = reply.choices[0].message
    history: list[Any] = [*ASK["messages"], message.to_dict()]
    history += [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in message.tool_calls or []]
    again = client.chat.completions.create(**{**ASK, "messages": history}, tools=FORCED)
    assert again.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > reply.usage.prompt_tokens, "the call is not read again"


def test_a_response_is_enforced(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in FORCED]
    reply = client.responses.create(
        model="outrider", input="Is it warm?", tools=tools, tool_choice={"type": "function", "name": "time"}
    )
    check([(item.name, item.arguments) for item in reply.output if item.type == "function_call"])
    assert [item.type for item in reply.output] == ["function_call"]


def test_a_schema_that_cannot_be_compiled_is_refused_at_its_field(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, tools=tools, tool_choice="required")
    assert refused.value.param == "tools.0.function.parameters"
    assert client.chat.completions.create(**ASK, tools=TOOLS).choices[0].finish_reason


def test_the_schema_of_a_response_s_tool_is_named_as_it_was_sent(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "f", "parameters": {"type": "nothing"}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="outrider", input="Hi", tools=tools, tool_choice="required")
    assert refused.value.param == "tools.0.parameters"


ANSWER: Any = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"warm": {"type": "boolean"}},
                                            "required": ["warm"], "additionalProperties": False}},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_beside_a_format_an_answer_is_calls_or_in_the_format(client: openai.OpenAI, seed: int) -> None:
    reply = client.chat.completions.create(**ASK, tools=FORCED, response_format=ANSWER, temperature=1.5, seed=seed)
    message = reply.choices[0].message
    if message.tool_calls:
        check([(call.function.name, call.function.arguments) for call in message.tool_calls])
    elif reply.choices[0].finish_reason == "stop":
        assert json.loads(message.content).keys() == {"warm"}


def test_an_error_names_the_schema_at_fault_among_several(client: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"not": {}}}}
    tools: Any = [*FORCED, {"type": "function", "function": {"name": "f", "parameters": bad}}]
    asked: Any = {**ASK, "tools": tools}
    for fields in ({"tool_choice": "required"}, {"response_format": ANSWER}):
        with pytest.raises(openai.BadRequestError, match="not supported: not") as refused:
            client.chat.completions.create(**asked, **fields)
        assert refused.value.param == "tools.2.function.parameters.properties.a"
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASK, tools=FORCED, response_format=wrong)
    assert refused.value.param == "response_format.json_schema.schema.properties.a"
    infinite = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tools[2]["function"]["parameters"] = infinite
    with pytest.raises(openai.BadRequestError, match="infinite recursion") as refused:
        client.chat.completions.create(**asked, tool_choice="required")
    assert refused.value.param == "tools.2.function.parameters"
