"""Rendering of results: tokens coloured by their source, a table of statistics, and streaming to a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.api import SpeculativeDecoder, StreamEvent
from outrider.cli.escape import escape_controls, one_line
from outrider.cli.options import Output
from outrider.cli.terminal import STDERR, borderless_table, stdout
from outrider.decoding.gain import CloudBaseline, Gain
from outrider.decoding.result import Result
from outrider.decoding.sequence import Source
from outrider.prompts.chat import PromptLike

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
MAX_NAME_WIDTH = 24  # columns of a file name
DROP_ORDER = ("corrected", "escalated", "near ties", "accepted", "seconds", "by cloud", "tokens")


def coloured(pieces: Iterable[str], sources: Iterable[Source]) -> Text:
    """Return the text, each token's piece in the colour of its source."""
    text = Text()
    for piece, source in zip(pieces, sources, strict=True):
        text.append(piece, STYLES[source])
    return text


def legend(sources: Iterable[Source]) -> Text:
    """Name the colours of the sources that occur."""
    present = set(sources)
    parts = [Text(NAMES[source], STYLES[source]) for source in Source if source in present]
    return Text(" · ").join(parts)


def table(rows: Sequence[tuple[str, Result]], width: int) -> Table:
    """Return a table with one row per result.

    In a narrow terminal columns are left out and names are folded, but no cell is cut.
    """
    cells = [{"": one_line(label), **_cells(result)} for label, result in rows]
    shown = _columns_that_fit(cells, width)
    out = borderless_table()
    for name in shown:
        whole = {"overflow": "fold"} if name == "" else {"no_wrap": True}
        out.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", **whole)
    for row in cells:
        out.add_row(*(row[name] for name in shown))
    return out


def _columns_that_fit(cells: Sequence[dict[str, str]], width: int) -> list[str]:
    """Return the names of the columns that fit next to the file names, which get up to `MAX_NAME_WIDTH` columns."""
    empty = {"near ties": "0", "": ""}  # a column in which every cell has this value is left out
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
    """Print a title in bold, unless it is empty."""
    if title:
        console.print(Text(title, "bold"))


def show_warnings(console: Console, result: Result, name: str = "") -> None:
    """Print a result's warnings. name: the recording that they concern."""
    for warning in result.warnings:
        console.print(Text(f"warning: {name}{': ' if name else ''}{warning}", "magenta"), soft_wrap=True)


def is_interactive(output: Output) -> bool:
    """Return whether stdout is a terminal, on which tokens are shown as they arrive."""
    return not output.json and stdout().is_terminal


class Strip:
    """The tokens of a stream as they are drafted, revised and decided. Provisional tokens are dim."""

    def __init__(self) -> None:
        self._tokens: list[tuple[str, str]] = []

    def update(self, event: StreamEvent) -> None:
        """Apply one event to its token."""
        if event.kind == "revised":
            del self._tokens[event.index :]
        style = "dim" if event.kind == "provisional" else STYLES[event.source]
        self._tokens[event.index : event.index + 1] = [(event.text, style)]

    @property
    def text(self) -> Text:
        """The tokens so far, with their styles."""
        return Text.assemble(*self._tokens)


def stream_to_terminal(decoder: SpeculativeDecoder, model_input: PromptLike, settings: dict[str, Any]) -> Result:
    """Generate on a terminal. Tokens appear when they are drafted, and take their colour when they are decided."""
    strip = Strip()
    stream = decoder.stream(model_input, **settings)
    with Live(console=stdout(), vertical_overflow="visible", refresh_per_second=10) as live:
        shown: Any = ""
        while True:
            try:
                strip.update(next(stream))
            except StopIteration as end:
                result: Result = end.value
                live.update(coloured(result.visible_pieces, result.sources))
                return result
            text = strip.text
            live.update(text, refresh=not shown)  # the first token at once, others ten times a second
            shown = text


def print_text(title: str, result: Result) -> None:
    """Print a text to a pipe or a file, under its title if there are several texts."""
    lines = [title] if title else []
    text = "".join(result.visible_pieces) if result.text is None else result.text
    print("\n".join([*lines, escape_controls(text), *[""] * bool(title)]), flush=True)  # noqa: T201


def print_summary(done: list[tuple[str, Result]], baseline: CloudBaseline | None = None) -> None:
    """Print the tokens' sources and the gain: below the text on a terminal, and otherwise to stderr."""
    console = stdout() if stdout().is_terminal else STDERR
    if console.is_terminal:
        console.print(legend(source for _, result in done for source in result.sources))
    console.print(table(done, console.width))
    if gain_text := Gain.of(result for _, result in done).describe(baseline):
        console.print(gain_text, style="bold", soft_wrap=True)
