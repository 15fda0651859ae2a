"""Progress on stderr: the start-up steps of a server, and a bar for a series of outputs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outrider.cli.escape import one_line


@contextmanager
def startup_steps(*, quiet: bool = False) -> Iterator[Callable[[str | None], None]]:
    """Yield a function that shows the next step, or ends the display when it is given None.

    A terminal shows a spinner, and other outputs get one line for each step. quiet: show nothing.
    """
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _spinner() as step:
            yield step
    else:
        yield _print_step


def _print_step(words: str | None) -> None:
    if words is not None:
        print(one_line(f"outrider: {words}"), file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def _spinner() -> Iterator[Callable[[str | None], None]]:
    """Show the current step in a spinner. A finished step leaves a line with its seconds."""
    from rich.text import Text

    from outrider.cli.terminal import STDERR

    status = STDERR.status("")
    current: list[tuple[str, float]] = []

    def step(words: str | None) -> None:
        if current:
            name, began = current.pop()
            STDERR.print(f"{name} ({time.monotonic() - began:.1f} s)", style="dim")
        if words is None:
            status.stop()
            return
        current.append((words, time.monotonic()))
        status.update(Text(words))
        status.start()

    try:
        yield step
    finally:
        status.stop()


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], Any]]:
    """Yield a function that advances a progress bar by one. The bar appears on a terminal if `total` is above 0."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from outrider.cli.terminal import STDERR

    if not total or not STDERR.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=STDERR, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
