"""From an application to a listening process, and its orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from outrider.errors import SettingsError
from outrider.gateway.desk import Desk

HEAD_S = 20  # s that a request's head may take to come, and a new connection its first one
LAST_WORDS = 5  # s that answers which are cut short get to say so
KEPT = 75  # s that an idle connection is kept: longer than clients keep it, so that none sends into a closed one


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn's own handling would end the process with the signal's status."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """Closes a connection on which a request's head is due, and does not come: uvicorn would keep it for ever."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        if self._due is None and (self.cycle is None or self.cycle.response_complete):
            self._expect()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._came()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._came()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._due = self.loop.call_later(HEAD_S, self.transport.close)

    def _came(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


def bound(host: str, port: int) -> socket.socket:
    """A socket with this address, which does not listen yet.

    Raises:
        SettingsError: the address is taken, or not this machine's.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, number)  # named as TCP: else asyncio leaves Nagle's 40 ms on
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"cannot listen on {where}: no address of this machine") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise SettingsError(f"cannot listen on {where}: {error.strerror}") from error
    return found


def config(app: FastAPI) -> uvicorn.Config:
    """How the application is served. What a client says of itself in X-Forwarded-For is not believed.

    httptools gives the first token half a millisecond sooner than h11.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a line for every request that is no HTTP, otherwise
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=_Protocol,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEPT,
        timeout_graceful_shutdown=LAST_WORDS,
    )


async def serve(app: FastAPI, on: socket.socket, desk: Desk, listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. listening: told the URL once clients can come."""
    server, loop, asked = _Server(config(app)), asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    serving = asyncio.create_task(server.serve(sockets=[on]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    listening(_url(on))
    stopping = asyncio.create_task(asked.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await desk.close()  # first: streams end, and with them what the server waits for
    stopping.cancel()
    await serving


def _url(on: socket.socket) -> str:
    host, port = on.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
