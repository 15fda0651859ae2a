"""Tools with Qwen2.5-Coder 1.5B on a real vLLM server, through the gateway. The pair lies in .cache/models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.processes import RunningClient, running_client
from tests.clients.test_real_tools import REAL_CLIENTS, WAYS, check_tool_loop
from tests.support.gateway_process import running_gateway
from tests.support.vllm_process import CLOUD, EDGE, OPEN, ROOT, Start

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def url(start: Start) -> Iterator[str]:
    for folder in (EDGE, CLOUD):
        if not folder.is_dir():
            pytest.skip(f"{folder.relative_to(ROOT)} is not there: docs/structure.md says how to make it")
    server = start(CLOUD, *OPEN)
    server.wait()
    cloud = f"vllm://127.0.0.1:{server.port}"
    # LlamaIndex asks for a temperature of 0.1, and the rows of this server have 256 entries.
    options = ("--deadline", "300", "--temperature", "0.1", "--top-k", "50")
    with running_gateway("--edge", str(EDGE), "--cloud", cloud, *options) as (url, _):
        yield url


@pytest.fixture(scope="module", params=REAL_CLIENTS, ids=lambda each: each.name)
def client(request: pytest.FixtureRequest) -> Iterator[RunningClient]:
    with running_client(request.param) as running:
        yield running


@WAYS
def test_the_tool_loop_of_every_client(client: RunningClient, url: str, way: str) -> None:
    check_tool_loop(client, url, way)
