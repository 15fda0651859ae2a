"""The Responses API: the unmodified openai client, with scripted outputs and with the bundled pair."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx2
import openai
import pytest
from pydantic import TypeAdapter

from outrider import Audio, SpeculativeDecoder, load_engine, local
from outrider.errors import CloudLost
from outrider.gateway import response_schema
from outrider.gateway.defaults import Defaults
from outrider.gateway.tool_parsers import HERMES
from outrider.gateway.tools import ToolSupport
from outrider.prompts.tool_template import ToolChat
from tests.gateway.test_tools import CALLS, letters, script
from tests.support.gateway_process import CLIPS, running_gateway
from tests.support.scripted_gateway import Running, Script, result_of, serving, spoken

DEFAULTS = Defaults(audio_seconds=30.0, tools=ToolSupport(HERMES))
TOOLS: Any = [
    {"type": "function", "name": name, "description": "d", "parameters": {"type": "object"}, "strict": False}
    for name in ("weather", "time")
]
CLIP = {"data": base64.b64encode((CLIPS / "en-1.ogg").read_bytes()).decode(), "format": "ogg"}


def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def create(played: Script | None = None, **fields: Any) -> tuple[Any, tuple[Any, ...]]:
    """The response, and what was asked of the scheduler."""
    with serving(played or script("Hello", " there"), defaults=DEFAULTS) as running, client(running) as api:
        reply: Any = api.responses.create(**{"model": "outrider", "input": "Hi", **fields})
        return (list(reply) if fields.get("stream") else reply), running.scheduler.asked[0]


def test_a_text_is_answered() -> None:
    reply, (_, prompt, settings, _) = create(instructions="Be brief.", max_output_tokens=9, temperature=0.5)
    assert (reply.output_text, reply.status, reply.incomplete_details) == ("Hello there", "completed", None)
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.store) == (7, 2, False)
    assert reply.outrider["guarantee"] == "exact"
    assert prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (settings["max_new_tokens"], settings["temperature"]) == (9, 0.5)
    TypeAdapter(response_schema.Response).validate_python(reply.to_dict())


def test_a_history_of_items_is_a_chat() -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rome?"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call", "call_id": "b", "name": "time", "arguments": '{"a": 1}', "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": "21"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    _, (_, prompt, _, _) = create(input=items, tools=TOOLS)
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {}}},
        {"id": "b", "type": "function", "function": {"name": "time", "arguments": {"a": 1}}},
    ]
    assert isinstance(prompt, ToolChat)
    assert prompt.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "21", "tool_call_id": "a"},
        {"role": "tool", "content": "noon", "tool_call_id": "b"},
    ]
    assert prompt.tools[0]["function"] == {"name": "weather", "description": "d", "parameters": {"type": "object"}}


def test_the_client_s_loop_sends_the_output_back() -> None:
    first, _ = create(script(*letters(CALLS)), tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "21"}
        for item in first.output
        if item.type == "function_call"
    ]
    history = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in first.output), *results]
    _, (_, prompt, _, _) = create(input=history, tools=TOOLS)
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool", "tool"]


def test_calls_are_items() -> None:
    reply, _ = create(script(*letters(CALLS)), tools=TOOLS)
    assert [item.type for item in reply.output] == ["message", "function_call", "function_call"]
    assert [(item.name, item.arguments) for item in reply.output[1:]] == [
        ("weather", '{"city": "Rome"}'),
        ("time", '{"city": "Rome"}'),
    ]
    assert reply.output_text == "I look."
    TypeAdapter(response_schema.Response).validate_python(reply.to_dict())


def test_the_events_are_those_of_openai() -> None:
    events, _ = create(stream=True)
    assert [each.type for each in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "Hello there"
    assert events[6].text == events[-1].response.output_text == "Hello there"
    assert events[0].response.status == "in_progress"
    assert {each.item_id for each in events if hasattr(each, "item_id")} == {events[-1].response.output[0].id}
    TypeAdapter(response_schema.Response).validate_python(events[-1].response.to_dict())


def test_the_events_of_calls_are_those_of_openai() -> None:
    events, _ = create(script(*letters(CALLS)), tools=TOOLS, stream=True)
    kinds = [each.type for each in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    done = [each for each in events if each.type == "response.function_call_arguments.done"]
    assert [(each.name, each.arguments) for each in done] == [
        ("weather", '{"city": "Rome"}'),
        ("time", '{"city": "Rome"}'),
    ]
    for index in (1, 2):
        deltas = [
            each.delta
            for each in events
            if each.type == "response.function_call_arguments.delta" and each.output_index == index
        ]
        assert len(deltas) > 1
        assert "".join(deltas) == '{"city": "Rome"}'


def test_the_client_s_own_accumulator_understands_the_stream() -> None:
    with (
        serving(script(*letters(CALLS)), defaults=DEFAULTS) as running,
        client(running) as api,
        api.responses.stream(model="outrider", input="Hi", tools=TOOLS) as events,
    ):
        list(events)
        final = events.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]


def test_an_answer_that_the_length_cuts_off_is_incomplete() -> None:
    played = script("Hel", reason="length")
    reply, _ = create(played)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    events, _ = create(played, stream=True)
    assert events[-1].type == "response.incomplete"


def test_an_empty_answer_is_a_message() -> None:
    reply, _ = create(Script([], result_of("", 1)))
    assert (reply.output_text, len(reply.output)) == ("", 1)
    events, _ = create(Script([], result_of("", 1)), stream=True)
    assert events[-1].response.output_text == ""


def test_an_error_in_mid_stream_is_the_last_event() -> None:
    events, _ = create(Script(spoken("a"), CloudLost("gone"), pause=0.01), stream=True)
    assert (events[-1].type, events[-1].code, events[-1].message) == ("error", "cloud_lost", "gone")


def test_tokens_are_reported_at_the_end() -> None:
    for stream in (False, True):
        found, _ = create(stream=stream, extra_body={"outrider": {"tokens": True}})
        response = found[-1].response if stream else found
        assert [token["text"] for token in response.outrider["tokens"]] == ["Hello", " there"]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole history"),
        ({"conversation": "c"}, "conversation", "send the whole history"),
        ({"store": True}, "store", "stores nothing"),
        ({"background": True}, "background", "stream it"),
        ({"truncation": "auto"}, "truncation", "not shortened"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "nothing to include"),
        ({"top_logprobs": 3}, "top_logprobs", "log-probabilities"),
        ({"prompt": {"id": "p"}}, "prompt", "no stored prompts"),
        ({"max_tool_calls": 3}, "max_tool_calls", "no built-in tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": TOOLS}, "text.format", "cannot be combined with tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice", "no tool 'x'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "an item of type message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0", "input_text"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content", "string|list"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]}, None, "JSON object"),
        ({"extra_body": {"outrider": {"provisional": True, "tokens": True}}}, "outrider.provisional", "chat"),
        ({"extra_body": {"messages": []}}, "messages", "no such field"),
        ({"extra_body": {"outrider": {"min_new_tokens": 500}}}, "outrider.min_new_tokens", "max_output_tokens"),
    ],
)
def test_what_does_not_map_is_refused_by_name(fields: dict[str, Any], param: str | None, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        create(**fields)
    found = str(refused.value.param)
    assert found == param or (param is None and found.startswith("input"))


def test_a_format_constrains_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    reply, (_, _, settings, _) = create(text=text)
    assert json.loads(settings["grammar"].text) == schema
    assert reply.text.format.schema_ == schema
    TypeAdapter(response_schema.Response).validate_python(reply.to_dict())
    assert create(text={"format": {"type": "json_object"}})[1][2]["grammar"].kind == "json_object"
    assert create(text={"format": {"type": "text"}})[1][2]["grammar"] is None


def test_an_error_names_the_item() -> None:
    items = [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "1"}]
    with serving(defaults=DEFAULTS) as running:
        reply = httpx2.post(f"{running.url}/v1/responses", json={"model": "outrider", "input": items})
    assert reply.json()["error"]["param"] == "input.1.arguments"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [{"type": "custom", "name": "f", "format": {}}]}, "tools.0.type", "expected function, the only"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.type", "expected func"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", '{"type": "function", "name": …}'),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0", "expected an item of type message, function_c"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0",
         "expected a part of type input_text, output_text or input_audio"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "system, developer, user or assistant"),
    ],
)  # fmt: skip
def test_a_wrong_kind_is_refused_with_those_that_there_are(fields: dict[str, Any], param: str, said: str) -> None:
    with serving(defaults=DEFAULTS) as running:
        reply = httpx2.post(f"{running.url}/v1/responses", json={"model": "outrider", "input": "x", **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert f"{param}: " in error["message"]
    assert said in error["message"]


@pytest.mark.parametrize("options", [{}, {"include_obfuscation": False}])
def test_options_of_a_stream_need_a_stream(options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="stream to true") as refused:
        create(extra_body={"stream_options": options})
    assert refused.value.param == "stream_options"
    assert create(stream=True, extra_body={"stream_options": options})[0]


def test_a_recording_is_captioned() -> None:
    part = {"type": "input_audio", "input_audio": CLIP}
    _, (_, prompt, _, _) = create(input=[{"role": "user", "content": [part]}])
    assert isinstance(prompt, Audio)


@pytest.mark.network
def test_the_bundled_pair_s_caption_is_that_of_python() -> None:
    expected = SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud"))).generate(
        Audio(CLIPS / "en-1.ogg")
    )
    items: Any = [{"role": "user", "content": [{"type": "input_audio", "input_audio": CLIP}]}]
    with running_gateway() as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        assert api.responses.create(model="outrider", input=items).output_text == expected.text
        with api.responses.stream(model="outrider", input=items) as events:
            list(events)
            assert events.get_final_response().output_text == expected.text
