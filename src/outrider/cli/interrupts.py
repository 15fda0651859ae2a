"""Ctrl-C at any moment ends the program with code 130 and without a traceback."""

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

INTERRUPTED = 130  # the exit code, as shells have it
_state = {"happened": False}


def install() -> None:
    """Take over SIGINT, unless it is ignored (as under nohup)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    # After its exit hooks, of which the first is the last to run, Python restores signals' default action: to kill.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def exit_at_once() -> None:
    """End the process at Ctrl-C without an exception, which a library or a half-made event loop could swallow.

    For a process that holds no child.
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
    """Exit with this code, or at once with 130 if Ctrl-C was pressed, as threads that it interrupted may never end."""
    if is_interrupted():
        if code != INTERRUPTED:  # a library swallowed it
            print_error("interrupted")
        _leave()
    sys.exit(code)


def is_interrupted() -> bool:
    """Return whether Ctrl-C was pressed."""
    return _state["happened"]


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed: a library that was loading a model may have swallowed it."""
    if is_interrupted():
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once, in order to close what is open; a second Ctrl-C ends the process at once."""
    _state["happened"] = True
    signal.signal(signal.SIGINT, lambda *_: _leave())
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of tasks whose results are no longer awaited
    raise KeyboardInterrupt


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    print_error("interrupted")
    _leave()


def _leave() -> NoReturn:
    """End the process without the interpreter's own end."""
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(INTERRUPTED)


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    """End the process where Python would swallow the interrupt: in a finaliser or a callback of the import system."""
    if isinstance(found.exc_value, KeyboardInterrupt):
        _exit(signal.SIGINT, None)
    if not is_interrupted():
        sys.__unraisablehook__(found)
