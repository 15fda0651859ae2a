"""What the gateway adds to the Python API: milliseconds to the first token, and per token.

The bundled edge model, alone or with a cloud (in this process; in one of its own, as `outrider edge` has it), is asked
the same prompt in turn: the same process decodes, once called through `SpeculativeDecoder.stream`, once over HTTP from
a client in another process. `first` is from the call to the first text that a client can show; `token` is the time from
there to the end, divided by the tokens in between. Medians over the rounds; the last line is JSON.

    python benchmarks/gateway.py [--rounds 40] [--tokens 64] [--cloud none|local|process]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from outrider.api import SpeculativeDecoder
from outrider.cli.subprocess_cloud import cloud_process, share_cores
from outrider.engines.load import load_engine
from outrider.engines.prefix_cache import unique_salt
from outrider.gateway.access import Access
from outrider.gateway.app import GatewayInfo, build_overview, create_app
from outrider.gateway.decoder_pool import DecoderPool, RequestOptions
from outrider.gateway.defaults import Defaults
from outrider.gateway.handlers import Gateway
from outrider.gateway.metrics import Metrics
from outrider.gateway.request_scheduler import RequestScheduler
from outrider.gateway.server import bound, http_server
from outrider.gateway.tokenization import Tokenization
from outrider.verifiers.base import Verifier
from outrider.verifiers.connect import connect
from outrider.verifiers.local import LocalVerifier

PROMPT = "The speaker speaks slowly and"
CLIENT = r"""
import http.client, json, sys, time
host, port, body = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
line = http.client.HTTPConnection(host, port)
line.connect()
for _ in sys.stdin:
    began = time.perf_counter()
    line.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    reply, first, last = line.getresponse(), 0.0, b""
    while part := reply.readline():
        if part.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            last = part
    total = time.perf_counter() - began
    tokens = json.loads(last[6:])["usage"]["completion_tokens"]
    print(json.dumps([first, (total - first) / max(tokens - 1, 1)]), flush=True)
"""
Timed = Callable[[], tuple[float, float]]


def in_python(decoder: SpeculativeDecoder, tokens: int) -> Timed:
    """The same generation through `SpeculativeDecoder.stream`."""

    def run() -> tuple[float, float]:
        began, first, count = time.perf_counter(), 0.0, 0
        for event in decoder.stream(PROMPT, cache_salt=unique_salt(), max_new_tokens=tokens, ignore_eos=True):
            count += event.kind != "provisional"
            if not first and event.kind != "provisional" and event.text:
                first = time.perf_counter() - began
        return first, (time.perf_counter() - began - first) / max(count - 1, 1)

    return run


@contextmanager
def over_http(pool: DecoderPool, options: RequestOptions, tokens: int) -> Iterator[Timed]:
    """The gateway in a thread of this process, its client in a process of its own."""
    scheduler = RequestScheduler(pool)
    metrics = Metrics(lambda: scheduler.active, lambda: scheduler.waiting, 8)
    defaults = Defaults(options)
    gateway = Gateway(scheduler, Access(), defaults, metrics, Tokenization(pool.engine, lambda: None))
    app = create_app(gateway, GatewayInfo(build_overview(defaults, "none", 8)))
    with bound("127.0.0.1", 0) as on:
        server = http_server(app, on)
        thread = threading.Thread(target=server.run, args=([on],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        ask = {"model": "outrider", "prompt": PROMPT, "max_tokens": tokens, "stream": True}
        ask |= {"stream_options": {"include_usage": True}, "outrider": {"ignore_eos": True}}
        command = [sys.executable, "-c", CLIENT, "127.0.0.1", str(on.getsockname()[1]), json.dumps(ask)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:

            def run() -> tuple[float, float]:
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write("go\n")
                child.stdin.flush()
                first, token = json.loads(child.stdout.readline())
                return first, token

            yield run
        server.should_exit = True
        thread.join()


@contextmanager
def reached(cloud: str) -> Iterator[Verifier | None]:
    """The verifier of this kind."""
    if cloud == "process":
        share_cores()
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        with cloud_process("demo") as address:
            yield connect(f"grpc://{address}")
    else:
        yield LocalVerifier(load_engine("demo:cloud")) if cloud == "local" else None


def measure(rounds: int, tokens: int, verifier: Verifier | None) -> dict[str, float]:
    """Medians in milliseconds; the two ways take turns, and which begins alternates."""
    pool = DecoderPool(load_engine("demo:edge"), None if verifier is None else lambda _: verifier)
    options = RequestOptions("edge-only" if verifier is None else "speculative", k=5)
    found: dict[str, list[tuple[float, float]]] = {"python": [], "http": []}
    with over_http(pool, options, tokens) as http:
        ways: list[tuple[str, Timed]] = [("python", in_python(pool.decoder(options), tokens)), ("http", http)]
        for _, run in 2 * ways:  # to warm up
            run()
        for n in range(rounds):
            for name, run in ways if n % 2 else reversed(ways):
                found[name].append(run())
    pool.close()
    medians = {
        name: [1000 * statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()
    }
    (python_first, python_token), (http_first, http_token) = medians["python"], medians["http"]
    return {
        "python_first_ms": python_first,
        "http_first_ms": http_first,
        "added_first_ms": http_first - python_first,
        "python_token_ms": python_token,
        "http_token_ms": http_token,
        "added_token_ms": http_token - python_token,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="gateway against Python API")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cloud", choices=("none", "local", "process"), default="none")
    options = parser.parse_args()
    with reached(options.cloud) as verifier:
        figures = measure(options.rounds, options.tokens, verifier)
    print(f"{'':12}{'Python API':>12}{'gateway':>12}{'added':>10}")
    for name, label in (("first", "first token"), ("token", "per token")):
        row = (figures[f"{side}_{name}_ms"] for side in ("python", "http", "added"))
        print(f"{label:12}" + "".join(f"{value:>{width}.2f}" for value, width in zip(row, (12, 12, 10), strict=True)))
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({"benchmark": "gateway", **vars(options), **rounded}))


if __name__ == "__main__":
    main()
