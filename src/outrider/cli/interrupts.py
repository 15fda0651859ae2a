"""Ctrl-C at any moment ends the program with code 130 and without a traceback."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

from outrider.cli.escape import complain

INTERRUPTED = 130  # the exit code, as shells have it
_state = {"happened": False}


def install() -> None:
    """Take over SIGINT, unless it is ignored (as under nohup)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable


def exit_at_once() -> None:
    """End the process at Ctrl-C without an exception, which a library or a half-made event loop could swallow.

    For a process that holds no child and no temporary file.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit)


def end(code: int) -> NoReturn:
    """Exit with this code, or with 130 after Ctrl-C: then at once, as threads that were interrupted may never end.

    From here on Ctrl-C ends the process: an exception would make the interpreter's own end a death by the signal.
    """
    if happened():
        _leave()
    exit_at_once()
    sys.exit(code)


def happened() -> bool:
    """Return whether Ctrl-C was pressed."""
    return _state["happened"]


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed: a library that was loading a model may have swallowed it."""
    if happened():
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt once, in order to close what is open; a second Ctrl-C ends the process at once."""
    _state["happened"] = True
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of tasks whose results are no longer awaited
    raise KeyboardInterrupt


def _exit(number: int, frame: FrameType | None) -> None:
    complain("interrupted")
    os._exit(INTERRUPTED)


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    """End the process where Python would swallow the interrupt: in a finaliser or a callback of the import system."""
    if isinstance(found.exc_value, KeyboardInterrupt):
        complain("interrupted")
        os._exit(INTERRUPTED)
    if not happened():
        sys.__unraisablehook__(found)
