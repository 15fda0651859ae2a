"""From a loaded engine to a listening process, and its orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2

from outrider.cloud.batcher import Batcher
from outrider.cloud.figures import listen
from outrider.cloud.health import health_handlers
from outrider.cloud.limits import Limits
from outrider.cloud.metrics import Metrics
from outrider.cloud.security import Tokens
from outrider.cloud.service import Service
from outrider.cloud.transport import options
from outrider.engines.base import Hosted
from outrider.errors import SettingsError
from outrider.wire import schema
from outrider.wire.hosts import ascii_host, bracketed
from outrider.wire.tls import ServerTls

log = logging.getLogger(__name__)

EVERYWHERE = "::"
ACTIVE = 5.0  # s; a session that asked for nothing for so long is not waited for
LAST_WORDS = 0.2  # s between not-serving and the first check of whether everyone has left


@dataclass(frozen=True)
class Serving:
    """How a service runs. budget: bytes for KV slots. max_length: positions of a session. grace: s to drain."""

    host: str
    port: int
    limits: Limits = field(default_factory=Limits)
    tokens: Tokens | None = None
    tls: ServerTls | None = None
    budget: int = 2**30
    max_length: int = 4096
    metrics_at: tuple[str, int] | None = None
    grace: float = 30.0


class Server:
    """One service on one address. `port` is known once it is started."""

    def __init__(self, engine: Hosted, serving: Serving) -> None:
        self._serving = serving
        self.metrics = Metrics()
        slots = engine.reserve(serving.budget, serving.max_length)
        max_length = min(serving.max_length, engine.max_length or serving.max_length)
        log.info("slots reserved", extra={"slots": slots, "tokens": max_length, "bytes": serving.budget})
        self._batcher = Batcher(engine, slots, self.metrics)
        self.service = Service(
            engine,
            self._batcher,
            limits=serving.limits,
            metrics=self.metrics,
            tokens=serving.tokens,
            max_length=max_length,
        )
        self._health = health.aio.HealthServicer()
        self._upkeep: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            SettingsError: the address cannot be bound.
        """
        serving = self._serving
        self._grpc = grpc.aio.server(options=options(serving.limits))
        self._grpc.add_generic_rpc_handlers((self.service.handlers(), health_handlers(self._health)))
        try:
            self.port = self._bind(_address(serving.host, serving.port))
            if serving.metrics_at is not None:
                self.metrics.serve(*serving.metrics_at, healthy=lambda: not self.service.draining)
        except SettingsError:
            await self.stop()
            raise
        self._batcher.start()
        await self._grpc.start()
        await self._serve_health(health_pb2.HealthCheckResponse.SERVING)
        self._upkeep = asyncio.create_task(self.service.upkeep())
        self._upkeep.add_done_callback(_report)

    async def drain(self) -> None:
        """Take no new sessions, let those at work finish for up to `grace` seconds, then end."""
        await self._serve_health(health_pb2.HealthCheckResponse.NOT_SERVING)  # first: balancers look elsewhere
        self.service.draining = True
        log.info("draining", extra={"sessions": len(self.service.sessions)})
        deadline = asyncio.get_running_loop().time() + self._serving.grace
        await asyncio.sleep(min(LAST_WORDS, self._serving.grace))
        while self.service.sessions.active(ACTIVE) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        await self.stop()

    async def stop(self) -> None:
        """End it now. Whoever comes second waits for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await self._grpc.stop(0.1)
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        await asyncio.to_thread(self._batcher.stop)
        self.metrics.close()
        log.info("stopped")

    def _bind(self, address: str) -> int:
        tls = self._serving.tls
        try:
            if tls is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise SettingsError(f"cannot listen on {address}: is it taken, or not this machine's?") from error

    async def _serve_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", schema.SERVICE):
            await self._health.set(name, status)


async def run(engine: Hosted, serving: Serving, listening: Callable[[Server], None]) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends it at once.

    Returns 0, or 128 + the signal's number if it came before this listened.
    """
    stop, hurry, early = asyncio.Event(), asyncio.Event(), 0
    loop = asyncio.get_running_loop()

    def asked(number: int) -> None:
        nonlocal early
        early = 0 if listens else early or 128 + number
        (hurry if stop.is_set() else stop).set()

    listens = False
    for number in (signal.SIGTERM, signal.SIGINT):  # first: an exception from a handler would be lost in a task
        loop.add_signal_handler(number, asked, number)
    server = Server(engine, serving)
    await server.start()
    if stop.is_set():
        await server.stop()
        return early
    listens = True
    listening(server)
    await stop.wait()
    draining = asyncio.create_task(server.drain())
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await server.stop()
    else:
        draining.result()
    hurrying.cancel()
    return 0


def check_free(host: str, port: int) -> None:
    """Check that an address can be bound, without listening.

    Raises:
        SettingsError: the address is in use or not this machine's, or the port is not permitted.
    """
    try:
        listen(host, port).close()
    except (OSError, UnicodeError) as error:
        where = f"{bracketed(host) or 'every interface'}, port {port}"
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise SettingsError(f"cannot listen on {where}: {reason}") from error


def _address(host: str, port: int) -> str:
    """As gRPC wants it. "" is every interface: gRPC takes [::] for both kinds of addresses, and cannot bind ""."""
    return f"{bracketed(ascii_host(host) or EVERYWHERE)}:{port}"


def _report(upkeep: asyncio.Task[None]) -> None:
    """A service that no longer expires sessions must not look well."""
    if not upkeep.cancelled() and upkeep.exception() is not None:
        log.error("upkeep has ended", exc_info=upkeep.exception())
