"""Connections of an endpoint: which address they go to, which bytes count, and what their failures say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.transport.endpoint import CountingSocket, Endpoint, _interleave
from outrider.transport.event_loop_thread import EventLoopThread
from outrider.transport.tls import ClientTls
from tests.support.certificates import Authority
from tests.support.grpc_server import MEGABYTE, run_with_deadline
from tests.support.ports import ReservedPort


@asynccontextmanager
async def echoing(address: str = "127.0.0.1") -> AsyncIterator[int]:
    """The port of a server that sends back all that comes."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, address, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def exchange(endpoint: Endpoint, data: bytes) -> None:
    reader, writer = await asyncio.open_connection(sock=await endpoint.connect())
    writer.write(data)
    writer.write_eof()
    assert await reader.read() == data
    writer.close()
    await writer.wait_closed()


def test_bytes_are_counted_over_all_connections_both_ways() -> None:
    async def work() -> None:
        async with echoing() as port:
            endpoint = Endpoint("localhost", port)
            await exchange(endpoint, b"12345")
            await asyncio.gather(exchange(endpoint, bytes(3 * MEGABYTE)), exchange(endpoint, b"678"))
            assert (endpoint.up, endpoint.down) == (8 + 3 * MEGABYTE,) * 2
            assert endpoint.connections == 3

    run_with_deadline(work())


def test_buffered_protocols_are_counted_too() -> None:
    """asyncio reads into their buffers; TLS is one of them."""

    class Buffered(asyncio.BufferedProtocol):
        def __init__(self) -> None:
            self.buffer, self.came = bytearray(64), asyncio.get_running_loop().create_future()

        def get_buffer(self, _: int) -> bytearray:
            return self.buffer

        def buffer_updated(self, size: int) -> None:
            self.came.set_result(size)

    async def work() -> None:
        async with echoing() as port:
            endpoint = Endpoint("127.0.0.1", port)
            connected = await endpoint.connect()
            transport, protocol = await asyncio.get_running_loop().create_connection(Buffered, sock=connected)
            transport.writelines([b"ab", b"cd"])
            assert await protocol.came == 4
            assert (endpoint.up, endpoint.down) == (4, 4)
            transport.abort()

    run_with_deadline(work())


def test_connections_live_in_a_loop_that_counts_whatever_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kind, such as uvloop's, would not call the methods of a socket."""

    def refuse() -> None:
        raise AssertionError

    monkeypatch.setattr(asyncio, "new_event_loop", refuse)
    thread = EventLoopThread("none", [])
    assert isinstance(thread._loop, asyncio.SelectorEventLoop)
    thread.close()


def test_several_buffers_in_one_call_are_counted() -> None:
    one, other = socket.socketpair()
    endpoint = Endpoint("127.0.0.1", 1)
    with CountingSocket(one, endpoint) as counting, other:
        assert counting.sendmsg([b"ab", b"cde"]) == 5
        assert other.recv(9) == b"abcde"
    assert (endpoint.up, endpoint.down) == (5, 0)


def test_what_tls_adds_is_counted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.server()

    async def work() -> None:
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(issued.cert, issued.key)
        received = 0

        async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal received
            received = len(await reader.readexactly(1000))
            writer.write(b"x" * 500)
            writer.close()

        server = await asyncio.start_server(count, "127.0.0.1", 0, ssl=context)
        endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
        tls = ClientTls(authority.ca).context()
        reader, writer = await asyncio.open_connection(
            sock=await endpoint.connect(), ssl=tls, server_hostname="localhost"
        )
        before = endpoint.up
        assert 200 < before < 2000, "the handshake"
        writer.write(bytes(1000))
        assert len(await reader.read()) == 500
        assert received == 1000
        assert 1000 < endpoint.up - before < 1100
        assert endpoint.down > 1000
        writer.close()
        server.close()

    run_with_deadline(work())


def test_sockets_send_small_packets_at_once() -> None:
    async def work() -> None:
        async with echoing() as port:
            endpoint = Endpoint("127.0.0.1", port)
            _, writer = await asyncio.open_connection(sock=await endpoint.connect())
            made = writer.get_extra_info("socket")
            assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()

    run_with_deadline(work())


# Addresses --------------------------------------------------------------------------------------------------


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Make every name resolve to these addresses of this machine."""
    real = socket.getaddrinfo

    def found(_: Any, port: Any, *args: Any, **options: Any) -> list[Any]:
        return [each for address in addresses for each in real(address, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", found)


def test_the_next_address_is_used_where_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with echoing("127.0.0.2") as port:
            resolving(monkeypatch, "127.0.0.1", "127.0.0.2")
            endpoint = Endpoint("cloud.example", port)
            connected = await endpoint.connect()
            assert connected.getpeername()[0] == "127.0.0.2"
            connected.close()
            assert (endpoint.connections, endpoint.connect_error) == (1, None)

    run_with_deadline(work())


def test_the_next_address_is_tried_where_one_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect
        given_up: list[str] = []

        async def sock_connect(attempt: socket.socket, address: Any) -> None:
            if address[0] == "127.0.0.1":
                try:
                    await asyncio.Event().wait()
                finally:
                    given_up.append(address[0])
            await connect(attempt, address)

        async with echoing("127.0.0.2") as port:
            monkeypatch.setattr(loop, "sock_connect", sock_connect)
            resolving(monkeypatch, "127.0.0.1", "127.0.0.2")
            (await Endpoint("cloud.example", port).connect()).close()
        assert given_up == ["127.0.0.1"]

    run_with_deadline(work())


def test_families_take_turns() -> None:
    found = [(family, number) for number, family in enumerate("666644")]
    assert _interleave(found) == [("6", 0), ("4", 4), ("6", 1), ("4", 5), ("6", 2), ("6", 3)]


# Failures ---------------------------------------------------------------------------------------------------


def failure(endpoint: Endpoint) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the message is what is returned
        asyncio.run(endpoint.connect())
    assert endpoint.connect_error == str(caught.value)
    assert endpoint.connections == 0
    return str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_refused_connection_has_one_reason(host: str) -> None:
    with ReservedPort() as port:
        reasons = failure(Endpoint(host, port)).split("; ")
    assert set(reasons) <= {"Connection refused", "Cannot assign requested address", "Network is unreachable"}
    assert len(set(reasons)) == len(reasons)


def test_a_name_that_does_not_resolve_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert failure(Endpoint("no.such.host.invalid", 1)) == "Name or service not known"


def test_reasons_of_several_addresses_are_all_given(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "127.0.0.1", "255.255.255.255", "127.0.0.1")
    first, *others = failure(Endpoint("cloud.example", 1)).split("; ")
    assert first == "Connection refused"
    assert len(others) == 1


def test_a_cut_endpoint_makes_no_connection_and_trouble_ends_with_success() -> None:
    async def work() -> None:
        async with echoing() as port:
            endpoint = Endpoint("127.0.0.1", port)
            endpoint.cut = True
            with pytest.raises(OSError, match=r"^the network is cut$"):
                await endpoint.connect()
            assert endpoint.connect_error == "the network is cut"
            endpoint.cut = False
            await exchange(endpoint, b"x")
            assert endpoint.connect_error is None

    run_with_deadline(work())


def test_names_are_resolved_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def found(host: str, *_: Any, **__: Any) -> None:
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", found)
    failure(Endpoint("bücher.example", 1))
    assert asked == ["xn--bcher-kva.example"]
