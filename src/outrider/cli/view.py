"""What a person sees: tokens coloured by who decided them, and a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.api import StreamEvent
from outrider.core.outcome import Result
from outrider.core.sequence import Source

STYLES = {
    Source.EDGE: "yellow",
    Source.SAMPLED: "bold yellow",
    Source.ACCEPTED: "green",
    Source.CORRECTION: "bold red",
    Source.BONUS: "cyan",
}
NAMES = {
    Source.EDGE: "edge, unverified",
    Source.SAMPLED: "edge, drawn to leave a loop",
    Source.ACCEPTED: "drafted, verified",
    Source.CORRECTION: "corrected",
    Source.BONUS: "bonus",
}


def coloured(pieces: Iterable[str], sources: Iterable[Source]) -> Text:
    """The text, each token's piece in the colour of who decided it."""
    text = Text()
    for piece, source in zip(pieces, sources, strict=True):
        text.append(piece, STYLES[source])
    return text


def legend(sources: Iterable[Source]) -> Text:
    """The colours that occur, named."""
    present = set(sources)
    parts = [Text(NAMES[source], STYLES[source]) for source in Source if source in present]
    return Text(" · ").join(parts)


def table(rows: Sequence[tuple[str, Result]]) -> Table:
    """One row per result."""
    out = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for name in ("", "guarantee", "tokens"):
        out.add_column(name, justify="left" if name != "tokens" else "right")
    for name in ("escalated", "accepted", "by cloud", "corrected", "seconds"):
        out.add_column(name, justify="right")
    for label, result in rows:
        out.add_row(label, *_cells(result))
    return out


def _cells(result: Result) -> list[str]:
    stats = result.stats
    rates = [_percent(r) for r in (stats.escalation_rate, stats.acceptance_rate, stats.cloud_share)]
    ties = f", {stats.near_ties} near ties" if stats.near_ties else ""
    return [result.guarantee + ties, str(len(result.token_ids)), *rates, str(stats.corrected), f"{stats.total_s:.2f}"]


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.0f} %"


def show(console: Console, title: str, pieces: Sequence[str], result: Result) -> None:
    """One result: its title, its coloured text, its warnings."""
    show_title(console, title)
    console.print(coloured(pieces, result.sources), soft_wrap=True)
    show_warnings(console, result)


def show_title(console: Console, title: str) -> None:
    if title:
        console.print(Text(title, "bold"))


def show_warnings(console: Console, result: Result) -> None:
    for warning in result.warnings:
        console.print(Text(f"warning: {warning}", "magenta"))


class Strip:
    """Tokens as they come, go and are decided; what is provisional is dim."""

    def __init__(self) -> None:
        self._tokens: list[tuple[str, str]] = []

    def take(self, event: StreamEvent) -> None:
        """Show what became of one token."""
        if event.kind == "revised":
            del self._tokens[event.index :]
        style = "dim" if event.kind == "provisional" else STYLES[event.source]
        self._tokens[event.index : event.index + 1] = [(event.text, style)]

    @property
    def text(self) -> Text:
        return Text.assemble(*self._tokens)
