"""Weight-only int8, and an fp8 KV cache, on a CPU: memory, and the time of a token and of a verdict.

A random model of Qwen2.5-0.5B's size is measured as it is, with int8 weights, and with an fp8 KV cache, in float32 and
bfloat16. Forwards of 1 token (plain decoding) and of 6 (a verdict on 5 drafts) follow the cached ones, the models in
turn, on one thread. Printed are medians of processor time. Last comes one JSON line.

    python -m benchmarks.quantization [--size 0.5B] [--cached 200] [--rounds 20]
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

COUNTS = (1, 6)


def engines(size: str) -> Iterator[tuple[str, TorchEngine]]:
    """Yield the engines by name."""
    for dtype in ("float32", "bfloat16"):
        model = random_model(size, "cpu").to(getattr(torch, dtype))
        yield dtype, TorchEngine(model)
        yield f"{dtype}, fp8 KV cache", TorchEngine(model, fp8_cache=True)
        quantized = random_model(size, "cpu").to(getattr(torch, dtype))
        quantize(quantized, size)
        yield f"{dtype}, int8", TorchEngine(quantized)


def measure(engine: TorchEngine, slot: int, count: int) -> float:
    """Return the processor milliseconds of a forward of so many tokens, and roll it back."""
    cached = engine.kv_len(slot)
    started = time.process_time()
    engine.forward(slot, list(range(1000, 1000 + count)))
    elapsed = time.process_time() - started
    engine.truncate(slot, cached)
    return 1000 * elapsed


def weights(model: Any) -> int:
    """Return the bytes of the parameters. Tied ones count once."""
    return sum(weight.nbytes for weight in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--cached", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = dict(engines(args.size))
    prompt = tuple(range(10, 10 + args.cached))
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
            "position_bytes": engine.position_bytes,
            **{f"ms_{count}": round(statistics.median(times[name, count]), 1) for count in COUNTS},
        }
        for name, engine in found.items()
    }
    for name, row in rows.items():
        print(f"{name:22s} {row}")
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps({"benchmark": "quantization", **vars(args), "rows": rows, **versions}))


if __name__ == "__main__":
    main()
