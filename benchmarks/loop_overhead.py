"""What the loop costs beside the models: everything but forwards, in milliseconds per token.

Two scripted engines answer at once with rows of a 151,936-token vocabulary, so that all the time measured is ours:
drafting, gate, constraints, verdicts, stop rules, loop watch, bookkeeping. The drafter is wrong every fifth token.
Each case runs several times; the median is printed, last as one JSON line.

    python benchmarks/loop_overhead.py [--vocab 151936] [--context 2000] [--tokens 256] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outrider.api import SpeculativeDecoder, local
from outrider.engines.base import Prompt, SequenceInput

CASES: dict[str, dict[str, object]] = {
    "unconstrained": {},
    "penalty_and_ngram_ban": {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
    "sampled_top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}


class InstantEngine:
    """Rows prepared beforehand: row n makes token `plan[n]` the best. Forwards cost next to nothing."""

    name = "instant"
    tokenizer = None
    eos_ids: tuple[int, ...] = ()
    max_length: int | None = None
    noise = 0.0
    fingerprint = "instant"

    def __init__(self, vocab_size: int, length: int, wrong_every: int = 0) -> None:
        self.vocab_size = self.row_count = vocab_size
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(64, vocab_size, generator=generator)
        plan = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        self._plan = [(t + 1) % vocab_size if wrong_every and n % wrong_every == 0 else t for n, t in enumerate(plan)]
        self._length = 0
        self.seconds = 0.0

    def open(self, prompt: Prompt) -> int:
        self._length = 0
        return 0

    def forward(self, slot: int, ids: Seq[int], rows: int | None = None) -> Tensor:
        started = time.perf_counter()
        self._length += len(ids)
        wanted = len(ids) if rows is None else rows
        out = self._rows[:wanted].clone()
        for i in range(wanted):
            out[i, self._plan[self._length - wanted + i]] = 30.0
        self.seconds += time.perf_counter() - started
        return out

    def forward_many(self, feeds: Seq[SequenceInput]) -> list[Tensor]:
        return [self.forward(feed.slot, feed.ids, feed.logits_to_keep) for feed in feeds]

    def truncate(self, slot: int, length: int) -> None:
        self._length = length

    def kv_len(self, slot: int) -> int:
        return self._length

    def close(self, slot: int) -> None:
        self._length = 0


def measure(vocab: int, context: int, tokens: int, settings: dict[str, Any]) -> float:
    """Milliseconds per generated token, forwards taken off."""
    length = context + tokens + 64
    drafter, target = InstantEngine(vocab, length, wrong_every=5), InstantEngine(vocab, length)
    decoder = SpeculativeDecoder(drafter, local(target), k=5)
    prompt = torch.randint(0, vocab, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    started = time.perf_counter()
    result = decoder.generate(prompt, max_new_tokens=tokens, **settings)
    elapsed = time.perf_counter() - started - drafter.seconds - target.seconds
    return 1000 * elapsed / len(result.token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocab", 151_936), ("context", 2000), ("tokens", 256), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    for settings in CASES.values():  # warm-up
        measure(options.vocab, options.context, 32, settings)
    runs: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.repeats):  # interleaved
        for name, settings in CASES.items():
            runs[name].append(measure(options.vocab, options.context, options.tokens, settings))
    medians = {name: round(statistics.median(values), 4) for name, values in runs.items()}
    for name, value in medians.items():
        print(f"{name:24s} {value:7.3f} ms per token")
    print(json.dumps({"benchmark": "loop_overhead", "unit": "ms_per_token", **vars(options), **medians}))


if __name__ == "__main__":
    main()
