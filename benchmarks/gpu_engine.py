"""Forwards of the engine on a GPU, random models of the sizes of Qwen2.5 0.5B and 7B in bfloat16.

Per case the median of several runs of `repeats` forwards each: wall-clock time from one forward's call to the next,
the choice read back at the end of each, or of each block of drafts. Floors: bytes of weights and cache ÷ what this card
copies in a second (read and written).
Last comes one JSON line.

    python -m benchmarks.gpu_engine [--models 0.5B 7B] [--contexts 200 2000] [--k 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from benchmarks.random_models import random_model
from outrider.config import GenerationSettings
from outrider.engines.base import Prompt, SequenceInput
from outrider.engines.torch.engine import TorchEngine
from outrider.sampling.policy import Policy

CONSTRAINED = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3}


def policy(engine: TorchEngine, **settings: object) -> Policy:
    return Policy.build(GenerationSettings.build(settings), (), engine.vocab_size, 1)


def milliseconds(run: Callable[[], object], repeats: int, runs: int = 5) -> float:
    """Median over runs of the mean time of one call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started) / repeats)
    return statistics.median(times)


def filled(engine: TorchEngine, context: int, sessions: int) -> list[int]:
    """Slots that hold `context` tokens each."""
    slots = [engine.open(Prompt((1,))) for _ in range(sessions)]
    generator = torch.Generator().manual_seed(context)
    for slot in slots:
        ids = torch.randint(10, engine.vocab_size, (context,), generator=generator).tolist()
        engine.forward(slot, ids, 1)
    return slots


def drafting(engine: TorchEngine, context: int, k: int, **settings: object) -> float:
    """Milliseconds of one of k draft steps."""
    (slot,) = filled(engine, context, 1)
    chooser = policy(engine, **settings)

    def block() -> None:
        engine.draft(slot, [11], k, chooser, with_signals=False)
        engine.truncate(slot, context)

    found = milliseconds(block, 10) / k
    engine.close(slot)
    return found


def verifying(engine: TorchEngine, context: int, sessions: int, tokens: int, **settings: object) -> float:
    """Milliseconds of one forward of `tokens` tokens for each of several sessions, choices included."""
    slots = filled(engine, context, sessions)
    feeds = [SequenceInput(slot, list(range(20, 20 + tokens)), tokens) for slot in slots]
    choosers = [policy(engine, **settings)] * sessions

    def verdict() -> None:
        engine.sample_many(feeds, choosers)
        for slot in slots:
            engine.truncate(slot, context)

    found = milliseconds(verdict, 10)
    for slot in slots:
        engine.close(slot)
    return found


def bandwidth() -> float:
    """Bytes per millisecond that a large copy on this card moves, read and written."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), 10)


def floor(engine: TorchEngine, context: int, sessions: int, speed: float) -> float:
    """Milliseconds to read the weights and what is cached once, at `speed` bytes per millisecond."""
    weights = sum(p.nbytes for p in engine.model.parameters())
    return (weights + sessions * context * engine.position_bytes) / speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.5B", "7B"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--k", type=int, default=5)
    args = parser.parse_args()
    results = {}
    speed = bandwidth()
    print(f"{'':54s} {'ms':>7} {'floor':>7}")

    def show(name: str, found: float, least: float) -> None:
        results[name] = {"ms": round(found, 4), "floor_ms": round(least, 4)}
        print(f"{name:54s} {found:7.3f} {least:7.3f}", flush=True)

    for size in args.models:
        started = time.perf_counter()
        engine = TorchEngine(random_model(size), name=size)
        print(f"{size}: loaded and probed in {time.perf_counter() - started:.1f} s, noise {engine.noise:.3f}")
        for context in args.contexts:
            at = f"{size}, context {context}: "
            if size == "0.5B":
                show(at + "draft step", drafting(engine, context, args.k), floor(engine, context, 1, speed))
                show(
                    at + "draft step, constrained",
                    drafting(engine, context, args.k, **CONSTRAINED),
                    floor(engine, context, 1, speed),
                )
            else:
                show(at + "1 token", verifying(engine, context, 1, 1), floor(engine, context, 1, speed))
                show(
                    at + f"{args.k + 1} tokens",
                    verifying(engine, context, 1, args.k + 1),
                    floor(engine, context, 1, speed),
                )
        if size != "0.5B":
            for sessions, tokens in ((32, 1), (32, args.k + 1), (64, 4), (128, 1), (128, 3)):
                at = f"{size}, context 1000: {sessions} sessions × {tokens}"
                least = floor(engine, 1000, sessions, speed)
                show(at, verifying(engine, 1000, sessions, tokens), least)
                if sessions == 32:
                    show(at + ", constrained", verifying(engine, 1000, sessions, tokens, **CONSTRAINED), least)
        del engine
        torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"benchmark": "gpu_engine", "card": torch.cuda.get_device_name(), **versions, "results": results}))


if __name__ == "__main__":
    main()
