"""The requests of Open WebUI, as its backend sends them to an OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from tests.clients.drivers.openai_client import TOOL
from tests.clients.drivers.protocol import Reply, Task, choice_after_call, reply, serve, weather

PARAMETERS = {"temperature": 0.0, "top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "stop": ["\n\n\n"]}


class RequestFailed(Exception):
    """An answer with an error, which Open WebUI shows to its user."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.status_code = status


class OpenWebUIDriver:
    """Sends what `routers/openai.py` of Open WebUI sends."""

    def models(self, task: Task) -> list[str]:
        """Return the models that the server lists."""
        answer = httpx2.get(f"{task.url}/models", headers=self._headers(task))
        return [model["id"] for model in answer.json()["data"]]

    def chat(self, task: Task) -> Reply:
        """Return the text and the usage of an answer, as for the titles of conversations."""
        request = {**self._request(task), "max_completion_tokens": task.max_tokens}
        answer = self._checked(httpx2.post(**self._call(task, request), timeout=None))
        return reply(answer["choices"][0]["message"]["content"], *self._usage(answer))

    def stream(self, task: Task) -> Reply:
        """Return the texts and the usage of a stream."""
        chunks = list(self._chunks(task, {**self._chatting(task), "stream_options": {"include_usage": True}}))
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
        return reply(text, *self._usage(chunks[-1]))

    def cancel(self, task: Task) -> str:
        """Return the first text of a stream, and cancel the stream."""
        chunks = self._chunks(task, self._chatting(task))
        text = next(text for chunk in chunks if (text := chunk["choices"][0]["delta"].get("content")))
        chunks.close()
        return str(text)

    def tools(self, task: Task) -> Reply:
        """Return the calls and the answer of a conversation with the tool `weather`."""

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            answer = self._checked(httpx2.post(**self._call(task, {**request, "stream": False}), timeout=None))
            return answer["choices"][0]["message"]

        return self._loop(task, ask)

    def stream_tools(self, task: Task) -> Reply:
        """Do the same with streams."""

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            message: dict[str, Any] = {"content": "", "tool_calls": []}
            for chunk in self._chunks(task, request):
                delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
                message["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls", ()):
                    add_call(message["tool_calls"], call)
            return message

        return self._loop(task, ask)

    def _loop(self, task: Task, ask: Any) -> Reply:
        request = {**self._chatting(task), "tools": [TOOL]}
        message = ask(request)
        calls = []
        results = []
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            calls.append([call["function"]["name"], arguments])
            results.append({"role": "tool", "tool_call_id": call["id"], "content": weather(**arguments)})
        called = {"role": "assistant", "content": message["content"] or "", "tool_calls": message["tool_calls"]}
        request["messages"] += [called, *results]
        request |= choice_after_call(task)
        return {"calls": calls, "answer": ask(request)["content"]}

    def _headers(self, task: Task) -> dict[str, str]:
        """Return the headers, with those of the option ENABLE_FORWARD_USER_INFO_HEADERS."""
        user = {"X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Id": "1", "X-OpenWebUI-User-Role": "user"}
        return {"Authorization": f"Bearer {task.key}", **user}

    def _call(self, task: Task, request: dict[str, Any]) -> dict[str, Any]:
        return {"url": f"{task.url}/chat/completions", "headers": self._headers(task), "json": request}

    def _request(self, task: Task) -> dict[str, Any]:
        return {"model": task.model, "messages": [{"role": "user", "content": task.prompt}], "stream": False}

    def _chatting(self, task: Task) -> dict[str, Any]:
        """Return the request of a conversation with advanced parameters."""
        return {**self._request(task), **PARAMETERS, "max_tokens": task.max_tokens, "stream": True}

    @contextmanager
    def _opened(self, task: Task, request: dict[str, Any]) -> Iterator[Any]:
        with httpx2.stream("POST", **self._call(task, request), timeout=None) as answer:
            if answer.status_code != 200:
                answer.read()
                self._checked(answer)
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield answer

    def _chunks(self, task: Task, request: dict[str, Any]) -> Any:
        with self._opened(task, request) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def _checked(self, answer: Any) -> dict[str, Any]:
        body = answer.json()
        if "error" in body:
            raise RequestFailed(answer.status_code, body["error"])
        return dict(body)

    def _usage(self, answer: dict[str, Any]) -> tuple[int, int]:
        return answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """Add a delta of a call to the calls before it."""
    if delta["index"] == len(calls):
        calls.append({**delta, "function": dict(delta["function"])})
    else:
        calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


if __name__ == "__main__":
    serve(OpenWebUIDriver())
