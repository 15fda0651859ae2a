"""Conversion of requests of `POST /v1/responses` to chat requests."""

from __future__ import annotations

import re
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
    grammar_field = None if parsed.grammar_field is None else _rename_field(parsed.grammar_field)
    parsed = replace(parsed, field="input", length_field=length_field, grammar_field=grammar_field)
    return parsed, ResponsesAnswer(parsed, request)


RESPONSES: Final = RequestKind(_prepare)


def _to_chat(request: ResponsesRequest) -> tuple[JsonObject, list[str]]:
    """Return the chat request, and the field of each of its messages."""
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


def _messages(request: ResponsesRequest) -> tuple[list[JsonObject], list[str]]:
    messages: list[JsonObject] = []
    places: list[str] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
        places.append("instructions")
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}], [*places, "input"]
    for number, item in enumerate(request.input):
        if isinstance(item, FunctionCallItem) and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        else:
            messages.append(_message(item))
            places.append(f"input.{number}")
    return messages, places


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


def _rename(error: RequestError, places: list[str]) -> RequestError:
    """Return an error about a chat request with the field names of the original request."""

    def rename(text: str) -> str:
        text = _rename_field(re.sub(r"\bmessages\.(\d+)", lambda found: places[int(found[1])], text))
        return re.sub(r"\b(max_tokens|max_completion_tokens|messages)\b", lambda found: _FIELDS[found[0]], text)

    param = None if error.param is None else rename(error.param)
    return RequestError(rename(str(error)), param=param, code=error.code, status=error.status)
