"""A drafter with another tokenizer than the target's: speed against transformers' universal assisted generation.

For every prompt, transformers' assisted generation (`assistant_model`, `tokenizer`, `assistant_tokenizer`, in its
defaults) and Outrider generate greedily, in alternating order, in one process and with the same weights in float32. For
every seed, Outrider and the target alone (`SpeculativeDecoder` without a drafter) sample, several prompts in a batch,
without timing. At last the target alone (transformers' `generate`) generates greedily. All outputs must be equal.
transformers samples by another algorithm (rejection sampling over the common tokens), so only its greedy speed is
compared.

    python -m benchmarks.other_tokenizers TARGET DRAFT PROMPTS.jsonl [--count 26] [--tokens 32] [--seeds 3] [--k auto]
        [--temperature 0.7] [--threads 1] [--results FILE.jsonl] [--budget SECONDS]

TARGET and DRAFT are directories. PROMPTS.jsonl holds one object per line with "category" and "turns", as Spec-Bench
does. The prompts are the shortest first turns of each category in turn. --results keeps the measurements in a file, and
runs only those that it lacks. --budget starts none after so many seconds. Prints a line per measurement and one JSON
line at the end. Exits 1 if outputs differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.api import SpeculativeDecoder, local
from outrider.engines.load import load_engine
from outrider.engines.prefix_cache import unique_salt

COMPARED = ("assisted", "outrider")
BATCH = 4


@dataclass(frozen=True)
class Key:
    """One measurement. seed: None for greedy decoding."""

    prompt: int
    seed: int | None
    name: str


@dataclass(frozen=True)
class Run:
    """The output of a generation and its cost.

    verdicts, draft_runs: forwards of target and drafter. drafted: tokens given to the target for verification. seconds:
    wall-clock time. processor_s: processor time. A generation in a batch has neither times nor draft_runs.
    """

    output: list[int]
    verdicts: int
    drafted: int
    draft_runs: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted: each verdict adds one token of its own."""
        return len(self.output) - self.verdicts


class Forwards:
    """Counts the forwards of a transformers model and their tokens."""

    def __init__(self, model: Any) -> None:
        self.runs = self.tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        shape = (kwargs["inputs_embeds"] if ids is None else ids).shape if not args else args[0].shape
        self.runs += 1
        self.tokens += shape[1]

    def reset(self) -> None:
        """Start again from 0."""
        self.runs = self.tokens = 0


class Pair:
    """Target and drafter, with the ways to generate with them."""

    def __init__(self, target: Any, draft: Any, options: argparse.Namespace) -> None:
        self.target, self.draft = target, draft
        self._options = options
        self._forwards = Forwards(self.target.model), Forwards(self.draft.model)
        k = options.k if options.k == "auto" else int(options.k)
        self._decoder = SpeculativeDecoder(draft, local(target), k=k, slots=BATCH)
        self._alone = SpeculativeDecoder(None, local(target), slots=BATCH)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a user's message."""
        return list(self._alone.encode([{"role": "user", "content": text}]).ids)

    def run(self, ids: list[int], name: str) -> Run:
        """Generate greedily."""
        for forwards in self._forwards:
            forwards.reset()
        started, processor = time.perf_counter(), time.process_time()
        output = self._outrider(ids) if name == "outrider" else self._transformers(ids, with_draft=name == "assisted")
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
        target, draft = self._forwards
        drafted = target.tokens - len(ids) - (target.runs - 1)
        return Run(output, target.runs, drafted, draft.runs, round(seconds, 4), round(processor, 4))

    def sample(self, prompts: list[list[int]], seed: int, name: str) -> list[Run]:
        """Generate samples for several prompts."""
        decoder = self._decoder if name == "outrider" else self._alone
        settings = {"temperature": self._options.temperature, "seed": seed}
        results = decoder.generate(prompts, max_new_tokens=self._options.tokens, **settings)
        return [Run(each.token_ids, each.stats.rounds, each.stats.verified) for each in results]

    def _outrider(self, ids: list[int]) -> list[int]:
        salt = unique_salt()  # no KV cache of an earlier generation
        return self._decoder.generate(ids, max_new_tokens=self._options.tokens, cache_salt=salt).token_ids

    def _transformers(self, ids: list[int], *, with_draft: bool) -> list[int]:
        prompt = torch.tensor([ids])
        tokenizers = {"tokenizer": self.target.tokenizer, "assistant_tokenizer": self.draft.tokenizer}
        options = {"assistant_model": self.draft.model, **tokenizers} if with_draft else {}
        out = self.target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self._options.tokens,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=self.target.eos_ids[0],
            **options,
        )
        return list(out[0, len(ids) :].tolist())


class Measurements:
    """Measurements by key, in a file if there is one. Those with other settings in the file are left alone."""

    def __init__(self, settings: dict[str, Any], file: Path | None) -> None:
        self._settings, self._file = settings, file
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        entries = [entry for entry in map(json.loads, lines) if entry["settings"] == settings]
        self.runs = {Key(**entry["key"]): Run(**entry["run"]) for entry in entries}

    def add(self, key: Key, run: Run) -> None:
        """Add a measurement."""
        self.runs[key] = run
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                print(json.dumps({"settings": self._settings, "key": asdict(key), "run": asdict(run)}), file=file)

    def different(self) -> list[Key]:
        """Return the measurements whose output is not that of the first one for the same prompt and seed."""
        first: dict[tuple[int, int | None], list[int]] = {}
        outputs = ((key, first.setdefault((key.prompt, key.seed), run.output), run) for key, run in self.runs.items())
        return [key for key, output, run in outputs if run.output != output]

    def figures(self) -> dict[str, Any]:
        """Return the figures over the prompts for which all compared measurements are known."""
        figures: dict[str, Any] = {}
        for title, names in (("greedy", COMPARED), ("greedy, with the target alone", ("alone", *COMPARED))):
            cases = [key.prompt for key in self.runs if key.seed is None and key.name == names[0]]
            cases = [n for n in cases if all(Key(n, None, name) in self.runs for name in names)]
            if cases:
                runs = {name: [self.runs[Key(n, None, name)] for n in cases] for name in names}
                figures[title] = {name: rates(each) | speeds(each) for name, each in runs.items()}
                figures[title]["ratio"] = {name: ratios(each, runs["outrider"]) for name, each in runs.items()}
        sampled = [run for key, run in self.runs.items() if key.seed is not None and key.name == "outrider"]
        return figures | ({"sampled": rates(sampled)} if sampled else {})


def rates(runs: list[Run]) -> dict[str, Any]:
    """Return the acceptance of some runs."""
    verdicts, drafted = sum(run.verdicts for run in runs), sum(run.drafted for run in runs)
    return {
        "outputs": len(runs),
        "acceptance_rate": round(sum(run.accepted for run in runs) / drafted, 3) if drafted else None,
        "tokens_per_verdict": round(sum(len(run.output) for run in runs) / verdicts, 3),
        "drafted_per_verdict": round(drafted / verdicts, 3),
    }


def speeds(runs: list[Run]) -> dict[str, Any]:
    """Return the speeds of some runs."""
    return {
        "draft_forwards_per_verdict": round(sum(run.draft_runs for run in runs) / sum(run.verdicts for run in runs), 3),
        "tokens_per_s": round(statistics.median(len(run.output) / run.seconds for run in runs), 3),
        "tokens_per_processor_s": round(statistics.median(len(run.output) / run.processor_s for run in runs), 3),
    }


def ratios(slow: list[Run], fast: list[Run]) -> dict[str, float]:
    """Return how many times faster `fast` is than `slow`: the median over prompts, and over all prompts together."""
    found = {}
    for name in ("seconds", "processor_s"):
        pairs = [(getattr(one, name), getattr(other, name)) for one, other in zip(slow, fast, strict=True)]
        found[f"median_{name}"] = round(statistics.median(one / other for one, other in pairs), 3)
        found[f"total_{name}"] = round(sum(one for one, _ in pairs) / sum(other for _, other in pairs), 3)
    return found


def prompts(options: argparse.Namespace, pair: Pair) -> list[tuple[str, list[int]]]:
    """Return the shortest prompts of each category, in turn."""
    by_category: dict[str, list[str]] = {}
    for line in options.prompts.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        by_category.setdefault(entry["category"], []).append(entry["turns"][0])
    ordered = {name: sorted(map(pair.encode, texts), key=len) for name, texts in by_category.items()}
    depth = max(map(len, ordered.values()))
    found = [(name, kept[n]) for n in range(depth) for name, kept in ordered.items() if n < len(kept)]
    return found[: options.count]


def batches(count: int, seeds: int) -> Iterator[list[Key]]:
    """Yield the measurements in their order, those of a batch together."""
    for n in range(count):
        yield from ([Key(n, None, name)] for name in (COMPARED if n % 2 else reversed(COMPARED)))
    for seed in range(seeds):
        for first in range(0, count, BATCH):
            chosen = range(first, min(first + BATCH, count))
            yield from ([Key(n, seed, name) for n in chosen] for name in ("outrider", "alone"))
    yield from ([Key(n, None, "alone")] for n in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int, default=26)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--k", default="auto")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--budget", type=float, default=float("inf"))
    options = parser.parse_args()
    ends = time.monotonic() + options.budget
    torch.set_num_threads(options.threads)
    target, draft = (load_engine(name, dtype="float32", device="cpu") for name in (options.target, options.draft))
    pair = Pair(target, draft, options)
    texts = prompts(options, pair)
    names = ("target", "draft", "tokens", "k", "temperature", "threads")
    settings = {name: str(getattr(options, name)) for name in names}
    measured = Measurements(settings, options.results)
    planned = list(batches(len(texts), options.seeds))
    for keys in planned:
        if all(key in measured.runs for key in keys) or time.monotonic() > ends:
            continue
        seed, name = keys[0].seed, keys[0].name
        ids = [texts[key.prompt][1] for key in keys]
        runs = [pair.run(ids[0], name)] if seed is None else pair.sample(ids, seed, name)
        for key, run in zip(keys, runs, strict=True):
            measured.add(key, run)
            figures = {**asdict(run), "output": len(run.output)}
            print(f"{texts[key.prompt][0]:15s} {key}: {figures}", flush=True)
    different = measured.different()
    for key in different:
        print(f"DIFFERENT: {key}")
    summary = {
        "benchmark": "other_tokenizers",
        **settings,
        "prompts": len(texts),
        "missing": sum(key not in measured.runs for keys in planned for key in keys),
        "different": len(different),
        **measured.figures(),
    }
    print(json.dumps(summary))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
