"""Clients under test: each is a driver in a process of its own, in the environment of the client."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import started

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "clients"
SCRIPTS = Path(__file__).parent / "js"
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise LiteLLM downloads its table of prices
    "LANGSMITH_TRACING": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "NO_PROXY": "*",
}


@dataclass(frozen=True)
class Errors:
    """The names of a client's exceptions."""

    unknown_model: str
    too_long: str
    bad_key: str


def one_error(name: str) -> Errors:
    """Return the errors of a client with one exception for all statuses."""
    return Errors(name, name, name)


OPENAI = Errors("NotFoundError", "BadRequestError", "AuthenticationError")


@dataclass(frozen=True)
class Client:
    """A client. needs: the packages that environment.py installs for it."""

    name: str
    driver: str
    needs: tuple[str, ...] = ()
    errors: Errors = OPENAI

    @property
    def command(self) -> list[str]:
        """Return the command of its driver."""
        if self.driver.endswith(".mjs"):
            return ["node", str(FOLDER / "js" / self.driver)]
        python = str(FOLDER / "venv" / "bin" / "python") if self.needs else sys.executable
        return [python, "-m", f"tests.clients.drivers.{self.driver}"]


CLIENTS = (
    Client("openai-3", "openai_client"),
    Client("openai-2", "openai_client", ("openai",)),
    Client(
        "langchain",
        "langchain",
        ("langchain-openai",),
        Errors("OpenAIModelNotFoundError", "OpenAIContextOverflowError", "OpenAIAuthenticationError"),
    ),
    Client("llama-index", "llama_index", ("llama-index-llms-openai-like",)),
    Client(
        "litellm",
        "litellm_client",
        ("litellm",),
        Errors("NotFoundError", "ContextWindowExceededError", "AuthenticationError"),
    ),
    Client("pydantic-ai", "pydantic_ai_client", ("pydantic-ai-slim",), one_error("ModelHTTPError")),
    Client("llm", "llm_cli", ("llm",), one_error("CommandFailed")),
    Client("openai-js", "openai_client.mjs", ("npm:openai",)),
    Client("ai-sdk", "ai_sdk.mjs", ("npm:ai", "npm:@ai-sdk/openai-compatible"), one_error("APICallError")),
    Client("open-webui", "open_webui", errors=one_error("RequestFailed")),
)


class RunningClient:
    """A driver that waits for tasks."""

    def __init__(self, client: Client, child: subprocess.Popen[str]) -> None:
        self.name, self.errors = client.name, client.errors
        self._child = child

    def do(self, do: str, **task: Any) -> Any:
        """Return the answer to a task."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps({"do": do, **task}) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        assert line, f"the driver of {self.name} has ended"
        return json.loads(line)


def skip_unless_installed(client: Client) -> None:
    """Skip the test with the reason why the client is not installed."""
    if not client.needs:
        return
    if not (FOLDER / "missing.json").exists():
        pytest.skip("the clients are not installed in .cache/clients: make test-clients installs them")
    missing = json.loads((FOLDER / "missing.json").read_text(encoding="utf-8"))
    for package in client.needs:
        if package in missing:
            pytest.skip(f"{package} is not installed: {missing[package]}")


@contextmanager
def running_client(client: Client) -> Iterator[RunningClient]:
    """Start a client's driver, and end it with the block."""
    skip_unless_installed(client)
    for script in SCRIPTS.glob("*.mjs") if client.driver.endswith(".mjs") else ():
        shutil.copy(script, FOLDER / "js")  # Node.js looks for packages beside the script
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started(client.command, cwd=ROOT, env={**os.environ, **OFFLINE}, **pipes) as child:
        yield RunningClient(client, child)
