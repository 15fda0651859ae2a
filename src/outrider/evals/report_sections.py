"""Sections of a report: the parts that all sections share, the overview, and the metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from markupsafe import Markup

from outrider.evals.charts import Bars, Series, swatch
from outrider.evals.results import Answer, EvalRun, Figure, Timing

Row = TypeVar("Row", Answer, Timing)


@dataclass(frozen=True)
class Cell:
    """A cell of a table. key: the number by which a column is sorted, None for a text."""

    text: str
    key: float | None = None


@dataclass(frozen=True)
class Table:
    """A table with its column heads."""

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def numeric(self) -> set[int]:
        """Return the columns with numbers."""
        return {n for row in self.rows for n, cell in enumerate(row) if cell.key is not None}


@dataclass(frozen=True)
class Section:
    """One chart with its table. missing: the note that replaces a section without data."""

    id: str
    title: str
    lead: str
    table: Table | None = None
    upright: str = ""  # the label of a plot's upright axis
    drawing: Markup | None = None
    bars: tuple[Bars, ...] = ()
    legend: tuple[tuple[Markup | str, str], ...] = ()  # (sign, or class of a segment; name)
    missing: str = ""
    points: tuple[str, ...] = ()  # sentences


def label(run: EvalRun, name: str, runs: Sequence[EvalRun]) -> str:
    """Return the name, with the run's name in front if there are several runs."""
    return f"{run.name} · {name}" if len(runs) > 1 else name


def labels(runs: Sequence[EvalRun]) -> Iterator[tuple[str, EvalRun, str]]:
    """Yield (label, run, mode) of all modes."""
    for run in runs:
        for mode in run.modes:
            yield label(run, mode, runs), run, mode


def extent(run: EvalRun) -> str:
    """Return the size of a run as a text."""
    answers, modes = len(run.answers), len(run.modes)
    return f"{answers:,} answer{'s' * (answers != 1)} in {modes} mode{'s' * (modes != 1)}"


def unfinished(run: EvalRun) -> str:
    """Return a note on an incomplete run, empty for a complete one."""
    if not run.missing:
        return ""
    are = "is" if run.missing == 1 else "are"
    whole = f"{run.missing:,} of {run.expected:,} answers {are} missing"
    return f"{run.name} is not finished: {whole}; repeat the eval command to complete it"


def of_mode(rows: Sequence[Row], mode: str) -> list[Row]:
    """Return the rows of a mode."""
    return [row for row in rows if row.mode == mode]


def legend(series: Sequence[Series]) -> tuple[tuple[Markup | str, str], ...]:
    """Return the legend of a plot."""
    return tuple((swatch(n, line=one.line), one.name) for n, one in enumerate(series))


# Cells and ticks --------------------------------------------------------------------------------------------

NOTHING = Cell("–")


def count(number: int) -> Cell:
    """Return a cell with an integer."""
    return Cell(f"{number:,}", number)


def percent(share: float | None) -> Cell:
    """Return a cell with a share in percent."""
    return NOTHING if share is None else Cell(f"{100 * share:.1f} %", share)


def seconds(value: float | None) -> Cell:
    """Return a cell with a time."""
    if value is None:
        return NOTHING
    return Cell(f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms", value)


def size(value: float | None) -> Cell:
    """Return a cell with a number of bytes."""
    if value is None:
        return NOTHING
    unit, written = next(
        ((unit, value / scale) for unit, scale in (("MB", 1e6), ("kB", 1e3)) if value >= scale), ("B", value)
    )
    return Cell(f"{written:.4g} {unit}", value)


def figure(value: Figure | None, unit: str = "", scale: float = 1.0, digits: str = ".3g") -> Cell:
    """Return a cell with a number and its interval. An interval of no width is left out."""
    if value is None:
        return NOTHING
    number, *ends = (None if one is None else f"{scale * one:{digits}}" for one in (value.value, value.low, value.high))
    between = f" [{ends[0]}, {ends[1]}]" if None not in ends and value.low != value.high else ""
    return Cell(f"{number}{between}{unit}", value.value)


def named_figure(name: str, value: Figure | None) -> Cell:
    """Return a cell with a figure of summary.json, in the unit that its name implies."""
    if value is not None and name.startswith(TIMES):
        long = value.value >= 1
        return figure(value, " s" if long else " ms", 1 if long else 1000, ".2f" if long else ".0f")
    if name in SHARES or name.startswith(SHARE_PREFIXES):
        return figure(value, " %", 100, ".1f")
    return figure(value, " of 100" if name in OUT_OF_100 else "", 1, ".1f" if name in OUT_OF_100 else ".3g")


def over(part: float, whole: float) -> float | None:
    """Return a ratio, or None if the denominator is 0."""
    return part / whole if whole else None


def tick_percent(value: float) -> str:
    """Format a tick in percent."""
    return f"{100 * value:.4g} %"


def plain(value: float) -> str:
    """Format a tick as a number."""
    return f"{value:.6g}"


# Overview ---------------------------------------------------------------------------------------------------


TIMES = ("ttft", "itl", "total")
SHARES = ("agreement", "same_text", "exact_match", "accuracy", "language_match", "rouge_l", "bertscore", "quality")
SHARE_PREFIXES = ("share_", "attribute_", "format_", "distinct_")
OUT_OF_100 = ("bleu", "chrf", "cloud_chrf")


def overview(runs: Sequence[EvalRun]) -> Section:
    """Return the table of all modes."""
    head = ("mode", "by cloud", "accepted", "escalated", "TTFT", "total", "bytes up", "items", "tokens", "guarantee")
    rows = tuple(_overview_row(name, run, mode) for name, run, mode in labels(runs))
    lead = "Per mode: sums over all items for the shares, the median item for times, the mean item for bytes."
    return Section("overview", "Overview", lead, Table(head, rows))


def _overview_row(name: str, run: EvalRun, mode: str) -> tuple[Cell, ...]:
    answers = of_mode(run.answers, mode)
    timings = of_mode(run.timings, mode)
    stats = Counter[str]()
    for answer in answers:
        stats.update({name: int(value) for name, value in answer.stats.items()})
    guarantees = Counter(answer.guarantee for answer in answers)
    given = ", ".join(name if len(guarantees) == 1 else f"{name} {n}" for name, n in guarantees.most_common())
    tokens = sum(len(answer.token_ids) for answer in answers)
    return (
        Cell(name),
        percent(over(stats["cloud_tokens"], stats["cloud_tokens"] + stats["edge_tokens"])),
        percent(over(stats["accepted"], stats["verified"])),
        percent(over(stats["escalated"], stats["blocks"])),
        seconds(median(t.ttft_s for t in timings) if timings else None),
        seconds(median(t.total_s for t in timings) if timings else None),
        size(fmean(sum(t.up.values()) for t in timings) if timings else None),
        count(len(answers)),
        count(tokens),
        Cell(given),
    )


def metrics(runs: Sequence[EvalRun]) -> Section:
    """Return the text metrics of summary.json."""
    lead = "Quality of the texts, with 95 % intervals where items differ. docs/metrics.md defines each figure."
    columns = [(label(run, mode, runs), run.metrics[mode]) for run in runs for mode in run.metrics]
    return _figures("metrics", "Metrics", lead, columns, "There is no summary.json with metrics.")


def durations(runs: Sequence[EvalRun]) -> Section:
    """Return the latency metrics of summary.json."""
    lead = (
        "TTFT: to the first token. ITL: between tokens. Total: the whole answer; p50 is the median. With 95 % "
        "intervals. Shares are of the total."
    )
    columns = [(label(run, mode, runs), run.latency[mode]) for run in runs for mode in run.latency]
    return _figures("durations", "Times", lead, columns, "There is no summary.json with times.")


def _figures(
    id_: str, title: str, lead: str, columns: Sequence[tuple[str, dict[str, Figure]]], missing: str
) -> Section:
    """Return a section with a row per figure and a column per mode."""
    names = list(dict.fromkeys(name for _, figures in columns for name in figures))
    if not names:
        return Section(id_, title, lead, missing=missing)
    rows = tuple(
        (Cell(_named(name)), *(named_figure(name, figures.get(name)) for _, figures in columns)) for name in names
    )
    return Section(id_, title, lead, Table(("", *(mode for mode, _ in columns)), rows))


def _named(metric: str) -> str:
    """Return the display name of a metric, with abbreviations in capitals."""
    words = (word.upper() if word in ("ttft", "itl", "bleu") else word for word in metric.split("_"))
    return " ".join(words)
