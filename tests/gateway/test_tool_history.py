"""Tool calls in a history: each has one result directly after its message, and each result has its call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import RequestError
from outrider.gateway.request_parsing import parse_request, validate_body
from outrider.gateway.request_schema import ChatRequest
from outrider.gateway.responses_request import RESPONSES
from outrider.gateway.tool_parsers import HERMES
from outrider.gateway.tools import ToolSupport

DEFAULTS = Defaults(tools=ToolSupport(HERMES, "<tool_call>\n"))
ASK = {"role": "user", "content": "Is it warm?"}
SAY = {"role": "assistant", "content": "It is."}


def calls(*ids: str, **more: Any) -> dict[str, Any]:
    made = [{"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id_ in ids]
    return {"role": "assistant", "tool_calls": made, **more}


def result(id_: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": "21"}


def chat(*messages: Any) -> list[Any]:
    """The messages of the prompt."""
    body = json.dumps({"model": "outrider", "messages": messages}).encode()
    return parse_request(validate_body(ChatRequest, body), DEFAULTS).prompt  # type: ignore[return-value]


@pytest.mark.parametrize(
    "messages",
    [
        (ASK, calls("a"), result("a")),
        (ASK, calls("a", "b"), result("b"), result("a"), SAY, ASK),
        (ASK, calls("a"), result("a"), calls("a", content="again"), result("a"), SAY),
        (ASK, calls("a"), result("a"), calls("b"), result("b"), ASK),
        (calls("a"), result("a")),
        (ASK, SAY),
    ],
)
def test_histories_with_a_result_for_each_call_are_accepted(messages: tuple[Any, ...]) -> None:
    assert len(chat(*messages)) == len(messages)


@pytest.mark.parametrize(
    ("messages", "param", "reason"),
    [
        ((ASK, result("a")), "messages.1.tool_call_id", "no call directly before it has the id 'a'"),
        ((result("a"),), "messages.0.tool_call_id", "no call directly before it"),
        ((ASK, SAY, result("a")), "messages.2.tool_call_id", "no call directly before it"),
        ((ASK, calls("a"), result("b")), "messages.2.tool_call_id", "no call directly before it has the id 'b'"),
        ((ASK, calls("a"), result("a"), SAY, result("a")), "messages.4.tool_call_id", "no call directly before it"),
        ((ASK, calls("a"), result("a"), result("a")), "messages.3.tool_call_id", "a second result for the call 'a'"),
        ((ASK, calls("a", "a"), result("a")), "messages.1.tool_calls.1.id", "a second call with the id 'a'"),
        ((ASK, calls("a"), ASK), "messages.1.tool_calls.0.id", "no result follows for the call 'a'"),
        ((ASK, calls("a"), SAY), "messages.1.tool_calls.0.id", "no result follows"),
        ((ASK, calls("a"), {"role": "system", "content": "x"}, result("a")), "messages.1.tool_calls.0.id", "no result"),
        ((ASK, calls("a", "b"), result("a"), ASK), "messages.1.tool_calls.1.id", "no result follows for the call 'b'"),
        ((ASK, calls("a")), "messages.1.tool_calls.0.id", "no result follows"),
    ],
)
def test_calls_and_results_that_do_not_match_are_refused_by_id(
    messages: tuple[Any, ...], param: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        chat(*messages)
    assert (refused.value.param, refused.value.status) == (param, 400)
    assert str(refused.value).startswith(f"{param}: ")


# Responses --------------------------------------------------------------------------------------------------


def call(id_: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "f", "arguments": arguments}


def output(id_: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": "21"}


def respond(*items: Any, **fields: Any) -> list[Any]:
    """The messages of the prompt."""
    body = json.dumps({"model": "outrider", "input": items, **fields}).encode()
    return RESPONSES.prepare(body, "", DEFAULTS)[0].prompt  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("items", "roles"),
    [
        ((ASK, call("a"), output("a")), ["user", "assistant", "tool"]),
        ((ASK, SAY, call("a"), call("b"), output("b"), output("a")), ["user", "assistant", "tool", "tool"]),
        ((ASK, call("a"), SAY, output("a"), ASK), ["user", "assistant", "tool", "user"]),
        ((ASK, call("a"), output("a"), call("b"), output("b"), SAY, SAY), None),
    ],
)
def test_items_with_a_result_for_each_call_are_accepted(items: tuple[Any, ...], roles: list[str] | None) -> None:
    messages = respond(*items)
    assert [message["role"] for message in messages] == (
        roles or ["user", "assistant", "tool", "assistant", "tool", "assistant", "assistant"]
    )


def test_a_turn_s_texts_and_calls_are_one_message() -> None:
    _, message, _ = respond(ASK, SAY, call("a"), {**SAY, "content": "Wait."}, output("a"))
    assert (message["content"], len(message["tool_calls"])) == ("It is.\nWait.", 1)


@pytest.mark.parametrize(
    ("items", "param", "reason"),
    [
        ((ASK, output("a")), "input.1.call_id", "no call directly before it has the id 'a'"),
        ((ASK, SAY, call("a"), output("b")), "input.3.call_id", "no call directly before it has the id 'b'"),
        ((ASK, SAY, call("a"), call("b"), output("a"), ASK), "input.3.call_id", "no result follows for the call 'b'"),
        ((ASK, call("a"), output("a"), output("a")), "input.3.call_id", "a second result for the call 'a'"),
        ((ASK, call("a"), call("a"), output("a")), "input.2.call_id", "a second call with the id 'a'"),
        ((ASK, call("a"), output("a"), call("a"), output("a")), "input.3.call_id", "a second call with the id 'a'"),
        ((ASK, SAY, call("a"), call("b", "[")), "input.3.arguments", "not a JSON object"),
        ((ASK, call("a", '{"a": NaN}')), "input.1.arguments", "not a JSON object"),
        ((ASK, call("a", '{"a": [-Infinity, 1]}')), "input.1.arguments", "not a JSON object"),
        ((ASK, call("a", '{"a": 1e999}')), "input.1.arguments", "not a JSON object"),
    ],
)
@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_call_items_and_results_that_do_not_match_are_refused(
    items: Any, param: str, reason: str, instructions: str | None
) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        respond(*items, instructions=instructions)
    assert (refused.value.param, refused.value.status) == (param, 400)
