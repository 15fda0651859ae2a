"""Tool calls and their results in the messages of a request."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from outrider.errors import quote
from outrider.gateway.errors import JsonObject, RequestError
from outrider.gateway.request_schema import Message
from outrider.gateway.tool_call_scanner import load_json

_INVALID: Final = "invalid_value"


def message_fields(at: int, message: Message) -> JsonObject:
    """Return a message's tool fields (`tool_calls`, `tool_call_id`) in the form that chat templates expect.

    Raises:
        RequestError: a field does not fit the message's role, there is no content, or arguments are not a JSON object.
    """
    where = f"messages.{at}"
    if message.tool_calls and message.role != "assistant":
        raise RequestError(f"{where}.tool_calls: only for the role assistant", param=f"{where}.tool_calls")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        reason = "is missing: give the call's id" if message.role == "tool" else "is only for messages of the role tool"
        raise RequestError(f"{where}.tool_call_id {reason}", param=f"{where}.tool_call_id")
    if message.content is None and not message.tool_calls:
        raise RequestError(f"{where}.content is missing", param=f"{where}.content", code="missing")
    fields: JsonObject = {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
    if message.tool_calls:
        fields["tool_calls"] = []
    for number, call in enumerate(message.tool_calls or []):
        arguments = load_json(call.function.arguments)
        if not isinstance(arguments, dict):
            path = f"{where}.tool_calls.{number}.function.arguments"
            raise RequestError(f"{path}: not a JSON object", param=path, code=_INVALID)
        function = {"name": call.function.name, "arguments": arguments}
        fields["tool_calls"].append({"id": call.id, "type": "function", "function": function})
    return fields


def check_results(messages: Seq[Message]) -> None:
    """Check that each call has one result, and each result a call.

    The results of a message's calls are the messages directly after it, in any order, as with OpenAI.

    Raises:
        RequestError: a call has no result or several, or a result has no call. The error names the call's id.
    """
    calls: dict[str, str] = {}  # of the last message other than results: the path of each call's id, by the id
    pending: dict[str, str] = {}  # the calls without a result yet
    for at, message in enumerate(messages):
        if message.role == "tool":
            _take_result(f"messages.{at}.tool_call_id", str(message.tool_call_id), calls, pending)
            continue
        _check_none_pending(pending)
        calls = _read_calls(at, message)
        pending = dict(calls)
    _check_none_pending(pending)


def _read_calls(at: int, message: Message) -> dict[str, str]:
    """Return the path of the id of each of a message's calls, by the id."""
    calls: dict[str, str] = {}
    for number, call in enumerate(message.tool_calls or ()):
        field = f"messages.{at}.tool_calls.{number}.id"
        if call.id in calls:
            raise RequestError(f"{field}: a second call with the id {quote(call.id)}", param=field, code=_INVALID)
        calls[call.id] = field
    return calls


def _take_result(field: str, call_id: str, calls: dict[str, str], pending: dict[str, str]) -> None:
    """Remove the call of a result from the pending ones. field: the path of the result's `tool_call_id`."""
    if pending.pop(call_id, None) is not None:
        return
    reason = "a second result for the call" if call_id in calls else "no call directly before it has the id"
    raise RequestError(f"{field}: {reason} {quote(call_id)}", param=field, code=_INVALID)


def _check_none_pending(pending: dict[str, str]) -> None:
    for call_id, field in pending.items():
        raise RequestError(f"{field}: no result follows for the call {quote(call_id)}", param=field, code=_INVALID)
