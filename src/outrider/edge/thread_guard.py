"""A guard that admits one generating thread at a time, for engines that serve one caller."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import StateError


class ThreadGuard:
    """The threads with unfinished generations. engines: those in this process, None for a missing one."""

    def __init__(self, *engines: object) -> None:
        self._allows_threads = all(getattr(engine, "serves_threads", False) for engine in engines if engine is not None)
        self._lock = threading.Lock()
        self._running: list[object] = []  # for each unfinished generation, its thread or group
        self._group: object = None

    def group(self) -> ThreadGuard:
        """Return this guard for threads that share the engines, and count as one thread together."""
        guard = copy.copy(self)
        guard._group = object()
        return guard

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Register one generation until its end.

        One thread may interleave several generations. A generation may move between threads.

        Raises:
            StateError: another thread's generation is unfinished.
        """
        owner = self._group or threading.get_ident()
        with self._lock:
            if not self._allows_threads and any(other != owner for other in self._running):
                raise StateError(
                    "another thread is generating with this decoder: use one decoder and engine per thread, or wait "
                    "until its generation ends or its stream is closed"
                )
            self._running.append(owner)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(owner)
