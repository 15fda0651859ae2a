"""Record traces for `benchmarks.trees`: the target's greedy output, and the drafter's two best tokens at each position.

Where the drafter's best token is wrong, its greedy continuation of that wrong token is recorded as well, since a live
draft contains it and a tree may branch there. Continuations do not end at an EOS. One JSON object per line.

    python -m benchmarks.tree_traces OUT.jsonl [--edge demo:edge] [--cloud demo:cloud] [--set demo] [--skip 0]
        [--count 12] [--tokens 128]

--set: a set of `outrider eval`: the bundled clips, a manifest, or a file of Spec-Bench, whose categories take turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider import load_engine, local
from outrider.config import GenerationSettings
from outrider.engines.base import CachedSequence, Prompt
from outrider.evals.manifest import Item, load_set
from outrider.evals.modes import item_prompt
from outrider.planning.json_validation import rows
from outrider.planning.trace_recorder import Recorder
from outrider.prompts.chat import encode

DEPTH = 23  # tokens of a continuation of a wrong token: the largest block of `benchmarks.trees` less one

Pair = tuple[float, float]  # probabilities of the drafter's best and second-best token


@dataclass(frozen=True)
class Place:
    """A position of the target's output. `astray` follows the drafter's best token, and is empty where that is right.

    best_right, second_right: whether the drafter's best or second-best token is the target's. pair: their
    probabilities.
    """

    best_right: bool
    second_right: bool
    pair: Pair
    astray: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class TreeTrace:
    """One output of the target."""

    id: str
    places: tuple[Place, ...]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TreeTrace:
        """Parse a line of `read`."""
        return cls(value["id"], tuple(map(_place, value["places"])))


def _place(value: dict[str, Any]) -> Place:
    astray = tuple((best, second) for best, second in value["astray"])
    best, second = value["pair"]
    return Place(value["best_right"], value["second_right"], (best, second), astray)


def read(path: Path) -> list[TreeTrace]:
    """Read recorded traces."""
    return list(rows(path, TreeTrace.from_json))


def best_two(logits: Tensor) -> tuple[list[int], Pair]:
    """Return the two most probable tokens and their probabilities. logits: float32 [V]."""
    found = torch.softmax(logits, -1).topk(2)
    return found.indices.tolist(), (float(found.values[0]), float(found.values[1]))


def record(recorder: Recorder, name: str, prompt: Prompt) -> TreeTrace:
    """Record one prompt. The last positions come first, so that the cache always holds a prefix of the output."""
    output = recorder.generate_target(prompt)
    ids, start = [*prompt.ids, *output], len(prompt.ids)
    vocabulary = recorder.pair.draft_vocabulary
    reader = CachedSequence(recorder.draft, prompt, "recorder")
    try:
        logits = reader.extend(ids[:-1], len(output))
        places: list[Place] = []
        for n in reversed(range(len(output))):
            (best, second), pair = best_two(logits[n][:vocabulary])
            right = best == output[n]
            astray = () if right else tuple(_continue(reader, [*ids[: start + n], best], vocabulary))
            places.append(Place(right, second == output[n], pair, astray))
        return TreeTrace(name, tuple(reversed(places)))
    finally:
        reader.close()


def _continue(reader: CachedSequence, ids: list[int], vocabulary: int) -> Iterator[Pair]:
    """Yield the probabilities along the drafter's greedy continuation of `ids`."""
    reader.rollback_to(len(ids) - 1)
    for _ in range(DEPTH):
        (best, _), pair = best_two(reader.extend(ids, 1)[0][:vocabulary])
        yield pair
        ids = [*ids, best]


def spread(items: list[Item]) -> list[Item]:
    """Return the items round robin over their categories. Items without a category keep their order."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.labels.get("category", ""), []).append(item)
    return [item for turn in zip_longest(*groups.values()) for item in turn if item is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--edge", default="demo:edge")
    parser.add_argument("--cloud", default="demo:cloud")
    parser.add_argument("--set", default="demo")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    edge = load_engine(args.edge)
    recorder = Recorder(edge, local(load_engine(args.cloud)), GenerationSettings(max_new_tokens=args.tokens))
    with args.out.open("w", encoding="utf-8") as file:
        for item in spread(load_set(args.set))[args.skip : args.skip + args.count]:
            trace = record(recorder, item.id, encode(edge, item_prompt(item)))
            file.write(json.dumps(asdict(trace)) + "\n")
            file.flush()
            right = sum(place.best_right for place in trace.places)
            print(f"{trace.id}: {len(trace.places)} tokens, {right} of them the drafter's best", flush=True)


if __name__ == "__main__":
    main()
