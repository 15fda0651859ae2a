"""Shell integration: defaults in help texts, and completion."""

from __future__ import annotations

from typing import Any, Literal

from cyclopts import App, Group

from outrider.cli.escape import print_error
from outrider.errors import SettingsError

Shell = Literal["bash", "zsh", "fish"]


def format_default(value: Any) -> str | None:
    """Return a default as a user types it, or None for a flag that is off and an empty list."""
    if value is None or value is False or value == ():
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def add_completion(app: App) -> None:
    """Add --install-completion."""

    def install_completion(shell: Shell | None = None) -> int:
        """Install completion of commands and options for your shell.

        Parameters
        ----------
        shell
            The shell. By default it is detected.
        """
        from cyclopts.completion.detect import ShellDetectionError

        try:
            path = app.install_completion(shell=shell)
        except (ShellDetectionError, OSError) as error:
            message = f"--install-completion: {error}; name the shell, as in --install-completion bash"
            raise SettingsError(message) from error
        print_error(f"wrote {path}: start a new shell to use it")
        return 0

    app.command(install_completion, name="--install-completion", group=Group("Shell", sort_key=9))
