"""Random requests to calibrate a gate on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from outrider.decoding.gate import Signals
from outrider.decoding.gate_file import ModelId
from outrider.planning.traces import Trace

EDGE, CLOUD = ModelId("small", "vocab-1"), ModelId("large", "vocab-1")
EOS = 9


def request(rng: np.random.Generator, name: int = 0, hard: float = 0.15) -> Trace:
    """One request: some are harder than others, and the drafter mostly knows where it errs."""
    size, hardness = int(rng.integers(5, 40)), rng.beta(1, 1 / hard)
    chances = np.clip(rng.beta(0.5, 3, size) * 2 * hardness + 0.02, 0, 1)
    target = [*rng.integers(10, 50, size - 1).tolist(), EOS]
    draft = [t if rng.random() > c else 50 for t, c in zip(target, chances, strict=True)]
    uncertainty = chances * rng.lognormal(0, 0.5, size)
    signals = tuple(Signals(float(2 * u), float(1 - min(u, 1)), float(min(u, 1)), float(u)) for u in uncertainty)
    return Trace(str(name), 10, tuple(target), tuple(draft), signals)


def requests(count: int, seed: int = 0, **more: float) -> list[Trace]:
    rng = np.random.default_rng(seed)
    return [request(rng, n, **more) for n in range(count)]


def write_requests(path: Path) -> None:
    path.write_text("".join(json.dumps(trace.to_json()) + "\n" for trace in requests(60)), encoding="utf-8")
