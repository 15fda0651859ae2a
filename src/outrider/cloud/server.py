"""The cloud server process: start, draining, and end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2

from outrider.cloud.batcher import Batcher, call_each
from outrider.cloud.channel_options import server_options
from outrider.cloud.health import health_handlers
from outrider.cloud.limits import Limits
from outrider.cloud.metrics import Metrics
from outrider.cloud.metrics_server import listen
from outrider.cloud.service import Service
from outrider.engines.base import ServableEngine
from outrider.engines.grammars import prepare
from outrider.errors import SettingsError
from outrider.protocol import schema
from outrider.serving.tokens import Tokens
from outrider.transport.hosts import ascii_host, bracket_host
from outrider.transport.tls import ServerTls

log = logging.getLogger(__name__)

ANY_ADDRESS = "::"
ACTIVE_WINDOW_S = 5.0  # s; draining does not wait for sessions without a request for so long
DRAIN_DELAY_S = 0.2  # s between not-serving and the first check for active sessions


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of a server. budget: bytes for KV slots. max_length: positions of a session. grace: s to drain."""

    host: str
    port: int
    limits: Limits = field(default_factory=Limits)
    tokens: Tokens | None = None
    tls: ServerTls | None = None
    budget: int = 2**30
    max_length: int = 4096
    metrics_address: tuple[str, int] | None = None
    grace: float = 30.0


class Server:
    """One service on one address. `port` is 0 until it is started."""

    def __init__(self, engine: ServableEngine, config: ServerConfig) -> None:
        self._config = config
        self.metrics = Metrics()
        prepare(engine)
        slots = engine.reserve(config.budget, config.max_length)
        max_length = min(config.max_length, engine.max_length or config.max_length)
        log.info("slots reserved", extra={"slots": slots, "tokens": max_length, "bytes": config.budget})
        self._batcher = Batcher(engine, slots, self.metrics)
        limits, tokens, metrics = config.limits, config.tokens, self.metrics
        self.service = Service(
            engine, self._batcher, limits=limits, metrics=metrics, tokens=tokens, max_length=max_length
        )
        self._health = health.aio.HealthServicer()
        self._housekeeping: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Bind the addresses and begin to serve.

        Raises:
            SettingsError: an address cannot be bound.
        """
        config = self._config
        self._grpc = grpc.aio.server(options=server_options(config.limits))
        self._grpc.add_generic_rpc_handlers((self.service.handlers(), health_handlers(self._health)))
        try:
            # gRPC takes [::] for every interface, IPv4 and IPv6, and cannot bind "".
            self.port = self._bind(f"{bracket_host(ascii_host(config.host) or ANY_ADDRESS)}:{config.port}")
            if config.metrics_address is not None:
                self.metrics.serve(*config.metrics_address, healthy=lambda: not self.service.draining)
        except SettingsError:
            await self.stop()
            raise
        loop = asyncio.get_running_loop()
        self._batcher.start(lambda outcomes: loop.call_soon_threadsafe(call_each, outcomes))
        await self._grpc.start()
        await self._serve_health(health_pb2.HealthCheckResponse.SERVING)
        self._housekeeping = asyncio.create_task(self.service.housekeeping())
        self._housekeeping.add_done_callback(_log_failure)

    async def drain(self) -> None:
        """Refuse new sessions, let active ones finish for up to `grace` seconds, then stop."""
        await self._serve_health(health_pb2.HealthCheckResponse.NOT_SERVING)  # first, so that load balancers react
        self.service.draining = True
        log.info("draining", extra={"sessions": len(self.service.sessions)})
        deadline = asyncio.get_running_loop().time() + self._config.grace
        await asyncio.sleep(min(DRAIN_DELAY_S, self._config.grace))
        while self.service.sessions.active(ACTIVE_WINDOW_S) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        await self.stop()

    async def stop(self) -> None:
        """Stop now. A second call waits for the first."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await self._grpc.stop(0.1)
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        await asyncio.to_thread(self._batcher.stop)
        self.metrics.close()
        log.info("stopped")

    def _bind(self, address: str) -> int:
        tls = self._config.tls
        try:
            if tls is None:
                return self._grpc.add_insecure_port(address)
            return self._grpc.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            message = f"cannot listen on {address}: it is in use, or not an address of this machine"
            raise SettingsError(message) from error

    async def _serve_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", schema.SERVICE):
            await self._health.set(name, status)


async def run(engine: ServableEngine, config: ServerConfig, on_listening: Callable[[Server], None]) -> int:
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends it at once.

    Return 0, or 128 + the signal's number if the signal came before the server listened.
    """
    stop, force_stop, exit_code = asyncio.Event(), asyncio.Event(), 0
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        nonlocal exit_code
        exit_code = 0 if is_listening else exit_code or 128 + number
        (force_stop if stop.is_set() else stop).set()

    is_listening = False
    for number in (signal.SIGTERM, signal.SIGINT):  # first: KeyboardInterrupt would be lost in a task
        loop.add_signal_handler(number, on_signal, number)
    server = Server(engine, config)
    await server.start()
    if stop.is_set():
        await server.stop()
        return exit_code
    is_listening = True
    on_listening(server)
    await stop.wait()
    draining = asyncio.create_task(server.drain())
    forced = asyncio.create_task(force_stop.wait())
    await asyncio.wait({draining, forced}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await server.stop()
    else:
        draining.result()
    forced.cancel()
    return 0


def check_bindable(host: str, port: int) -> None:
    """Check that an address can be bound, without listening.

    Raises:
        SettingsError: the address is in use or not this machine's, or the port is not permitted.
    """
    try:
        listen(host, port).close()
    except (OSError, UnicodeError) as error:
        where = f"{bracket_host(host) or 'every interface'}, port {port}"
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise SettingsError(f"cannot listen on {where}: {reason}") from error


def _log_failure(housekeeping: asyncio.Task[None]) -> None:
    """Log the failure of the housekeeping task, without which no session expires."""
    if not housekeeping.cancelled() and housekeeping.exception() is not None:
        log.error("upkeep has ended", exc_info=housekeeping.exception())
