"""The outermost frame of the process: every error becomes a line on stderr and an exit code."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable, Sequence

from cyclopts import CycloptsError

from outrider.cli import interrupts
from outrider.cli.escape import escape_controls, print_error
from outrider.errors import InputError, OutriderError
from outrider.files import out_of_space

# Settings by the options that have another name.
OPTION_ALIASES = {
    "--no-repeat-ngram": "no_repeat_ngram_size",
    "--modes": "mode",
    "--idle": "idle_seconds",
    "--max-prompt": "max_prompt_tokens",
}
# Options by the option that appears in their error messages.
DEPENDENT_OPTIONS = {"--repetition-window": "--repetition-penalty"}


def run_guarded(run: Callable[[], int], argv: Sequence[str] = ()) -> int:
    """Run a command and return its exit code. An error after Ctrl-C counts as an interruption. argv: its words."""
    try:
        return run()
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return _print_error("interrupted", interrupts.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 (the process's outermost loop)
        if interrupts.is_interrupted():
            return _print_error("interrupted", interrupts.INTERRUPTED)
        return _failed(error, argv)


def _failed(error: Exception, argv: Sequence[str]) -> int:
    full = out_of_space(error)
    is_input = isinstance(error, (CycloptsError, InputError))
    if is_input and full is None:
        return _print_error(use_option_names(str(error), argv), 2)
    _show_traceback(error, argv)
    if isinstance(error, OutriderError) and not is_input:
        return _print_error(str(error), 1)
    if isinstance(error, MemoryError):
        return _print_error("out of memory", 1)
    if full is not None:  # stdout, or a library's file
        return _print_error(full, 1)
    return _print_error(f"unexpected {type(error).__name__}: {error} (see --verbose)", 1)


def use_option_names(message: str, argv: Sequence[str]) -> str:
    """Replace the names of settings by options in an error message.

    `top_k` becomes --top-k if that option, or an option that depends on it, is in `argv`.
    """
    options = {word.partition("=")[0] for word in argv if word.startswith("--")}
    for option in options | {DEPENDENT_OPTIONS[option] for option in options & DEPENDENT_OPTIONS.keys()}:
        name = OPTION_ALIASES.get(option, option[2:].replace("-", "_"))
        begins = rf"^{re.escape(name)}(?=[ :,])"  # inside the message, a plain word may not be a setting
        anywhere = rf"(?<![\w.-]){re.escape(name)}(?!\w)"
        message = re.sub(anywhere if "_" in name else begins, option, message)
    return message


def _show_traceback(error: Exception, argv: Sequence[str]) -> None:
    """Print the traceback with --verbose."""
    if logging.getLogger("outrider").level == logging.DEBUG or {"-v", "--verbose"} & set(argv):
        print(escape_controls("".join(traceback.format_exception(error))), end="", file=sys.stderr)  # noqa: T201


def _print_error(message: str, code: int) -> int:
    print_error(message)
    return code
