"""A real vLLM server in a process of its own."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.support.ports import ReservedPort

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "vllm"
PYTHON = FOLDER / "venv" / "bin" / "python"
MODELS = ROOT / ".cache" / "models"  # a real pair, if it has been put there
EDGE, CLOUD = MODELS / "qwen2.5-coder-0.5b-instruct-q4", MODELS / "qwen2.5-coder-1.5b-instruct-q4"
STARTS_WITHIN = 300.0  # s
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Runner V1, the only one on a CPU, answers with rows of cached tokens that nobody filled in, and fails where these
    # happen not to be numbers. With this, fresh memory is zero. Runner V2 sends no such rows.
    "MALLOC_PERTURB_": "255",
}
COMMON = ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--block-size", "32"]
OPEN = ["--enable-scale-out", "--logprobs-mode", "raw_logits", "--max-logprobs", "256"]


class Server:
    """A vLLM server of its own."""

    def __init__(self, model: Path, log: Path, options: list[str]) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        command = [str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(model), *COMMON, *options]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", model.name]
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, env={**os.environ, **ENVIRONMENT}, stdout=file, stderr=file, start_new_session=True
            )

    def wait(self) -> None:
        """Return when it serves."""
        for _ in range(int(STARTS_WITHIN)):
            if self.process.poll() is not None:
                raise RuntimeError(f"vllm ended: {self.log.read_text(errors='replace')[-2000:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)  # the pause of a poll, which also ends with the process
        raise RuntimeError(f"vllm did not start: {self.log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """End it at once, with the processes that it started: they are a group of their own."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        self._reserved.release()


Start = Callable[..., Server]
