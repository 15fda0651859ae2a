"""Live runs of a pair under many thresholds. Thresholds between two values of its blocks share one run.

`LiveRuns.run(name, file)` decodes an item with `SpeculativeDecoder` under a gate file. Runs are kept in a file, so that
an interrupted benchmark can resume.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from outrider import SpeculativeDecoder, load_engine, local
from outrider.config import Loss
from outrider.decoding.calibrated_gate import Calibrated
from outrider.decoding.gate import Decision, Signals, Threshold
from outrider.decoding.gate_file import GateFile
from outrider.decoding.gate_parsing import gate
from outrider.evals.manifest import load_set
from outrider.evals.modes import item_prompt
from outrider.planning.blocks import direction


@dataclass(frozen=True)
class Watched(Threshold):
    """A threshold that records the largest value that it passed and the smallest that it escalated."""

    met: list[float] = field(default_factory=lambda: [-math.inf, math.inf])

    def decide(self, block: Seq[Signals]) -> Decision:
        found, value = super().decide(block), direction(self) * self.value(block)
        if found.escalate:
            self.met[1] = min(self.met[1], value)
        else:
            self.met[0] = max(self.met[0], value)
        return found


@dataclass(frozen=True)
class Run:
    """A live output."""

    ids: tuple[int, ...]
    guarantee: str
    escalated: int
    blocks: int


def realised(ids: Seq[int], target: Seq[int], loss: Loss) -> float:
    """The loss of an output, beside the target's own."""
    if tuple(ids) == tuple(target):
        return 0.0
    pairs = zip(ids, target, strict=False)
    same = next((n for n, (mine, said) in enumerate(pairs) if mine != said), min(len(ids), len(target)))
    return 1.0 if loss == "outputs" else 1 - same / len(target)


def threshold(file: GateFile) -> Threshold:
    return cast(Threshold, gate(file.gate))


class LiveRuns:
    """The bundled pair on a set's items. kept: the file of earlier runs."""

    def __init__(self, data: str, kept: Path) -> None:
        self._items, self._kept = load_set(data), kept
        self._draft, self._target = load_engine("demo:edge"), local(load_engine("demo:cloud"))
        self._known: dict[tuple[str, str, float], list[tuple[float, float, Run]]] = {}
        for line in kept.read_text(encoding="utf-8").splitlines() if kept.exists() else ():
            self._add(json.loads(line))

    def run(self, name: str, file: GateFile) -> Run:
        """Return the run of that item under that gate."""
        limit = direction(threshold(file)) * threshold(file).limit
        known = self._known.setdefault((name, threshold(file).signal, file.audit), [])
        found = next((run for low, high, run in known if low <= limit < high), None)
        return found or self._decode(name, file)

    def _decode(self, name: str, file: GateFile) -> Run:
        item = next(item for item in self._items if item.id == name)
        watched = Watched(threshold(file).signal, threshold(file).limit)
        decoder = SpeculativeDecoder(self._draft, self._target, gate=Calibrated(watched, file, "gate.json"), k=file.k)
        result = decoder.generate(item_prompt(item))
        low, high = (value if math.isfinite(value) else None for value in watched.met)
        row = {
            "name": name,
            "signal": watched.signal,
            "audit": file.audit,
            "low": low,
            "high": high,
            "ids": result.token_ids,
            "guarantee": result.guarantee,
            "escalated": result.stats.escalated,
            "blocks": result.stats.blocks,
        }
        with self._kept.open("a", encoding="utf-8") as kept:
            kept.write(json.dumps(row) + "\n")
        return self._add(row)

    def _add(self, row: dict[str, Any]) -> Run:
        low = -math.inf if row["low"] is None else row["low"]
        high = math.inf if row["high"] is None else row["high"]
        run = Run(tuple(row["ids"]), row["guarantee"], row["escalated"], row["blocks"])
        self._known.setdefault((row["name"], row["signal"], row["audit"]), []).append((low, high, run))
        return run
