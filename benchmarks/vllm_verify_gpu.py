"""Verification on a vLLM server (vllm://) against the same server's own decoding: verdicts, tokens per second, costs.

Starts `vllm serve` with the model of `vllm_model` on loopback, or uses a running one (--port). For each load, sessions
× tokens of context, all sessions ask at once, again and again:

    plain      the server decodes for each session: ms per step of all (an output of N + 8 tokens less one of 8)
    verified   each session asks for verdicts on k drafts of the target's own output, wrong at rate 1 − alpha, through
               the verifier; drafting takes no time here. Median ms of a verdict, tokens per second of all sessions

The clients are processes of their own (--processes), so that none of them is the limit. With a verdict come its costs:
CPU time of the clients and of the server's processes, the time from arrival to answer that the server counts and the
part of it in the engine, and the bytes in both directions, all per verdict. One JSON line per load, and one at the end.

    python -m benchmarks.vllm_verify_gpu [--size 7B] [--loads 1x150 … 32x6000] [--k 5] [--alpha 0.8] [-- OPTIONS]

OPTIONS go to `vllm serve`. For model runner V2 set VLLM_USE_V2_MODEL_RUNNER=1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engines import in_worker
from benchmarks.vllm_model import plugin, vocabulary, write_model
from benchmarks.vllm_server import Server
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.transport.http_client import HttpClient
from outrider.verifiers.base import ModelInfo, SessionParams
from outrider.verifiers.llm_server.verifier import LlmServerVerifier
from outrider.verifiers.llm_server.vllm import DEFAULT_PARAMS, PER_PREFIX, PROMPT_LOGPROBS, VllmBackend

LOADS = ("1x150", "8x150", "32x150", "1x1500", "8x1500", "32x1500", "1x6000", "8x6000", "32x6000", "32x1000")
SHORT = 8  # tokens of the short output
MIN_VERDICTS = 200  # of a load, so that the tokens per round are near those that alpha promises
WAIT = 600.0  # s
HISTOGRAMS = {
    "server_ms": "vllm:e2e_request_latency_seconds",
    "engine_ms": "vllm:request_inference_time_seconds",
    "queue_ms": "vllm:request_queue_time_seconds",
}


@dataclass(frozen=True)
class Load:
    """A load.

    vocabulary: tokens of the model. mode: the request mode, or "" for the one that the probe chooses. one_prefill: no
    request of its own computes the prompt.
    """

    port: int
    sessions: int
    context: int
    k: int
    alpha: float
    rounds: int
    vocabulary: int
    mode: str
    one_prefill: bool

    def prompts(self) -> list[list[int]]:
        """The prompts of the sessions, the same in every process."""
        rng = random.Random(f"{self.sessions} {self.context}")
        return [rng.choices(range(10, self.vocabulary), k=self.context) for _ in range(self.sessions)]


# The server's own figures ---------------------------------------------------------------------------------------------


def counters(port: int) -> dict[str, float]:
    """Sums and counts of the histograms, and CPU seconds of the server's processes by the names they give themselves.

    A histogram that the server does not have is 0.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for key, name in HISTOGRAMS.items():
        for part in ("sum", "count"):
            values = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name}_{part}{{")]
            found[f"{key} {part}"] = sum(map(float, values))
    group = _group_of(port)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            if int(fields[2]) == group:
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                found[f"cpu {name}"] = found.get(f"cpu {name}", 0.0) + seconds
    return found


def _group_of(port: int) -> int:
    """Return the process group of the server, whose command names the port."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"serve" in words and str(port).encode() in words:
                return int((folder / "stat").read_text().rpartition(")")[2].split()[2])
    return -1


# Plain decoding -----------------------------------------------------------------------------------------------------


def plain(load: Load, tokens: int, runs: int) -> dict[str, Any]:
    """Decoding by the server itself, without prefill: the prefix cache has the prompts."""
    prompts, salt = load.prompts(), uuid.uuid4().hex

    async def all_sessions(client: HttpClient, count: int) -> tuple[float, list[list[int]]]:
        async def one(prompt: list[int]) -> list[int]:
            body = {**DEFAULT_PARAMS, "model": "model", "prompt": prompt, "cache_salt": salt, "max_tokens": count}
            reply = await client.post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True}, WAIT)
            if reply.status != 200:
                raise SystemExit(f"plain decoding: {reply.error}")
            return list(reply.content["choices"][0]["token_ids"])

        started = time.perf_counter()
        outputs = await asyncio.gather(*map(one, prompts))
        return time.perf_counter() - started, outputs

    async def measure(client: HttpClient) -> tuple[float, list[list[int]]]:
        await all_sessions(client, 2)
        times = []
        for _ in range(runs):
            short, _ = await all_sessions(client, SHORT)
            long, outputs = await all_sessions(client, SHORT + tokens)
            times.append((long - short) / tokens)
        return statistics.median(times), outputs

    step, outputs = in_worker(("127.0.0.1", load.port), measure)
    pairs = zip(prompts, outputs, strict=True)
    counted = [all(t == (p[-1] + n) % load.vocabulary for n, t in enumerate(out, 1)) for p, out in pairs]
    return {"step_ms": 1000 * step, "tokens_per_s": load.sessions / step, "counting": sum(counted) / len(counted)}


# Verified -----------------------------------------------------------------------------------------------------------

_barrier: Any = None
_verifiers: dict[int, LlmServerVerifier] = {}  # by port; the first connection compares the vocabularies


def _start(barrier: Any) -> None:
    import torch

    global _barrier
    _barrier = barrier
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s")


def _verifier(load: Load) -> LlmServerVerifier:
    if load.port not in _verifiers:
        size = load.vocabulary
        info = ModelInfo("drafter", size, size, (), "counting", None, decode=lambda ids: "".join(f"t{n}" for n in ids))
        verifier = LlmServerVerifier(VllmBackend(), [("127.0.0.1", load.port)], deadline=WAIT, retry_timeout=1.0)
        verifier.describe(info)
        (replica,) = verifier.replicas
        capabilities = replica.capabilities
        assert capabilities is not None
        mode, separate = load.mode or capabilities.mode, capabilities.sends_computed_rows and not load.one_prefill
        replica.capabilities = replace(capabilities, mode=mode, sends_computed_rows=separate)
        _verifiers[load.port] = verifier
    return _verifiers[load.port]


def _client(work: tuple[Load, int, int]) -> dict[str, Any]:
    """Some of a load's sessions, in a process of its own: number `index` of `count`."""
    load, index, count = work
    prompts = load.prompts()[index::count]
    verifier = _verifier(load)
    capabilities = verifier.replicas[0].capabilities
    assert capabilities is not None
    sessions = [_Session(verifier, prompt, load, index * 1000 + n) for n, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(len(sessions)) as threads:
        first = list(threads.map(lambda session: session.round(), sessions))  # reads the prompt
        sent = _bytes(verifier, sessions)
        _barrier.wait(WAIT)
        before = counters(load.port) if index == 0 else None
        _barrier.wait(WAIT)
        started, cpu = time.perf_counter(), time.process_time()
        loops = list(threads.map(lambda session: [session.round() for _ in range(load.rounds)], sessions))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        _barrier.wait(WAIT)
        after = counters(load.port) if index == 0 else None
    rounds = [one for loop in loops for one in loop]
    return {
        "mode": (capabilities.mode, capabilities.top, capabilities.normalised, capabilities.noise),
        "first_ms": [1000 * one[0] for one in first],
        "verdict_ms": [1000 * one[0] for one in rounds],
        "tokens": sum(one[1] for one in rounds),
        "seconds": seconds,
        "cpu": cpu,
        "bytes": [later - earlier for later, earlier in zip(_bytes(verifier, sessions), sent, strict=True)],
        "counters": (before, after),
    }


def _bytes(verifier: LlmServerVerifier, sessions: Sequence[_Session]) -> tuple[int, int]:
    """Bytes of the sessions, up and down."""
    counts = [verifier.byte_counts(session.number) for session in sessions]
    return sum(sum(one.up.values()) for one in counts), sum(sum(one.down.values()) for one in counts)


class _Session:
    """One session, whose drafts are the target's own next tokens, wrong at rate 1 − alpha."""

    def __init__(self, verifier: Any, prompt: list[int], load: Load, seed: int) -> None:
        settings = GenerationSettings(max_new_tokens=1 << 20, ignore_eos=True)
        self._verifier, self._load, self._random = verifier, load, random.Random(seed)
        self._last, self._length, self._round = prompt[-1], len(prompt), 0
        self.number = verifier.open(Prompt(tuple(prompt)), SessionParams(settings, "exact", load.vocabulary))

    def round(self) -> tuple[float, int]:
        """Seconds and tokens of a round."""
        self._round += 1
        right = [(self._last + n) % self._load.vocabulary for n in range(1, self._load.k + 1)]
        drafts = [t if self._random.random() < self._load.alpha else (t + 7) % self._load.vocabulary for t in right]
        started = time.perf_counter()
        verdict = self._verifier.verify(self.number, Verify(self._round, self._length, (), tuple(drafts)))
        seconds = time.perf_counter() - started
        self._length += verdict.accepted + 1
        self._last = (self._last + verdict.accepted + 1) % self._load.vocabulary
        if verdict.next_token != self._last:
            raise RuntimeError(f"{verdict} on {drafts}: expected token {self._last}")
        return seconds, verdict.accepted + 1


def verified(load: Load, pool: Any, processes: int) -> dict[str, Any]:
    """The load through the verifier. The first processes of the pool wait for each other."""
    count = min(processes, load.sessions)
    parts = pool.map(_client, [(load, index, count) for index in range(count)], chunksize=1)
    verdicts = sorted(ms for part in parts for ms in part["verdict_ms"])
    seconds = max(part["seconds"] for part in parts)
    tokens = sum(part["tokens"] for part in parts)
    before, after = next(part["counters"] for part in parts if part["counters"][0] is not None)
    spent = {key: after[key] - before.get(key, 0.0) for key in after}
    spans = {key: 1000 * spent[f"{key} sum"] / max(spent[f"{key} count"], 1.0) for key in HISTOGRAMS}
    return {
        "mode": parts[0]["mode"],
        "verdict_ms": statistics.median(verdicts),
        "p95_ms": verdicts[int(0.95 * (len(verdicts) - 1))],
        "first_ms": statistics.median(ms for part in parts for ms in part["first_ms"]),
        "tokens_per_s": tokens / seconds,
        "tokens_per_round": tokens / len(verdicts),
        "client_cpu_ms": 1000 * sum(part["cpu"] for part in parts) / len(verdicts),
        "server_cpu_ms": {k[4:]: 1000 * s / len(verdicts) for k, s in spent.items() if k.startswith("cpu ") and s},
        "up_bytes": sum(part["bytes"][0] for part in parts) / len(verdicts),
        "down_bytes": sum(part["bytes"][1] for part in parts) / len(verdicts),
        **spans,
    }


def rounded(value: Any) -> Any:
    """Floats with four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def run(options: argparse.Namespace, port: int) -> None:
    context = multiprocessing.get_context("spawn")
    results = []
    pools: dict[int, Any] = {}
    try:
        for name in options.loads:
            sessions, length = map(int, name.split("x"))
            rounds = max(options.rounds, MIN_VERDICTS // sessions)
            chosen = (options.k, options.alpha, rounds, vocabulary(options.size))
            load = Load(port, sessions, length, *chosen, options.mode, options.one_prefill)
            count = min(options.processes, sessions)
            if count not in pools:
                pools[count] = context.Pool(count, _start, (context.Barrier(count),))
            result = {"load": name, "plain": plain(load, options.tokens, options.runs)}
            result["verified"] = verified(load, pools[count], options.processes)
            result["verdict_in_steps"] = result["verified"]["verdict_ms"] / result["plain"]["step_ms"]
            result["speedup"] = result["verified"]["tokens_per_s"] / result["plain"]["tokens_per_s"]
            results.append(rounded(result))
            print(json.dumps(results[-1]), flush=True)
    finally:
        for pool in pools.values():
            pool.terminate()
    setting = {name: getattr(options, name) for name in ("label", "size", "k", "alpha", "rounds", "processes")}
    short = {one["load"]: [one["plain"]["step_ms"], one["verified"]["verdict_ms"], one["speedup"]] for one in results}
    print(json.dumps({"benchmark": "vllm_verify_gpu", **setting, "step_verdict_speedup": short}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, help="of a running server of the same model")
    parser.add_argument("--size", default="7B")
    parser.add_argument("--label", default="")
    parser.add_argument("--one-prefill", action="store_true", help="compute prompts with their first block")
    parser.add_argument("--mode", default="", choices=("", PER_PREFIX, PROMPT_LOGPROBS))
    parser.add_argument("--python", default=sys.executable, help="of the environment that has vLLM")
    parser.add_argument("--loads", nargs="+", default=list(LOADS))
    parser.add_argument("--alpha", type=float, default=0.8)
    for name, default in (("k", 5), ("rounds", 20), ("processes", 8), ("tokens", 64), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--start-only", type=Path, metavar="FILE", help="start the server, write its port, and wait")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "vllm_serve.log")
    parser.add_argument("server", nargs="*", help="options of vllm serve, after --")
    options = parser.parse_args()
    if options.port is not None:
        run(options, options.port)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with this process
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", options.size)
        command = ["--load-format", "counting", "--dtype", "bfloat16", "--max-model-len", "8448", *options.server]
        with Server(model, command, options.log, python=options.python, environment=plugin(Path(folder))) as server:
            if options.start_only is None:
                run(options, server.port)
            else:
                options.start_only.write_text(str(server.port))
                server.process.wait()


if __name__ == "__main__":
    main()
