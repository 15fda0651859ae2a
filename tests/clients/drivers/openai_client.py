"""The client `openai` for Python."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.clients.drivers.protocol import Reply, Task, choice_after_call, reply, serve, weather

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class OpenAIDriver:
    """Chats and streams with `client.chat.completions`."""

    def models(self, task: Task) -> list[str]:
        """Return the models that the server lists."""
        return [model.id for model in self._client(task).models.list()]

    def chat(self, task: Task) -> Reply:
        """Return the text and the usage of an answer."""
        answer = self._client(task).chat.completions.create(**self._request(task))
        return reply(answer.choices[0].message.content, answer.usage.prompt_tokens, answer.usage.completion_tokens)

    def stream(self, task: Task) -> Reply:
        """Return the texts and the usage of a stream."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(self._client(task).chat.completions.create(**self._request(task), **options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return reply(text, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens)

    def cancel(self, task: Task) -> str:
        """Return the first text of a stream, and cancel the stream."""
        with self._client(task).chat.completions.create(**self._request(task), stream=True) as stream:
            return next(chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)

    def tools(self, task: Task) -> Reply:
        """Return the calls and the answer of a conversation with the tool `weather`."""
        client, request = self._client(task), {**self._request(task), "tools": [TOOL]}
        message = client.chat.completions.create(**request).choices[0].message
        request["messages"] += [message, *self._results(message.tool_calls)]
        request |= choice_after_call(task)
        calls = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]
        return {"calls": calls, "answer": client.chat.completions.create(**request).choices[0].message.content}

    def stream_tools(self, task: Task) -> Reply:
        """Do the same with streams."""
        client, request = self._client(task), {**self._request(task), "tools": [TOOL]}
        with client.chat.completions.stream(**request) as stream:
            message = stream.get_final_completion().choices[0].message
        request["messages"] += [message, *self._results(message.tool_calls)]
        request |= choice_after_call(task)
        calls = [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls]
        with client.chat.completions.stream(**request) as stream:
            return {"calls": calls, "answer": stream.get_final_completion().choices[0].message.content}

    def _client(self, task: Task) -> openai.OpenAI:
        return openai.OpenAI(base_url=task.url, api_key=task.key, max_retries=0)

    def _request(self, task: Task) -> dict[str, Any]:
        content: Any = task.prompt
        if task.sound is not None:
            part = {"type": "input_audio", "input_audio": {"data": task.sound, "format": "wav"}}
            content = [{"type": "text", "text": task.prompt}, part]
        messages = [{"role": "user", "content": content}]
        return {"model": task.model, "messages": messages, "max_tokens": task.max_tokens}

    def _results(self, calls: Any) -> list[dict[str, str]]:
        return [
            {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
            for call in calls
        ]


if __name__ == "__main__":
    serve(OpenAIDriver())
