"""A thread with an event loop, for all connections to a cloud."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import TypeVar

from outrider.errors import CloudError, StateError
from outrider.transport.endpoint import TCP, Endpoint, Network

T = TypeVar("T")

CLOSE_TIMEOUT = 1.0  # s for closing frames to be sent
CLOSING_TASK_NAME = "outrider-goodbye"  # `close` waits for tasks of this name


class EventLoopThread:
    """A thread that runs coroutines. name: the server, for error messages. endpoints: one per host, in order."""

    def __init__(self, name: str, hosts: Sequence[tuple[str, int]], network: Network = TCP) -> None:
        self.name = name
        self._process = os.getpid()
        self.endpoints = [Endpoint(host, port, network) for host, port in hosts]
        self._network = network
        self._lock = threading.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[object]] = set()
        self._loop = asyncio.SelectorEventLoop()  # other loops bypass the methods of CountingSocket
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-connection", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[None, None, T]) -> Future[T]:
        """Run a coroutine in the thread's event loop.

        Raises:
            CloudError: the connection is closed. The future raises it too, if the connection closes during the work.
            StateError: the connection was made before a fork, in another process.
        """
        if self.is_forked:
            work.close()
            raise StateError(
                f"the connection to {self.name} was made in process {self._process}, before a fork, and this process "
                f"({os.getpid()}) has no thread that serves it: connect again here"
            )
        with self._lock:
            if self._closed:
                work.close()
                raise self._disconnected()
            return asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop)

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the one that made the connection. Threads do not survive a fork."""
        return os.getpid() != self._process

    def close(self) -> None:
        """End running calls, all connections and the thread. After a fork, the parent's connections stay open."""
        if self.is_forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            stopped = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        stopped.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def close_clients(self) -> None:
        """Close the clients of the endpoints, in the event loop. `close` calls it once."""

    async def _until_closed(self, work: Coroutine[None, None, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise self._disconnected() from None
        finally:
            self._tasks.discard(task)

    def _disconnected(self) -> CloudError:
        return CloudError(f"{self.name} was disconnected")

    async def _stop(self) -> None:
        """Cancel the running calls, wait for the closing tasks, and close the clients."""
        closing = {task for task in self._tasks if task.get_name() == CLOSING_TASK_NAME}
        for task in self._tasks - closing:
            task.cancel()
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_TIMEOUT)
        await self.close_clients()
        await self._network.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT)
