"""Child processes of tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

HANG_S = 300  # s that only a hang exceeds


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and kill it at the end: one that hangs must fail its test, not stop the whole run."""
    with subprocess.Popen(command, text=True, **options) as child:
        try:
            yield child
        finally:
            child.kill()
