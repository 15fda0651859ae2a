"""Handling of Ctrl-C: at any moment it ends the program with code 130 and without a traceback."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from outrider.cli.escape import print_error

INTERRUPTED = 130  # the exit code by the convention of shells
_state = {"happened": False}


def install() -> None:
    """Take over SIGINT, unless it is ignored (as under nohup)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    # After its exit hooks Python restores the default action of signals, which kills. The first hook runs last.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def exit_at_once() -> None:
    """End the process at Ctrl-C without an exception, from now on.

    A library or a half-made event loop could swallow an exception. The process must have no child process.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT while the process ends.

    The interpreter replaces Python's handlers by the default action before it has ended, and a second signal would
    then change the exit code.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def end(code: int) -> NoReturn:
    """Exit with this code, or at once with 130 after Ctrl-C, as interrupted threads may never end."""
    if is_interrupted():
        if code != INTERRUPTED:  # a library swallowed the exception
            print_error("interrupted")
        _leave()
    sys.exit(code)


def is_interrupted() -> bool:
    """Return whether Ctrl-C was pressed."""
    return _state["happened"]


def check() -> None:
    """Raise KeyboardInterrupt after Ctrl-C, as a library may have swallowed the exception while it loaded a model."""
    if is_interrupted():
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once, so that files and connections are closed. A second Ctrl-C ends the process."""
    _state["happened"] = True
    signal.signal(signal.SIGINT, lambda *_: _leave())
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # no messages about abandoned tasks
    raise KeyboardInterrupt


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    print_error("interrupted")
    _leave()


def _leave() -> NoReturn:
    """End the process without the interpreter's shutdown."""
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(INTERRUPTED)


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    """End the process if Python would swallow the interrupt, in a finaliser or a callback of the import system."""
    if isinstance(found.exc_value, KeyboardInterrupt):
        _exit(signal.SIGINT, None)
    if not is_interrupted():
        sys.__unraisablehook__(found)
