"""Tools through the gateway: what the openai client sends and receives, with scripted outputs of the model."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import TypeAdapter
from tokenizers import AddedToken

from outrider.errors import PromptError
from outrider.gateway import response_schema
from outrider.gateway.defaults import Defaults
from outrider.gateway.tool_parsers import HERMES, LLAMA, MISTRAL
from outrider.gateway.tools import ToolSupport, find_tool_support
from outrider.prompts.tool_template import ToolChat
from tests.prompts.test_chat_template import model
from tests.support import chat_templates, tool_templates
from tests.support.scripted_gateway import Running, Script, event, result_of, serving, spoken

FIRST_ID = 100  # of scripted tokens
SUPPORT = ToolSupport(HERMES, "<tool_call>\n")
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Return the {name}.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "time")
]
ASK: dict[str, Any] = {"model": "outrider", "messages": [{"role": "user", "content": "Is it warm in Rome?"}]}
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def script(*pieces: str, reason: Any = "eos") -> Script:
    return Script(spoken(*pieces), result_of("".join(pieces), len(pieces), reason))


def letters(text: str) -> list[str]:
    """The text in pieces of three characters."""
    return [text[at : at + 3] for at in range(0, len(text), 3)]


def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def ask(played: Script, support: ToolSupport | str = SUPPORT, **fields: Any) -> Any:
    with serving(played, defaults=Defaults(tools=support)) as running, client(running) as api:
        return api.chat.completions.create(**{**ASK, "tools": TOOLS, **fields})


def stream(played: Script, support: ToolSupport = SUPPORT, **fields: Any) -> tuple[list[Any], list[Any]]:
    """The deltas, and the chunks."""
    with serving(played, defaults=Defaults(tools=support)) as running, client(running) as api:
        chunks = list(api.chat.completions.create(**{**ASK, "tools": TOOLS, "stream": True, **fields}))
    return [chunk.choices[0].delta for chunk in chunks if chunk.choices], chunks


def assembled(deltas: list[Any]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls, as clients put them together."""
    calls: list[list[str]] = []
    for delta in deltas:
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                calls.append([call.function.name, ""])
            else:
                assert call.function.name is None
                calls[call.index][1] += call.function.arguments
    return "".join(delta.content or "" for delta in deltas), [(name, arguments) for name, arguments in calls]


# The syntax of a model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "syntax", "opening"),
    [
        (tool_templates.HERMES, HERMES, "<tool_call>\n"),
        (tool_templates.LLAMA, LLAMA, ""),
        (tool_templates.MISTRAL, MISTRAL, "[TOOL_CALLS] ["),
    ],
)
def test_the_syntax_is_what_the_template_writes(template: str, syntax: Any, opening: str) -> None:
    made = model(template)
    made.tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("<|python_tag|>", special=True)])
    found = find_tool_support("some/model", made.tokenizer)
    assert (found.syntax, found.opening) == (syntax, opening)
    token = made.tokenizer.convert_tokens_to_ids(syntax.opener)
    assert found.special == ({} if syntax is HERMES else {token: syntax.opener})


def test_special_tokens_of_the_syntax_are_found() -> None:
    made = model(tool_templates.HERMES)
    made.tokenizer.add_tokens([AddedToken("<tool_call>", special=True), AddedToken("</tool_call>", special=False)])
    found = find_tool_support("some/model", made.tokenizer)
    assert list(found.special.values()) == ["<tool_call>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (chat_templates.CHATML, "does not support tools"),
        (tool_templates.FORGETFUL, "drops the tool calls"),
        (tool_templates.XML, "in a syntax that the gateway cannot parse"),
        (None, "has no chat template"),
    ],
)
def test_a_template_without_readable_calls_has_no_support(template: Any, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        find_tool_support("some/model", model(template).tokenizer)


# Requests -------------------------------------------------------------------------------------------------------


def test_tools_and_their_results_reach_the_template() -> None:
    history = [
        *ASK["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "time", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]},
    ]
    with serving(script("It is noon."), defaults=Defaults(tools=SUPPORT)) as running, client(running) as api:
        api.chat.completions.create(**{**ASK, "messages": history, "tools": TOOLS})
        prompt = running.scheduler.asked[0][1]
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": {"city": "Rome"}}}
    assert prompt == ToolChat(
        [
            {"role": "user", "content": "Is it warm in Rome?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "noon", "tool_call_id": "a"},
        ],
        tuple(TOOLS),
    )


def test_answers_are_accepted_back_as_clients_keep_them() -> None:
    with serving(script(*letters(CALLS)), defaults=Defaults(tools=SUPPORT)) as running, client(running) as api:
        whole = api.chat.completions.create(**ASK, tools=TOOLS).choices[0].message
        with api.chat.completions.stream(**ASK, tools=TOOLS) as events:  # adds parsed and parsed_arguments
            helped = events.get_final_completion().choices[0].message
        numbered = whole.to_dict()  # as of a client that adds up the deltas of a stream
        numbered["tool_calls"] = [{**call, "index": at} for at, call in enumerate(numbered["tool_calls"])]
        nulls = {**numbered, "audio": None, "function_call": None, "annotations": [], "parsed": None}
        for message in (whole, whole.to_dict(), helped, helped.to_dict(), numbered, nulls):
            calls = (message if isinstance(message, dict) else message.to_dict())["tool_calls"]
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "warm"} for call in calls]
            messages = [*ASK["messages"], message, *results]
            api.chat.completions.create(**{**ASK, "messages": messages, "tools": TOOLS})  # type: ignore[arg-type]
            called = running.scheduler.asked[-1][1].messages[1]
            assert [call.keys() for call in called["tool_calls"]] == [{"id", "type", "function"}] * 2
            assert all(call["function"].keys() == {"name", "arguments"} for call in called["tool_calls"])


def test_with_the_choice_none_the_model_sees_no_tools() -> None:
    with serving(script(CALLS), defaults=Defaults(tools=SUPPORT)) as running, client(running) as api:
        reply = api.chat.completions.create(**ASK, tools=TOOLS, tool_choice="none")
        assert running.scheduler.asked[0][1] == ASK["messages"]
    assert reply.choices[0].message.content == CALLS


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1", "duplicate tool name"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "there is no tool 'x'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "w", "parameters": {"type": "array"}}}]},
            "tools.0.function.parameters",
            "expected a schema of the type object",
        ),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        ask(script("x"), **fields)
    assert refused.value.param == param


def test_a_model_without_support_is_refused_with_the_reason() -> None:
    with pytest.raises(openai.BadRequestError, match="the reason") as refused:
        ask(script("x"), "tools: the reason")
    assert refused.value.param == "tools"


# Answers --------------------------------------------------------------------------------------------------------


def test_calls_are_those_of_openai() -> None:
    reply = ask(script(*letters(CALLS)))
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    found = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert found == [("function", "weather", {"city": "Rome"}), ("function", "time", {"city": "Rome"})]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert reply.outrider["finish_reason"] == "eos"
    TypeAdapter(response_schema.ChatCompletion).validate_python(reply.to_dict())


def test_a_call_alone_has_no_content() -> None:
    message = ask(script(CALLS.removeprefix("I look.\n"))).choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 2


def test_a_stream_s_deltas_are_those_of_openai() -> None:
    deltas, chunks = stream(script(*letters(CALLS)))
    assert assembled(deltas) == ("I look.", [("weather", '{"city": "Rome"}'), ("time", '{"city": "Rome"}')])
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    fragments = [call for delta in deltas for call in delta.tool_calls or [] if call.id is None]
    assert len(fragments) > 4, "arguments arrive in parts"


def test_the_client_s_own_accumulator_understands_the_stream() -> None:
    with (
        serving(script(*letters(CALLS)), defaults=Defaults(tools=SUPPORT)) as running,
        client(running) as api,
        api.chat.completions.stream(**ASK, tools=TOOLS) as events,
    ):
        kinds = [each.type for each in events]
        message = events.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert [json.loads(call.function.arguments) for call in message.tool_calls or []] == [{"city": "Rome"}] * 2


def test_text_without_a_call_is_unchanged() -> None:
    text = " It is < warm.\n"
    assert ask(script(*letters(text))).choices[0].message.content == text
    deltas, chunks = stream(script(*letters(text)))
    assert assembled(deltas) == (text, [])
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("syntax", [LLAMA, MISTRAL])
def test_special_tokens_that_the_detokenizer_drops_begin_calls(syntax: Any) -> None:
    support = ToolSupport(syntax, special={FIRST_ID + 1: syntax.opener})
    body = json.dumps({"name": "time", syntax.arguments: {"city": "Rome"}})
    pieces = ["Well.", "", *letters(f"[{body}]" if syntax is MISTRAL else body)]
    events = [[event(index, text)] for index, text in enumerate(pieces)]
    end = replace(result_of("".join(pieces), len(pieces)), pieces=pieces)
    played = Script(events, end)
    message = ask(played, support).choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("time", '{"city": "Rome"}')
    ]
    assert message.content == "Well."
    assert assembled(stream(played, support)[0]) == ("Well.", [("time", '{"city": "Rome"}')])


def test_a_malformed_call_is_content_with_a_warning() -> None:
    output = '<tool_call>\n{"name": "weather", "arguments": Rome}\n</tool_call>'
    reply = ask(script(*letters(output)))
    assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == (output, None)
    assert reply.choices[0].finish_reason == "stop"
    assert any("malformed" in warning for warning in reply.outrider["warnings"])
    deltas, chunks = stream(script(*letters(output)))
    assert assembled(deltas) == (output, [])
    assert any("malformed" in warning for warning in chunks[-1].outrider["warnings"])


def test_a_call_that_the_length_cuts_off_is_text_or_what_was_sent() -> None:
    output = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro'
    reply = ask(script(*letters(output), reason="length"))
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (output, "length")
    deltas, chunks = stream(script(*letters(output), reason="length"))
    assert assembled(deltas) == ("", [("weather", '{"city": "Ro')])
    assert chunks[-1].choices[0].finish_reason == "length"
    assert any("not valid JSON" in warning for warning in chunks[-1].outrider["warnings"])


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_second_call_that_is_cut_off_is_text_with_a_warning_that_says_so(reason: str) -> None:
    rest = '\n<tool_call>\n{"name": "ti'
    output = CALLS.partition('\n<tool_call>\n{"name": "time')[0] + rest
    reply = ask(script(*letters(output), reason=reason))
    by = "by the token limit" if reason == "length" else "at the end of the output"
    warning = f"1 tool calls were cut off {by}: they are text of the answer"
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["weather"]
    assert reply.choices[0].message.content == "I look." + rest
    assert reply.choices[0].finish_reason == ("length" if reason == "length" else "tool_calls")
    assert reply.outrider["warnings"] == [warning]
    deltas, chunks = stream(script(*letters(output), reason=reason))
    assert assembled(deltas) == ("I look." + rest, [("weather", '{"city": "Rome"}')])
    assert chunks[-1].outrider["warnings"] == [warning]


def test_without_parallel_calls_there_is_one() -> None:
    reply = ask(script(*letters(CALLS)), parallel_tool_calls=False)
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["weather"]
    assert any("parallel_tool_calls" in warning for warning in reply.outrider["warnings"])
    assert assembled(stream(script(*letters(CALLS)), parallel_tool_calls=False)[0])[1] == [
        ("weather", '{"city": "Rome"}')
    ]


def test_token_reports_come_with_every_token_of_a_call() -> None:
    _, chunks = stream(script(*letters(CALLS)), extra_body={"outrider": {"tokens": True}})
    told = [token["text"] for chunk in chunks for token in getattr(chunk, "outrider", {}).get("tokens", ())]
    assert "".join(told) == CALLS


# Enforced calls -------------------------------------------------------------------------------------------------


def enforced(syntax: Any, special: dict[int, str] | None = None, **fields: Any) -> tuple[Any, Any]:
    """The prompt and the settings of a request."""
    support = ToolSupport(syntax, syntax.opener + syntax.start, special or {})
    with serving(script("x"), defaults=Defaults(tools=support)) as running, client(running) as api:
        api.chat.completions.create(**{**ASK, "tools": TOOLS, "tool_choice": "required", **fields})
        _, prompt, settings, _ = running.scheduler.asked[0]
    return prompt, settings


def test_a_required_call_is_enforced_by_a_grammar() -> None:
    _, settings = enforced(HERMES)
    assert "weather" in settings["grammar"].text
    assert "time" in settings["grammar"].text
    named = {"type": "function", "function": {"name": "time"}}
    assert "weather" not in enforced(HERMES, tool_choice=named)[1]["grammar"].text
    assert enforced(HERMES, tool_choice="auto")[1]["grammar"] is None


@pytest.mark.parametrize("streamed", [False, True])
def test_an_enforced_call_that_begins_with_a_special_token_is_parsed(streamed: bool) -> None:
    support = ToolSupport(MISTRAL, "[TOOL_CALLS] [", {FIRST_ID: "[TOOL_CALLS]"})
    pieces = ["", *letters(' [{"name": "time", "arguments": {"city": "Rome"}}]')]
    events = [[event(index, text)] for index, text in enumerate(pieces)]
    played = Script(events, replace(result_of("".join(pieces), len(pieces)), pieces=pieces))
    if streamed:
        assert assembled(stream(played, support, tool_choice="required")[0]) == ("", [("time", '{"city": "Rome"}')])
        return
    message = ask(played, support, tool_choice="required").choices[0].message
    assert (message.content, message.tool_calls[0].function.name) == (None, "time")


# A format of the answer beside tools -----------------------------------------------------------------------------

FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"name": {}}}}}


@pytest.mark.parametrize("response_format", [FORMAT, {"type": "json_object"}])
@pytest.mark.parametrize("syntax", [HERMES, MISTRAL])
def test_the_model_may_call_a_tool_or_answer_in_the_format(syntax: Any, response_format: Any) -> None:
    settings = enforced(syntax, tool_choice="auto", response_format=response_format)[1]
    assert "answer: %json" in settings["grammar"].text
    assert '"weather"' in settings["grammar"].text


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize(
    "text",
    ['{"name": "time", "arguments": {"city": "Rome"}}', '{"a": "<tool_call>{\\"name\\": \\"time\\"}"}', "[]", "3"],
)
def test_an_answer_in_the_format_is_text_even_if_it_looks_like_a_call(text: str, fields: dict[str, Any]) -> None:
    played = script(*letters(text))
    if fields:
        deltas, chunks = stream(played, response_format=FORMAT)
        assert assembled(deltas) == (text, [])
        assert chunks[-1].outrider["warnings"] == []
        return
    reply = ask(played, response_format=FORMAT)
    assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == (text, None)
    assert reply.outrider["warnings"] == []


def test_a_call_beside_a_format_is_a_call() -> None:
    calls = CALLS.removeprefix("I look.\n")
    expected = [("weather", '{"city": "Rome"}'), ("time", '{"city": "Rome"}')]
    assert assembled(stream(script(*letters(calls)), response_format=FORMAT)[0]) == ("", expected)
    assert len(ask(script(*letters(calls)), response_format=FORMAT).choices[0].message.tool_calls) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "response_format": FORMAT}, "response_format.json_schema.schema"),
        ({"extra_body": {"outrider": {"regex": "a"}}}, "outrider.regex"),
        ({"extra_body": {"outrider": {"grammar": 'start: "a"'}}}, "outrider.grammar"),
    ],
)
def test_other_grammars_beside_tools_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be combined with tools") as refused:
        ask(script("x"), **fields)
    assert refused.value.param == param
    assert ask(script("x"), tool_choice="none", response_format={"type": "json_object"}).choices


def test_a_format_is_refused_where_a_call_is_json_alone() -> None:
    with pytest.raises(openai.BadRequestError, match="cannot be distinguished") as refused:
        ask(script("x"), ToolSupport(LLAMA), response_format=FORMAT)
    assert refused.value.param == "response_format"


# Keywords of schemas ---------------------------------------------------------------------------------------------


def with_typo(**more: Any) -> Any:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "minLenght": 3}}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


TYPO: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": {"maximun": 3}}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOLS[0], with_typo(strict=True)]}, "tools.1.function.parameters.properties.city.minLenght"),
        (
            {"tools": [], "response_format": {**TYPO, "json_schema": {**TYPO["json_schema"], "strict": True}}},
            "response_format.json_schema.schema.items.maximun",
        ),
    ],
)
def test_an_unknown_keyword_of_a_strict_schema_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError, match="no such keyword") as refused:
        ask(script("x"), **fields)
    assert refused.value.param == param


def test_an_unknown_keyword_of_another_schema_is_a_warning() -> None:
    warnings = ask(script("x"), tools=[], response_format=TYPO).outrider["warnings"]
    assert any(each.startswith("response_format.json_schema.schema: ") and "items.maximun" in each for each in warnings)
    warnings = ask(script("x"), tools=[with_typo()], tool_choice="required").outrider["warnings"]
    assert any("tools.0.function.parameters: " in each and "properties.city.minLenght" in each for each in warnings)
    assert ask(script("x"), tools=[with_typo()]).outrider["warnings"] == []


def test_schemas_that_are_too_long_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 2**17}}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(script("x"), tools=[tool], tool_choice="required")
    assert refused.value.param == "tools"


def test_each_choice_has_calls_of_its_own() -> None:
    reply = ask(script(*letters(CALLS)), n=2, temperature=1)
    assert [len(choice.message.tool_calls) for choice in reply.choices] == [2, 2]
    assert len({call.id for choice in reply.choices for call in choice.message.tool_calls}) == 4
