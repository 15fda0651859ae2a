"""The process's outermost frame: every error becomes a line on stderr and an exit code."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from cyclopts import CycloptsError

from outrider.cli import interrupts
from outrider.cli.escape import complain, visible
from outrider.errors import InputError, OutriderError
from outrider.files import out_of_space

RENAMED = {"--no-repeat-ngram": "no_repeat_ngram_size", "--modes": "mode"}  # settings whose option has another name
NEEDED = {"--repetition-window": "--repetition-penalty"}  # options that messages on another one name


def guarded(run: Callable[[], int], typed: Sequence[str] = ()) -> int:
    """Run to an exit code. An error after Ctrl-C is treated as its consequence. typed: the command line."""
    try:
        return run()
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return _complain("interrupted", interrupts.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 (the process's outermost loop)
        if interrupts.happened():
            return _complain("interrupted", interrupts.INTERRUPTED)
        return _failed(error, typed)


def _failed(error: Exception, typed: Sequence[str]) -> int:
    full = out_of_space(error)
    is_input = isinstance(error, (CycloptsError, InputError))
    if is_input and full is None:
        return _complain(in_options(str(error), typed), 2)
    _show_traceback(error, typed)
    if isinstance(error, OutriderError) and not is_input:
        return _complain(str(error), 1)
    if isinstance(error, MemoryError):
        return _complain("out of memory", 1)
    if full is not None:  # stdout, or a library's file
        return _complain(full, 1)
    return _complain(f"unexpected {type(error).__name__}: {error} (see --verbose)", 1)


def in_options(message: str, typed: Sequence[str]) -> str:
    """Replace settings' names by options: `top_k` becomes --top-k if that option, or one that needs it, was given."""
    options = {word.partition("=")[0] for word in typed if word.startswith("--")}
    for option in options | {NEEDED[option] for option in options & NEEDED.keys()}:
        name = RENAMED.get(option, option[2:].replace("-", "_"))
        begins = rf"^{re.escape(name)}(?=[ :,])"  # further in, a plain word need not be a setting
        anywhere = rf"(?<![\w.-]){re.escape(name)}(?!\w)"
        message = re.sub(anywhere if "_" in name else begins, option, message)
    return message


def _show_traceback(error: Exception, typed: Sequence[str]) -> None:
    """With --verbose."""
    if logging.getLogger("outrider").level == logging.DEBUG or {"-v", "--verbose"} & set(typed):
        print(visible("".join(traceback.format_exception(error))), end="", file=sys.stderr)  # noqa: T201


def _complain(message: str, code: int) -> int:
    complain(message)
    return code
