"""LiteLLM: `litellm.completion` for an OpenAI-compatible server."""

from __future__ import annotations

import json
from typing import Any

import litellm

from tests.clients.drivers.openai_client import TOOL
from tests.clients.drivers.protocol import Reply, Task, choice_after_call, reply, serve, weather


class LiteLLMDriver:
    """Chats and streams with `litellm.completion`."""

    def models(self, task: Task) -> list[str]:
        """Return the models that the server lists."""
        return litellm.get_valid_models(
            check_provider_endpoint=True, custom_llm_provider="openai", api_key=task.key, api_base=task.url
        )

    def chat(self, task: Task) -> Reply:
        """Return the text and the usage of an answer."""
        answer = litellm.completion(**self._request(task))
        return reply(answer.choices[0].message.content, answer.usage.prompt_tokens, answer.usage.completion_tokens)

    def stream(self, task: Task) -> Reply:
        """Return the texts and the usage of a stream."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(litellm.completion(**self._request(task), **options))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return reply(text, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens)

    def cancel(self, task: Task) -> str:
        """Return the first text of a stream, and cancel the stream."""
        stream = litellm.completion(**self._request(task), stream=True)
        text = next(chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content)
        stream.close()
        return str(text)

    def tools(self, task: Task) -> Reply:
        """Return the calls and the answer of a conversation with the tool `weather`."""
        return self._loop(task, lambda request: litellm.completion(**request))

    def stream_tools(self, task: Task) -> Reply:
        """Do the same with streams."""

        def ask(request: dict[str, Any]) -> Any:
            return litellm.stream_chunk_builder(list(litellm.completion(**request, stream=True)))

        return self._loop(task, ask)

    def _loop(self, task: Task, ask: Any) -> Reply:
        request = {**self._request(task), "tools": [TOOL]}
        message = ask(request).choices[0].message
        request["messages"].append(message)
        calls = []
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            calls.append([call.function.name, arguments])
            request["messages"].append({"role": "tool", "tool_call_id": call.id, "content": weather(**arguments)})
        request |= choice_after_call(task)
        return {"calls": calls, "answer": ask(request).choices[0].message.content}

    def _request(self, task: Task) -> dict[str, Any]:
        content: Any = task.prompt
        if task.sound is not None:
            part = {"type": "input_audio", "input_audio": {"data": task.sound, "format": "wav"}}
            content = [{"type": "text", "text": task.prompt}, part]
        server = {"api_base": task.url, "api_key": task.key, "max_retries": 0}
        messages = [{"role": "user", "content": content}]
        return {"model": f"openai/{task.model}", "messages": messages, "max_tokens": task.max_tokens, **server}


if __name__ == "__main__":
    serve(LiteLLMDriver())
