"""An event loop whose clock stands still while there is work, and jumps to the next timer when there is none.

For code whose sockets all end in the same loop: what takes time then is what was ordered, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from types import ModuleType
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
DELIVERY = 0.002  # s, of real time, in which loopback delivers what was sent before it counts as quiet


class _Selector(selectors.DefaultSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(DELIVERY)
        if not events:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """To be given to asyncio.Runner."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def monotonic() -> float:
    """The running loop's time, and the machine's where none runs."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let modules that imported `monotonic` ask the running loop instead."""
    for module in modules:
        monkeypatch.setattr(module, "monotonic", monotonic)
