"""What a drafter would have done along the target's own output, token by token: it replays any gate, k and network.

A trace is taken with every token verified. At each position of the target's output it holds the target's token, the
drafter's proposal given the same prefix, and how sure the drafter was of it. One JSON object per line:

    {"id": "a1", "prompt_tokens": 40, "target": [5, …], "draft": [5, …],
     "entropy": [0.1, …], "margin": […], "maxprob": […], "logprob": […], "media_bytes": 0}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import is_integer, is_number
from outrider.decoding.gate import SIGNAL_NAMES, Signals
from outrider.errors import DataError
from outrider.files import parse_json, read_text

LARGEST = {"margin": 1.0, "maxprob": 1.0}  # the other signals have no upper end; none is below 0
ROUNDED = 1e-6  # that a signal may be past its end


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
        """Raises DataError for an object that is no trace, or says what no model can."""
        try:
            columns = [[_signal(entry, name) for entry in value[name]] for name in SIGNAL_NAMES]
            signals = tuple(Signals(*row) for row in zip(*columns, strict=True))
            target, draft = (tuple(_whole(token, f"{n} token") for token in value[n]) for n in ("target", "draft"))
            sizes = [_whole(value[name], name) for name in ("prompt_tokens", "media_bytes")]
            return cls(str(value["id"]), sizes[0], target, draft, signals, sizes[1])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"no trace: {type(error).__name__} {error}") from error


def _signal(value: Any, name: str) -> float:
    if not is_number(value):
        raise DataError(f"{name} {value!r} is no finite number")
    if not -ROUNDED <= value <= LARGEST.get(name, value) + ROUNDED:
        raise DataError(f"{name} {value!r} is {'not between 0 and 1' if name in LARGEST else 'below 0'}")
    return float(value)


def _whole(value: Any, name: str) -> int:
    if not is_integer(value) or value < 0:
        raise DataError(f"{name} {value!r} is no whole number, 0 or more")
    return int(value)


def read_traces(path: Path) -> list[Trace]:
    """The traces in a file, one JSON object a line.

    Raises:
        DataError: it cannot be read, is empty, or a line (named) is no trace or has the id of another one.
    """
    lines = read_text(path).split("\n")  # and not splitlines, which cuts at U+2028 inside an id
    found: dict[str, tuple[int, Trace]] = {}
    for n, line in enumerate(lines, 1):
        if line.strip():
            trace = _parse(line, f"{path}, line {n}")
            if trace.id in found:  # copies are not exchangeable, which is what a calibration's budget stands on
                raise DataError(f"{path}, line {n}: id {trace.id!r} is that of line {found[trace.id][0]} already")
            found[trace.id] = n, trace
    if not found:
        raise DataError(f"{path} holds no trace")
    return [trace for _, trace in found.values()]


def _parse(line: str, where: str) -> Trace:
    value = parse_json(line, where)
    try:
        if not isinstance(value, dict):
            raise DataError("not an object")
        return Trace.from_json(value)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
