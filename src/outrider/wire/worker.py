"""A thread with an event loop and a link to each host: what every connection to a cloud is built on.

What is sent ends at a Unix socket in this process; the link behind it carries the bytes to the host, counts every one
of them, and is where `--net` emulates a network. TLS runs through it untouched.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from outrider.errors import CloudError, StateError
from outrider.files import TemporaryFolder
from outrider.netem.conditions import Conditions
from outrider.netem.link import Link
from outrider.wire.hosts import ascii_host
from outrider.wire.ledger import Account

T = TypeVar("T")

GOODBYE = 1.0  # s that closing frames may take to leave
GOODBYE_NAME = "outrider-goodbye"  # tasks of this name may finish while the connection is closed


@dataclass(frozen=True)
class Line:
    """The way to one host. path: the Unix socket where it begins. account: the books of what crosses it."""

    path: str
    link: Link
    account: Account = field(default_factory=Account)


class Worker:
    """`run` brings work into the thread. name: as errors call it. lines: one to each host, in their order."""

    def __init__(self, name: str, hosts: Sequence[tuple[str, int]], net: Conditions) -> None:
        self.name = name
        self._process = os.getpid()
        self._folder = TemporaryFolder()
        weakref.finalize(self, self._folder.close)  # also without close()
        self.lines = [
            Line(os.path.join(self._folder.path, f"s{n}"), Link(ascii_host(host), port, net))
            for n, (host, port) in enumerate(hosts)
        ]
        self._lock = threading.Lock()
        self._ended = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-connection", daemon=True)
        self._thread.start()
        for line in self.lines:
            self.run(line.link.start_unix(line.path)).result()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the worker's loop.

        Raises:
            CloudError: the connection is closed; if it closes before the work is done, the future raises it.
            StateError: the connection was made before a fork, in another process.
        """
        if self.inherited:
            work.close()
            raise StateError(
                f"the connection to {self.name} was made in process {self._process}, before a fork, and this process "
                f"({os.getpid()}) has no thread that serves it: connect again here"
            )
        with self._lock:
            if self._ended:
                work.close()
                raise self._disconnected()
            return asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop)

    @property
    def inherited(self) -> bool:
        """Return whether this process is a fork of the one that made the connection. Threads do not survive a fork."""
        return os.getpid() != self._process

    def close(self) -> None:
        """End running calls, the link and the thread. An inherited connection belongs to the parent and stays open."""
        if self.inherited:
            return
        with self._lock:
            if self._ended:
                return
            self._ended = True
            stopped = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        stopped.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.close()

    async def hang_up(self) -> None:
        """Close what speaks through the link, in the loop; called once, by `close`."""

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._ended:
                raise
            raise self._disconnected() from None
        finally:
            self._tasks.discard(task)

    def _disconnected(self) -> CloudError:
        return CloudError(f"{self.name} was disconnected")

    async def _stop(self) -> None:
        """Goodbyes may leave; who waits for an answer is told that none comes."""
        goodbyes = {task for task in self._tasks if task.get_name() == GOODBYE_NAME}
        for task in self._tasks - goodbyes:
            task.cancel()
        if goodbyes:
            await asyncio.wait(goodbyes, timeout=GOODBYE)
        await self.hang_up()
        for line in self.lines:
            await line.link.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GOODBYE)
