"""What it costs on a GPU to read the first drafted token apart from its block, so that prefill has a time of its own.

A random bfloat16 model of the size of Qwen2.5 0.5B drafts alone; with the split as it is, and with the first block
drafted as one. Runs are interleaved, medians are printed, and one JSON line comes last.

    python -m benchmarks.gpu_first_token [--contexts 200 2000] [--tokens 64] [--repeats 30]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.random_models import random_model
from outrider.api import SpeculativeDecoder
from outrider.edge.drafter import Drafter
from outrider.edge.generation import Generation
from outrider.engines.torch.engine import TorchEngine


class Unsplit(SpeculativeDecoder):
    """A decoder whose first block is drafted like any other, as if its drafter had already drafted a token."""

    def _start(self, *arguments: Any, **options: Any) -> Generation:
        generation = super()._start(*arguments, **options)
        open_drafter = generation.open_drafter

        def open_started_drafter() -> Drafter | None:
            drafter = open_drafter()
            assert isinstance(drafter, Drafter)
            drafter.prefill_seconds = 1.0
            return drafter

        generation.open_drafter = open_started_drafter  # type: ignore[method-assign]
        return generation


def milliseconds(decoder: SpeculativeDecoder, prompt: list[int], tokens: int) -> float:
    began = time.perf_counter()
    assert len(decoder.generate(prompt, max_new_tokens=tokens, ignore_eos=True).token_ids) == tokens
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description="the first token apart from its block")
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    engine = TorchEngine(random_model("0.5B"), name="0.5B")
    split, whole = SpeculativeDecoder(engine, k=5), Unsplit(engine, k=5)
    figures: dict[str, float] = {}
    for context in options.contexts:
        prompt = [100 + n % 1000 for n in range(context)]
        found: dict[str, list[float]] = {"split": [], "whole": []}
        for n in range(options.repeats + 3):
            for name, decoder in (("split", split), ("whole", whole))[:: 1 if n % 2 else -1]:
                taken = milliseconds(decoder, prompt, options.tokens)
                if n >= 3:
                    found[name].append(taken)
        medians = {name: statistics.median(times) for name, times in found.items()}
        figures[f"added_ms_{context}"] = round(medians["split"] - medians["whole"], 3)
        print(f"{context} tokens: split {medians['split']:.2f} ms, as one block {medians['whole']:.2f} ms")
    print(json.dumps({"benchmark": "gpu_first_token", "tokens": options.tokens, **figures}))


if __name__ == "__main__":
    main()
