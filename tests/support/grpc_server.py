"""A real gRPC server of raw bytes, and channels to it whose bytes are counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

import grpc
import pytest

from outrider.netem.link import Link
from outrider.transport.channel import Channel
from outrider.transport.endpoint import Endpoint
from outrider.transport.http2 import Http2
from outrider.transport.status import CallFailed
from outrider.transport.stream import Stream
from outrider.transport.tls import ClientTls, ServerTls
from tests.support.ports import ReservedPort
from tests.support.processes import HANG_S
from tests.support.processes import until as until

UNARY, MANY, ECHO = "/test/Unary", "/test/Many", "/test/Echo"
MEGABYTE = 2**20
_LIMITS = [("grpc.max_receive_message_length", 64 * MEGABYTE), ("grpc.max_send_message_length", 128 * MEGABYTE)]


class Handler(grpc.GenericRpcHandler):
    """Unary answers by what it is asked, Many counts to what it is asked, Echo echoes."""

    def __init__(self) -> None:
        self.ended = 0  # calls to Many and Echo
        self.metadata: list[dict[str, str]] = []
        self.left: list[float] = []  # seconds that calls had

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        self.metadata.append(dict(details.invocation_metadata))
        return {
            UNARY: grpc.unary_unary_rpc_method_handler(self.unary),
            MANY: grpc.unary_stream_rpc_method_handler(self.many),
            ECHO: grpc.stream_stream_rpc_method_handler(self.echo),
        }.get(details.method)

    async def unary(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.left.append(context.time_remaining())
        if data == b"who":
            return b",".join(context.auth_context().get("x509_common_name", []))
        if data == b"abort":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you: 100 % sure, 不行")
        if data == b"raise":
            raise ValueError("inside")
        if data == b"sleep":
            await asyncio.sleep(HANG_S)  # scripted: an answer that does not come
        return bytes(int(data[4:])) if data.startswith(b"size") else data

    async def many(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        context.add_done_callback(self._ended)
        count, _, size = data.partition(b" ")
        for number in range(int(count)):
            yield str(number).encode() if not size else bytes(int(size))
        if size == b"0":
            await context.abort(grpc.StatusCode.DATA_LOSS, "all empty")

    async def echo(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        context.add_done_callback(self._ended)
        async for data in requests:
            if data == b"abort":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "enough")
            if data == b"return":
                return
            yield data
        yield b"end"

    def _ended(self, context: grpc.aio.ServicerContext) -> None:
        self.ended += 1


@asynccontextmanager
async def serving(tls: ServerTls | None = None, **options: int) -> AsyncIterator[tuple[int, Handler, grpc.aio.Server]]:
    """(port, handler, server); options are gRPC's, after "grpc."."""
    handler = Handler()
    mine = [(f"grpc.{name}", value) for name, value in options.items()]
    server = grpc.aio.server(handlers=[handler], options=[*_LIMITS, *mine, ("grpc.http2.bdp_probe", 0)])
    with ReservedPort() as port:
        address = f"127.0.0.1:{port}"
        if tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, tls.credentials())
        await server.start()
        try:
            yield port, handler, server
        finally:
            await server.stop(None)


@asynccontextmanager
async def connected(
    port: int, tls: ClientTls | None = None, host: str = "localhost", metadata: tuple[tuple[str, str], ...] = ()
) -> AsyncIterator[tuple[Channel, Endpoint]]:
    """A channel to a port of this machine, whatever the host is called."""
    endpoint, loop = Endpoint("127.0.0.1", port), asyncio.get_running_loop()

    async def dial(factory: Callable[[], Http2]) -> None:
        context = None if tls is None else tls.context()
        name = None if tls is None else host
        connected = await endpoint.connect()
        await loop.create_connection(factory, sock=connected, ssl=context, server_hostname=name)

    channel = Channel(dial, f"{host}:{port}", metadata)
    try:
        yield channel, endpoint
    finally:
        await channel.close()


@asynccontextmanager
async def relayed(port: int) -> AsyncIterator[tuple[int, Link]]:
    """The port of a link in front of a port of this machine."""
    link = Link("127.0.0.1", port)
    await link.start()
    assert link.port is not None
    try:
        yield link.port, link
    finally:
        await link.close()


def run_with_deadline(work: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 2 * HANG_S))


async def failure_of(work: Awaitable[object]) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await work
    return caught.value


async def echo_of(stream: Stream, data: bytes) -> None:
    await stream.send(data)
    assert await stream.receive() == data


async def until_ended(handler: Handler) -> None:
    """Wait until the server has noticed the end of a call."""
    await until(lambda: handler.ended)
