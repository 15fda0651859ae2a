"""Report sections of trade-offs: quality against cloud share, latency against round-trip time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from outrider.evals.charts import Axis, Point, Series, plot
from outrider.evals.report_sections import (
    OUT_OF_100,
    Cell,
    Section,
    Table,
    label,
    labels,
    legend,
    named_figure,
    of_mode,
    over,
    percent,
    plain,
    tick_percent,
)
from outrider.evals.results import Answer, EvalRun, Figure, SweepPoint
from outrider.evals.summary import REFERENCE

MAX_LINES = 8  # colours of one chart
QUALITIES = {  # measures and their labels, of which the first that two modes have is drawn
    "attribute_all": "captions with every attribute right",
    "same_text": "outputs equal to the cloud's",
    "agreement": "tokens equal to the cloud's",
    "quality": "quality",
    "accuracy": "accuracy",
    "exact_match": "answers equal to a reference",
    "chrf": "chrF",
    "rouge_l": "ROUGE-L",
    "bleu": "BLEU",
}
POINT = 0.01  # one percentage point


# Quality against cloud share --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setting:
    """One point of the quality chart. data: hash of the data set."""

    family: str
    name: str
    share: float
    quality: Figure
    data: str = ""


def measured(runs: Sequence[EvalRun]) -> Section:
    """Plot the measured quality of runs, by the first measure that they have."""
    title = "Measured quality against cloud share"
    settings, measure = _summed_settings(runs)
    if len(settings) < 2:
        missing = "There is no summary.json with a known metric of quality for at least two modes."
        return Section("measured", title, "", missing=missing)
    title = f"Measured: {QUALITIES[measure]}, against cloud share"
    return _quality_section("measured", title, measure, QUALITIES[measure], settings, _reach(settings, measure))


def quality(runs: Sequence[EvalRun]) -> Section:
    """Plot a sweep: the share of outputs equal to the cloud's, or of tokens if the sweep does not count outputs."""
    settings = _swept_settings(runs, "changed_outputs")
    counted = "outputs" if settings else "tokens"
    settings = settings or _swept_settings(runs, "disagreement")
    title = f"Simulated: {counted} equal to the cloud's, against cloud share"
    if not settings:
        missing = "There is no sweep.jsonl with cloud_share and disagreement."
        return Section("quality", title, "", missing=missing)
    name = "same_text" if counted == "outputs" else "agreement"
    return _quality_section("quality", title, name, QUALITIES[name], settings)


def _quality_section(
    id_: str, title: str, name: str, measure: str, settings: list[_Setting], more: str = ""
) -> Section:
    best = frontier([(s.share, s.quality.value) for s in settings])
    families = list(dict.fromkeys(s.family for s in settings))
    series = [_quality_series(name, family, settings, set(best)) for family in families]
    lead = (
        "Up is better, left is cheaper. The stepped line is the Pareto frontier (filled marks): no other setting is "
        f"both better and cheaper.{more}"
    )
    drawing = plot(title, series, Axis("cloud share", tick_percent, 0, 1), _quality_axis(settings), best)
    rows = tuple(
        (
            Cell(s.name),
            percent(s.share),
            named_figure(name, s.quality),
            Cell("yes" if (s.share, s.quality.value) in best else "no"),
        )
        for s in sorted(settings, key=lambda s: (s.share, -s.quality.value))
    )
    table = Table(("setting", "cloud share", measure, "on the frontier"), rows)
    return Section(id_, title, lead, table, measure, drawing, legend=legend(series))


def _reach(settings: Sequence[_Setting], measure: str) -> str:
    """Return a sentence on the smallest cloud share within a point of the cloud alone, on the same data."""
    alone = next((s for s in settings if s.family == REFERENCE), None)
    if alone is None:
        return ""
    point = 100 * POINT if measure in OUT_OF_100 else POINT
    near = [s for s in settings if s.data == alone.data and s.quality.value >= alone.quality.value - point]
    least = min(near, key=lambda s: s.share)
    if least.share >= alone.share:
        return " Nothing here comes within a point of the cloud alone at a smaller cloud share."
    found = f"{least.name}, {percent(least.share).text}"
    return f" Within a point of the cloud alone at the smallest share, intervals aside: {found}."


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto frontier of (cost, quality), in rising order."""
    kept: list[tuple[float, float]] = []
    for cost, value in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not kept or value > kept[-1][1]:
            kept.append((cost, value))
    return kept


def _swept_settings(runs: Sequence[EvalRun], lost: str) -> list[_Setting]:
    """Return a setting for each gate and k, as drivers and networks change neither share nor quality."""
    found: dict[tuple[str, float, Figure], _Setting] = {}
    for run in runs:
        for row in run.sweep:
            loss: Figure | None = getattr(row, lost)
            if row.cloud_share is None or loss is None:
                continue
            text = row.gate if row.gate == REFERENCE else f"{row.gate}, k {row.k}"
            name, family = (label(run, part, runs) for part in (text, row.gate.partition(":")[0]))
            found[name, row.cloud_share, loss] = _Setting(family, name, row.cloud_share, _complement(loss))
    return list(found.values())


def _summed_settings(runs: Sequence[EvalRun]) -> tuple[list[_Setting], str]:
    for measure in QUALITIES:
        settings = []
        for name, run, mode in labels(runs):
            value = run.metrics.get(mode, {}).get(measure)
            share = _cloud_share(of_mode(run.answers, mode))
            if value is not None and share is not None:
                shown = f"{name} {run.configured('speculation', 'gate')}" if mode == "gated" else name
                settings.append(_Setting(mode, shown, share, value, run.configured("data", "hash")))
        if len(settings) > 1:
            return settings, measure
    return [], ""


def _cloud_share(answers: Sequence[Answer]) -> float | None:
    cloud = sum(answer.count("cloud_tokens") for answer in answers)
    return over(cloud, cloud + sum(answer.count("edge_tokens") for answer in answers))


def _complement(figure: Figure) -> Figure:
    low, high = (None if end is None else 1 - end for end in (figure.high, figure.low))
    return Figure(1 - figure.value, low, high)


def _quality_series(measure: str, family: str, settings: Sequence[_Setting], best: set[tuple[float, float]]) -> Series:
    own = [s for s in settings if s.family == family]
    points = tuple(
        Point(
            s.share,
            s.quality.value,
            f"{s.name}\ncloud share {percent(s.share).text}, {named_figure(measure, s.quality).text}",
            s.quality.low,
            s.quality.high,
            faint=(s.share, s.quality.value) not in best,
        )
        for s in own
    )
    return Series(family, points, line=False)


def _quality_axis(settings: Sequence[_Setting]) -> Axis:
    shares = all(0 <= s.quality.value <= 1 for s in settings)
    return Axis("", tick_percent if shares else plain)


# Latency against RTT ----------------------------------------------------------------------------------------


def latency(runs: Sequence[EvalRun]) -> Section:
    """Plot a line per driver and gate, with the fastest k at each round-trip time."""
    title = "Latency against round-trip time"
    rows = [(run, row) for run in runs for row in run.sweep if row.rtt_s is not None and row.total_s is not None]
    if not rows:
        return Section("latency", title, "", missing="There is no sweep.jsonl with rtt_s and total_s.")
    grouped: dict[str, list[SweepPoint]] = {}
    for run, row in rows:
        name = row.gate if row.gate == REFERENCE else f"{row.driver}, {row.gate}"
        grouped.setdefault(label(run, name, runs), []).append(row)
    alone = [name for name in grouped if name.endswith(REFERENCE)]
    chosen = alone + _spread([name for name in grouped if name not in alone], MAX_LINES - len(alone))
    series = [Series(name, tuple(_latency_points(name, grouped[name]))) for name in chosen]
    lead = "Simulated seconds for a whole answer, by driver and gate, at each round-trip time with the fastest k."
    if not alone:
        lead += " The sweep has no cloud-only rows to compare with: run outrider sweep again."
    if len(chosen) < len(grouped):
        lead += f" {len(chosen)} of {len(grouped)} lines are drawn; the table has all."
    cells = tuple(
        (Cell(name), Cell(r.k), Cell(f"{1000 * (r.rtt_s or 0.0):g} ms", r.rtt_s), named_figure("total", r.total_s))
        for name, own in grouped.items()
        for r in own
    )
    drawing = plot(title, series, Axis("round-trip time, ms", plain, 0), Axis("", plain, 0))
    table = Table(("driver, gate", "k", "RTT", "total"), cells)
    return Section("latency", title, lead, table, "seconds per answer", drawing, legend=legend(series))


def _latency_points(name: str, rows: Sequence[SweepPoint]) -> Iterator[Point]:
    ordered = sorted(rows, key=lambda row: row.rtt_s or 0.0)
    for rtt, same in groupby(ordered, key=lambda row: round(1000 * (row.rtt_s or 0.0), 6)):
        row, total = min(((r, r.total_s) for r in same if r.total_s is not None), key=lambda pair: pair[1].value)
        tip = f"{name}, k {row.k}\n{total.value:.2f} s at {rtt:g} ms"
        yield Point(rtt, total.value, tip, total.low, total.high)


def _spread(names: list[str], count: int) -> list[str]:
    """Return at most `count` names, evenly spaced, with the first and the last."""
    if len(names) <= count:
        return names
    return [names[round(n * (len(names) - 1) / (count - 1))] for n in range(count)]
