"""The channel through TLS, and what it says where that fails."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from outrider.transport.status import Disconnected
from outrider.transport.tls import ClientTls, ServerTls
from tests.support.certificates import Authority
from tests.support.grpc_server import ECHO, MEGABYTE, UNARY, connected, echo_of, run_with_deadline, serving
from tests.support.processes import HANG_S


def test_calls_work_over_tls(authority: Authority) -> None:
    async def work() -> None:
        issued = authority.server()
        async with serving(ServerTls(issued.cert, issued.key)) as (port, _, _):
            for host in ("localhost", "127.0.0.1"):
                async with connected(port, ClientTls(authority.ca), host) as (c, _):
                    assert await c.unary(UNARY, b"size3000000", HANG_S) == bytes(3_000_000)
                    stream = await c.stream(ECHO)
                    await echo_of(stream, bytes(MEGABYTE))
                    stream.cancel()

    run_with_deadline(work())


def test_tls_of_another_name_or_authority(authority: Authority, tmp_path: Path) -> None:
    async def work() -> None:
        issued = authority.server()
        async with serving(ServerTls(issued.cert, issued.key)) as (port, _, _):
            async with connected(port, ClientTls(authority.ca), "elsewhere") as (c, _):
                with pytest.raises(Disconnected, match=r"certificate verify failed: Hostname mismatch.*elsewhere"):
                    await c.unary(UNARY, b"", HANG_S)
            async with connected(port, ClientTls(Authority(tmp_path, "other").ca)) as (c, _):
                with pytest.raises(Disconnected, match="certificate verify failed: unable to get local issuer"):
                    await c.unary(UNARY, b"", HANG_S)

    run_with_deadline(work())


def test_calls_work_over_mutual_tls(authority: Authority) -> None:
    async def work() -> None:
        issued, edge = authority.server(), authority.client("edge-7")
        async with serving(ServerTls(issued.cert, issued.key, authority.ca)) as (port, _, _):
            async with connected(port, ClientTls(authority.ca, edge.cert, edge.key)) as (c, _):
                assert await c.unary(UNARY, b"who", HANG_S) == b"edge-7"
            async with connected(port, ClientTls(authority.ca)) as (c, _):
                with pytest.raises(
                    Disconnected, match="closed the connection after the TLS handshake: our certificate is missing"
                ):
                    await c.unary(UNARY, b"who", HANG_S)

    run_with_deadline(work())


def test_tls_where_there_is_none(authority: Authority) -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port, ClientTls(authority.ca)) as (c, _):
            with pytest.raises(Disconnected, match="TLS failure: wrong version number"):
                await c.unary(UNARY, b"", HANG_S)
        issued = authority.server()
        async with serving(ServerTls(issued.cert, issued.key)) as (port, _, _), connected(port) as (c, _):
            with pytest.raises(Disconnected):
                await c.unary(UNARY, b"", HANG_S)

    run_with_deadline(work())


def test_tls_to_a_closed_port_is_unavailable(authority: Authority) -> None:
    async def work() -> None:
        async with serving() as (port, _, server), connected(port, ClientTls(authority.ca)) as (c, _):
            await server.stop(None)
            with pytest.raises(Disconnected, match="no connection: Connection refused"):
                await c.unary(UNARY, b"", HANG_S)

    run_with_deadline(work())


def test_a_server_that_speaks_tls_but_not_http2(authority: Authority) -> None:
    async def work() -> None:
        issued = authority.server()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(issued.cert, issued.key)
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        async with server, connected(port, ClientTls(authority.ca)) as (c, _):
            with pytest.raises(Disconnected, match="the server does not agree to HTTP/2"):
                await c.unary(UNARY, b"", HANG_S)

    run_with_deadline(work())
