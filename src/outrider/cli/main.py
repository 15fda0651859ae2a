"""The process of `outrider`. Exit codes: 0 success, 1 failure, 2 wrong usage or input, 130 Ctrl-C."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from functools import partial
from typing import Any

from outrider.cli import interrupts
from outrider.cli.app import app
from outrider.cli.exit_codes import run_guarded


def main() -> None:
    """Parse the command line and run the command. Turn every error into a line on stderr and an exit code."""
    words, code = sys.argv[1:], interrupts.INTERRUPTED
    try:
        try:
            code = run_guarded(partial(_run, words), words)
        finally:
            interrupts.exit_at_once()
    except KeyboardInterrupt:  # raised outside of `run_guarded`; it cannot occur twice
        pass
    interrupts.end(code)


def _run(tokens: list[str]) -> int:
    interrupts.install()  # here, where an exception of the handler is caught
    # Until models are loaded, thousands of modules hold no garbage, and collection costs a seventh of the time.
    gc.disable()
    signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for terminals and pipes that are not UTF-8
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars of the model libraries in a log
    result: Any = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    sys.stdout.flush()  # here, where an error of the file system is still reported
    return result if isinstance(result, int) else 0


def _terminated(number: int, frame: object) -> None:
    """Exit through the cleanup handlers, which end a cloud in a process of its own."""
    interrupts.ignore_signals()
    sys.exit(128 + number)
