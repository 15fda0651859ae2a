"""Is exact mode exact on real models? Our output against transformers' own greedy `generate` of the target.

For every prompt both decode the same number of tokens from the same weights in the same number format. In float32
they must be equal. In bfloat16 and float16 the first difference must be at a position that the result reports as a
near-tie (its two best logits lie within the measured numeric noise of the engine); such prompts are counted apart.

    python benchmarks/exactness.py EDGE CLOUD PROMPTS.jsonl [--count 26] [--tokens 64] [--dtype float32] [--k 5]

PROMPTS.jsonl holds one object per line with "turns" (the first is used) and "category" (prompts are spread over
them). Prints a line per prompt and one JSON line at the end; exits 1 if anything is unexplained.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from outrider.api import SpeculativeDecoder, local
from outrider.engines.load import load_engine


def prompts(path: Path, count: int) -> list[str]:
    """First turns, round robin over the categories."""
    by_category: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        by_category.setdefault(entry["category"], []).append(entry["turns"][0])
    depth = max(map(len, by_category.values()))
    spread = [texts[n] for n in range(depth) for texts in by_category.values() if n < len(texts)]
    return spread[:count]


def reference(engine: Any, ids: tuple[int, ...], tokens: int) -> list[int]:
    """What transformers generates alone."""
    prompt = torch.tensor([ids], device=engine.device)
    out = engine.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        repetition_penalty=1.0,
        pad_token_id=engine.eos_ids[0],
    )
    return out[0, len(ids) :].tolist()


def compare(ours: list[int], theirs: list[int], near_ties: list[int]) -> str:
    """equal, near-tie, or DIFFERENT."""
    if ours == theirs:
        return "equal"
    shared = zip(ours, theirs, strict=False)
    first = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(ours), len(theirs)))
    return "near-tie" if first in near_ties else "DIFFERENT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("edge")
    parser.add_argument("cloud")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int, default=26)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--k", type=int, default=5)
    options = parser.parse_args()
    placed = {"dtype": options.dtype, "device": options.device}
    edge, cloud = load_engine(options.edge, **placed), load_engine(options.cloud, **placed)
    decoder = SpeculativeDecoder(edge, local(cloud), k=options.k)
    tally = {"equal": 0, "near-tie": 0, "DIFFERENT": 0}
    accepted = verified = 0
    seconds = {"outrider": 0.0, "generate": 0.0}
    for n, text in enumerate(prompts(options.prompts, options.count)):
        ids = decoder.encode([{"role": "user", "content": text}]).ids
        started = time.perf_counter()
        result = decoder.generate(list(ids), max_new_tokens=options.tokens)
        middle = time.perf_counter()
        theirs = reference(cloud, ids, options.tokens)
        seconds["outrider"] += middle - started
        seconds["generate"] += time.perf_counter() - middle
        verdict = compare(result.token_ids, theirs, result.near_ties)
        tally[verdict] += 1
        accepted, verified = accepted + result.stats.accepted, verified + result.stats.verified
        print(f"{n:3d} {verdict:9s} {len(ids):5d} prompt tokens, {len(result.near_ties)} near-ties", flush=True)
    summary = {
        "benchmark": "exactness",
        "dtype": options.dtype,
        "noise": round(cloud.noise, 4),
        **tally,
        "acceptance_rate": round(accepted / max(verified, 1), 3),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }
    print(json.dumps(summary))
    sys.exit(1 if tally["DIFFERENT"] else 0)


if __name__ == "__main__":
    main()
