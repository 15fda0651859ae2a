"""What a drafter would have done along the target's own output, token by token: it replays any gate, k and network.

A trace is taken with every token verified. At each position of the target's output it holds the target's token, the
drafter's proposal given the same prefix, and how sure the drafter was of it. One JSON object per line:

    {"id": "a1", "prompt_tokens": 40, "target": [5, …], "draft": [5, …],
     "entropy": [0.1, …], "margin": […], "maxprob": […], "logprob": […], "media_bytes": 0}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.gate import NAMES, Signals
from outrider.errors import DataError


@dataclass(frozen=True)
class Trace:
    """One output of the target. target, draft, signals: one entry for each of its tokens, the end token included.

    media_bytes: what of a recording would cross once, at the first escalation.

    Raises:
        DataError: entries of different number, or none.
    """

    id: str
    prompt_tokens: int
    target: tuple[int, ...]
    draft: tuple[int, ...]
    signals: tuple[Signals, ...]
    media_bytes: int = 0

    def __post_init__(self) -> None:
        lengths = {len(self.target), len(self.draft), len(self.signals)}
        if lengths == {0} or len(lengths) > 1:
            raise DataError(
                f"trace {self.id!r}: {len(self.target)} targets, {len(self.draft)} drafts, {len(self.signals)} signals"
            )

    @property
    def agrees(self) -> tuple[bool, ...]:
        """Where the drafter proposes what the target says."""
        return tuple(t == d for t, d in zip(self.target, self.draft, strict=True))

    def to_json(self) -> dict[str, Any]:
        signals = {str(name): [round(getattr(s, name), 6) for s in self.signals] for name in NAMES}
        return {
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "target": list(self.target),
            "draft": list(self.draft),
            **signals,
            "media_bytes": self.media_bytes,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Trace:
        """Raises DataError for an object that is no trace."""
        try:
            rows = zip(*(value[name] for name in NAMES), strict=True)
            signals = tuple(Signals(**dict(zip(NAMES, map(float, row), strict=True))) for row in rows)
            target, draft = (tuple(int(token) for token in value[name]) for name in ("target", "draft"))
            return cls(str(value["id"]), int(value["prompt_tokens"]), target, draft, signals, int(value["media_bytes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"no trace: {type(error).__name__} {error}") from error


def read_traces(path: Path) -> list[Trace]:
    """The traces in a file, one JSON object a line.

    Raises:
        DataError: it cannot be read, is empty, or a line (named) is no trace.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    traces = [_parse(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not traces:
        raise DataError(f"{path} holds no trace")
    return traces


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    path.write_text("".join(json.dumps(trace.to_json()) + "\n" for trace in traces), encoding="utf-8")


def _parse(line: str, where: str) -> Trace:
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise DataError("no object")
        return Trace.from_json(value)
    except (json.JSONDecodeError, DataError) as error:
        raise DataError(f"{where}: {error}") from error
