"""A link for code that has no event loop: benchmarks, and tests with synchronous clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from types import TracebackType
from typing import TypeVar

from outrider.netem.conditions import Conditions
from outrider.netem.link import NO_CONDITIONS, Link

T = TypeVar("T")


class LinkThread:
    """A Link in a thread and event loop of its own, as a context manager with methods for any thread.

    It listens on 127.0.0.1 at `port`. A change is in force when the method returns. The thread shares the interpreter
    lock: while another thread computes in pure Python, a hop may wait for sys.getswitchinterval() (5 ms).

    Raises:
        OSError: on entering, if the link cannot listen.
    """

    def __init__(self, host: str, port: int, conditions: Conditions = NO_CONDITIONS, *, seed: int = 0) -> None:
        self._link = Link(host, port, conditions, seed=seed)
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = Thread(target=lambda: asyncio.run(self._run()), name="outrider-link", daemon=True)

    def __enter__(self) -> LinkThread:
        self._thread.start()
        self._loop, self._stop_event = self._started.result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop_event.set)
        self._thread.join()

    @property
    def port(self) -> int | None:
        """Port that the link listens on."""
        return self._link.port

    @property
    def up(self) -> int:
        """Number of bytes forwarded from clients to the target."""
        return self._link.up

    @property
    def down(self) -> int:
        """Number of bytes forwarded from the target to clients."""
        return self._link.down

    @property
    def connections(self) -> int:
        """Number of connections accepted so far."""
        return self._link.connections

    @property
    def conditions(self) -> Conditions:
        """Present conditions. New ones apply to bytes that have not passed the bottleneck."""
        return self._link.conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        """Set the conditions."""
        self._call(lambda: setattr(self._link, "conditions", conditions))

    def cut(self) -> None:
        """Abort all present connections, as `Link.cut` does."""
        self._call(self._link.cut)

    def stall(self, seconds: float) -> None:
        """Hold all bytes back for a time, as `Link.stall` does."""
        self._call(lambda: self._link.stall(seconds))

    def block(self, blocked: bool) -> None:
        """Block or unblock the link, as `Link.block` does."""
        self._call(lambda: self._link.block(blocked))

    def _call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _run(self) -> None:
        stop = asyncio.Event()
        try:
            await self._link.start()
        except OSError as error:
            self._started.set_exception(error)
            return
        self._started.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        await self._link.close()
