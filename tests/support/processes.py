"""Child processes of tests, and waits for conditions."""

from __future__ import annotations

import asyncio
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
HANG_S = 300  # s that only a hang exceeds
POLL_S = 0.005


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and kill it at the end: one that hangs must fail its test, not stop the whole run."""
    with subprocess.Popen(command, text=True, **options) as child:
        try:
            yield child
        finally:
            child.kill()


def wait_until(condition: Callable[[], T]) -> T:
    """Wait until a condition is true, and return its value.

    Raises:
        AssertionError: it was still false after `HANG_S`.
    """
    deadline = time.monotonic() + HANG_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition was still false after {HANG_S} s"
        time.sleep(POLL_S)
    return value


async def until(condition: Callable[[], T]) -> T:
    """Wait as `wait_until` does, without blocking the event loop."""
    deadline = time.monotonic() + HANG_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"the condition was still false after {HANG_S} s"
        await asyncio.sleep(POLL_S)
    return value


def read_metric(url: str, name: str) -> float:
    """Return a figure without labels from the /metrics of the service at `url`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=HANG_S) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.split()[0] == name)
