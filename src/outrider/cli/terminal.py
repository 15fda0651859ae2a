"""Output to a terminal. Control sequences in text from outside (peers, models, file names) are escaped here."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from outrider.cli.escape import escape_controls, to_json

if TYPE_CHECKING:
    from outrider.cli.options import Output

UNLIMITED_WIDTH = 10_000  # columns: lines of piped output are never cut or folded


class Terminal(Console):
    """A console that escapes control sequences in everything that it renders, and takes no markup from text."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)
        if not self.is_terminal:  # COLUMNS is ignored: a parent with readline exports it
            self.width = UNLIMITED_WIDTH

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a text before rich measures it, as escapes are wider than the characters that they replace."""
        return super().render_str(escape_controls(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of an object, with escaped texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))


STDERR = Terminal(stderr=True)


def stdout() -> Terminal:
    """Return a console for sys.stdout as it is now."""
    return Terminal()


def borderless_table(columns: Sequence[str] = (), texts: Container[str] = (), **options: Any) -> Table:
    """Return an empty table. texts: the columns without numbers. options: of each column."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in texts else "right", **options)
    return table


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line."""
    print(to_json(value), flush=True)  # noqa: T201


def print_message(message: str, style: str = "") -> None:
    """Print a message to stderr. Further lines are indented, so that text inside it cannot forge a message."""
    STDERR.print(message.replace("\n", "\n  "), style=style or None, soft_wrap=True)


class LogHandler(logging.Handler):
    """A handler that writes log records to stderr, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's level and message."""
        try:
            print_message(f"{record.levelname.lower()}: {self.format(record)}")
        except Exception:  # noqa: BLE001 (as every handler of the standard library does)
            self.handleError(record)


def configure_logging(output: Output) -> None:
    """Log warnings to stderr. With --verbose, also log details and the model library's messages and progress bars."""
    from transformers.utils import logging as transformers_logging

    logging.basicConfig(level=logging.WARNING, handlers=[LogHandler()], format="%(message)s")
    logging.captureWarnings(True)  # so that control sequences in a library's warning are escaped as well
    logging.getLogger("outrider").setLevel(logging.DEBUG if output.verbose else logging.NOTSET)
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    if not output.verbose:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
