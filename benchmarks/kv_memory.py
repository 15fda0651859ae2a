"""Memory of the KV cache against what its tokens need: 64 sessions of 200 to 8,000 tokens.

Sessions are opened in chunks of 512 tokens and grow token by token. Some are rolled back, and 40 are closed and opened
again. Per stage, the largest ratio of bytes held to bytes needed that any step of it showed, over several seeds, both
distributions of lengths and all orders. The figure holds for any model, as all layers are alike: the cache here has one
small layer. Forwards compute nothing but write their entries. Last comes one JSON line.

    python -m benchmarks.kv_memory [--sessions 64] [--seeds 4] [--growth 200]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from itertools import product

import torch

from outrider.engines.torch.kv_cache import SlotKVCache

SHORTEST, LONGEST, CHUNK = 200, 8000, 512
DISTRIBUTIONS = {
    "uniform": lambda rng: rng.randint(SHORTEST, LONGEST),
    "log-uniform": lambda rng: round(SHORTEST * (LONGEST / SHORTEST) ** rng.random()),
}
ORDERS = ("random", "ascending", "descending")
CPU = torch.device("cpu")
DIM = 8


class Mix:
    """Sessions in one cache. ratios: the largest of each stage."""

    def __init__(self) -> None:
        self.cache = SlotKVCache(1, by_row=True)
        self.slots: list[int] = []
        self.ratios: dict[str, float] = defaultdict(float)
        self.tokens = 0

    def open(self, length: int) -> None:
        self.slots.append(self.cache.allocate())
        for start in range(0, length, CHUNK):
            self.append(self.slots[-1:], min(CHUNK, length - start))

    @torch.inference_mode()
    def append(self, slots: list[int], count: int) -> None:
        self.cache.prepare_append(slots, [count] * len(slots), CPU)
        new = torch.zeros(len(slots), 1, count, DIM)
        self.cache.layers[0].update(new, new)
        self.cache.commit_append()
        self.tokens += count * len(slots)

    def record(self, stage: str) -> None:
        held = sum(buffer.nbytes for buffer in self.cache.buffers)
        needed = sum(self.cache.lengths[slot] for slot in self.slots) * 2 * DIM * 4
        self.ratios[stage] = max(self.ratios[stage], held / needed)


def run(seed: int, distribution: str, order: str, sessions: int, growth: int) -> Mix:
    rng, mix = random.Random(seed), Mix()
    lengths = [DISTRIBUTIONS[distribution](rng) for _ in range(sessions)]
    if order != "random":
        lengths.sort(reverse=order == "descending")
    for length in lengths:
        mix.open(length)
    mix.record("opened")
    for _ in range(growth):
        mix.append(mix.slots, 1)
        mix.record("grown")
    for slot in mix.slots[::2]:
        mix.cache.truncate(slot, mix.cache.lengths[slot] // 2)
        mix.record("rolled back")
    closed = min(40, sessions)
    for slot in mix.slots[:closed]:
        mix.cache.release(slot)
    del mix.slots[:closed]
    if mix.slots:
        mix.record("closed")
    for _ in range(closed):
        mix.open(DISTRIBUTIONS[distribution](rng))
    mix.record("opened again")
    return mix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--growth", type=int, default=200, help="tokens that each session appends one by one")
    args = parser.parse_args()
    worst: dict[str, float] = defaultdict(float)
    started, tokens = time.process_time(), 0
    for seed, distribution, order in product(range(args.seeds), DISTRIBUTIONS, ORDERS):
        mix = run(seed, distribution, order, args.sessions, args.growth)
        tokens += mix.tokens
        for stage, ratio in mix.ratios.items():
            worst[stage] = max(worst[stage], ratio)
    ratios = {stage: round(ratio, 3) for stage, ratio in worst.items()}
    for stage, ratio in ratios.items():
        print(f"{stage:15s} {ratio:6.3f}")
    microseconds = round(1e6 * (time.process_time() - started) / tokens, 3)
    print(json.dumps({"benchmark": "kv_memory", **vars(args), "ratios": ratios, "us_per_token": microseconds}))


if __name__ == "__main__":
    main()
