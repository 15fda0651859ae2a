"""Reading and validation of an evaluation's folder. One folder is one run:

    run.json        {"configuration": {…}, "versions": {…}, "hardware": {…}}
    results.jsonl   one line per (item, mode): {"id", "mode", "text", "token_ids", "guarantee", "finish_reason",
                    "stats": {counters}}, and with one entry per token: "sources", "pieces" (texts) and "signals" (an
                    object of numbers or null, or a list for each signal, as in a trace)
    timings.jsonl   {"id", "mode", "ttft_s", "total_s", "draft_s", "wait_s", "queue_s", "verify_s",
                    "bytes": {"up": {kind: n}, "down": {kind: n}}}, and optionally "prefill_s", a part of draft_s, and
                    "verify_prefill_s", a part of verify_s
    traces.jsonl    see planning/traces.py
    sweep.jsonl     {"gate", "k", "driver", "rtt_s", "cloud_share", "disagreement" (of tokens), "changed_outputs",
                    "total_s"}. The gate "cloud-only" stands for cloud-only decoding.
    summary.json    {"modes": {mode: {metric: figure}}, "latency": {mode: {metric: figure}}}

An item that a mode did not answer has only "id", "mode", and "error" (a text, or {"type", "message"}) or "skipped" (a
text). Only run.json and results.jsonl are required. A figure is a number, or {"value", "low", "high"} with the ends of
its confidence interval. In a sweep, "NAME_ci": [low, high] has the interval of NAME. Other keys are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from outrider.decoding.sequence import Source
from outrider.errors import DataError, quote
from outrider.numeric import is_integer
from outrider.planning.json_validation import (
    Row,
    entries,
    error_prefix,
    mapping,
    number,
    numbers,
    read_object,
    rows,
    seconds,
    share,
    string,
    text,
    whole_number,
)
from outrider.planning.traces import Trace, read_traces

SOURCES = {source.value: source for source in Source}


@dataclass(frozen=True)
class Figure:
    """A measured number with its confidence interval, if known."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Answer:
    """The answer of one mode to one item. sources, pieces and signals have one entry per token, or none."""

    id: str
    mode: str
    text: str | None
    token_ids: tuple[int, ...]
    guarantee: str
    finish_reason: str
    stats: dict[str, float]
    sources: tuple[Source, ...] = ()
    pieces: tuple[str, ...] = ()
    signals: tuple[dict[str, float], ...] = ()

    def count(self, name: str) -> int:
        """Return a counter of `stats`, 0 if it is missing."""
        return int(self.stats.get(name, 0))


@dataclass(frozen=True)
class Failure:
    """An item that a mode did not answer, with the reason."""

    id: str
    mode: str
    reason: str


@dataclass(frozen=True)
class Timing:
    """Seconds and bytes of one (item, mode). stages: the seconds by name that the file has."""

    id: str
    mode: str
    ttft_s: float
    total_s: float
    stages: dict[str, float]
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepPoint:
    """One setting of a sweep. rtt_s, total_s, cloud_share and disagreement are None if absent from the file."""

    gate: str
    k: str
    driver: str
    rtt_s: float | None
    cloud_share: float | None
    disagreement: Figure | None
    total_s: Figure | None
    changed_outputs: Figure | None = None


@dataclass(frozen=True)
class EvalRun:
    """The contents of one evaluation's folder."""

    name: str
    about: dict[str, Row]
    answers: tuple[Answer, ...]
    failures: tuple[Failure, ...] = ()
    timings: tuple[Timing, ...] = ()
    traces: tuple[Trace, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()
    metrics: dict[str, dict[str, Figure]] = field(default_factory=dict)
    latency: dict[str, dict[str, Figure]] = field(default_factory=dict)

    def configured(self, group: str, name: str) -> str:
        """Return a value of run.json's configuration, empty if it is missing."""
        found = self._configuration.get(group)
        return str(found.get(name, "")) if isinstance(found, dict) else ""

    @property
    def modes(self) -> list[str]:
        """Return the modes in the order of their first answer."""
        return list(dict.fromkeys(answer.mode for answer in self.answers))

    @property
    def expected(self) -> int:
        """Return the lines of a complete results.jsonl, as run.json implies, 0 if unknown."""
        data = self._configuration.get("data")
        items: object = data.get("items") if isinstance(data, dict) else None
        return items * len(self._configured_modes) if isinstance(items, int) and is_integer(items) else 0

    @property
    def missing(self) -> int:
        """Return the number of missing lines. Failures have lines, as the same command does not retry them."""
        lines = [*(answer.mode for answer in self.answers), *(failure.mode for failure in self.failures)]
        return max(self.expected - sum(mode in self._configured_modes for mode in lines), 0)

    @property
    def _configuration(self) -> Row:
        return self.about.get("configuration", {})

    @property
    def _configured_modes(self) -> list[object]:
        modes = self._configuration.get("modes")
        return modes if isinstance(modes, list) else []


Keyed = TypeVar("Keyed", Answer | Failure, Timing)


def read_run(folder: Path) -> EvalRun:
    """Read an evaluation's folder.

    Raises:
        DataError: a missing or invalid file. The message names the file and the line.
    """
    if not folder.is_dir():
        raise DataError(f"no such directory: {folder} (outrider report reads the output of outrider eval)")
    about = read_object(folder / "run.json")
    with error_prefix(str(folder / "run.json")):
        groups = [key for key in ("configuration", "versions", "hardware") if about.get(key) is not None]
        found = dict.fromkeys(("configuration", "versions", "hardware"), Row()) | {
            key: mapping(about, key) for key in groups
        }
    lines = _distinct(rows(folder / "results.jsonl", _line), folder / "results.jsonl")
    traces, sweep, timings, summary = (
        folder / name for name in ("traces.jsonl", "sweep.jsonl", "timings.jsonl", "summary.json")
    )
    return EvalRun(
        name=folder.resolve().name,
        about=found,
        answers=tuple(line for line in lines if isinstance(line, Answer)),
        failures=tuple(line for line in lines if isinstance(line, Failure)),
        timings=_distinct(rows(timings, _timing), timings) if timings.exists() else (),
        traces=tuple(read_traces(traces)) if traces.exists() else (),
        sweep=rows(sweep, _swept) if sweep.exists() else (),
        metrics=_metrics(summary, "modes"),
        latency=_metrics(summary, "latency"),
    )


# Rows -------------------------------------------------------------------------------------------------------


def _line(row: Row) -> Answer | Failure:
    for name in ("error", "skipped"):
        if "token_ids" not in row and row.get(name) is not None:
            reason = row[name]
            if isinstance(reason, dict) and "message" in reason:
                reason = f"{reason.get('type', 'error')}: {reason['message']}"
            shown = string(reason, "error") if isinstance(reason, str) else quote(reason)
            return Failure(text(row, "id"), text(row, "mode"), shown)
    ids = tuple(whole_number(token, "token_ids") for token in entries(row, "token_ids"))
    answer = Answer(
        id=text(row, "id"),
        mode=text(row, "mode"),
        text=None if row.get("text") is None else text(row, "text"),
        token_ids=ids,
        guarantee=text(row, "guarantee"),
        finish_reason=text(row, "finish_reason"),
        stats=numbers(mapping(row, "stats")),
        sources=tuple(_source(value) for value in entries(row, "sources", optional=True)),
        pieces=tuple(string(piece, "pieces") for piece in entries(row, "pieces", optional=True)),
        signals=_signals(row.get("signals")),
    )
    for name in ("sources", "pieces", "signals"):
        count = len(getattr(answer, name))
        if count and count != len(ids):
            raise DataError(f"{name} has {count} entries for {len(ids)} tokens")
    return answer


def _timing(row: Row) -> Timing:
    known = ("prefill_s", "draft_s", "wait_s", "queue_s", "verify_s", "verify_prefill_s")
    spent = mapping(row, "bytes") if row.get("bytes") is not None else {"up": {}, "down": {}}
    up, down = ({kind: whole_number(n, "bytes") for kind, n in mapping(spent, sign).items()} for sign in ("up", "down"))
    return Timing(
        id=text(row, "id"),
        mode=text(row, "mode"),
        ttft_s=seconds(row, "ttft_s"),
        total_s=seconds(row, "total_s"),
        stages={name.removesuffix("_s"): seconds(row, name) for name in known if row.get(name) is not None},
        up=up,
        down=down,
    )


def _swept(row: Row) -> SweepPoint:
    return SweepPoint(
        gate=text(row, "gate"),
        k=str(row.get("k", "–")),
        driver=str(row.get("driver", "sequential")),
        rtt_s=None if row.get("rtt_s") is None else seconds(row, "rtt_s"),
        cloud_share=None if row.get("cloud_share") is None else share(row["cloud_share"], "cloud_share"),
        disagreement=_figure_of(row, "disagreement"),
        total_s=_figure_of(row, "total_s"),
        changed_outputs=_figure_of(row, "changed_outputs"),
    )


def _metrics(path: Path, group: str) -> dict[str, dict[str, Figure]]:
    """Return the figures of summary.json by mode and metric. Other values (texts, lists, null) are ignored."""
    whole_file = read_object(path) if path.exists() else {}
    with error_prefix(str(path)):
        modes = mapping(whole_file, group) if group in whole_file else {}
        found = {mode: {name: _figure(v, name) for name, v in mapping(modes, mode).items()} for mode in modes}
    return {mode: {name: f for name, f in figures.items() if f is not None} for mode, figures in found.items()}


def _figure_of(row: Row, name: str) -> Figure | None:
    figure = _figure(row.get(name), name)
    if figure is None and row.get(name) is not None:
        raise DataError(f"{name}: expected a number, not {quote(row[name])}")
    ends = row.get(f"{name}_ci")
    if figure is None or ends is None:
        return figure
    if not (isinstance(ends, list) and len(ends) == 2):
        raise DataError(f"{name}_ci: expected [low, high], not {quote(ends)}")
    return Figure(figure.value, *(number(end, f"{name}_ci") for end in ends))


def _figure(value: object, name: str) -> Figure | None:
    if isinstance(value, dict) and value.get("value") is not None:
        ends = (None if value.get(end) is None else number(value[end], name) for end in ("low", "high"))
        return Figure(number(value["value"], name), *ends)
    return Figure(number(value, name)) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _source(value: object) -> Source:
    if not isinstance(value, str) or value not in SOURCES:
        raise DataError(f"sources: expected one of {', '.join(SOURCES)}, not {quote(value)}")
    return SOURCES[value]


def _signals(value: object) -> tuple[dict[str, float], ...]:
    if isinstance(value, dict):  # the form of traces: one list per signal
        lists = [entries(value, name) for name in value]
        if len({len(column) for column in lists}) > 1:
            raise DataError(f"signals: lists of different length, {', '.join(value)}")
        value = [dict(zip(value, entry, strict=True)) for entry in zip(*lists, strict=True)]
    if value is not None and not isinstance(value, list):
        raise DataError(f"signals: expected a list, not {quote(value)}")
    for entry in value or []:
        if entry is not None and not isinstance(entry, dict):
            raise DataError(f"signals: expected an object or null for each token, not {quote(entry)}")
    return tuple(numbers(entry or {}) for entry in value or [])


def _distinct(rows: tuple[Keyed, ...], path: Path) -> tuple[Keyed, ...]:
    """Return the rows. Raise DataError if two have the same item and mode."""
    seen: set[tuple[str, str]] = set()
    for row in rows:
        key = (row.id, row.mode)
        if key in seen:
            raise DataError(f"{path}: item {quote(key[0])} has two lines of mode {quote(key[1])}")
        seen.add(key)
    return rows
