"""A server's start-up steps on stderr: a spinner on a terminal, else a line for each step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.cli.escape import one_line


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[str | None], None]]:
    """Yield a function that shows the next step; None ends the show. quiet: show nothing."""
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
    """Show the current step in a spinner; a finished step leaves a line with its seconds."""
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
