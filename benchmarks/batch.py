"""Seconds for twelve captions of the bundled pair: one call for each, a batch, and asyncio tasks.

The outputs must be equal. The ways take turns, and the fastest of the repeats counts, last as one JSON line.

    python -m benchmarks.batch [--repeats 3] [--slots 1 4 8] [--tokens 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from importlib.resources import files

from outrider import Audio, Result, SpeculativeDecoder, load_engine, local

Way = Callable[[list[Audio]], list[Result]]


def ways(slots: list[int], tokens: int) -> dict[str, Way]:
    """Return the ways by name."""
    pair = load_engine("demo:edge"), local(load_engine("demo:cloud"))
    found: dict[str, Way] = {}

    def add(count: int) -> None:
        decoder = SpeculativeDecoder(*pair, slots=count)

        async def tasks(clips: list[Audio]) -> list[Result]:
            return await asyncio.gather(*(decoder.agenerate(clip, max_new_tokens=tokens) for clip in clips))

        found[f"batch, {count} slots"] = lambda clips: decoder.generate(clips, max_new_tokens=tokens)
        found[f"tasks, {count} slots"] = lambda clips: asyncio.run(tasks(clips))

    single = SpeculativeDecoder(*pair)
    found["single calls"] = lambda clips: [single.generate(clip, max_new_tokens=tokens) for clip in clips]
    for count in slots:
        add(count)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    clips = [
        Audio(str(path)) for path in (files("outrider") / "demo" / "clips").iterdir() if path.name.endswith(".ogg")
    ]
    measured, expected = ways(args.slots, args.tokens), None
    best: dict[str, float] = {}
    for _ in range(args.repeats):
        for name, way in measured.items():
            started = time.perf_counter()
            outputs = [result.token_ids for result in way(clips)]
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - started)
            expected = expected or outputs
            assert outputs == expected, name
    for name, seconds in best.items():
        print(f"{name:18} {seconds:7.3f} s")
    print(json.dumps({name: round(seconds, 3) for name, seconds in best.items()}))


if __name__ == "__main__":
    main()
