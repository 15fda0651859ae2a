"""An edge's connection to `outrider cloud`: one gRPC channel over a counting endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.protocol import schema
from outrider.transport.channel import Channel
from outrider.transport.endpoint import TCP, Network
from outrider.transport.event_loop_thread import EventLoopThread
from outrider.transport.hosts import bracket_host, peer_name
from outrider.transport.http2 import Http2
from outrider.transport.stream import Stream
from outrider.transport.tls import ClientTls


class Connection(EventLoopThread):
    """The gRPC connection to one cloud. token: sent as a bearer token with every call."""

    def __init__(
        self, host: str, port: int, *, tls: ClientTls | None = None, token: str | None = None, network: Network = TCP
    ) -> None:
        self.has_token = token is not None
        self._host, self._tls = peer_name(host), tls
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = Channel(self._open, f"{bracket_host(self._host)}:{port}", metadata)
        super().__init__(f"grpc://{bracket_host(host)}:{port}", [(host, port)], network)
        (self.endpoint,) = self.endpoints

    async def _open(self, factory: Callable[[], Http2]) -> None:
        context, name = (None, None) if self._tls is None else (self._tls.context(), self._host)
        connected = await self.endpoint.connect()
        await asyncio.get_running_loop().create_connection(factory, sock=connected, ssl=context, server_hostname=name)

    async def open_stream(self) -> Stream:
        """Open a session stream."""
        return await self._channel.stream(f"/{schema.SERVICE}/Session")

    async def describe(self, timeout: float) -> schema.DescribeAnswer:
        """Return the cloud's description."""
        request = schema.DescribeRequest().SerializeToString()
        data = await self._channel.unary(f"/{schema.SERVICE}/Describe", request, timeout)
        return schema.DescribeAnswer.FromString(data)

    async def vocabulary(self, most: int, timeout: float) -> list[str]:
        """Return the cloud's token strings. Reading stops after more than `most`."""
        names: list[str] = []
        async for data in self._channel.unary_stream(f"/{schema.SERVICE}/Vocabulary", b"", timeout):
            names += schema.VocabularyPart.FromString(data).tokens
            if len(names) > most:
                break
        return names

    async def tokenizer(self, most: int, timeout: float) -> bytes:
        """Return the packed files of the cloud's tokenizer. Reading stops after more than `most` bytes."""
        packed = bytearray()
        async for data in self._channel.unary_stream(f"/{schema.SERVICE}/Tokenizer", b"", timeout):
            packed += schema.TokenizerPart.FromString(data).data
            if len(packed) > most:
                break
        return bytes(packed)

    def drain(self) -> None:
        """Let present calls finish on the present TCP connection. The next call opens a new one."""
        self._channel.drain()

    def reconnect(self) -> None:
        """Abort the present TCP connection. The next call opens a new one."""
        self._channel.drop_connection()

    async def cut(self) -> None:
        """Abort the present TCP connection and fail all further attempts to connect."""
        self.endpoint.cut = True
        self._channel.drop_connection()

    async def close_clients(self) -> None:
        """Close the channel."""
        await self._channel.close()
