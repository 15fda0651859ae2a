"""A real service on loopback, in a thread of its own: for tests of whatever talks to one, and for benchmarks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.cloud.server import Server, ServerConfig
from outrider.cloud.service import Service
from tests.support.ports import ReservedPort
from tests.support.processes import HANG_S

T = TypeVar("T")


@dataclass
class Served:
    """A running service."""

    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def service(self) -> Service:
        return self.server.service

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run something in the service's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result(HANG_S)

    def restart(self) -> None:
        """Stop it, and serve the same engine at the same port again: every session is lost."""
        self.server = self.run(_restarted(self.server))


@contextmanager
def serving(engine: Any, *, slots: int = 8, max_length: int = 256, **options: Any) -> Iterator[Served]:
    """Serve `engine`, with so many slots of `max_length` positions. options: fields of `ServerConfig`."""
    budget = slots * max_length * engine.position_bytes
    with ReservedPort() as port:
        options = {"host": "127.0.0.1", "port": port, "budget": budget, **options}
        with _running(Server(engine, ServerConfig(max_length=max_length, **options))) as served:
            yield served


@contextmanager
def _running(server: Server) -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="served", daemon=True)
    thread.start()
    served = Served(server, loop)
    try:
        served.run(server.start())
        yield served
    finally:
        served.run(served.server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _restarted(old: Server) -> Server:
    await old.stop()
    new = Server(old.service.engine, old._config)
    await new.start()
    return new
