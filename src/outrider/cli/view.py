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
    """One row per result. In a narrow terminal only names of files are folded; every other cell stays whole."""
    out = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    ties = any(result.stats.near_ties for _, result in rows)
    if any(label for label, _ in rows):
        out.add_column("", overflow="fold")
    out.add_column("guarantee", no_wrap=True)
    numbers = ["tokens", "escalated", "accepted", "by cloud", "corrected", "seconds", *["near ties"] * ties]
    for name in numbers:
        out.add_column(name, justify="right", min_width=min(len(name), 6))
    for label, result in rows:
        cells = _cells(result)
        out.add_row(*[label] * bool(out.columns[0].overflow == "fold"), result.guarantee, *(cells[n] for n in numbers))
    return out


def _cells(result: Result) -> dict[str, str]:
    stats = result.stats
    return {
        "tokens": str(len(result.token_ids)),
        "escalated": _percent(stats.escalation_rate),
        "accepted": _percent(stats.acceptance_rate),
        "by cloud": _percent(stats.cloud_share),
        "corrected": str(stats.corrected),
        "seconds": f"{stats.total_s:.2f}",
        "near ties": str(stats.near_ties),
    }


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.0f} %"


def show_title(console: Console, title: str) -> None:
    if title:
        console.print(Text(title, "bold"))


def show_warnings(console: Console, result: Result) -> None:
    for warning in result.warnings:
        console.print(Text(f"warning: {warning}", "magenta"), soft_wrap=True)


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
