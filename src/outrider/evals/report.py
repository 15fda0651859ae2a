"""Reports: a self-contained HTML page about evaluation runs. It needs no network, and escapes all texts."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from outrider import __version__
from outrider.decoding.gate import SIGNAL_NAMES as SIGNALS
from outrider.decoding.sequence import Source
from outrider.errors import DataError
from outrider.evals import breakdown, report_sections, tradeoffs
from outrider.evals.charts import stack
from outrider.evals.conclusion import conclusion
from outrider.evals.report_sections import Section, label
from outrider.evals.results import Answer, EvalRun, read_run
from outrider.files import check_writable, write_file

MAX_ITEMS = 12  # with token strips
MAX_TOKENS = 2_000  # of one answer
EMPTY = "◌"  # shown for a token without text
KINDS = {source: source.value[0] for source in Source}  # CSS classes
NAMES = {
    Source.EDGE: "edge, unverified",
    Source.SAMPLED: "edge, drawn to leave a loop",
    Source.ACCEPTED: "drafted, verified",
    Source.CORRECTION: "corrected by the cloud",
    Source.BONUS: "bonus from the cloud",
}


@dataclass(frozen=True)
class Token:
    """A token of a strip.

    kind: CSS class of its source. void: it has no text. signals: space-separated numbers, in the order of the strip's
    names.
    """

    kind: str
    id: int
    text: str
    void: bool
    signals: str


@dataclass(frozen=True)
class TokenStrip:
    """The tokens of one answer. signals: space-separated names. cut: a note on omitted tokens, or empty."""

    name: str
    about: str
    tokens: tuple[Token, ...]
    signals: str
    cut: str


def read_runs(folders: Sequence[Path]) -> list[EvalRun]:
    """Read runs and make their names unique.

    Raises:
        DataError: no folder, a repeated folder, or one that is not an evaluation.
    """
    if not folders:
        raise DataError("no folder was given: outrider report DIR… --out report.html")
    places = [folder.resolve() for folder in folders]
    for n, place in enumerate(places):
        if place in places[:n]:
            raise DataError(f"{folders[n]} was given twice")
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    pairs = zip(runs, folders, strict=True)
    return [run if names.count(run.name) == 1 else replace(run, name=str(folder)) for run, folder in pairs]


def render(runs: Sequence[EvalRun]) -> str:
    """Return the page of some runs."""
    strips, lead = _strips(runs)
    sections = [
        conclusion(runs),
        tradeoffs.measured(runs),
        tradeoffs.quality(runs),
        tradeoffs.latency(runs),
        breakdown.acceptance(runs),
        breakdown.stages(runs),
        breakdown.ledger(runs),
        report_sections.overview(runs),
        report_sections.metrics(runs),
        report_sections.durations(runs),
    ]
    present = {source for run in runs for answer in run.answers for source in answer.sources}
    sources = [(KINDS[source], NAMES[source]) for source in Source if source in present]
    missing = [(section.title, section.missing) for section in sections if section.missing]
    if not strips:
        missing.append(("Source of each token", "results.jsonl has no answer with sources."))
    return str(
        _template().render(
            runs=runs,
            sections=sections,
            missing=missing,
            wide=_wide([section for section in sections if not section.missing]),
            strips=strips,
            strips_lead=lead,
            sources=sources,
            version=__version__,
        )
    )


def _wide(sections: Sequence[Section]) -> set[str]:
    """Return the sections that span both columns: tables, and the last of an odd number of charts."""
    charts = [section.id for section in sections if section.drawing or section.bars]
    return {section.id for section in sections} - set(charts[: len(charts) // 2 * 2])


@cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(csp_hash=_csp_hash, stack=stack, flat=lambda values: list(_flat(values)))
    environment.filters.update(extent=report_sections.extent, unfinished=report_sections.unfinished)
    text = files("outrider.evals").joinpath("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(text)


def _csp_hash(script: str) -> str:
    """Return the hash by which a Content-Security-Policy admits this script alone."""
    return "sha256-" + b64encode(hashlib.sha256(str(script).encode()).digest()).decode()


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield prefix + _writable(key), _writable(text)


def _writable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


# Token strips -----------------------------------------------------------------------------------------------


def _strips(runs: Sequence[EvalRun]) -> tuple[list[tuple[str, list[TokenStrip]]], str]:
    """Return the strips of the first MAX_ITEMS items, in the order of the files, and a note on omitted items."""
    by_item: dict[str, list[TokenStrip]] = {}
    for run in runs:
        for answer in run.answers:
            if answer.sources and (answer.id in by_item or len(by_item) < MAX_ITEMS):
                strip = _strip(label(run, answer.mode, runs), _with_signals(answer, run))
                by_item.setdefault(answer.id, []).append(strip)
    total = len({answer.id for run in runs for answer in run.answers if answer.sources})
    lead = f"The first {len(by_item)} of {total} items, in the order of results.jsonl." if total > MAX_ITEMS else ""
    return list(by_item.items()), lead


def _with_signals(answer: Answer, run: EvalRun) -> Answer:
    """Return the answer. If it has no signals and equals the output of a trace, it gets the trace's signals."""
    for trace in run.traces:
        if trace.id == answer.id and trace.target == answer.token_ids and not answer.signals:
            return replace(answer, signals=tuple(map(asdict, trace.signals)))
    return answer


def _strip(name: str, answer: Answer) -> TokenStrip:
    names = [name for name in SIGNALS if any(name in entry for entry in answer.signals[:MAX_TOKENS])]
    count = len(answer.token_ids)
    cut = f"The first {MAX_TOKENS:,} of {count:,} tokens are shown." if count > MAX_TOKENS else ""
    about = f"{answer.guarantee} · {count:,} tokens · ended by {answer.finish_reason}"
    return TokenStrip(name, about, tuple(_tokens(answer, names)), " ".join(names), cut)


def _tokens(answer: Answer, names: Sequence[str]) -> Iterator[Token]:
    for n, (token, source) in enumerate(zip(answer.token_ids[:MAX_TOKENS], answer.sources, strict=False)):
        piece = answer.pieces[n] if answer.pieces else f"{token} "
        entry = answer.signals[n] if answer.signals else {}
        signals = " ".join(f"{entry[name]:.3g}" if name in entry else "-" for name in names) if entry else ""
        yield Token(KINDS[source], token, piece or EMPTY, not piece, signals)


# Writing ----------------------------------------------------------------------------------------------------


def write_report(folders: Sequence[Path], out: Path) -> list[EvalRun]:
    """Read the folders, write the page, and return its runs.

    Raises:
        DataError: a folder is not an evaluation, or the page cannot be written.
        OutriderError: the file system rejects the write.
    """
    check_writable(out)
    runs = read_runs(folders)
    write_file(out, render(runs))
    return runs
