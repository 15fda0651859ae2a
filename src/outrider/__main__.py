"""The entry point of `outrider` and `python -m outrider`. Ctrl-C never prints a traceback, not even during imports."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def _leave(*_: object) -> NoReturn:
    """Exit at once: before the command line is imported, there is nothing to clean up."""
    os._exit(130)


def main() -> None:
    """Import the command line and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup, which ignores it
        signal.signal(signal.SIGINT, _leave)
    from outrider.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
