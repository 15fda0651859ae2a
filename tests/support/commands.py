"""The command line within a test's process."""

from __future__ import annotations

from outrider.cli.app import app
from outrider.cli.exit_codes import run_guarded


def run_command(words: list[str]) -> int:
    """Return a command's exit code."""
    return run_guarded(lambda: app(words, exit_on_error=False, print_error=False, result_action="return_value"), words)
