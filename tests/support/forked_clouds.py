"""Cloud services in processes of their own that start in a moment.

Importing torch and loading a model takes seconds. So one process does that once, and forks a server whenever it is
asked to: a real process, on a real socket, to be killed by a real SIGKILL, and back within a fraction of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.support.ports import ReservedPort
from tests.support.processes import read_metric, wait_until

ROOT = Path(__file__).parents[2]


class Cloud:
    """One service: where it listens, and its process, which may die and come back."""

    host = "127.0.0.1"

    def __init__(self, nursery: CloudForker, spec: dict[str, Any]) -> None:
        self._nursery, self._spec = nursery, spec
        self.pid: int | None = None
        self._ports = (ReservedPort(), ReservedPort())
        self.port, self.metrics_port = (port.number for port in self._ports)
        self.starts = 0
        self.start()

    @property
    def address(self) -> str:
        return f"grpc://{self.host}:{self.port}"

    def start(self) -> None:
        """Start the server, always on the same port."""
        self.pid = self._nursery.fork({**self._spec, "port": self.port, "metrics": self.metrics_port})
        self.starts += 1

    def metric(self, name: str) -> float:
        """One of the service's figures; gauges are set every second."""
        return read_metric(f"http://{self.host}:{self.metrics_port}", name)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: in order, but at once."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        if self.pid is not None:
            self.kill()
        for port in self._ports:
            port.release()

    def _end(self, number: signal.Signals) -> None:
        assert self.pid is not None, "it does not run"
        pid, self.pid = self.pid, None
        os.kill(pid, number)
        wait_until(lambda: not _exists(pid))


class CloudForker:
    """The process that loads `model` once and forks servers of it."""

    def __init__(self, model: str = "demo:cloud") -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.support.forked_clouds", model]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - what the servers say, closed in `close`
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        self._process = subprocess.Popen(command, cwd=ROOT, env=env, **pipes)  # type: ignore[call-overload]
        self._clouds: list[Cloud] = []

    def cloud(self, **spec: Any) -> Cloud:
        """spec: slots, max_length, tls (certificate and key), limits."""
        self._clouds.append(Cloud(self, spec))
        return self._clouds[-1]

    def fork(self, spec: dict[str, Any]) -> int:
        """Return the process id of a new server that listens."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(spec).encode() + b"\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or b"{}")
        assert said.get("listens"), f"no server came of {spec}: {self.said()}"
        return said["pid"]

    def said(self) -> str:
        """The servers' log: warnings, and whatever is worse."""
        return os.pread(self._log.fileno(), 2**20, 0).decode(errors="replace")

    def close(self) -> None:
        for cloud in self._clouds:
            cloud.close()
        self._process.communicate()
        self._log.close()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# In the process itself ------------------------------------------------------------------------------------------------


def main(model: str) -> None:
    import torch

    from outrider.engines.load import load_engine

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    engine = load_engine(model, dtype="float32", device="cpu")
    for line in sys.stdin.buffer:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reading)
                _serve(engine, json.loads(line), writing)
            except BaseException:  # noqa: BLE001 - whatever it was, the child ends here
                traceback.print_exc()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            listens = bool(pipe.readline())
        sys.stdout.write(json.dumps({"pid": pid, "listens": listens}) + "\n")
        sys.stdout.flush()


def _serve(engine: Any, spec: dict[str, Any], writing: int) -> None:
    import asyncio

    from outrider.cloud.limits import Limits
    from outrider.cloud.server import Server, ServerConfig, run
    from outrider.engines import locking
    from outrider.serving import logs
    from outrider.transport.tls import ServerTls

    locking._loaders.clear()  # the parent has one thread, for OpenMP too: here a fork is safe
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the nursery
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    logs.configure("WARNING", json=False, stream=sys.stderr)
    max_length = spec.get("max_length", 512)
    tls = ServerTls(*map(Path, spec["tls"])) if "tls" in spec else None
    budget = spec.get("slots", 8) * engine.position_bytes * max_length
    limits = Limits(**spec.get("limits", {}))
    metrics = (Cloud.host, spec["metrics"])
    serving = ServerConfig(
        Cloud.host,
        spec["port"],
        limits,
        tls=tls,
        budget=budget,
        max_length=max_length,
        metrics_address=metrics,
        grace=0.0,
    )

    def listening(_: Server) -> None:
        os.write(writing, b"\n")
        os.close(writing)

    asyncio.run(run(engine, serving, listening))


if __name__ == "__main__":
    main(sys.argv[1])
