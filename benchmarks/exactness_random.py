"""Is exact mode exact on a device? Random models against transformers' `generate`, in every number format.

A random Qwen2 target, and a drafter that is a disturbed copy of it, so that drafts are accepted and rejected in turn.
In float32 every output must be equal; in bfloat16 and float16 a difference must begin at a reported near-tie.

    python benchmarks/exactness_random.py [--device cuda] [--prompts 8] [--tokens 64]

Prints a line per format and case and one JSON line at the end; exits 1 if anything is unexplained.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from typing import Any

import torch
import transformers

from benchmarks.exactness import compare
from outrider.api import SpeculativeDecoder, local
from outrider.engines.torch.engine import TorchEngine

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "constrained": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 20},
}


def pair(device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A random target and a drafter that often agrees with it."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=7,
        pad_token_id=0,
    )
    target = transformers.Qwen2ForCausalLM(config).eval()
    for weight in target.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.08)
    drafter = copy.deepcopy(target)
    for weight in drafter.parameters():
        weight.data += 0.02 * weight.data.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    return target.to(device, dtype), drafter.to(device, dtype)


def reference(target: Any, ids: list[int], settings: dict[str, Any], tokens: int) -> list[int]:
    prompt = torch.tensor([ids], device=target.device)
    mask = torch.ones_like(prompt)
    out = target.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **settings)
    return out[0, len(ids) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    results: dict[str, dict[str, int]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        target, drafter = pair(options.device, dtype)
        engine = TorchEngine(target)
        decoder = SpeculativeDecoder(TorchEngine(drafter), local(engine), k=5)
        for case, settings in CASES.items():
            tally = {"equal": 0, "near-tie": 0, "DIFFERENT": 0}
            for seed in range(options.prompts):
                generator = torch.Generator().manual_seed(seed)
                ids = torch.randint(8, 4096, (20 + 30 * seed,), generator=generator).tolist()
                result = decoder.generate(ids, max_new_tokens=options.tokens, **settings)
                theirs = reference(target, ids, settings, options.tokens)
                tally[compare(result.token_ids, theirs, result.near_ties)] += 1
            name = f"{str(dtype).removeprefix('torch.')} {case}"
            results[name] = tally
            print(f"{name:24s} {tally}  noise {engine.noise:.3g}", flush=True)
    print(json.dumps({"benchmark": "exactness_random", "device": options.device, "results": results}))
    sys.exit(1 if any(tally["DIFFERENT"] for tally in results.values()) else 0)


if __name__ == "__main__":
    main()
