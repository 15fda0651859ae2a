"""Times of logits processors, partial rows and log-probabilities on one row of a large vocabulary, on one CPU core.

python -m benchmarks.sampling_fields
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from outrider.config import GenerationSettings
from outrider.sampling.logprobs import compute_logprobs
from outrider.sampling.policy import Policy
from outrider.sampling.top_logprobs import TopLogprobs

VOCAB = 151_936
PROMPT, OUTPUT = 200, 1000  # tokens
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.1},
    "frequency_presence": {"frequency_penalty": 0.5, "presence_penalty": 0.2},
    "bias_20": {"logit_bias": dict.fromkeys(range(20), 1.0)},
}


def best_ms(run: Callable[[], object]) -> float:
    """Return the shortest of 40 runs, in milliseconds."""
    times = []
    for _ in range(41):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return round(min(times[1:]) * 1e3, 3)


def main() -> None:
    """Print a table, and its figures as one JSON line."""
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    row = torch.from_numpy(generator.normal(0, 3, VOCAB).astype(np.float32))
    ids = generator.integers(0, VOCAB, PROMPT).tolist() + generator.integers(0, OUTPUT, OUTPUT).tolist()
    top = torch.topk(row, 64)
    part = TopLogprobs(top.indices.numpy(), top.values.numpy(), float(top.values[-1]))
    found: dict[str, float] = {}
    for name, values in SETTINGS.items():
        policy = Policy.build(GenerationSettings.build(values), (), VOCAB, PROMPT)
        found[name] = best_ms(lambda policy=policy: policy.distribution(row, ids, len(ids)).token)  # type: ignore[misc]
        found[f"{name}_top64"] = best_ms(lambda policy=policy: policy.distribution_at([part], 0, ids, len(ids)))  # type: ignore[misc]
    found["logprobs_20"] = best_ms(lambda: compute_logprobs(row[None], [5], 20, VOCAB, 0))
    for name, milliseconds in found.items():
        print(f"{name:28}{milliseconds:8.3f} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
