"""A vLLM server for a benchmark: `vllm serve` on loopback, in a process group of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.ports import ReservedPort

STARTS_WITHIN = 240.0  # s


class Server:
    """A server that serves as a context. python: the interpreter of the environment that has vLLM."""

    def __init__(
        self,
        model: Path,
        options: Sequence[str],
        log: Path,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "model"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--disable-uvicorn-access-log", *options]
        variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(environment or {})}
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=file, stderr=file, start_new_session=True
            )

    def __enter__(self) -> Server:
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _wait(self) -> None:
        ends = time.monotonic() + STARTS_WITHIN
        while self.process.poll() is None and time.monotonic() < ends:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise SystemExit(f"vllm did not start: {self._log.read_text(errors='replace')[-3000:]}")

    def _stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        self._reserved.release()
