"""How calls and connections end: cancelled, lost, dropped, closed, going away."""

from __future__ import annotations

import asyncio
import gc

import pytest

from outrider.errors import SettingsError
from outrider.transport import channel as channel_module
from outrider.transport import http2
from outrider.transport.channel import Channel
from outrider.transport.status import CallFailed, Disconnected, Status
from tests.support.grpc_server import (
    ECHO,
    MEGABYTE,
    UNARY,
    connected,
    echo_of,
    failure_of,
    relayed,
    run_with_deadline,
    serving,
    until,
    until_ended,
)
from tests.support.http2_server import scripted_server
from tests.support.processes import HANG_S


def test_cancel_reaches_the_server() -> None:
    async def work() -> None:
        async with serving() as (port, handler, _), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            await echo_of(stream, b"x")
            stream.cancel()
            stream.cancel()
            assert (await failure_of(stream.receive())).status is Status.CANCELLED
            await until_ended(handler)

    run_with_deadline(work())


def test_a_cancelled_receive_loses_nothing() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            for _ in range(3):
                receiving = asyncio.create_task(stream.receive())
                await asyncio.sleep(0)  # one turn of the loop: it waits now
                receiving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await receiving
                await echo_of(stream, b"x")
            stream.cancel()

    run_with_deadline(work())


def test_a_cancelled_send_cancels_its_call_only() -> None:
    async def work() -> None:
        async with scripted_server(stop_reading=True) as (port, _), connected(port) as (c, endpoint):
            stream = await c.stream(ECHO)
            sending = asyncio.create_task(stream.send(bytes(MEGABYTE)))
            await until(lambda: endpoint.up > 65_535)  # the window ends, and the rest waits
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert (await failure_of(stream.receive())).status is Status.CANCELLED
        async with serving() as (port, _, _), connected(port) as (c, endpoint):
            cut = asyncio.create_task((await c.stream(ECHO)).send(bytes(20 * MEGABYTE)))
            await until(lambda: endpoint.up > 65_535)
            cut.cancel()
            await echo_of(await c.stream(ECHO), bytes(MEGABYTE))

    run_with_deadline(work())


def test_cancelling_one_wait_for_the_connection_cancels_no_other() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, endpoint):
            first = asyncio.create_task(c.unary(UNARY, b"1", HANG_S))
            second = asyncio.create_task(c.unary(UNARY, b"2", HANG_S))
            await asyncio.sleep(0)  # one turn of the loop: both wait now
            first.cancel()
            assert await second == b"2"
            assert endpoint.connections == 1

    run_with_deadline(work())


# Losses -----------------------------------------------------------------------------------------------------


def test_refused_then_served() -> None:
    async def work() -> None:
        async with serving() as (port, _, server), connected(port) as (c, _):
            await server.stop(None)
            with pytest.raises(Disconnected, match="no connection: Connection refused"):
                await c.unary(UNARY, b"", HANG_S)
            with pytest.raises(Disconnected):
                await (await c.stream(ECHO)).receive()

    run_with_deadline(work())


def test_a_server_that_stops_in_order_finishes_its_calls() -> None:
    async def work() -> None:
        async with serving() as (port, _, server), connected(port) as (c, endpoint):
            stream = await c.stream(ECHO)
            await echo_of(stream, b"before")
            stopping = asyncio.create_task(server.stop(HANG_S))
            await until(lambda: c._http is not None and not c._http.usable)  # it has said that it goes
            assert not stopping.done()
            await echo_of(stream, b"after")
            with pytest.raises(Disconnected, match="Connection refused"):  # a new connection is needed
                await c.unary(UNARY, b"", HANG_S)
            assert endpoint.connections == 1
            await stream.send(b"last", last=True)
            assert [await stream.receive() for _ in range(3)] == [b"last", b"end", None]
            await stopping

    run_with_deadline(work())


def test_a_server_that_stops_at_once() -> None:
    async def work() -> None:
        async with serving() as (port, _, server), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            await echo_of(stream, b"x")
            await server.stop(None)
            with pytest.raises((Disconnected, CallFailed)):
                await stream.receive()

    run_with_deadline(work())


def test_a_lost_connection_loses_all_calls_and_the_next_makes_a_new_one() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), relayed(port) as (relay, link), connected(relay) as (c, endpoint):
            streams = [await c.stream(ECHO) for _ in range(3)]
            for stream in streams:
                await echo_of(stream, b"x")
            waiting = [asyncio.create_task(stream.receive()) for stream in streams]
            await asyncio.sleep(0)  # one turn of the loop: all of them wait now
            link.cut()
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(result, Disconnected)
                assert "the connection was lost" in str(result)
            with pytest.raises(Disconnected):
                await streams[0].send(b"x")
            assert await c.unary(UNARY, b"new", HANG_S) == b"new"
            assert endpoint.connections == 2

    run_with_deadline(work())


def test_a_send_that_waits_hears_of_the_loss() -> None:
    async def work() -> None:
        async with (
            scripted_server(stop_reading=True) as (port, _),
            relayed(port) as (relay, link),
            connected(relay) as (c, endpoint),
        ):
            stream = await c.stream(ECHO)
            sending = asyncio.create_task(stream.send(bytes(20 * MEGABYTE)))
            await until(lambda: endpoint.up > 65_535)
            link.cut()
            with pytest.raises(Disconnected):
                await sending

    run_with_deadline(work())


def test_drop_abandons_the_connection() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, endpoint):
            c.drop_connection()
            stream = await c.stream(ECHO)
            await echo_of(stream, b"x")
            c.drop_connection()
            with pytest.raises(Disconnected, match="given up here"):
                await stream.receive()
            assert await c.unary(UNARY, b"new", HANG_S) == b"new"
            assert endpoint.connections == 2
            c.drop_connection()
            waiting = asyncio.create_task(c.stream(ECHO))
            await asyncio.sleep(0)  # one turn of the loop: it connects now
            c.drop_connection()
            with pytest.raises(Disconnected, match="given up here"):
                await waiting
            assert await c.unary(UNARY, b"newer", HANG_S) == b"newer"

    run_with_deadline(work())


def test_close_ends_calls_and_is_final() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            await echo_of(stream, b"x")
            await c.close()
            await c.close()
            with pytest.raises(Disconnected, match="the channel was closed"):
                await stream.receive()
            with pytest.raises(Disconnected, match="the channel is closed"):
                await c.stream(ECHO)

    run_with_deadline(work())


def test_a_connection_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "CONNECT_TIMEOUT", 0.05)
    monkeypatch.setattr(http2, "SETTINGS_TIMEOUT", 0.05)

    async def forever(_: object) -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        with pytest.raises(Disconnected, match=r"no connection within 0\.05 s"):
            await Channel(forever, "nowhere:1").unary(UNARY, b"", HANG_S)
        monkeypatch.setattr(channel_module, "CONNECT_TIMEOUT", HANG_S)
        async with scripted_server(mute=True) as (port, _), connected(port) as (c, _):
            with pytest.raises(Disconnected, match=r"no HTTP/2 within 0\.05 s"):
                await c.unary(UNARY, b"", HANG_S)

    run_with_deadline(work())


def test_a_header_that_cannot_be_sent_is_refused_early() -> None:
    for token in ("Bearer 不", "Bearer a\r\nx: y"):
        with pytest.raises(SettingsError, match="authorization: only printable ASCII"):
            Channel(_never, "here:1", (("authorization", token),))


async def _never(_: object) -> None:
    raise AssertionError


def test_nothing_is_left_behind() -> None:
    """A failed connection's exception, a task, a transport: the collector would complain, and warnings are errors."""

    async def work() -> None:
        async with serving() as (port, _, server), connected(port) as (c, _):
            abandoned = asyncio.create_task(c.unary(UNARY, b"", HANG_S))
            await asyncio.sleep(0)  # one turn of the loop: it connects now
            abandoned.cancel()
            await server.stop(None)
            with pytest.raises(Disconnected):  # what was lost has ended before
                await c.unary(UNARY, b"", HANG_S)

    run_with_deadline(work())
    gc.collect()
