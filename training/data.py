"""Many clips at once: synthesised by a pool of processes, as 16-bit samples end to end."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from training.augment import recording
from training.grammar import Attributes

EVALUATION_SEED = 900_000_000  # far from every training seed
SHARD = 64


@dataclass
class Clips:
    """Recordings with their truth. `samples` holds them end to end, int16, 16 kHz; `lengths` in samples."""

    samples: list[npt.NDArray[np.int16]] = field(default_factory=list)
    attributes: list[Attributes] = field(default_factory=list)
    langs: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.samples)


Shard = list[tuple[npt.NDArray[np.int16], Attributes, str, str]]


def _shard(job: tuple[int, int, bool]) -> Shard:
    start, count, held_out = job
    made: Shard = []
    for seed in range(start, start + count):
        spec, wave = recording(seed, held_out)
        made.append((to_int16(wave), dict(spec.attributes), spec.lang, spec.text))
    return made


def to_int16(wave: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Samples as a 16-bit file would hold them."""
    return np.round(np.clip(wave, -1, 1) * 32767).astype(np.int16)


def synthesise(count: int, seed: int, held_out: bool, workers: int | None = None) -> Clips:
    """`count` clips from consecutive seeds, on all cores."""
    jobs = [(seed + a, min(SHARD, count - a), held_out) for a in range(0, count, SHARD)]
    clips = Clips()
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(workers or os.cpu_count() or 1, len(jobs))) as pool:
        for shard in pool.imap(_shard, jobs):
            for samples, attributes, lang, text in shard:
                clips.samples.append(samples)
                clips.attributes.append(attributes)
                clips.langs.append(lang)
                clips.texts.append(text)
    return clips
