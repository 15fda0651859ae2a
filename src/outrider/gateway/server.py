"""The gateway's server process: sockets, signals, start and end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from outrider.errors import SettingsError
from outrider.gateway import connections
from outrider.gateway.connections import ACCEPTS_PER_TICK, LimitedProtocol, Listener, max_connections
from outrider.gateway.request_scheduler import RequestScheduler
from outrider.transport.hosts import bracket_host

SHUTDOWN_GRACE_S = 5  # s for the last events of streams that are cut short


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process with the signal's status."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound(host: str, port: int) -> Listener:
    """Return a socket that is bound to this address, and does not listen yet.

    host: "" is every interface, IPv6 and IPv4.

    Raises:
        SettingsError: the address is in use, or not an address of this machine.
    """
    where = f"{bracket_host(host)}:{port}"
    if not host and socket.has_dualstack_ipv6():
        return _bind(socket.AF_INET6, ("::", port), where, both=True)
    if not host:
        return _bind(socket.AF_INET, ("0.0.0.0", port), where)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"cannot listen on {where}: not an address of this machine") from error
    return _bind(family, address, where)


def _bind(
    family: int,
    address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes],
    where: str,
    *,
    both: bool = False,
) -> Listener:
    found = None
    try:
        found = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # with this proto asyncio sets TCP_NODELAY
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind(address)
    except OSError as error:
        if found is not None:
            found.close()
        raise SettingsError(f"cannot listen on {where}: {error.strerror}") from error
    return found


def http_server(app: FastAPI, listener: Listener) -> uvicorn.Server:
    """Return a server of the application, with limits on connections."""
    server = _Server(build_config(app))
    listener.max_connections, server.server_state.connections = max_connections(), listener.connections
    return server


def build_config(app: FastAPI) -> uvicorn.Config:
    """Return uvicorn's configuration. X-Forwarded-For is not trusted.

    With httptools, the first token arrives half a millisecond sooner than with h11.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else each invalid request logs a line
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=connections.KEEP_ALIVE_S,
        backlog=ACCEPTS_PER_TICK,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )


class StopSignal:
    """SIGTERM and SIGINT as an awaitable. Replaces the running loop's handlers of these signals.

    received: returns the number of an earlier signal, or 0. It is called after the handlers are in place.
    """

    def __init__(self, received: Callable[[], int] = lambda: 0) -> None:
        self.number = 0  # of the first one that came
        self._received = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if received():
            self._on_signal(received())

    def _on_signal(self, number: int) -> None:
        self.number = self.number or number
        self._received.set()

    async def wait(self) -> None:
        """Wait for a signal."""
        await self._received.wait()


async def serve(
    app: FastAPI, listener: Listener, scheduler: RequestScheduler, stop: StopSignal, on_listening: Callable[[str], None]
) -> int:
    """Serve until SIGTERM or SIGINT. Return 0, or 128 + the signal's number if it came before the server listened.

    on_listening: called with the URL once clients can connect.
    """
    server = http_server(app, listener)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    early_signal = stop.number
    if not early_signal:
        on_listening(_url(listener))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await scheduler.close()  # first: the server waits for the end of streams
    stopping.cancel()
    await serving
    return 128 + early_signal if early_signal else 0


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
