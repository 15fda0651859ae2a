"""Report sections that break down acceptance by position, bytes by kind of frame, and time by stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from outrider.decoding.result import wilson_interval
from outrider.decoding.sequence import Source
from outrider.evals.charts import Axis, Bars, Point, Series, bars, plot
from outrider.evals.latency import split_total
from outrider.evals.report_sections import (
    Cell,
    Section,
    Table,
    count,
    label,
    labels,
    legend,
    of_mode,
    percent,
    plain,
    seconds,
    size,
    tick_percent,
)
from outrider.evals.results import Answer, EvalRun, Timing

MIN_DRAFTS = 20  # a rate over fewer drafts is drawn hollow
MAX_BLOCK = 64  # tokens
TWO_SIDED = 1.959964  # standard deviations to each side of 95 %
MAX_KINDS = 7  # colours of one bar
STAGES = ("edge prefill", "draft", "cloud prefill", "verify", "queue", "network", "rest")


# Acceptance by position -------------------------------------------------------------------------------------

Tally = dict[int, tuple[int, int]]  # position: (accepted, judged)


def acceptance(runs: Sequence[EvalRun]) -> Section:
    """Return the acceptance rate by position in the block."""
    title = "Acceptance by position in the block"
    shown = [(name, run, mode) for name, run, mode in labels(runs) if not uses_repair(run)]
    tallies = [(name, by_position(of_mode(run.answers, mode))) for name, run, mode in shown]
    tallies += [(label(run, "traces", runs), _tally_traces(run)) for run in runs if run.traces]
    tallies = [(name, tally) for name, tally in tallies if tally]
    if not tallies:
        missing = (
            "It needs traces.jsonl, or the sources of tokens of a run in which each verdict ends with a token of the "
            "cloud. The pipelined driver and --scope repair do not have such verdicts."
        )
        return Section("acceptance", title, "", missing=missing)
    beside = [0.06 * (n - (len(tallies) - 1) / 2) for n in range(len(tallies))]  # so that intervals do not overlap
    last = max(position for _, tally in tallies for position in tally)
    pairs = zip(tallies, beside, strict=True)
    series = [Series(name, tuple(_acceptance_points(name, tally, shift))) for (name, tally), shift in pairs]
    lead = (
        "The share of accepted drafts among those that a verdict reached at this position, with 95 % Wilson intervals. "
        f"Hollow: fewer than {MIN_DRAFTS} drafts."
    )
    rows = tuple(
        (Cell(name), count(position), count(judged), percent(accepted / judged))
        for name, tally in tallies
        for position, (accepted, judged) in sorted(tally.items())
    )
    drawing = plot(
        title,
        series,
        Axis("position in the block", _position, 0.5, last + 0.5),
        Axis("", tick_percent, 0, 1),
    )
    table = Table(("mode", "position", "judged", "accepted"), rows)
    return Section("acceptance", title, lead, table, "accepted", drawing, legend=legend(series))


def uses_repair(run: EvalRun) -> bool:
    """Return whether verdicts may have covered tokens of earlier blocks."""
    return run.configured("speculation", "scope") == "repair"


def by_position(answers: Sequence[Answer]) -> Tally:
    """Count accepted and judged drafts by position.

    The result is empty if the blocks cannot be reconstructed: a verdict without a token of the cloud joins two blocks.
    """
    runs: list[tuple[int, bool]] = []
    for answer in answers:
        if not answer.count("verified"):
            continue
        own = answer.count("corrected") + answer.count("bonus")
        if answer.sources and answer.count("escalated") - own > 1:
            return {}
        runs += _blocks(answer.sources)
    return _tally(runs) if all(length <= MAX_BLOCK for length, _ in runs) else {}


def _blocks(sources: Sequence[Source]) -> Iterator[tuple[int, bool]]:
    """Yield, per verified block, the number of accepted drafts and whether the next draft was rejected."""
    length = 0
    for source in sources:
        if source is Source.ACCEPTED:
            length += 1
            continue
        if length or source is Source.CORRECTION:
            yield length, source is Source.CORRECTION
        length = 0
    if length:
        yield length, False


def _tally(runs: Iterable[tuple[int, bool]]) -> Tally:
    accepted, judged = Counter[int](), Counter[int]()
    for length, rejected in runs:
        accepted.update(range(1, length + 1))
        judged.update(range(1, length + 1 + rejected))
    return {position: (accepted[position], judged[position]) for position in judged}


def _tally_traces(run: EvalRun) -> Tally:
    """Count the blocks along the traces, with the k of the run, or 5."""
    configuration = run.about.get("configuration", {})
    places = (configuration, configuration.get("speculation"))
    given = [place["k"] for place in places if isinstance(place, dict) and isinstance(place.get("k"), int)]
    length = next((k for k in given if k > 0), 5)
    return _tally(block for trace in run.traces for block in replay_blocks(trace.agrees, length))


def replay_blocks(agrees: Sequence[bool], k: int) -> Iterator[tuple[int, bool]]:
    """Yield the verdicts on blocks of k along a trace, each followed by a correction or bonus token."""
    at = 0
    while at < len(agrees):
        block = list(agrees[at : at + k])
        length = block.index(False) if False in block else len(block)
        yield length, length < len(block)
        at += length + 1


def _position(tick: float) -> str:
    """Return the label of a tick, empty between positions."""
    return plain(tick) if tick.is_integer() and tick > 0 else ""


def _acceptance_points(name: str, tally: Tally, shift: float) -> Iterator[Point]:
    for position, (accepted, judged) in sorted(tally.items()):
        tip = f"{name}, position {position}\n{accepted} of {judged}: {percent(accepted / judged).text}"
        low, high = wilson_interval(accepted / judged, judged, TWO_SIDED)
        yield Point(position + shift, accepted / judged, tip, low, high, faint=judged < MIN_DRAFTS)


# Bytes ------------------------------------------------------------------------------------------------------


def ledger(runs: Sequence[EvalRun]) -> Section:
    """Return the mean bytes per item by kind of frame."""
    title = "Bytes by kind"
    sums = [
        (f"{name} {sign}", _bytes(of_mode(run.timings, mode), sign))
        for name, run, mode in labels(runs)
        for sign in "↑↓"
    ]
    sums = [(name, spent) for name, spent in sums if spent]
    if not sums:
        return Section("ledger", title, "", missing="There is no timings.jsonl with transferred bytes.")
    whole = Counter[str]()
    for _, spent in sums:
        whole.update(spent)
    kinds = [kind for kind, _ in whole.most_common()]
    shown, others = kinds[:MAX_KINDS], kinds[MAX_KINDS:]
    groups = [_ledger_bars("", sums, shown, others)]
    if "media" in whole and len(whole) > 1:  # next to a recording the other kinds are too small to see
        small = [(name, {kind: n for kind, n in spent.items() if kind != "media"}) for name, spent in sums]
        groups = [replace(groups[0], title="All"), _ledger_bars("Without media", small, shown, others)]
    lead = "Mean bytes per item by kind of frame, ↑ from edge to cloud and ↓ back; transport is HTTP/2 and TLS."
    cells = tuple((Cell(name), *(size(spent.get(kind, 0.0)) for kind in kinds)) for name, spent in sums)
    names = [*shown, *(["other kinds"] if others else [])]
    signs = tuple((f"s{n}", kind) for n, kind in enumerate(names))
    return Section("ledger", title, lead, Table(("mode", *kinds), cells), bars=tuple(groups), legend=signs)


def _ledger_bars(title: str, sums: Sequence[tuple[str, dict[str, float]]], shown: list[str], others: list[str]) -> Bars:
    rows = [(name, size(sum(spent.values())).text, _kinds(spent, shown, others)) for name, spent in sums]
    return bars(rows, title)


def _bytes(timings: Sequence[Timing], sign: str) -> dict[str, float]:
    """Return the mean bytes of one direction by kind."""
    total = Counter[str]()
    for timing in timings:
        total.update(timing.up if sign == "↑" else timing.down)
    return {kind: n / len(timings) for kind, n in total.items() if n}


def _kinds(spent: dict[str, float], shown: list[str], others: list[str]) -> list[tuple[str, float, str]]:
    parts = [
        (f"s{n}", spent.get(kind, 0.0), f"{kind}: {size(spent.get(kind, 0.0)).text}") for n, kind in enumerate(shown)
    ]
    left = sum(spent.get(kind, 0.0) for kind in others)
    return [*parts, (f"s{len(shown)}", left, f"other kinds: {size(left).text}")]


# Time -------------------------------------------------------------------------------------------------------


def stages(runs: Sequence[EvalRun]) -> Section:
    """Return the mean time per item by stage."""
    title = "Time by stage"
    means = [(name, _mean_stages(of_mode(run.timings, mode))) for name, run, mode in labels(runs)]
    means = [(name, spent) for name, spent in means if spent]
    if not means:
        return Section("stages", title, "", missing="There is no timings.jsonl with draft_s or wait_s.")
    lead = (
        "Mean seconds per item on the edge's clock. Network is the part of the wait that the cloud's clock does not "
        "cover. Work of the cloud while the edge drafts costs no time and is not drawn."
    )
    names = [stage for stage in STAGES if any(stage in spent for _, spent in means)]
    rows = [(name, seconds(sum(spent.values())).text, _segments(spent)) for name, spent in means]
    cells = tuple(
        (Cell(name), *(seconds(spent.get(stage)) for stage in names), seconds(sum(spent.values())))
        for name, spent in means
    )
    signs = tuple((f"s{STAGES.index(stage)}", stage) for stage in names)
    return Section("stages", title, lead, Table(("mode", *names, "total"), cells), bars=(bars(rows),), legend=signs)


def _segments(spent: dict[str, float]) -> list[tuple[str, float, str]]:
    return [(f"s{n}", spent.get(s, 0.0), f"{s}: {seconds(spent.get(s)).text}") for n, s in enumerate(STAGES)]


def _mean_stages(timings: Sequence[Timing]) -> dict[str, float]:
    each = [stages_of(timing) for timing in timings if timing.stages]
    names = [stage for stage in STAGES if any(stage in one for one in each)]
    return {stage: fmean(one.get(stage, 0.0) for one in each) for stage in names}


def stages_of(timing: Timing) -> dict[str, float]:
    """Return the total time by stage."""
    return split_total(timing.total_s, timing.stages)
