"""Conversion of requests of `POST /v1/responses` to chat requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from outrider.errors import quote
from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import JsonObject, RequestError
from outrider.gateway.request_kind import Output, RequestKind
from outrider.gateway.request_parsing import ParsedRequest, check_stream_options, parse_json, parse_request, validate
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
_LENGTHS: Final = re.compile(r"\b(?:max_tokens|max_completion_tokens)\b")
_TOOL: Final = re.compile(r"\b(tools\.\d+)\.function\b")
_MESSAGE: Final = re.compile(r"\bmessages(?:\.\w+)*")


def _prepare(body: bytes, _: str, defaults: Defaults) -> tuple[ParsedRequest, Output]:
    request = validate(ResponsesRequest, parse_json(body))
    check_stream_options(request)
    if request.outrider is not None and request.outrider.provisional:
        raise RequestError(
            "outrider.provisional: events have no provisional tokens: use chat completions",
            param="outrider.provisional",
            code="unsupported",
        )
    chat, names = _to_chat(request)
    try:
        parsed = parse_request(validate(ChatRequest, chat), defaults)
    except RequestError as error:
        raise _rename(error, names) from error
    parsed = replace(parsed, rename=names.apply, notes=tuple(map(names.apply, parsed.notes)))
    return parsed, ResponsesAnswer(parsed, request)


RESPONSES: Final = RequestKind(_prepare)


def _to_chat(request: ResponsesRequest) -> tuple[JsonObject, FieldNames]:
    """Return the chat request, and the names of its fields in this request."""
    fields = {name: getattr(request, name) for name in (*_SAME, *_SAME_WORDS)}
    messages, names = _messages(request)
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
    return {**chat, "messages": messages}, names


def _format(text_format: TextFormat | JsonObjectFormat | JsonSchemaText) -> JsonObject:
    """Return the format of an answer as in chats."""
    if not isinstance(text_format, JsonSchemaText):
        return {"type": text_format.type}
    schema = text_format.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": schema}


class FieldNames:
    """The fields of the original request, by the paths of a chat's fields, such as "messages.2.content"."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {"messages": "input"}

    def add_message(self, number: int, item: MessageItem | FunctionCallItem | FunctionResultItem, field: str) -> None:
        """Record the item from which a message is built. number: the message's index. field: the item's path."""
        self.places[f"messages.{number}"] = field
        if isinstance(item, FunctionResultItem):
            self.places[f"messages.{number}.content"] = f"{field}.output"
            self.places[f"messages.{number}.tool_call_id"] = f"{field}.call_id"

    def add_call(self, number: int, index: int, field: str) -> None:
        """Record the item of the call `index` in the message `number`. field: the item's path."""
        calls = f"messages.{number}.tool_calls"
        self.places.setdefault(calls, field)
        self.places |= {f"{calls}.{index}": field, f"{calls}.{index}.function": field}
        self.places[f"{calls}.{index}.id"] = f"{field}.call_id"

    def apply(self, text: str) -> str:
        """Return a text about the chat with the field names of the original request."""
        text = _MESSAGE.sub(lambda found: self._path(found[0]), text)
        text = text.replace("response_format.json_schema", "text.format").replace("response_format", "text.format")
        return _LENGTHS.sub("max_output_tokens", _TOOL.sub(r"\1", text))

    def _path(self, path: str) -> str:
        steps = path.split(".")
        prefixes = (".".join(steps[:count]) for count in range(len(steps), 0, -1))
        known = next(prefix for prefix in prefixes if prefix in self.places)
        return self.places[known] + path.removeprefix(known)


def _messages(request: ResponsesRequest) -> tuple[list[JsonObject], FieldNames]:
    """Return the messages of a chat, and the names of their fields. Calls and texts of one turn are one message."""
    messages: list[JsonObject] = []
    names = FieldNames()
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
        names.places["messages.0"] = names.places["messages.0.content"] = "instructions"
    if isinstance(request.input, str):
        at = f"messages.{len(messages)}"
        names.places[at] = names.places[f"{at}.content"] = "input"
        return [*messages, {"role": "user", "content": request.input}], names
    _check_call_ids(request.input)
    for number, item in enumerate(request.input):
        field = f"input.{number}"
        last: JsonObject = messages[-1] if messages else {}
        if isinstance(item, FunctionCallItem) and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(_call(item))
        elif isinstance(item, MessageItem) and item.role == "assistant" and "tool_calls" in last:
            last["content"] = [*_as_parts(last.get("content", [])), *_as_parts(_message(item)["content"])]
        else:
            messages.append(_message(item))
            names.add_message(len(messages) - 1, item, field)
        if isinstance(item, FunctionCallItem):
            names.add_call(len(messages) - 1, len(messages[-1]["tool_calls"]) - 1, field)
    return messages, names


def _check_call_ids(items: Sequence[Item]) -> None:
    """Refuse two calls with the same id, because results are matched with calls by id."""
    seen: set[str] = set()
    for number, item in enumerate(items):
        if isinstance(item, FunctionCallItem):
            if item.call_id in seen:
                field = f"input.{number}.call_id"
                raise RequestError(f"{field}: a second call with the id {quote(item.call_id)}", param=field)
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


def _rename(error: RequestError, names: FieldNames) -> RequestError:
    """Return an error about a chat request with the field names of the original request."""
    param = None if error.param is None else names.apply(error.param)
    return RequestError(names.apply(str(error)), param=param, code=error.code, status=error.status)
