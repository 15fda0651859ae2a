"""The service's batcher in process: cloud-only decoding and verification of many sessions, and where the time goes.

Cloud-only: every session generates by itself, as for a client that reads at once. Verifying: all sessions request a
verdict on k drafts at once, again and again. The drafts are the target's own output, wrong with probability 1 − alpha,
and take no time here. Both run interleaved on the same engine, and medians are printed, last as one JSON line. The
capacity is the number of sessions up to which a token takes no longer than --latency, by linear interpolation.

    python -m benchmarks.cloud_batches [--model 7B|demo:cloud|instant|…] [--sessions 1 8 32 128] [--context 1000]
        [--k 5] [--alpha 0.8] [--timeline FILE.svg]

--model instant: no model, so that the host's time is left (`cpu_ms` in the JSON line). --timeline: also draw 30 ms of
the host's threads and of the GPU, for the last number of sessions.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import timeline
from benchmarks.instant_sampler import InstantSampler
from benchmarks.random_models import SIZES, counting, random_model
from benchmarks.synthetic_drafter import corrupt_tokens
from outrider.cloud.batcher import Batcher
from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt, ServableEngine
from outrider.engines.load import load_engine
from outrider.engines.torch.engine import TorchEngine
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import open_session

MODES = ("cloud_only", "verifying")
BATCHER_SPANS = ("_run_step", "_plan", "_admit_waiting", "_launch", "_read_back", "_judge_flight", "_deliver", "submit")


class Client:
    """A session with a prepared output, from which its drafts are taken."""

    def __init__(self, engine: ServableEngine, context: int, alpha: float, seed: int, length: int) -> None:
        self._engine, self._alpha, self._seed, self._length = engine, alpha, seed, length
        choice = random.Random(seed)
        self._prompt = Prompt(tuple(choice.randrange(10, engine.vocab_size // 2) for _ in range(context)))
        self._drafts: list[int] = []
        self.open()

    def open(self) -> None:
        """Open a new session."""
        settings = GenerationSettings(max_new_tokens=self._length, ignore_eos=True)
        session = open_session(self._engine, self._prompt, SessionParams(settings, "exact", self._engine.vocab_size))
        self.entry = SessionEntry("bench", session, settings, lambda: self._prompt)

    def reopen(self, batcher: Batcher) -> None:
        """Take the output until now as the target's, and open a new session that repeats it."""
        output = self.entry.session.ids[len(self._prompt.ids) :]
        if len(output) > len(self._drafts):
            self._drafts = corrupt_tokens(output, self._alpha, self._seed)
        batcher.release(self.entry)
        self.open()

    def request(self, k: int) -> Verify:
        """Return the request of the next verdict."""
        session = self.entry.session
        length = len(session.ids)
        at = length - len(self._prompt.ids)
        return Verify(session.rounds + 1, length, (), tuple(self._drafts[at : at + k]))


def verify(batcher: Batcher, clients: list[Client], k: int, rounds: int) -> int:
    """Verify a block of each session, `rounds` times. Return the number of tokens."""
    tokens = 0
    for _ in range(rounds):
        answers = [batcher.submit(client.entry, client.request(k)) for client in clients]
        tokens += sum(answer.result().accepted + 1 for answer in answers)
    return tokens


def generate(batcher: Batcher, clients: list[Client], count: int) -> int:
    """Generate `count` tokens in each session. Return their number."""
    over, left = threading.Event(), len(clients)
    received: list[Verdict] = []

    def on_done(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            over.set()

    jobs = []
    for client in clients:
        session = client.entry.session
        first = Verify(session.rounds + 1, len(session.ids), (), ())
        jobs.append(batcher.generate(client.entry, first, count, (), received.append))
        jobs[-1].future.add_done_callback(on_done)
    for job in jobs:
        batcher.grant(job, count)
    over.wait()
    for job in jobs:
        job.future.result()
    return len(received)


def measure(
    engine: ServableEngine, count: int, args: argparse.Namespace
) -> tuple[dict[str, Any], Batcher, list[Client]]:
    """Return wall and CPU ms per step and tokens per second of both modes, and the running batcher and its clients."""
    length = (args.repeats + 2) * args.rounds * (args.k + 3)
    batcher = Batcher(engine, count, Metrics())
    batcher.start()
    clients = [Client(engine, args.context, args.alpha, seed, length + args.k) for seed in range(count)]
    generate(batcher, clients, length)
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    for repeat in range(args.repeats + 1):
        for client in clients:
            client.reopen(batcher)
        generate(batcher, clients, 3)  # prefill
        for mode in found:
            started, cpu_started = time.perf_counter(), time.process_time()
            if mode == "cloud_only":
                tokens = generate(batcher, clients, args.rounds)
            else:
                tokens = verify(batcher, clients, args.k, args.rounds)
            seconds = time.perf_counter() - started
            cpu_ms = 1000 * (time.process_time() - cpu_started) / args.rounds
            found[mode] += [(1000 * seconds / args.rounds, cpu_ms, tokens / seconds)] if repeat else []
    result: dict[str, Any] = {}
    for mode, values in found.items():
        step, cpu, rate = (statistics.median(column) for column in zip(*values, strict=True))
        result[mode] = {"step_ms": round(step, 3), "cpu_ms": round(cpu, 3), "tokens_per_s": round(rate, 1)}
    return result, batcher, clients


def capacity(results: dict[int, dict[str, Any]], mode: str, latency: float) -> float:
    """Return up to how many sessions a token of each takes at most `latency` ms: at most the last measured number."""
    counts = sorted(results)
    times = [1000 * count / results[count][mode]["tokens_per_s"] for count in counts]
    return round(float(np.interp(latency, times, counts)), 1)


def draw(engine: Any, batcher: Batcher, clients: list[Client], args: argparse.Namespace) -> dict[str, Any]:
    """Record both modes, write the picture, and return ms per step of the GPU and of the host's spans."""
    targets = [(batcher, name) for name in BATCHER_SPANS]
    runner = getattr(engine, "_runner", None)
    if runner is not None:
        targets += [(runner, "logits"), (runner, "sample")]
    lines, found = {}, {}
    for mode in MODES:
        for client in clients:
            client.reopen(batcher)
        generate(batcher, clients, 3)
        with timeline.record(targets) as line:
            if mode == "cloud_only":
                generate(batcher, clients, args.rounds)
            else:
                verify(batcher, clients, args.k, args.rounds)
        lines[mode], found[mode] = line, timeline.summarise(line, args.rounds)
        print(mode, json.dumps(found[mode]), flush=True)
    Path(args.timeline).write_text(timeline.to_svg(lines), encoding="utf-8")
    return found


def load(model: str) -> Any:
    """Return the engine of `--model`."""
    if model == "instant":
        return InstantSampler()
    return TorchEngine(counting(random_model(model))) if model in SIZES else load_engine(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7B")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=20, help="steps of a measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--latency", type=float, default=5.0, help="ms per token")
    parser.add_argument("--timeline", metavar="FILE.svg")
    args = parser.parse_args()
    engine = load(args.model)
    print(f"{'sessions':>8} {'cloud-only':>22} {'verifying':>22}   (ms per step, tokens per second)")
    results, spans = {}, None
    for count in args.sessions:
        results[count], batcher, clients = measure(engine, count, args)
        columns = [f"{each['step_ms']:>10.2f} {each['tokens_per_s']:>11.0f}" for each in results[count].values()]
        print(f"{count:>8} {columns[0]} {columns[1]}", flush=True)
        if args.timeline and count == args.sessions[-1]:
            spans = draw(engine, batcher, clients, args)
        batcher.stop()
    device = torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu"
    versions = {"torch": torch.__version__, "device": device}
    found = {"results": results, "capacity": {mode: capacity(results, mode, args.latency) for mode in MODES}}
    print(json.dumps({"benchmark": "cloud_batches", **vars(args), **versions, **found, "timeline": spans}))


if __name__ == "__main__":
    main()
