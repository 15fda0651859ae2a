"""The requests of Continue's autocompletion: its provider `openai` with `useLegacyCompletionsEndpoint`."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from tests.clients.drivers.open_webui import RequestFailed
from tests.clients.drivers.protocol import Reply, Task, reply, serve

SUFFIX = "\n\nprint(total)\n"
FILL_IN = "<|fim_prefix|>{}<|fim_suffix|>{}<|fim_middle|>"  # of Qwen2.5-Coder
STOPS = [
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|im_start|>",
    "<|im_end|>",
    "/src/",
    "#- coding: utf-8",
    "```",
]


class ContinueDriver:
    """Sends the prompt of a template for code, with its stop strings."""

    def models(self, task: Task) -> list[str]:
        """Return the models that the server lists."""
        answer = httpx2.get(f"{task.url}/models", headers=self._headers(task))
        return [model["id"] for model in answer.json()["data"]]

    def complete(self, task: Task) -> Reply:
        """Return the text of a stream. The prompt is the text before the cursor."""
        return reply("".join(self._texts(task)), None, None)

    def cancel(self, task: Task) -> str:
        """Return the first text of a stream, and cancel the stream, as the next key press does."""
        texts = self._texts(task)
        text = next(text for text in texts if text)
        texts.close()
        return str(text)

    def _texts(self, task: Task) -> Any:
        request = {
            "model": task.model,
            "max_tokens": task.max_tokens,
            "temperature": 0.01,
            "stream": True,
            "stop": STOPS,
            "prompt": FILL_IN.format(task.prompt, SUFFIX),
        }
        call: Any = {"url": f"{task.url}/completions", "headers": self._headers(task), "json": request}
        with httpx2.stream("POST", **call, timeout=None) as answer:
            if answer.status_code != 200:
                raise RequestFailed(answer.status_code, json.loads(answer.read())["error"])
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    def _headers(self, task: Task) -> dict[str, str]:
        return {"Authorization": f"Bearer {task.key}", "api-key": task.key}


if __name__ == "__main__":
    serve(ContinueDriver())
