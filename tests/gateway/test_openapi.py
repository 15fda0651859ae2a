"""The OpenAPI document is complete and true: schemathesis asks what it allows, and what it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from outrider.gateway.access import Access
from outrider.gateway.defaults import Defaults
from outrider.gateway.tool_parsers import HERMES
from outrider.gateway.tools import ToolSupport
from outrider.serving.tokens import Tokens
from tests.prompts.test_chat_template import model
from tests.support import tool_templates
from tests.support.scripted_gateway import Script, event, result_of, serving

KEY = "a-key-that-is-long-enough"
SCRIPT = Script([[event(0, "a")]], result_of("a", 1))
# A request that its schema allows can still contradict itself (two words for one limit): that is 400.
LEFT_OUT = "positive_data_acceptance"


def schemathesis(url: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "all"]
    command += ["--exclude-checks", LEFT_OUT, "--max-examples", "25", "--seed", "1", "--no-color"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=400, check=False, cwd=folder)


@pytest.mark.network  # a minute or two
def test_schemathesis_finds_no_server_s_error_and_no_answer_that_is_not_documented(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"me {KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    access, defaults = Access(Tokens.load(tmp_path / "keys")), Defaults(audio_seconds=30.0, tools=ToolSupport(HERMES))
    with serving(SCRIPT, access, defaults, engine=model(tool_templates.HERMES)) as running:
        done = schemathesis(running.url, tmp_path, "--header", f"Authorization: Bearer {KEY}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_document_names_all_that_can_be_asked_and_what_it_is_answered() -> None:
    with serving(SCRIPT) as running:
        document = httpx2.get(f"{running.url}/openapi.json").json()
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/v1/outrider"}
    paths |= {"/v1/audio/transcriptions", "/v1/responses", "/tokenize", "/detokenize"}
    assert set(document["paths"]) == paths | {"/health", "/metrics", "/v1/outrider/cut/{id}"}
    asked = document["paths"]["/v1/chat/completions"]["post"]
    assert asked["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert set(asked["responses"]) == {"200", "400", "403", "404", "408", "413", "415", "429", "500", "503", "504"}
    assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
    assert "securitySchemes" not in document["components"]
