"""A guard that admits one generating thread at a time, for engines that serve one caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import StateError


class ThreadGuard:
    """The threads with unfinished generations. engines: those in this process, None for a missing one."""

    def __init__(self, *engines: object) -> None:
        self._allows_threads = all(getattr(engine, "serves_threads", False) for engine in engines if engine is not None)
        self._lock = threading.Lock()
        self._running: list[int] = []  # a thread for each unfinished generation

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Register one generation until its end.

        One thread may interleave several generations. A generation may move between threads.

        Raises:
            StateError: another thread's generation is unfinished.
        """
        thread = threading.get_ident()
        with self._lock:
            if not self._allows_threads and any(other != thread for other in self._running):
                raise StateError(
                    "another thread is generating with this decoder: use one decoder and engine per thread, or wait "
                    "until its generation ends"
                )
            self._running.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(thread)
