"""A real pair on a CPU: our exact mode against transformers' assisted generation, tuned, and against plain `generate`.

The target is the same transformers model for all. The edge is a GGUF file for us, the same weights made dense for
transformers, whose settings are searched on a few prompts: number of assistant tokens, schedule, confidence. So is our
k. Then the best of each side and plain `generate` run over all prompts, prompt by prompt in turn. Compared are seconds
per token from the first verdict on, and over all; and the outputs, as in exactness.py. Last comes one JSON line.

    python -m benchmarks.cpu_pair EDGE.gguf EDGE_DIR CLOUD_DIR PROMPTS.jsonl [--count 26] [--tokens 64]
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.exactness import compare, prompts
from outrider.api import SpeculativeDecoder, local
from outrider.engines.load import load_engine
from outrider.engines.prefix_cache import unique_salt
from outrider.engines.torch.engine import TorchEngine

KS: tuple[int | str, ...] = (2, 3, 4, "auto")
SETTINGS = [
    *itertools.product((2, 3, 5), ("constant",), (0.0, 0.4, 0.7)),
    (5, "heuristic", 0.0),
    (20, "constant", 0.4),  # transformers' defaults
]


@dataclass
class Run:
    """One generation: its tokens, when the first of them were there and how many, and when all were, in seconds."""

    tokens: list[int]
    first_s: float
    first_tokens: int
    total_s: float
    near_ties: list[int] = field(default_factory=list)


@dataclass
class Sum:
    """Of many runs."""

    decode_s: float = 0.0
    decoded: int = 0
    total_s: float = 0.0
    tokens: int = 0

    def add(self, run: Run) -> None:
        self.decode_s += run.total_s - run.first_s
        self.decoded += len(run.tokens) - run.first_tokens
        self.total_s += run.total_s
        self.tokens += len(run.tokens)

    @property
    def decode_ms(self) -> float:
        return 1000 * self.decode_s / max(self.decoded, 1)

    @property
    def total_ms(self) -> float:
        return 1000 * self.total_s / max(self.tokens, 1)


Clock = Callable[[], float]


class Watch(transformers.generation.streamers.BaseStreamer):
    """Notes when the first generated tokens come; the prompt comes before them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls = self.first_tokens = 0
        self.first = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first, self.first_tokens = self.clock(), value.numel()

    def end(self) -> None:
        pass


Way = Callable[[list[int], int], Run]


def ours(decoder: SpeculativeDecoder, clock: Clock = time.perf_counter) -> Way:
    def run(ids: list[int], tokens: int) -> Run:
        started, first, count = clock(), 0.0, 0
        stream = decoder.stream(ids, cache_salt=unique_salt(), max_new_tokens=tokens)
        while True:
            try:
                event = next(stream)
            except StopIteration as stop:
                result, ended = stop.value, clock()
                break
            if event.kind != "provisional":
                first = first or clock()
                count += clock() - first < 0.005  # those of the first verdict come together
        return Run(result.token_ids, first - started, count, ended - started, result.near_ties)

    return run


def peers(
    model: Any,
    eos: int,
    assistant: Any = None,
    count: int = 5,
    schedule: str = "constant",
    sure: float = 0.0,
    clock: Clock = time.perf_counter,
) -> Way:
    def run(ids: list[int], tokens: int) -> Run:
        prompt, watch, more = torch.tensor([ids]), Watch(clock), {}
        if assistant is not None:
            config = assistant.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = count, schedule
            config.assistant_confidence_threshold = sure
            more["assistant_model"] = assistant
        started = clock()
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=eos,
            streamer=watch,
            **more,
        )
        ended = clock()
        return Run(out[0, len(ids) :].tolist(), watch.first - started, watch.first_tokens, ended - started)

    return run


def search(ways: dict[str, Way], texts: list[list[int]], tokens: int) -> str:
    """The name of the way that decodes fastest, prompt by prompt in turn."""
    sums = {name: Sum() for name in ways}
    for ids in texts:
        for name, way in ways.items():
            sums[name].add(way(ids, tokens))
    for name, found in sums.items():
        print(f"    {name:40s} {found.decode_ms:7.1f} ms per token", flush=True)
    return min(sums, key=lambda name: sums[name].decode_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("edge", "edge_dense", "cloud"):
        parser.add_argument(name)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int, default=26)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", help="of target and dense edge")
    parser.add_argument("--longest", type=int, default=10**6, help="prompt tokens; longer prompts are left out")
    parser.add_argument("--searched", type=int, default=5, help="prompts that settings are searched on")
    parser.add_argument("--searched-tokens", type=int, default=32)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    edge = load_engine(args.edge)
    cloud, dense = (load_engine(name, dtype=args.dtype, device="cpu") for name in (args.cloud, args.edge_dense))
    assert isinstance(cloud, TorchEngine)
    assert isinstance(dense, TorchEngine)
    decoders = {f"ours, k {k}": SpeculativeDecoder(edge, local(cloud), k=k) for k in KS}
    first = next(iter(decoders.values()))
    texts = [list(first.encode([{"role": "user", "content": text}]).ids) for text in prompts(args.prompts, args.count)]
    texts = [ids for ids in texts if len(ids) <= args.longest]
    target, assistant, eos = cloud.model, dense.model, cloud.eos_ids[0]
    plain = peers(target, eos)
    assisted = {
        f"assisted, {count} {schedule}, confidence {sure:g}": peers(target, eos, assistant, count, schedule, sure)
        for count, schedule, sure in SETTINGS
    }
    own = {name: ours(decoder) for name, decoder in decoders.items()}
    short = sorted(texts, key=len)[:: max(1, len(texts) // (2 * args.searched))][: args.searched]
    print("searched:")
    best_peer, best_own = (search(ways, short, args.searched_tokens) for ways in (assisted, own))
    ways = {"plain": plain, best_peer: assisted[best_peer], best_own: own[best_own]}
    sums, tally = {name: Sum() for name in ways}, {"equal": 0, "near-tie": 0, "DIFFERENT": 0}
    for n, ids in enumerate(texts):
        runs = {name: way(ids, args.tokens) for name, way in ways.items()}
        for name, run in runs.items():
            sums[name].add(run)
        verdict = compare(runs[best_own].tokens, runs["plain"].tokens, runs[best_own].near_ties)
        tally[verdict] += 1
        now = ", ".join(f"{name} {found.decode_ms:.1f}" for name, found in sums.items())
        print(f"{n:3d} {verdict:9s} {len(ids):5d} prompt tokens; ms per token so far: {now}", flush=True)
    found = {
        "against best assisted": round(sums[best_peer].decode_ms / sums[best_own].decode_ms, 2),
        "against plain": round(sums["plain"].decode_ms / sums[best_own].decode_ms, 2),
        "against best assisted, prefill included": round(sums[best_peer].total_ms / sums[best_own].total_ms, 2),
        "against plain, prefill included": round(sums["plain"].total_ms / sums[best_own].total_ms, 2),
    }
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    ms = {name: {"decode": round(one.decode_ms, 1), "all": round(one.total_ms, 1)} for name, one in sums.items()}
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    print(
        json.dumps(
            {
                "benchmark": "cpu_pair",
                "dtype": args.dtype,
                "prompts": len(texts),
                "tokens": args.tokens,
                "ms": ms,
                **found,
                **tally,
                **versions,
            }
        )
    )
    sys.exit(1 if tally["DIFFERENT"] else 0)


if __name__ == "__main__":
    main()
