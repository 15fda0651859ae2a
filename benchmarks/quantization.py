"""Weight-only int8 and int4, and an fp8 KV cache, on a CPU: memory, and the time of a token and of a verdict.

A random model of Qwen2.5-0.5B's size is measured as it is, with int8 and int4 weights, and with an fp8 KV cache, in
float32 and bfloat16. Forwards of 1 token (plain decoding) and of 6 (a verdict on 5 drafts) follow the cached ones, the
models in turn, on one thread. It prints medians of processor time, then one JSON line.

With --checkpoint, a real model continues chats greedily in float32, and each quantised model reads these outputs. The
benchmark prints the share of positions with the same most probable token, and the mean KL divergence from the
unquantised distribution, in nats. PROMPTS.jsonl has the format that exactness.py reads.

    python -m benchmarks.quantization [--size 0.5B] [--cached 200] [--rounds 20]
    python -m benchmarks.quantization --checkpoint DIR PROMPTS.jsonl [--count 12] [--tokens 48]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.exactness import prompts
from benchmarks.random_models import random_model
from outrider.api import SpeculativeDecoder, local
from outrider.engines.base import Engine, Prompt
from outrider.engines.load import load_engine
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.torch.quantization import QUANTIZED_LAYERS, quantize

COUNTS = (1, 6)


def engines(size: str) -> Iterator[tuple[str, TorchEngine]]:
    """Yield the engines by name."""
    for dtype in ("float32", "bfloat16"):
        model = random_model(size, "cpu").to(getattr(torch, dtype))
        yield dtype, TorchEngine(model)
        yield f"{dtype}, fp8 KV cache", TorchEngine(model, fp8_cache=True)
        for name in QUANTIZED_LAYERS:
            quantized = random_model(size, "cpu").to(getattr(torch, dtype))
            quantize(quantized, size, name)
            yield f"{dtype}, {name}", TorchEngine(quantized)


def measure(engine: TorchEngine, slot: int, count: int) -> float:
    """Return the processor milliseconds of a forward of so many tokens, and roll it back."""
    cached = engine.kv_len(slot)
    started = time.process_time()
    engine.forward(slot, list(range(1000, 1000 + count)))
    elapsed = time.process_time() - started
    engine.truncate(slot, cached)
    return 1000 * elapsed


def logprobs_of(engine: Engine, ids: tuple[int, ...], output: tuple[int, ...]) -> torch.Tensor:
    """Return the log-probabilities [len(output), vocabulary] of the positions of an output."""
    slot = engine.open(Prompt(ids))
    rows = engine.forward(slot, (*ids, *output[:-1]), len(output))
    engine.close(slot)
    return torch.as_tensor(rows).float().log_softmax(-1)


def compare(checkpoint: str, file: Path, count: int, tokens: int) -> dict[str, dict[str, float]]:
    """Return agreement and KL divergence of each quantised model, by its quantisation."""
    plain = load_engine(checkpoint, dtype="float32", device="cpu")
    decoder = SpeculativeDecoder(None, local(plain))
    chats = [decoder.encode([{"role": "user", "content": text}]).ids for text in prompts(file, count)]
    outputs = [tuple(decoder.generate(list(ids), max_new_tokens=tokens).token_ids) for ids in chats]
    wanted = [logprobs_of(plain, ids, output) for ids, output in zip(chats, outputs, strict=True)]
    found = {}
    for name in QUANTIZED_LAYERS:
        engine = load_engine(checkpoint, dtype="float32", device="cpu", quantization=name)
        rows = [logprobs_of(engine, ids, output) for ids, output in zip(chats, outputs, strict=True)]
        got, reference = torch.cat(rows), torch.cat(wanted)
        same = (got.argmax(-1) == reference.argmax(-1)).float().mean()
        divergence = (reference.exp() * (reference - got)).sum(-1).mean()
        found[name] = {"same": round(float(same), 4), "kl_nats": round(float(divergence), 5), "positions": len(got)}
    return found


def weights(model: Any) -> int:
    """Return the bytes of the parameters. Tied ones count once."""
    return sum(weight.nbytes for weight in model.parameters())


def time_forwards(args: argparse.Namespace) -> dict[str, Any]:
    """Return memory and times of the engines, by name."""
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
    return {
        name: {
            "weights_mb": round(weights(engine.model) / 1e6),
            "position_bytes": engine.position_bytes,
            **{f"ms_{count}": round(statistics.median(times[name, count]), 1) for count in COUNTS},
        }
        for name, engine in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--cached", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--checkpoint", nargs=2, metavar=("DIR", "PROMPTS.jsonl"))
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "threads": 1}
    if args.checkpoint:
        rows: dict[str, Any] = compare(args.checkpoint[0], Path(args.checkpoint[1]), args.count, args.tokens)
    else:
        rows = time_forwards(args)
    for name, row in rows.items():
        print(f"{name:22s} {row}")
    print(json.dumps({"benchmark": "quantization", **vars(args), "rows": rows, **versions}))


if __name__ == "__main__":
    main()
