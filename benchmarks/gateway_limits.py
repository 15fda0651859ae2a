"""Eight clients at work while a ninth is at each of the gateway's limits: their latency, and the gateway's memory.

`outrider edge` runs with the bundled pair and an API key for each client. The eight ask for short texts, one after
another. The ninth has a process of its own; `LIMITS` names its abuses. A ratio is the eight's median latency with the
ninth over that without it; the target is at most 2. The last line is JSON.

    python benchmarks/gateway_limits.py [--seconds 8]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx2
import psutil  # type: ignore[import-untyped]

CLIENTS = 8
SHORT = {"model": "outrider", "prompt": "hello", "max_tokens": 16, "outrider": {"ignore_eos": True}}
LONG = {
    "model": "outrider",
    "prompt": "hello",
    "max_tokens": 800,
    "outrider": {"ignore_eos": True, "on_loop": "ignore"},
}
KEY = "benchmark-key-{}-of-the-gateway"
LARGEST = 16 * 2**20
READY_S = 5.0  # until the ninth is at its limit


def head(path: str, key: str, length: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, f"Authorization: Bearer {key}", "", ""]).encode()


def connections(port: int, stack: ExitStack, stop: Event) -> None:
    """As many connections as may be open, each with a head that does not end."""
    with suppress(OSError):
        while not stop.is_set():
            line = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            line.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 30_000)
            time.sleep(0.002)


def unauthenticated(port: int, stack: ExitStack, stop: Event) -> None:
    """The largest bodies without a key, one after another on 16 connections."""
    threads = stack.enter_context(ThreadPoolExecutor(16))

    def upload() -> None:
        while not stop.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as line:
                line.sendall(head("/v1/completions", "nobody", LARGEST))
                for _ in range(LARGEST // 2**16):
                    line.sendall(b" " * 2**16)
                    time.sleep(0.01)

    for _ in range(16):
        threads.submit(upload)


def bodies(port: int, stack: ExitStack, stop: Event) -> None:
    """With a key, as many of the largest bodies as there is room for, none of which ends."""
    for _ in range(80):
        line = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        with suppress(OSError):
            line.sendall(head("/v1/completions", KEY.format("greedy"), LARGEST) + b" " * 2**20)


def generations(port: int, stack: ExitStack, stop: Event) -> None:
    """With a key, all slots and the whole queue with long generations."""
    content = json.dumps(LONG).encode()
    for _ in range(80):
        line = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        line.sendall(head("/v1/completions", KEY.format("greedy"), len(content)) + content)


Hold = Callable[[int, ExitStack, Event], None]
LIMITS: dict[str, Hold] = {
    "connections": connections,
    "unauthenticated bodies": unauthenticated,
    "bodies": bodies,
    "generations": generations,
}


def harm(name: str, port: int, stop: Event) -> None:
    """In a process of its own: one client at a limit until `stop`."""
    with ExitStack() as stack:
        LIMITS[name](port, stack, stop)
        stop.wait()


@contextmanager
def ninth(name: str, port: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=harm, args=(name, port, stop))
    process.start()
    time.sleep(READY_S)
    try:
        yield
    finally:
        stop.set()
        process.join(10)
        process.kill()


@contextmanager
def gateway() -> Iterator[tuple[int, psutil.Process]]:
    """`outrider edge` with keys; yields its port and process."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.touch(0o600)
        names = ["greedy", *map(str, range(CLIENTS))]
        keys.write_text("".join(f"{name} {KEY.format(name)}\n" for name in names))
        command = [
            sys.executable,
            "-m",
            "outrider",
            "edge",
            "--listen",
            "127.0.0.1:0",
            "--json",
            "--api-keys",
            str(keys),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ, text=True) as child:
            assert child.stdout is not None
            try:
                yield (
                    int(json.loads(child.stdout.readline())["listening"].rpartition(":")[2]),
                    psutil.Process(child.pid),
                )
            finally:
                child.terminate()


def latencies(port: int, seconds: float) -> tuple[list[float], int]:
    """Of the eight, and how many of their requests failed."""
    until = time.monotonic() + seconds
    found: list[float] = []
    failed: list[float] = []

    def work(number: int) -> None:
        headers = {"Authorization": f"Bearer {KEY.format(number)}"}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120) as client:
            while time.monotonic() < until:
                began = time.monotonic()
                reply = client.post("/v1/completions", json=SHORT)
                (found if reply.is_success else failed).append(time.monotonic() - began)

    with ThreadPoolExecutor(CLIENTS) as threads:
        for done in [threads.submit(work, number) for number in range(CLIENTS)]:
            done.result()
    return found, len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description="eight clients beside one at each limit")
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    rows = {}
    with gateway() as (port, process):
        latencies(port, 2)
        for name in LIMITS:
            before, memory = statistics.median(latencies(port, options.seconds)[0]), process.memory_info().rss
            with ninth(name, port):
                during, failed = latencies(port, options.seconds)
                grown = process.memory_info().rss - memory
            ratio = statistics.median(during) / before
            rows[name] = {"ratio": round(ratio, 2), "failed": failed, "requests": len(during), "mib": grown >> 20}
            print(f"{name:24}{ratio:8.2f} times the latency{failed:6} failed{grown / 2**20:8.0f} MiB", flush=True)
    print(json.dumps({"benchmark": "gateway_limits", **vars(options), "limits": rows}))


if __name__ == "__main__":
    main()
