"""vLLM's own decoding on one GPU, the yardstick of `gpu_generate`, `capacity` and `gpu_first_token`.

Needs vLLM in the environment (0.24 was used). Random weights, sizes of Qwen2.5, bfloat16. Per load: ms per token and
tokens per second without prefill (the difference of a long and a short output of the same prompts, whose prefill the
prefix cache serves), then the time to the first token of prompts that were never read before. Medians. With `--spec`
a draft model of 0.5B drafts k tokens, accepted by vLLM's synthetic rejection at 0.8 a position. Each figure is printed
when it is known, and one JSON line ends the output.

    python -m benchmarks.vllm_gpu [--size 7B] [--loads 1x200 1x2000 8x1000 32x1000 128x1000] [--prompts 200 2000 8000]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.vllm_model import vocabulary, write_model

SHORT = 8  # tokens of the short output
ALPHA = 0.8  # acceptance of each draft, given that of the ones before it


class Engine:
    """vLLM in this process."""

    def __init__(self, size: str, spec: int, **more: Any) -> None:
        from vllm import LLM

        self._random, self._vocabulary = random.Random(0), vocabulary(size)
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {
                "model": str(write_model(Path(folder) / "target", size)),
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "dtype": "bfloat16",
                "enable_prefix_caching": True,
                **more,
            }
            if spec:
                settings["speculative_config"] = {
                    "model": str(write_model(Path(folder) / "draft", "0.5B")),
                    "method": "draft_model",
                    "num_speculative_tokens": spec,
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rates": [ALPHA**n for n in range(1, spec + 1)],
                }
            self._llm = LLM(**settings)

    def prompts(self, count: int, context: int) -> list[dict[str, list[int]]]:
        """Prompts that were never read before."""
        ids = range(10, self._vocabulary)
        return [{"prompt_token_ids": self._random.choices(ids, k=context)} for _ in range(count)]

    def seconds(self, prompts: list[dict[str, list[int]]], tokens: int) -> float:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    def decoding(self, sessions: int, context: int, tokens: int, runs: int) -> dict[str, float]:
        """Decoding without prefill."""
        prompts = self.prompts(sessions, context)
        self.seconds(prompts, 2)
        pairs = [(self.seconds(prompts, SHORT), self.seconds(prompts, SHORT + tokens)) for _ in range(runs)]
        step = statistics.median(long - short for short, long in pairs) / tokens
        return {"ms_per_token": round(1000 * step, 3), "tokens_per_s": round(sessions / step, 1)}

    def first_token(self, context: int, runs: int) -> float:
        """Milliseconds to the first token of one prompt."""
        self.seconds(self.prompts(1, context), 1)
        return round(1000 * statistics.median(self.seconds(self.prompts(1, context), 1) for _ in range(runs)), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7B")
    parser.add_argument("--loads", nargs="+", default=["1x200", "1x2000", "8x1000", "32x1000", "128x1000"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[200, 2000, 8000])
    parser.add_argument("--spec", type=int, default=0, metavar="K")
    for name, default in (("tokens", 128), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--engine", type=json.loads, default={}, help="further settings of vllm.LLM, as JSON")
    options = parser.parse_args()
    started = time.perf_counter()
    limits = {"max_model_len": 8448, "max_num_seqs": 128, "gpu_memory_utilization": 0.85}
    engine = Engine(options.size, options.spec, **{**limits, **options.engine})
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1), "decoding": {}, "first_token_ms": {}}
    for load in options.loads:
        sessions, context = map(int, load.split("x"))
        found["decoding"][load] = engine.decoding(sessions, context, options.tokens, options.runs)
        print(load, found["decoding"][load], flush=True)
    for context in options.prompts:
        found["first_token_ms"][context] = engine.first_token(context, 2 * options.runs + 1)
        print("first token", context, found["first_token_ms"][context], flush=True)
    print(json.dumps({"benchmark": "vllm_gpu", "size": options.size, "spec": options.spec, **found}), flush=True)


if __name__ == "__main__":
    main()
