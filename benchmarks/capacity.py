"""Tokens per second of a service that verifies drafts, against the same service decoding for its clients.

Sessions of one model go through the batcher, all of them asking at once, again and again. Verifying: each asks about k
drafts of the target's own output, wrong at rate 1 − alpha; drafting is the clients' and takes no time here. Cloud-only:
each asks for the next token. Both ways run interleaved on the same engine; medians. The capacity is the number of
sessions up to which a token takes no longer than --latency, by linear interpolation. Last comes one JSON line.

    python -m benchmarks.capacity [--model 7B|demo:cloud|…] [--sessions 1 8 32] [--context 1000] [--k 5] [--alpha 0.8]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.random_models import SIZES, counting, random_model
from outrider.cloud.batcher import Batcher
from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.engines.load import load_engine
from outrider.engines.torch.engine import TorchEngine
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import open_session

ROUNDS = 10  # of a measurement


class Client:
    """A session that asks for verdicts on what the target would say, wrong at rate 1 − alpha."""

    def __init__(self, engine: TorchEngine, context: int, alpha: float, seed: int, rounds: int, **more: Any) -> None:
        self._random, self._alpha = random.Random(seed), alpha
        self._prompt = Prompt(tuple(self._random.randrange(10, engine.vocab_size // 2) for _ in range(context)))
        self._settings = GenerationSettings(max_new_tokens=rounds, ignore_eos=True, **more)
        self._conditions = SessionParams(self._settings, "exact", engine.vocab_size)
        self._output: list[int] = []
        self.entry = self._opened(engine)

    def _opened(self, engine: TorchEngine) -> SessionEntry:
        session = open_session(engine, self._prompt, self._conditions)
        return SessionEntry("bench", session, self._settings, lambda: self._prompt)

    def restart(self, engine: TorchEngine, batcher: Batcher) -> None:
        """What was said until now is the output; say it again."""
        self._output = self.entry.session.ids[len(self._prompt.ids) :]
        batcher.release(self.entry)
        self.entry = self._opened(engine)

    def request(self, k: int) -> Verify:
        session = self.entry.session
        at = len(session.ids) - len(self._prompt.ids)
        drafts = self._output[at : at + k]
        assert len(drafts) == k, "too short an output was prepared"
        drafts = [token if self._random.random() < self._alpha else token ^ 1 for token in drafts]
        return Verify(session.rounds + 1, len(session.ids), (), tuple(drafts))


def ask(batcher: Batcher, clients: list[Client], k: int) -> int:
    """One verdict for each, on k drafts; returns the tokens that came of them."""
    answers = [batcher.submit(client.entry, client.request(k)) for client in clients]
    return sum(answer.result().accepted + 1 for answer in answers)


def rate(batcher: Batcher, clients: list[Client], k: int) -> float:
    """Tokens per second of all clients together."""
    started = time.perf_counter()
    tokens = sum(ask(batcher, clients, k) for _ in range(ROUNDS))
    return tokens / (time.perf_counter() - started)


def measure(engine: TorchEngine, count: int, args: argparse.Namespace, **more: Any) -> dict[str, float]:
    longest = (args.repeats + 1) * ROUNDS * (args.k + 2) + args.k + 2
    clients = [Client(engine, args.context, args.alpha, seed, longest, **more) for seed in range(count)]
    batcher = Batcher(engine, count, Metrics())
    batcher.start()
    for _ in range(longest):
        ask(batcher, clients, 0)
    for client in clients:
        client.restart(engine, batcher)
    rates: dict[str, list[float]] = {"cloud_only": [], "verifying": []}
    for run in range(args.repeats + 1):  # the first one fills the caches
        for name, k in (("cloud_only", 0), ("verifying", args.k)):
            found = rate(batcher, clients, k)
            rates[name] += [found] if run else []
    batcher.stop()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {**medians, "ratio": medians["verifying"] / medians["cloud_only"]}


def capacity(results: dict[int, dict[str, float]], way: str, latency: float) -> float:
    """Sessions up to which a token of each takes at most `latency` ms; the last measured number if all do."""
    counts = sorted(results)
    times = [1000 * count / results[count][way] for count in counts]
    return float(np.interp(latency, times, counts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7B")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--latency", type=float, default=5.0, help="ms per token")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    engine = TorchEngine(counting(random_model(args.model))) if args.model in SIZES else load_engine(args.model)
    assert isinstance(engine, TorchEngine)
    print(f"{'sessions':>8} {'cloud-only':>11} {'verifying':>11} {'ratio':>6}   (tokens per second)")
    results = {}
    for count in args.sessions:
        results[count] = found = measure(engine, count, args)
        line = f"{count:>8} {found['cloud_only']:>11.0f} {found['verifying']:>11.0f} {found['ratio']:>6.2f}"
        print(line, flush=True)
    max_sessions = {way: round(capacity(results, way, args.latency), 1) for way in ("cloud_only", "verifying")}
    print(
        f"sessions at {args.latency:g} ms per token: {max_sessions['cloud_only']} cloud-only, "
        f"{max_sessions['verifying']} verifying"
    )
    device = torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu"
    versions = {"torch": torch.__version__, "device": device}
    print(json.dumps({"benchmark": "capacity", **vars(args), **versions, "results": results, "capacity": max_sessions}))


if __name__ == "__main__":
    main()
