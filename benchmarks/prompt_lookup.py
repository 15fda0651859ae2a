"""Accepted tokens per verdict of prompt lookup, of a draft model, and of both together, on real models.

For every prompt transformers generates with `prompt_lookup_num_tokens` k, and Outrider with prompt lookup and the same
k. Both must give the same tokens. The other drafters then draft against a verifier that replays these tokens: in
float32 a verdict depends on them alone, so that the target need not run again. With --timed the target does run for
the draft model and for both together, and all drafters have tokens per second (without the time to the first token).

    python benchmarks/prompt_lookup.py TARGET DRAFT PROMPTS.jsonl [--categories summarization,rag,coding] [--count 3]
        [--tokens 96] [--prompt-tokens 900] [--k 10] [--timed]

PROMPTS.jsonl holds one object per line with "category" and "turns", as Spec-Bench does. The first turn is the prompt.
Prints a line per prompt and one JSON line at the end. Exits 1 if an output differs from transformers'.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.api import SpeculativeDecoder, local
from outrider.decoding.actions import Verify
from outrider.engines.base import Engine, Prompt
from outrider.engines.load import load_engine
from outrider.engines.prompt_lookup import prompt_lookup
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.base import ModelInfo, SessionParams, SessionTable
from outrider.verifiers.local import describe

MIN_NGRAMS = (1, 2, 3)


@dataclass
class Tally:
    """Sums over prompts. seconds: of timed outputs, without the time to their first token."""

    tokens: int = 0
    verdicts: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Add the sums of another tally."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def figures(self) -> dict[str, float | None]:
        """Return the rates."""
        return {
            "tokens_per_verdict": round(self.tokens / self.verdicts, 3),
            "acceptance_rate": round(self.accepted / self.drafted, 3) if self.drafted else None,
            "tokens_per_s": round(self.tokens / self.seconds, 2) if self.seconds else None,
        }


class ReplayVerifier(SessionTable[int]):
    """A verifier that replays `output`, the greedy output of an engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine, self.output = engine, list[int]()

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        """Return the engine's description."""
        return describe(self.engine)

    def open(self, prompt: Prompt, params: SessionParams) -> int:
        """Open a session."""
        return self._add(len(prompt.ids))

    def verify(self, session: int, request: Verify) -> Verdict:
        """Accept the drafts that agree with the output, and correct the next one."""
        rest = self.output[request.base_length - self._get(session) :]
        pairs = zip(request.draft_ids, rest, strict=False)
        accepted = next((n for n, (drafted, token) in enumerate(pairs) if drafted != token), None)
        if accepted is None:
            accepted = min(len(request.draft_ids), len(rest))
        return Verdict(request.round, accepted, [*rest, 0][accepted])

    def generate(self, session: int) -> Iterator[Verdict]:
        """Raise NotImplementedError: there is always a drafter."""
        raise NotImplementedError

    def close(self, session: int) -> None:
        """Close a session."""
        del self._sessions[session]


class Drafters:
    """The compared drafters by name, each with a decoder that learns from prompt to prompt."""

    def __init__(self, target: Engine, model: Engine, k: int | str, *, timed: bool) -> None:
        self._replay = ReplayVerifier(target)
        verifier = local(target) if timed else self._replay
        self.lookup = SpeculativeDecoder(prompt_lookup(), local(target), k=k)
        self._others = {
            "model": SpeculativeDecoder(model, verifier, k=k),
            "model+lookup": SpeculativeDecoder(model, verifier, lookup=prompt_lookup(), k=k),
        }
        for size in MIN_NGRAMS:
            lookup = prompt_lookup(min_ngram=size)
            self._others[f"lookup, min_ngram {size}"] = SpeculativeDecoder(lookup, self._replay, k=k)

    def run(self, ids: list[int], output: list[int]) -> dict[str, Tally]:
        """Draft against the output with all drafters but the lookup with the target."""
        self._replay.output = output
        return {name: measure(decoder, ids, output) for name, decoder in self._others.items()}


def measure(decoder: SpeculativeDecoder, ids: list[int], output: list[int]) -> Tally:
    """Generate `output` again.

    Raises:
        ValueError: the decoder gives another output.
    """
    result = decoder.generate(ids, max_new_tokens=len(output), ignore_eos=True)
    if result.token_ids != output:
        raise ValueError(f"{decoder.summary()}: {result.token_ids} in place of {output}")
    stats = result.stats
    seconds = 0.0 if isinstance(decoder.verifier, ReplayVerifier) else stats.total_s - stats.ttft_s
    return Tally(len(output), stats.rounds, stats.verified, stats.accepted, seconds)


def reference(engine: Any, ids: list[int], tokens: int, k: int) -> tuple[list[int], Tally]:
    """Generate with transformers' prompt lookup. Return the output and its tally."""
    calls: list[tuple[int, float]] = []  # tokens and end of each forward
    handle = engine.model.register_forward_hook(
        lambda module, args, options, out: calls.append((options["input_ids"].shape[1], time.perf_counter())),
        with_kwargs=True,
    )
    prompt = torch.tensor([ids])
    try:
        out = engine.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=engine.eos_ids[0],
            prompt_lookup_num_tokens=k,
        )
    finally:
        handle.remove()
    seconds = time.perf_counter() - calls[0][1]
    output = out[0, len(ids) :].tolist()
    drafted = sum(count for count, _ in calls) - len(ids) - (len(calls) - 1)
    return output, Tally(len(output), len(calls), drafted, len(output) - len(calls), seconds)


def prompts(options: argparse.Namespace, decoder: SpeculativeDecoder) -> Iterator[tuple[str, list[int]]]:
    """Yield the first prompts of each category that are short enough, category by category in turn."""
    found: dict[str, list[list[int]]] = defaultdict(list)
    for line in options.prompts.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        category = found[entry["category"]]
        if entry["category"] in options.categories.split(",") and len(category) < options.count:
            ids = list(decoder.encode([{"role": "user", "content": entry["turns"][0]}]).ids)
            if len(ids) <= options.prompt_tokens:
                category.append(ids)
    for n in range(options.count):
        yield from ((name, kept[n]) for name, kept in found.items() if n < len(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--categories", default="summarization,rag,coding")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=900)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--timed", action="store_true")
    options = parser.parse_args()
    target, model = (load_engine(name, dtype="float32", device="cpu") for name in (options.target, options.draft))
    drafters = Drafters(target, model, options.k, timed=options.timed)
    tallies: dict[str, dict[str, Tally]] = defaultdict(lambda: defaultdict(Tally))
    different = 0
    for n, (category, ids) in enumerate(prompts(options, drafters.lookup)):
        output, theirs = reference(target, ids, options.tokens, options.k)
        found = {"transformers": theirs}
        try:
            found["lookup"] = measure(drafters.lookup, ids, output)
        except ValueError as error:
            different += 1
            print(error, flush=True)
        found |= drafters.run(ids, output)
        for name, tally in found.items():
            tallies[category][name].add(tally)
            tallies["all"][name].add(tally)
        rates = ", ".join(f"{name} {tally.tokens / tally.verdicts:.2f}" for name, tally in found.items())
        print(f"{n:2d} {category:13s} {len(ids):4d}+{len(output)} tokens: {rates}", flush=True)
    summary = {
        "benchmark": "prompt_lookup",
        "k": options.k,
        "different": different,
        "figures": {
            category: {name: tally.figures() for name, tally in by_name.items()}
            for category, by_name in tallies.items()
        },
    }
    print(json.dumps(summary))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
