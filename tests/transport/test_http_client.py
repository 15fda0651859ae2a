"""HTTP over counted connections: answers, bytes, TLS, and connections that the server has closed."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outrider.netem.conditions import parse_conditions
from outrider.netem.emulator import EmulatedNetwork
from outrider.transport.endpoint import TCP, Endpoint, Network
from outrider.transport.http_client import HttpClient
from outrider.transport.status import Disconnected, UntrustedServer
from outrider.transport.tls import ClientTls
from tests.support.certificates import Authority
from tests.support.grpc_server import MEGABYTE, run_with_deadline
from tests.support.processes import HANG_S, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Served:
    """A server's port, and its connections."""

    port: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    received: int = 0  # bytes, without TLS
    sent: int = 0


def answer(body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def request_of(reader: asyncio.StreamReader, served: Served) -> bytes:
    """The body of the next request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    body = await reader.readexactly(length)
    served.received += len(head) + len(body)
    return body


def echo(body: bytes) -> bytes:
    return answer(json.dumps({"size": len(body)}).encode())


@asynccontextmanager
async def serving(
    respond: Callable[[bytes], bytes] = echo, context: ssl.SSLContext | None = None
) -> AsyncIterator[Served]:
    served = Served()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.writers.append(writer)
        try:
            while True:
                reply = respond(await request_of(reader, served))
                writer.write(reply)
                served.sent += len(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        for writer in served.writers:
            writer.transport.abort()


@asynccontextmanager
async def connected(
    port: int, tls: ClientTls | None = None, host: str = "localhost", network: Network = TCP
) -> AsyncIterator[HttpClient]:
    client = HttpClient(Endpoint("127.0.0.1", port, network), host, port, tls, token=None)
    try:
        yield client
    finally:
        await client.close()
        await network.close()


def server_context(authority: Authority) -> ssl.SSLContext:
    issued = authority.server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.cert, issued.key)
    return context


def test_bytes_are_those_that_the_server_sees() -> None:
    async def work() -> None:
        async with serving() as served, connected(served.port) as client:
            for size in (0, 10, 4 * MEGABYTE):
                reply = await client.post("/x", bytes(size), HANG_S)
                assert (reply.status, reply.content, reply.up) == (200, {"size": size}, size)
            assert (await client.get("/y")).content == {"size": 0}
            assert (client.endpoint.up, client.endpoint.down) == (served.received, served.sent)
            assert client.endpoint.connections == len(served.writers) == 1

    run_with_deadline(work())


def test_requests_at_once_have_connections_of_their_own() -> None:
    async def work() -> None:
        async with serving() as served, connected(served.port) as client:
            await asyncio.gather(*(client.post("/x", bytes(n), HANG_S) for n in range(8)))
            assert client.endpoint.connections == len(served.writers) > 1
            assert (client.endpoint.up, client.endpoint.down) == (served.received, served.sent)

    run_with_deadline(work())


def test_tls_is_counted_and_verified(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        async with serving(context=server_context(authority)) as served:
            async with connected(served.port, ClientTls(authority.ca)) as client:
                assert (await client.post("/x", bytes(2 * MEGABYTE), HANG_S)).content == {"size": 2 * MEGABYTE}
                handshake = client.endpoint.up - served.received
                assert 300 < handshake < 20_000
                assert client.endpoint.down > served.sent + 500
            for tls, host in (
                (ClientTls(authority.ca), "elsewhere"),
                (ClientTls(Authority(tmp_path, "o").ca), "localhost"),
            ):
                async with connected(served.port, tls, host) as client:
                    with pytest.raises(UntrustedServer, match="its certificate: "):
                        await client.get("/x")

    run_with_deadline(work())


def test_compressed_answers_are_read() -> None:
    async def work() -> None:
        body = gzip.compress(b'{"a": 1}')
        kind = b"content-encoding: gzip"
        async with serving(lambda _: answer(body, kind)) as served, connected(served.port) as client:
            assert (await client.get("/x")).content == {"a": 1}
        async with serving(lambda _: answer(b"not gzip", kind)) as served, connected(served.port) as client:
            with pytest.raises(Disconnected):
                await client.get("/x")

    run_with_deadline(work())


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("end", ["close", "abort", "timeout"])
def test_an_idle_connection_that_the_server_has_ended_is_not_used_again(
    authority: Authority, encrypted: bool, end: str
) -> None:
    async def work() -> None:
        context = server_context(authority) if encrypted else None
        tls = ClientTls(authority.ca) if encrypted else None
        async with serving(context=context) as served, connected(served.port, tls) as client:
            await client.get("/x")
            (writer,) = served.writers
            if end == "timeout":
                writer.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
            writer.transport.abort() if end == "abort" else writer.close()
            (idle,) = client._client._transport._pool.connections  # type: ignore[union-attr]
            await until(idle.has_expired)  # the end has arrived
            assert (await client.get("/x")).status == 200
            assert client.endpoint.connections == 2

    run_with_deadline(work())


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.close()


async def cut_short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    writer.close()


async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    writer.close()


@pytest.mark.parametrize("behave", [hang_up, cut_short, babble])
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_server_that_breaks_off_is_an_error_with_a_reason(
    authority: Authority, behave: Callable[..., Awaitable[None]], encrypted: bool
) -> None:
    async def work() -> None:
        server = await asyncio.start_server(behave, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with connected(port, ClientTls(authority.ca) if encrypted else None) as client:
            with pytest.raises(Disconnected) as caught:  # as one of its kinds, UntrustedServer, where TLS was expected
                await client.get("/x")
            assert len(str(caught.value)) > 10
        server.close()

    run_with_deadline(work())


def test_a_request_out_of_time_has_its_connection_closed() -> None:
    async def work() -> None:
        gone = asyncio.Event()

        async def answers_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await reader.read()
            gone.set()
            writer.close()

        server = await asyncio.start_server(answers_once, "127.0.0.1", 0)
        async with connected(server.sockets[0].getsockname()[1]) as client:
            await client.get("/x")  # connected before the time begins
            with pytest.raises(TimeoutError):
                await client.post("/x", {}, 0.05)
            await gone.wait()
        server.close()

    run_with_deadline(work())


def test_an_emulated_network_lies_in_between() -> None:
    async def work() -> None:
        network = EmulatedNetwork(parse_conditions("rtt=60ms"))
        async with serving() as served, connected(served.port, network=network) as client:
            start = asyncio.get_running_loop().time()
            for _ in range(2):
                await client.get("/x")
            assert asyncio.get_running_loop().time() - start > 0.179  # a handshake and two exchanges
            assert (client.endpoint.up, client.endpoint.down) == (served.received, served.sent)
        async with connected(1, network=network) as client:
            with pytest.raises(Disconnected, match=r"^Connection refused$"):
                await client.get("/x")

    run_with_deadline(work())
