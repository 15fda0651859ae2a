"""Held-out synthetic clips as files, with a manifest: the clips of `training.evaluate`, for `outrider eval`.

python -m training.heldout --out DIR --clips 500 [--jobs 2] [--tasks default detailed concise]

Writes one 16-bit FLAC file per clip, manifest.jsonl (one item per clip and task) and facts.jsonl (what is done so far:
a run that was interrupted goes on where it stopped). Each item's labels are what a right caption of its task states.
Seeds and attributes are those of `training.evaluate`; a few per cent of the clips differ in sentence or voice (what
is not clear-cut is drawn again). Here a clip is the same to the sample in every run, which there it is not: espeak-ng
draws from the time of day and from what it said before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import soundfile

from outrider.evals.manifest import Item, write_manifest
from outrider.prompts.captions import TASKS
from training.augment import recording
from training.data import EVALUATION_SEED, to_int16
from training.grammar import caption, stated
from training.speech import SAMPLE_RATE, espeak

Facts = dict[str, Any]  # seed, lang, text, attributes


def synthesise_to(job: tuple[Path, int]) -> Facts:
    """Write the clip of a seed, whole or not at all; returns its facts."""
    directory, seed = job
    espeak()._lib.espeak_ng_SetRandSeed(ctypes.c_long(seed))  # it would take the time of day
    spec, wave = recording(seed, held_out=True)
    partial = directory / f"{seed}.partial"
    soundfile.write(partial, to_int16(wave), SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    partial.replace(clip_path(directory, seed))
    return {"seed": seed, "lang": spec.lang, "text": spec.text, "attributes": dict(spec.attributes)}


def clip_path(directory: Path, seed: int) -> Path:
    return directory / f"{seed}.flac"


def done(directory: Path) -> dict[int, Facts]:
    """The facts of the clips that an earlier run wrote. A last line that was cut off counts as not done."""
    path = directory / "facts.jsonl"
    found: dict[int, Facts] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            facts = json.loads(line)
        except json.JSONDecodeError:
            continue
        if clip_path(directory, facts["seed"]).exists():
            found[facts["seed"]] = facts
    return found


def complete(directory: Path, seeds: range, jobs: int) -> list[Facts]:
    """Synthesise what is missing; the facts of all seeds, in order."""
    known = done(directory)
    missing = [(directory, seed) for seed in seeds if seed not in known]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training.augment", "soundfile"])  # a process per clip costs little then
    with (directory / "facts.jsonl").open("a", encoding="utf-8") as log:
        if log.tell():
            log.write("\n")  # ends a line that was cut off
        if missing:
            # espeak-ng keeps state from clip to clip: only in a fresh process is a clip a function of its seed alone.
            with context.Pool(min(jobs, len(missing)), maxtasksperchild=1) as pool:
                for facts in pool.imap_unordered(synthesise_to, missing):
                    log.write(json.dumps(facts, ensure_ascii=False) + "\n")
                    log.flush()
                    known[facts["seed"]] = facts
    return [known[seed] for seed in seeds]


def items(directory: Path, facts: Facts, tasks: list[str]) -> list[Item]:
    """The manifest's items of one clip."""
    return [
        Item(
            f"{facts['seed']}-{task}",
            clip_path(directory, facts["seed"]),
            lang=facts["lang"],
            references=(caption(facts["attributes"], task, facts["lang"]),),
            labels=stated(facts["attributes"], task),
            transcript=facts["text"],
            task=task,
        )
        for task in tasks
    ]


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clips", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["default"])
    args = parser.parse_args(argv)
    if args.clips < 1 or args.jobs < 1:
        parser.error("--clips and --jobs are 1 or more")
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    clips = complete(args.out, range(args.seed, args.seed + args.clips), args.jobs)
    manifest = args.out / "manifest.jsonl"
    write_manifest(manifest, [item for facts in clips for item in items(args.out, facts, args.tasks)])
    print(json.dumps({"clips": len(clips), "manifest": str(manifest), "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
