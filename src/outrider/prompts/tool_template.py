"""Tools in chat templates, with a check that no tool and no call is lost.

A template without tool support drops the tools and the calls of a conversation without an error. To detect this, their
names are replaced by marks, and every mark must appear in the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Final

from outrider.errors import PromptError

Tools = Seq[dict[str, Any]]

_TOOL: Final = "Tool{}of9Tools"
_CALL: Final = "Call{}of9Calls"
_ARGUMENT: Final = "Key{}of9Calls"


@dataclass(frozen=True)
class ToolChat:
    """A conversation with tools, as a prompt.

    messages: those of a chat. A message of the assistant may hold `tool_calls`, whose arguments are objects, and a
    message of the role tool holds a result. tools: descriptions of functions, as in OpenAI's API.
    """

    messages: Seq[dict[str, Any]]
    tools: Tools = ()


def mark_tools(tools: Tools) -> list[dict[str, Any]]:
    """Return the tools with a mark in place of each name."""
    return [
        {**tool, "function": {**tool["function"], "name": _TOOL.format(number)}} for number, tool in enumerate(tools)
    ]


def mark_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with marks in place of the names and arguments of their calls."""
    marked, count = [], 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                function = {"name": _CALL.format(count), "arguments": {_ARGUMENT.format(count): 1}}
                calls.append({**call, "function": {**call.get("function", {}), **function}})
                count += 1
            message = {**message, "tool_calls": calls}
        marked.append(message)
    return marked


def check_marks(name: str, prompt: str, messages: Seq[dict[str, Any]], tools: Tools) -> None:
    """Raise PromptError if the prompt of a marked conversation lacks a tool, a call, or a call's arguments."""
    if not all(_TOOL.format(number) in prompt for number in range(len(tools))):
        raise PromptError(f"tools: the chat template of {name} does not support tools: leave them out", place="tools")
    count = 0
    for number, message in enumerate(messages):
        for at, _ in enumerate(message.get("tool_calls") or ()):
            if _CALL.format(count) not in prompt or _ARGUMENT.format(count) not in prompt:
                place = f"messages.{number}.tool_calls.{at}"
                raise PromptError(
                    f"{place}: the chat template of {name} drops the tool calls from the history: write them into the "
                    "message's text",
                    place=place,
                )
            count += 1


def holds_result(text: str, prompt: str) -> bool:
    """Return whether the prompt holds a tool's result, verbatim or within JSON."""
    return text.strip() in prompt or json.dumps(text, ensure_ascii=False)[1:-1].strip() in prompt


def iterate_strings(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield all strings in a JSON value, keys included, each with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield path, key
            yield from iterate_strings(f"{path}.{key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from iterate_strings(f"{path}.{number}", inner)
