"""Weight-only int8 on a CPU: the memory of the weights, and the time of a token and of a verdict.

A random model of Qwen2.5-0.5B's size is measured as it is and quantised, in float32 and bfloat16. Forwards of 1 token
(plain decoding) and of 6 (a verdict on 5 drafts) follow 200 cached ones, the four models in turn. Printed are medians.
Last comes one JSON line.

    python -m benchmarks.quantization [--size 0.5B] [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.random_models import random_model
from outrider.engines.base import Prompt
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.torch.quantization import quantize

CACHED = 200
COUNTS = (1, 6)


def engines(size: str) -> Iterator[tuple[str, TorchEngine]]:
    """Yield the four engines by name."""
    for dtype in ("float32", "bfloat16"):
        for quantized in (False, True):
            model = random_model(size, "cpu").to(getattr(torch, dtype))
            if quantized:
                quantize(model, size)
            yield f"{dtype}{', int8' * quantized}", TorchEngine(model)


def measure(engine: TorchEngine, slot: int, count: int) -> float:
    """Return the milliseconds of a forward of so many tokens, and roll it back."""
    started = time.perf_counter()
    engine.forward(slot, list(range(1000, 1000 + count)))
    elapsed = time.perf_counter() - started
    engine.truncate(slot, CACHED)
    return 1000 * elapsed


def weights(model: Any) -> int:
    """Return the bytes of the parameters. Tied ones count once."""
    return sum(weight.nbytes for weight in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    found = dict(engines(args.size))
    prompt = tuple(range(10, 10 + CACHED))
    slots = {name: engine.open(Prompt(prompt)) for name, engine in found.items()}
    for name, engine in found.items():
        engine.forward(slots[name], prompt, 1)
    times: dict[tuple[str, int], list[float]] = {(name, count): [] for name in found for count in COUNTS}
    for n in range(args.rounds + 2):
        for (name, count), milliseconds in times.items():
            elapsed = measure(found[name], slots[name], count)
            if n > 1:  # the first forwards warm up
                milliseconds.append(elapsed)
    rows = {
        name: {
            "weights_mb": round(weights(engine.model) / 1e6),
            **{f"ms_{count}": round(statistics.median(times[name, count]), 1) for count in COUNTS},
        }
        for name, engine in found.items()
    }
    for name, row in rows.items():
        print(f"{name:16s} {row}")
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps({"benchmark": "quantization", "size": args.size, "rounds": args.rounds, "rows": rows, **versions}))


if __name__ == "__main__":
    main()
