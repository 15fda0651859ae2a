"""Writing to a terminal: control sequences in text from outside (peers, models, file names) are escaped here."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from outrider.cli.escape import escape_controls, to_json

UNLIMITED_WIDTH = 10_000  # columns: lines of piped output are never cut or folded


class Terminal(Console):
    """A console that escapes control sequences in everything that it renders, and takes no markup from text."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)
        if not self.is_terminal:  # COLUMNS is ignored: a parent with readline exports it
            self.width = UNLIMITED_WIDTH

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_controls(text), **options)  # before it is measured: escapes are wider

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))


STDERR = Terminal(stderr=True)


def stdout() -> Terminal:
    """Return a console for sys.stdout as it is now."""
    return Terminal()


def print_json(value: dict[str, Any]) -> None:
    """Print one object on one line."""
    print(to_json(value), flush=True)  # noqa: T201


def print_message(message: str, style: str = "") -> None:
    """Print a message to stderr. Further lines are indented, so that text inside it cannot forge a message."""
    STDERR.print(message.replace("\n", "\n  "), style=style or None, soft_wrap=True)


class LogHandler(logging.Handler):
    """Writes log records to stderr, one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_message(f"{record.levelname.lower()}: {self.format(record)}")
        except Exception:  # noqa: BLE001 (as every handler of the standard library does)
            self.handleError(record)
