"""Tools with a real pair, where one lies in .cache/models: Qwen2.5-Coder 1.5B calls the tool and uses its result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.processes import CLIENTS, RunningClient
from tests.support.gateway_process import running_gateway

pytestmark = pytest.mark.real

MODELS = Path(__file__).parents[2] / ".cache" / "models"
# Their drivers forbid a second call, which the small model makes otherwise.
CALL_ONCE = ("openai-3", "openai-2", "langchain", "llama-index", "litellm", "ai-sdk", "open-webui")
REAL_CLIENTS = [each for each in CLIENTS if each.name in CALL_ONCE]
WAYS = pytest.mark.parametrize("way", ["tools", "stream_tools"])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install 'outrider[gguf]'")
    files = sorted(MODELS.glob("*.gguf"), key=lambda file: file.stat().st_size)
    if len(files) < 2:
        pytest.skip(f"no pair of .gguf files in {MODELS}")
    with running_gateway("--edge", str(files[0]), "--cloud", f"local:{files[-1]}") as (url, _):
        yield url


@WAYS
@pytest.mark.parametrize("client", REAL_CLIENTS, indirect=True, ids=lambda each: each.name)
def test_a_real_model_calls_the_tool_and_answers_with_its_result(client: RunningClient, url: str, way: str) -> None:
    check_tool_loop(client, url, way)


def check_tool_loop(client: RunningClient, url: str, way: str) -> None:
    """Check that the model calls the tool once, and says what it returned."""
    question = "What is the weather in Rome?"
    answer = client.do(way, url=f"{url}/v1", key="none", prompt=question, max_tokens=60, call_once=True)
    assert "error" not in answer, answer["error"]
    assert answer["calls"] == [["weather", {"city": "Rome"}]]
    assert "31" in answer["answer"]
