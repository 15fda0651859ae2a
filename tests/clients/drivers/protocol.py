"""The loop of a driver: it reads one task per line from stdin, runs it with a client, and prints one line of JSON.

A driver runs in the environment of its client, so it imports nothing of Outrider. A task is an object: `do` names a
method of the driver, and the other fields are those of `Task`. The answer is the method's result, or
`{"error": …}` with the classes of the exception and its HTTP status.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Protocol

Reply = dict[str, Any]
WEATHER = {"Rome": "warm and 31 degrees", "Oslo": "cold and 3 degrees"}


@dataclass(frozen=True)
class Task:
    """A task.

    url: the API's base, with /v1. sound: a recording beside the prompt, WAV in base64. call_once: forbid calls of tools
    once there is a result, with `tool_choice: none`, as small models otherwise repeat them.
    """

    url: str
    key: str
    prompt: str = ""
    model: str = "outrider"
    max_tokens: int = 12
    sound: str | None = None
    call_once: bool = False


class Driver(Protocol):
    """A client under test."""

    def models(self, task: Task) -> list[str]:
        """Return the models that the server lists."""

    def chat(self, task: Task) -> Reply:
        """Return the text and the usage of an answer."""

    def stream(self, task: Task) -> Reply:
        """Return the texts and the usage of a stream."""

    def cancel(self, task: Task) -> str:
        """Return the first text of a stream, and cancel the stream."""

    def tools(self, task: Task) -> Reply:
        """Return the calls and the answer of a conversation with the tool `weather`."""

    def stream_tools(self, task: Task) -> Reply:
        """Do the same with streams."""


def choice_after_call(task: Task) -> dict[str, str]:
    """Return the field `tool_choice` of a request after the first call."""
    return {"tool_choice": "none"} if task.call_once else {}


def weather(city: str) -> str:
    """Return the weather of a city."""
    return WEATHER[city]


def reply(text: str, prompt_tokens: int | None, completion_tokens: int | None) -> Reply:
    """Return an answer and its usage as drivers report them."""
    return {"text": text, "usage": [prompt_tokens, completion_tokens]}


def serve(driver: Driver) -> None:
    """Run tasks until stdin ends."""
    output, sys.stdout = sys.stdout, sys.stderr  # clients print to stdout as they like
    for line in sys.stdin:
        fields = json.loads(line)
        try:
            answer = getattr(driver, fields.pop("do"))(Task(**fields))
        except Exception as error:  # noqa: BLE001 (the test judges it)
            answer = {"error": describe(error)}
        print(json.dumps(answer), file=output, flush=True)


def describe(error: BaseException) -> Reply:
    """Return an exception's classes, HTTP status and text."""
    classes = [f"{each.__module__}.{each.__name__}" for each in type(error).__mro__]
    return {"classes": classes, "status": getattr(error, "status_code", None), "message": str(error)}
