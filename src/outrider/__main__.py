"""The entry point of `outrider` and `python -m outrider`. Ctrl-C leaves no traceback, from the first line on."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def _leave(*_: object) -> NoReturn:
    """End at once: until the command line is imported there is nothing to clean up."""
    os._exit(130)


def main() -> None:
    """Import the command line and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it may be ignored, as under nohup
        signal.signal(signal.SIGINT, _leave)
    from outrider.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
