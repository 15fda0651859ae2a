"""Conversion of requests of `POST /v1/responses` to chat requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import JsonObject, RequestError
from outrider.gateway.request_kind import Output, RequestKind
from outrider.gateway.request_parsing import ParsedRequest, parse_json, parse_request, validate
from outrider.gateway.request_schema import ChatRequest, JsonObjectFormat, TextFormat
from outrider.gateway.responses_answer import ResponsesAnswer
from outrider.gateway.responses_schema import (
    FunctionCallItem,
    FunctionResultItem,
    InputAudioPart,
    Item,
    JsonSchemaText,
    MessageItem,
    Parts,
    ResponsesRequest,
    ToolName,
)

_SAME: Final = ("model", "stream", "temperature", "top_p", "seed", "parallel_tool_calls", "metadata", "user")
_SAME_WORDS: Final = ("safety_identifier", "prompt_cache_key", "outrider")
_FIELDS: Final = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "messages": "input"}


def _prepare(body: bytes, _: str, defaults: Defaults) -> tuple[ParsedRequest, Output]:
    request = validate(ResponsesRequest, parse_json(body))
    if request.outrider is not None and request.outrider.provisional:
        raise RequestError(
            "outrider.provisional: events have no provisional tokens: use chat completions",
            param="outrider.provisional",
            code="unsupported",
        )
    chat, places = _to_chat(request)
    try:
        parsed = parse_request(validate(ChatRequest, chat), defaults)
    except RequestError as error:
        raise _rename(error, places) from error
    length_field = "max_output_tokens" if request.max_output_tokens else None
    grammar_fields = {place: _rename_field(field) for place, field in parsed.grammar_fields.items()}
    notes = tuple(map(_rename_field, parsed.notes))
    parsed = replace(parsed, field="input", length_field=length_field, grammar_fields=grammar_fields, notes=notes)
    return parsed, ResponsesAnswer(parsed, request)


RESPONSES: Final = RequestKind(_prepare)


def _to_chat(request: ResponsesRequest) -> tuple[JsonObject, dict[str, str]]:
    """Return the chat request, and the field of each of its messages and calls."""
    fields = {name: getattr(request, name) for name in (*_SAME, *_SAME_WORDS)}
    messages, places = _messages(request)
    chat: JsonObject = {name: value for name, value in fields.items() if value is not None}
    if request.outrider is not None:
        chat["outrider"] = request.outrider.model_dump(exclude_none=True)
    if request.max_output_tokens is not None:
        chat["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning is not None and request.reasoning.effort is not None:
        chat["reasoning_effort"] = request.reasoning.effort
    if request.tools:
        tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in request.tools]
        chat["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if request.text is not None and request.text.format is not None:
        chat["response_format"] = _format(request.text.format)
    choice = request.tool_choice
    if choice is not None:
        is_named = isinstance(choice, ToolName)
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if is_named else choice  # type: ignore[union-attr]
    return {**chat, "messages": messages}, places


def _format(text_format: TextFormat | JsonObjectFormat | JsonSchemaText) -> JsonObject:
    """Return the format of an answer as in chats."""
    if not isinstance(text_format, JsonSchemaText):
        return {"type": text_format.type}
    schema = text_format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": schema}


def _messages(request: ResponsesRequest) -> tuple[list[JsonObject], dict[str, str]]:
    """Return the messages of a chat, and the field of each of them and of each of their calls.

    Calls and texts of one turn are one message.
    """
    messages: list[JsonObject] = []
    places: dict[str, str] = {}
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
        places["messages.0"] = "instructions"
    if isinstance(request.input, str):
        places[f"messages.{len(messages)}"] = "input"
        return [*messages, {"role": "user", "content": request.input}], places
    _check_call_ids(request.input)
    for number, item in enumerate(request.input):
        last: JsonObject = messages[-1] if messages else {}
        if isinstance(item, FunctionCallItem) and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, MessageItem) and item.role == "assistant" and "tool_calls" in last:
            last["content"] = [*_as_parts(last.get("content", [])), *_as_parts(_message(item)["content"])]
        else:
            messages.append(_message(item))
            places[f"messages.{len(messages) - 1}"] = f"input.{number}"
        if isinstance(item, FunctionCallItem):
            at = f"messages.{len(messages) - 1}"
            places[f"{at}.tool_calls.{len(messages[-1]['tool_calls']) - 1}"] = f"input.{number}"
    return messages, places


def _check_call_ids(items: Sequence[Item]) -> None:
    """Refuse two calls with the same id. Results are matched with calls by their id."""
    seen: set[str] = set()
    for number, item in enumerate(items):
        if isinstance(item, FunctionCallItem):
            if item.call_id in seen:
                field = f"input.{number}.call_id"
                raise RequestError(f"{field}: a second call with the id {item.call_id!r}", param=field)
            seen.add(item.call_id)


def _as_parts(content: str | list[JsonObject]) -> list[JsonObject]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _message(item: MessageItem | FunctionCallItem | FunctionResultItem) -> JsonObject:
    if isinstance(item, FunctionCallItem):
        return {"role": "assistant", "tool_calls": [_call(item)]}
    if isinstance(item, FunctionResultItem):
        output = item.output if isinstance(item.output, str) else "\n".join(part.text for part in item.output)
        return {"role": "tool", "tool_call_id": item.call_id, "content": output}
    assert isinstance(item, MessageItem)  # the only other kind
    return {"role": item.role, "content": item.content if isinstance(item.content, str) else _parts(item.content)}


def _parts(parts: Parts) -> list[JsonObject]:
    return [
        part.model_dump() if isinstance(part, InputAudioPart) else {"type": "text", "text": part.text} for part in parts
    ]


def _call(item: FunctionCallItem) -> JsonObject:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _rename_field(text: str) -> str:
    """Return a text about a chat request with the field names of this endpoint."""
    text = text.replace("response_format.json_schema", "text.format").replace("response_format", "text.format")
    return re.sub(r"\b(tools\.\d+)\.function\b", r"\1", text)


def _rename(error: RequestError, places: Mapping[str, str]) -> RequestError:
    """Return an error about a chat request with the field names of the original request."""

    def rename(text: str) -> str:
        text = re.sub(r"\bmessages\.\d+(\.tool_calls\.\d+)?", lambda found: _place(found[0], places), text)
        text = re.sub(r"\b(input\.\d+)\.(function\.arguments|tool_call_id|id)\b", _item_field, _rename_field(text))
        return re.sub(r"\b(max_tokens|max_completion_tokens|messages)\b", lambda found: _FIELDS[found[0]], text)

    param = None if error.param is None else rename(error.param)
    return RequestError(rename(str(error)), param=param, code=error.code, status=error.status)


def _place(field: str, places: Mapping[str, str]) -> str:
    message = ".".join(field.split(".")[:2])
    return places.get(field) or places.get(message, message) + field.removeprefix(message)


def _item_field(found: re.Match[str]) -> str:
    return f"{found[1]}.{'arguments' if found[2].endswith('arguments') else 'call_id'}"
