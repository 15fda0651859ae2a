"""Traces of a pair, token by token, from which the simulator replays any gate, k and network.

A trace comes from a run in which every token was verified. For each position of the target's output it holds the
target's token, the drafter's proposal after the same prefix, and the confidence signals of that proposal. A file holds
one JSON object per line:

    {"id": "a1", "prompt_tokens": 40, "target": [5, …], "draft": [5, …],
     "entropy": [0.1, …], "margin": […], "maxprob": […], "logprob": […], "media_bytes": 0}
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.decoding.gate import SIGNAL_NAMES, Signals
from outrider.errors import DataError, quote
from outrider.planning.json_validation import entries, number, required, rows, whole_number

UPPER_BOUNDS = {"margin": 1.0, "maxprob": 1.0}  # the other signals are unbounded, and none is below 0
TOLERANCE = 1e-6  # rounding may move a signal beyond its bounds by this much


@dataclass(frozen=True)
class Trace:
    """One output of the target. target, draft and signals have one entry per token, including the end token.

    media_bytes: bytes of the recording that cross the network once, with the first escalation.

    Raises:
        DataError: no entries, or different numbers of entries.
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
                f"trace {quote(self.id)}: {len(self.target)} targets, {len(self.draft)} drafts, "
                f"{len(self.signals)} signals"
            )

    @property
    def agrees(self) -> tuple[bool, ...]:
        """Return, per token, whether the drafter's proposal equals the target's token."""
        return tuple(t == d for t, d in zip(self.target, self.draft, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return the trace as a JSON object, with signals rounded to six digits."""
        signals = {str(name): [round(getattr(s, name), 6) for s in self.signals] for name in SIGNAL_NAMES}
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
        """Parse and validate a JSON object. Raises DataError for a missing field or an impossible value."""
        columns = [[_signal(entry, name) for entry in entries(value, name)] for name in SIGNAL_NAMES]
        if len({len(column) for column in columns}) > 1:
            raise DataError(f"{', '.join(SIGNAL_NAMES)}: lists of different lengths")
        return cls(
            id=str(required(value, "id")),
            prompt_tokens=whole_number(required(value, "prompt_tokens"), "prompt_tokens"),
            target=tuple(whole_number(token, "target") for token in entries(value, "target")),
            draft=tuple(whole_number(token, "draft") for token in entries(value, "draft")),
            signals=tuple(map(Signals, *columns)),
            media_bytes=whole_number(required(value, "media_bytes"), "media_bytes"),
        )


def _signal(value: Any, name: str) -> float:
    signal = number(value, name)
    if not -TOLERANCE <= signal <= UPPER_BOUNDS.get(name, signal) + TOLERANCE:
        bounds = "between 0 and 1" if name in UPPER_BOUNDS else "0 or more"
        raise DataError(f"{name}: expected {bounds}, not {signal:g}")
    return signal


def find_traces(path: str) -> Path:
    """Return the path of the traces file. path: the file, or the directory of its run."""
    return Path(path, "traces.jsonl") if Path(path).is_dir() else Path(path)


def read_traces(path: Path) -> list[Trace]:
    """Read the traces of a file.

    Raises:
        DataError: the file is unreadable or empty, a line is not a trace, or two traces have the same id.
    """
    traces = rows(path, Trace.from_json)
    repeated = [name for name, times in Counter(trace.id for trace in traces).items() if times > 1]
    if repeated:  # copies are not exchangeable, as risk control requires
        raise DataError(f"{path}: several traces have the id {quote(repeated[0])}")
    return list(traces)
