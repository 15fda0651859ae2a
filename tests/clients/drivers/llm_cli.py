"""`llm`, the command line: its models are entries of a YAML file."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.drivers.protocol import WEATHER, Reply, Task, reply, serve

FUNCTION = f"""
def weather(city: str) -> str:
    "Return the weather of a city."
    return {WEATHER!r}[city]
"""


class CommandFailed(Exception):
    """The command has failed. Its text is what the command has printed."""


class LLMDriver:
    """Chats and streams with the command `llm`."""

    def models(self, task: Task) -> list[str]:
        """Return the models that the command lists, which are those of the YAML file."""
        listed = self._run(task, "models", "list").splitlines()
        return [line.split(": ", 1)[1] for line in listed if "OpenAI Chat: " + task.model in line]

    def chat(self, task: Task) -> Reply:
        """Return the text and the usage of an answer."""
        return self._answer(task, "--no-stream")

    def stream(self, task: Task) -> Reply:
        """Return the texts and the usage of a stream."""
        return self._answer(task)

    def cancel(self, task: Task) -> str:
        """Return the first text of a stream, and cancel the stream."""
        with subprocess.Popen(**self._call(task, *self._prompt(task)), stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            text = os.read(running.stdout.fileno(), 1000).decode()
            running.send_signal(signal.SIGINT)
        return text

    def tools(self, task: Task) -> Reply:
        """Return the calls and the answer of a conversation with the tool `weather`."""
        return self._loop(task, "--no-stream")

    def stream_tools(self, task: Task) -> Reply:
        """Do the same with streams."""
        return self._loop(task)

    def _answer(self, task: Task, *options: str) -> Reply:
        text = self._run(task, *self._prompt(task), *options).removesuffix("\n")
        last = self._logs(task)[-1]
        return reply(text, last["input_tokens"], last["output_tokens"])

    def _loop(self, task: Task, *options: str) -> Reply:
        answer = self._run(task, *self._prompt(task), "--functions", FUNCTION, *options)
        calls = [call for entry in self._logs(task) for call in entry["tool_calls"]]
        return {"calls": [[call["name"], call["arguments"]] for call in calls], "answer": answer.strip()}

    def _prompt(self, task: Task) -> list[str]:
        prompt = ["prompt", task.prompt, "--model", task.model, "--option", "max_tokens", str(task.max_tokens)]
        if task.sound is None:
            return prompt
        file = Path(os.environ["LLM_USER_PATH"]) / "sound.wav"
        file.write_bytes(base64.b64decode(task.sound))
        return [*prompt, "--attachment", str(file)]

    def _logs(self, task: Task) -> list[dict[str, Any]]:
        """Return the log entries of the last command, the oldest first."""
        return list(json.loads(self._run(task, "logs", "list", "--current", "--json")))

    def _run(self, task: Task, *arguments: str) -> str:
        done = subprocess.run(**self._call(task, *arguments), capture_output=True, text=True, check=False)
        if done.returncode:
            raise CommandFailed(done.stderr)
        return done.stdout

    def _call(self, task: Task, *arguments: str) -> dict[str, Any]:
        folder = Path(os.environ["LLM_USER_PATH"])
        entry = {"model_id": task.model, "model_name": task.model, "api_base": task.url, "api_key_name": "outrider"}
        # JSON is YAML.
        models = json.dumps([{**entry, "supports_tools": True, "audio": True}])
        (folder / "extra-openai-models.yaml").write_text(models, encoding="utf-8")
        (folder / "keys.json").write_text(json.dumps({"outrider": task.key}), encoding="utf-8")
        return {"args": [sys.executable, "-m", "llm", *arguments], "stdin": subprocess.DEVNULL}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.environ["LLM_USER_PATH"] = made
        serve(LLMDriver())
