"""An HTTP/2 server that does as it is told, rules or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, PingAckReceived, RequestReceived
from h2.settings import SettingCodes, Settings

OK = ((b":status", b"200"), (b"content-type", b"application/grpc"))
DONE = ((b"grpc-status", b"0"),)
LIMIT = 3  # streams at once


class Fake(asyncio.Protocol):
    """An HTTP/2 server that does what `script` says with each request."""

    def __init__(self, script: Callable[[Fake, int], None], mute: bool, stop_reading: bool) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False))
        self.pongs: list[bytes] = []
        self.requests = 0
        self._script, self._mute, self._stop = script, mute, stop_reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.h2.local_settings = Settings(client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: LIMIT})
        self.h2.initiate_connection()
        if not self._mute:
            self.flush()

    def data_received(self, data: bytes) -> None:
        if self._mute:
            return
        for event in self.h2.receive_data(data):
            if isinstance(event, RequestReceived):
                self.requests += 1
                self._script(self, event.stream_id)
            if isinstance(event, DataReceived) and not self._stop:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if isinstance(event, PingAckReceived):
                self.pongs.append(event.ping_data)
        self.flush()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def answer(self, number: int, data: bytes = b"", trailers: tuple[tuple[bytes, bytes], ...] = DONE) -> None:
        self.h2.send_headers(number, OK)
        if data:
            self.h2.send_data(number, data)
        self.h2.send_headers(number, trailers, end_stream=True)

    def go_away(self, last: int, code: int) -> None:
        """By hand: h2 would close itself."""
        self.flush()
        body = last.to_bytes(4, "big") + code.to_bytes(4, "big") + b"tired"
        self.transport.write(len(body).to_bytes(3, "big") + bytes((7, 0, 0, 0, 0, 0)) + body)


@asynccontextmanager
async def fake(
    script: Callable[[Fake, int], None] = lambda *_: None, *, mute: bool = False, stop_reading: bool = False
) -> AsyncIterator[tuple[int, list[Fake]]]:
    made: list[Fake] = []

    def make() -> Fake:
        made.append(Fake(script, mute, stop_reading))
        return made[-1]

    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], made
    finally:
        server.close()
        for one in made:
            one.transport.abort()
        await server.wait_closed()
