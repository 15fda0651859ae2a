"""What a person sees: tokens coloured by who decided them, and a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.api import StreamEvent
from outrider.cli.escape import one_line
from outrider.decoding.result import Result
from outrider.decoding.sequence import Source

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


TEXT_COLUMNS = ("", "guarantee")
MAX_NAME_WIDTH = 24  # columns of a file name; if the table is too wide, other columns are left out
DROP_ORDER = ("corrected", "escalated", "near ties", "accepted", "seconds", "by cloud", "tokens")


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


def table(rows: Sequence[tuple[str, Result]], width: int) -> Table:
    """One row per result. In a narrow terminal columns are left out and names are folded, but no cell is cut."""
    cells = [{"": one_line(label), **_cells(result)} for label, result in rows]
    shown = _columns_that_fit(cells, width)
    out = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for name in shown:
        whole = {"overflow": "fold"} if name == "" else {"no_wrap": True}
        out.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", **whole)
    for row in cells:
        out.add_row(*(row[name] for name in shown))
    return out


def _columns_that_fit(cells: Sequence[dict[str, str]], width: int) -> list[str]:
    """Return the names of the columns that fit beside the file names, which get up to `MAX_NAME_WIDTH` columns."""
    empty = {"near ties": "0", "": ""}  # columns without news
    shown = [name for name in cells[0] if any(row[name] != empty.get(name) for row in cells)]
    wide = {name: max(cell_len(text) for text in (name, *(row[name] for row in cells))) for name in shown}
    wide[""] = min(wide.get("", 0), MAX_NAME_WIDTH)
    for name in DROP_ORDER:
        if sum(wide[name] + 2 for name in shown) <= width:
            break
        if name in shown:
            shown.remove(name)
    return shown


def _cells(result: Result) -> dict[str, str]:
    stats = result.stats
    return {
        "guarantee": result.guarantee,
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


def show_warnings(console: Console, result: Result, name: str = "") -> None:
    """Print a result's warnings; name: of the recording that they concern."""
    for warning in result.warnings:
        console.print(Text(f"warning: {name}{': ' if name else ''}{warning}", "magenta"), soft_wrap=True)


class Strip:
    """Tokens as they come, go and are decided; what is provisional is dim."""

    def __init__(self) -> None:
        self._tokens: list[tuple[str, str]] = []

    def update(self, event: StreamEvent) -> None:
        """Show what became of one token."""
        if event.kind == "revised":
            del self._tokens[event.index :]
        style = "dim" if event.kind == "provisional" else STYLES[event.source]
        self._tokens[event.index : event.index + 1] = [(event.text, style)]

    @property
    def text(self) -> Text:
        return Text.assemble(*self._tokens)
