"""Accepted tokens per verdict of prompt lookup, of a draft model, and of both together, on real models.

The target generates with prompt lookup. All drafters, among them transformers' own prompt lookup with the same k, then
draft against a verifier that replays this output: a greedy verdict depends on it alone, so that the target need not run
again. With --check transformers generates with `prompt_lookup_num_tokens` as well: in float32 it must give the same
tokens, in as many forwards as its replay. With --timed the target runs for each drafter, for tokens per second without
the time to the first token.

    python -m benchmarks.prompt_lookup TARGET DRAFT PROMPTS.jsonl [--categories summarization,rag,coding] [--count 5]
        [--tokens 96] [--k 10] [--outputs FILE.jsonl] [--check] [--timed]

A model is a directory (float32) or a .gguf file (llama.cpp). PROMPTS.jsonl holds one object per line with "category"
and "turns", as Spec-Bench does. The prompts are the shortest first turns. --outputs keeps the target's outputs in a
file, and uses those in it. Prints a line per prompt and one JSON line at the end. Exits 1 if an output differs from
transformers'.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from outrider.api import SpeculativeDecoder, local
from outrider.decoding.actions import Verify
from outrider.engines.base import Engine, Prompt
from outrider.engines.load import load_engine
from outrider.engines.prompt_lookup import prompt_lookup
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.base import ModelInfo, SessionParams, SessionTable, Verifier
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
            "accepted_per_verdict": round(self.accepted / self.verdicts, 3),
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
        accepted = count_accepted(list(request.draft_ids), rest)
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
        verifier: Verifier = local(target) if timed else self._replay
        self._decoders = {
            "lookup": SpeculativeDecoder(prompt_lookup(), verifier, k=k),
            "model": SpeculativeDecoder(model, verifier, k=k),
            "model+lookup": SpeculativeDecoder(model, verifier, lookup=prompt_lookup(), k=k),
        }
        for size in MIN_NGRAMS:
            lookup = prompt_lookup(min_ngram=size)
            self._decoders[f"min_ngram {size}"] = SpeculativeDecoder(lookup, self._replay, k=k)

    def run(self, ids: list[int], output: list[int]) -> dict[str, Tally]:
        """Draft against the output with each drafter."""
        self._replay.output = output
        return {name: measure(decoder, ids, output) for name, decoder in self._decoders.items()}


def count_accepted(drafted: list[int], output: list[int]) -> int:
    """Return how many of the drafted tokens agree with the output."""
    pairs = zip(drafted, output, strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(drafted), len(output)))


def measure(decoder: SpeculativeDecoder, ids: list[int], output: list[int]) -> Tally:
    """Generate as many tokens as the output has, which is the decoder's output in a replay."""
    stats = decoder.generate(ids, max_new_tokens=len(output), ignore_eos=True).stats
    seconds = 0.0 if isinstance(decoder.verifier, ReplayVerifier) else stats.total_s - stats.ttft_s
    return Tally(len(output), stats.rounds, stats.verified, stats.accepted, seconds)


def replay_transformers(ids: list[int], output: list[int], k: int) -> Tally:
    """Draft against the output with transformers' prompt lookup, in its defaults."""
    generator = PromptLookupCandidateGenerator(num_output_tokens=k, max_length=len(ids) + len(output))
    tally, at = Tally(tokens=len(output)), 0
    while at < len(output):
        candidates, _ = generator.get_candidates(torch.tensor([[*ids, *output[:at]]]))
        drafted = candidates[0, len(ids) + at :].tolist()[: len(output) - at - 1]
        accepted = count_accepted(drafted, output[at:])
        tally.add(Tally(0, 1, len(drafted), accepted))
        at += accepted + 1
    return tally


def check(engine: Any, ids: list[int], output: list[int], options: argparse.Namespace) -> str:
    """Return how the output and the forwards of its replay differ from transformers' generate, "" if they do not."""
    forwards: list[int] = []
    handle = engine.model.register_forward_hook(lambda *_: forwards.append(1))
    prompt = torch.tensor([ids])
    try:
        out = engine.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.tokens,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=engine.eos_ids[0],
            prompt_lookup_num_tokens=options.k,
        )
    finally:
        handle.remove()
    theirs, replayed = out[0, len(ids) :].tolist(), replay_transformers(ids, output, options.k).verdicts
    if theirs != output:
        return f"transformers gives {theirs} in place of {output}"
    return "" if len(forwards) == replayed else f"transformers takes {len(forwards)} forwards, its replay {replayed}"


def prompts(options: argparse.Namespace, decoder: SpeculativeDecoder) -> Iterator[tuple[str, list[int]]]:
    """Yield the shortest prompts of each category, in turn."""
    found: dict[str, list[list[int]]] = {name: [] for name in options.categories.split(",")}
    for line in options.prompts.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        kept = found.get(entry["category"])
        if kept is not None:
            kept.append(list(decoder.encode([{"role": "user", "content": entry["turns"][0]}]).ids))
    for n in range(options.count):
        yield from ((name, sorted(kept, key=len)[n]) for name, kept in found.items() if n < len(kept))


class Outputs:
    """The target's outputs, in a file if there is one."""

    def __init__(self, decoder: SpeculativeDecoder, tokens: int, file: Path | None) -> None:
        self._decoder, self._tokens, self._file = decoder, tokens, file
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        self._known = {tuple(entry["ids"]): entry["output"] for entry in map(json.loads, lines)}

    def output(self, ids: list[int]) -> list[int]:
        """Return the output of a prompt."""
        known: list[int] | None = self._known.get(tuple(ids))
        if known is not None and (len(known) >= self._tokens or known[-1] in self._eos_ids):
            return known[: self._tokens]
        output = self._decoder.generate(ids, max_new_tokens=self._tokens).token_ids
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                print(json.dumps({"ids": ids, "output": output}), file=file)
        return output

    @property
    def _eos_ids(self) -> tuple[int, ...]:
        return self._decoder.verifier.engine.eos_ids  # type: ignore[union-attr]


def load(name: str) -> Engine:
    """Load a .gguf file into llama.cpp, or a directory in float32."""
    return load_engine(name) if name.endswith(".gguf") else load_engine(name, dtype="float32", device="cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--categories", default="summarization,rag,coding")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--outputs", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--timed", action="store_true")
    options = parser.parse_args()
    target, model = load(options.target), load(options.draft)
    drafters = Drafters(target, model, options.k, timed=options.timed)
    reader = SpeculativeDecoder(prompt_lookup(), local(target), k=options.k)
    outputs = Outputs(reader, options.tokens, options.outputs)
    tallies: dict[str, dict[str, Tally]] = defaultdict(lambda: defaultdict(Tally))
    different = 0
    for n, (category, ids) in enumerate(prompts(options, reader)):
        output = outputs.output(ids)
        if options.check and (difference := check(target, ids, output, options)):
            different += 1
            print(f"{n:2d} {category}: {difference}", flush=True)
        found = {"transformers": replay_transformers(ids, output, options.k), **drafters.run(ids, output)}
        for name, tally in found.items():
            tallies[category][name].add(tally)
            tallies["all"][name].add(tally)
        rates = ", ".join(f"{name} {tally.tokens / tally.verdicts:.2f}" for name, tally in found.items())
        print(f"{n:2d} {category:13s} {len(ids):4d}+{len(output)} tokens: {rates}", flush=True)
    summary = {
        "benchmark": "prompt_lookup",
        "target": target.name,
        "k": options.k,
        "checked": options.check,
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
