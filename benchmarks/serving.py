"""Verdicts per second of a service: sessions read together in batches, against one at a time.

The same requests go through the same batcher: once each is submitted when the one before is answered, once all sessions
submit theirs at the same time. Drafts are the target's own continuation with errors at a chosen rate. Both ways run
interleaved; the median of several repeats is printed, last as one JSON line.

    python benchmarks/serving.py [--model demo:cloud] [--sessions 1 4 16] [--context 200] [--k 5] [--alpha 0.8]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from outrider.cloud.batcher import Batcher
from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt, ServableEngine
from outrider.engines.load import load_engine
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier, open_session

ROUNDS = 6  # per repeat and session


class Client:
    """One session whose drafts are right with probability alpha."""

    def __init__(
        self, engine: ServableEngine, batcher: Batcher, context: int, seed: int, args: argparse.Namespace
    ) -> None:
        self._random = random.Random(seed)
        self._batcher, self._k, self._alpha, self._vocab = batcher, args.k, args.alpha, engine.vocab_size
        length = (args.repeats * 2 + 1) * ROUNDS * (args.k + 1) + args.k
        settings = GenerationSettings(max_new_tokens=length, ignore_eos=True)
        prompt = Prompt(tuple(self._random.randrange(10, engine.vocab_size) for _ in range(context)))
        conditions = SessionParams(settings, "exact", engine.vocab_size)
        self.output = said(engine, prompt, conditions, length)
        self.entry = SessionEntry("bench", open_session(engine, prompt, conditions), settings, lambda: prompt)
        self._start = context

    def request(self) -> Verify:
        session = self.entry.session
        at = len(session.ids) - self._start
        drafts = [self._maybe_wrong(token) for token in self.output[at : at + self._k]]
        return Verify(session.rounds + 1, len(session.ids), (), tuple(drafts))

    def _maybe_wrong(self, token: int) -> int:
        return token if self._random.random() < self._alpha else (token + 1) % self._vocab


def said(engine: ServableEngine, prompt: Prompt, conditions: SessionParams, length: int) -> list[int]:
    """The target's own output."""
    verifier = LocalVerifier(engine)
    session = verifier.open(prompt, conditions)
    stream = verifier.generate(session)
    out = [next(stream).next_token for _ in range(length)]
    verifier.close(session)
    return out


def one_at_a_time(batcher: Batcher, clients: Sequence[Client]) -> None:
    for client in clients:
        batcher.submit(client.entry, client.request()).result()


def together(batcher: Batcher, clients: Sequence[Client]) -> None:
    for answer in [batcher.submit(client.entry, client.request()) for client in clients]:
        answer.result()


def rate(way: Callable[[Batcher, Sequence[Client]], None], batcher: Batcher, clients: Sequence[Client]) -> float:
    """Verdicts per second."""
    started = time.perf_counter()
    for _ in range(ROUNDS):
        way(batcher, clients)
    return ROUNDS * len(clients) / (time.perf_counter() - started)


def measure(engine: ServableEngine, count: int, args: argparse.Namespace) -> dict[str, float]:
    batcher = Batcher(engine, max(args.sessions), Metrics())
    clients = [Client(engine, batcher, args.context, seed, args) for seed in range(count)]
    batcher.start()
    together(batcher, clients)  # prefill
    rates: dict[str, list[float]] = {"one at a time": [], "together": []}
    for _ in range(args.repeats):
        rates["one at a time"].append(rate(one_at_a_time, batcher, clients))
        rates["together"].append(rate(together, batcher, clients))
    for client in clients:
        batcher.release(client.entry)
    batcher.stop()
    out = {name: statistics.median(values) for name, values in rates.items()}
    return {**out, "ratio": out["together"] / out["one at a time"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:cloud")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    engine = load_engine(args.model)
    print(f"{'sessions':>8}  {'one at a time':>14}  {'together':>9}  ratio   (verdicts per second)")
    results = {}
    for count in args.sessions:
        results[count] = found = measure(engine, count, args)
        print(f"{count:>8}  {found['one at a time']:>14.0f}  {found['together']:>9.0f}  {found['ratio']:.2f}")
    machine = {
        "threads": torch.get_num_threads(),
        "device": str(getattr(engine, "device", "cpu")),
        "processor": platform.machine(),
    }
    print(json.dumps({"benchmark": "serving", **vars(args), **machine, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
