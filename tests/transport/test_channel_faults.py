"""The channel against servers that fail, and that break the rules of HTTP/2 and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from outrider.transport import message_reader
from outrider.transport.status import Disconnected, Status
from tests.support.grpc_server import ECHO, MANY, MEGABYTE, UNARY, connected, failure_of, run_with_deadline, until
from tests.support.http2_server import DONE, LIMIT, OK, ScriptedServer, scripted_server
from tests.support.processes import HANG_S


def _headers(*headers: tuple[bytes, bytes]) -> Callable[[ScriptedServer, int], None]:
    return lambda server, number: server.h2.send_headers(number, headers, end_stream=True)


def _answer(data: bytes, *trailers: tuple[bytes, bytes]) -> Callable[[ScriptedServer, int], None]:
    return lambda server, number: server.answer(number, data, trailers or DONE)


def _html(server: ScriptedServer, number: int) -> None:
    server.h2.send_headers(number, [(b":status", b"200"), (b"content-type", b"text/html")])
    server.h2.send_data(number, b"<html>", end_stream=True)


def _no_trailers(server: ScriptedServer, number: int) -> None:
    server.h2.send_headers(number, OK)
    server.h2.send_data(number, b"\0\0\0\0\1x", end_stream=True)


@pytest.mark.parametrize(
    ("script", "status", "details"),
    [
        (_headers(*OK, (b"grpc-status", b"5"), (b"grpc-message", b"a%20b%zz%E4")), Status.NOT_FOUND, "a b%zz\ufffd"),
        (_headers(*OK, (b"grpc-status", b"99")), Status.UNKNOWN, ""),
        (_headers(*OK, (b"grpc-status", b"x")), Status.UNKNOWN, ""),
        (_headers((b":status", b"503")), Status.UNAVAILABLE, "HTTP status 503 instead of gRPC's"),
        (_headers((b":status", b"401")), Status.UNAUTHENTICATED, "HTTP status 401 instead of gRPC's"),
        (_headers((b":status", b"404")), Status.UNIMPLEMENTED, "HTTP status 404 instead of gRPC's"),
        (_headers((b":status", b"418")), Status.UNKNOWN, "HTTP status 418 instead of gRPC's"),
        (_headers((b":status", b"503"), (b"grpc-status", b"8")), Status.RESOURCE_EXHAUSTED, ""),
        (_html, Status.UNKNOWN, "an answer of content type text/html instead of gRPC's"),
        (_no_trailers, Status.UNKNOWN, "the server ended the call without a status"),
        (_answer(b"\1\0\0\0\1x"), Status.UNIMPLEMENTED, "the server sent a compressed message"),
        (_answer(b"\7\0\0\0\1x"), Status.INTERNAL, "a message that begins with 0x07 is not a gRPC message"),
        (_answer(b"\0\4\0\0\1x"), Status.RESOURCE_EXHAUSTED, "a message of 67108865 bytes; 67108864 are accepted"),
        (_answer(b"\0\0\0\0\2x"), Status.INTERNAL, "the server ended the call within a message"),
        (_answer(b""), Status.INTERNAL, "0 messages answer /test/Unary, which has one"),
        (_answer(b"\0\0\0\0\1x" * 2), Status.INTERNAL, "2 messages answer /test/Unary, which has one"),
        (_answer(b"\0\0\0\0\1x", (b"grpc-status", b"13")), Status.INTERNAL, ""),
    ],
)
def test_answers_that_are_no_success(
    script: Callable[[ScriptedServer, int], None], status: Status, details: str
) -> None:
    async def work() -> None:
        async with scripted_server(script) as (port, made), connected(port) as (c, endpoint):
            for _ in range(2):  # the connection survives
                failure = await failure_of(c.unary(UNARY, b"", HANG_S))
                assert failure.status is status
                assert failure.details.startswith(details)
            assert (endpoint.connections, len(made)) == (1, 1)

    run_with_deadline(work())


def test_messages_are_found_wherever_frames_begin() -> None:
    def script(server: ScriptedServer, number: int) -> None:
        server.h2.send_headers(number, OK)
        for byte in b"".join(message_reader.frame_message(bytes(size)) for size in range(10)):
            server.h2.send_data(number, bytes([byte]), pad_length=3)
        server.h2.send_headers(number, DONE, end_stream=True)
        whole = server.h2.data_to_send()
        for at in range(len(whole)):
            server.transport.write(whole[at : at + 1])

    async def work() -> None:
        async with scripted_server(script) as (port, _), connected(port) as (c, _):
            assert [len(data) async for data in c.unary_stream(MANY, b"", HANG_S)] == list(range(10))

    run_with_deadline(work())


def test_a_reset_loses_one_call() -> None:
    async def work() -> None:
        def script(server: ScriptedServer, number: int) -> None:
            if number == 1:
                server.h2.reset_stream(number, 7)
            else:
                server.answer(number, message_reader.frame_message(b"x"))

        async with scripted_server(script) as (port, _), connected(port) as (c, endpoint):
            with pytest.raises(Disconnected, match="the stream was reset: REFUSED_STREAM"):
                await c.unary(UNARY, b"", HANG_S)
            assert await c.unary(UNARY, b"", HANG_S) == b"x"
            assert endpoint.connections == 1

    run_with_deadline(work())


def test_going_away_loses_what_was_not_processed_and_finishes_the_rest() -> None:
    async def work() -> None:
        async with scripted_server() as (port, made), connected(port) as (c, endpoint):
            kept, lost = await c.stream(ECHO), await c.stream(ECHO)
            for stream in (kept, lost):
                await stream.send(b"x")
            await until(lambda: made and made[0].requests == 2)
            made[0].go_away(1, 11)
            with pytest.raises(Disconnected, match=r"going away: ENHANCE_YOUR_CALM, tired; it has not processed"):
                await lost.receive()
            fresh = await c.stream(ECHO)
            assert endpoint.connections == 2
            made[0].answer(1, message_reader.frame_message(b"y"))
            made[0].flush()
            assert [await kept.receive(), await kept.receive()] == [b"y", None]
            kept.cancel()
            fresh.cancel()
            await until(lambda: made[0].transport.is_closing())  # nobody needs it any more

    run_with_deadline(work())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol error: a frame of 4740180 bytes"),  # after its SETTINGS
        (b"\0\0\1\7\0\0\0\0\0x", "protocol error: a GOAWAY frame that is too short"),
        (b"\0\0\4\x01\4\0\0\0\1\xff\xff\xff\xff", "protocol error: "),  # headers that HPACK cannot have made
        (b"\0\0\1\0\x08\0\0\0\1\xff", "protocol error: "),  # padding beyond the frame
        (b"\0\0\0\x06\0\0\0\0\0", "protocol error: "),  # an empty ping
        (b"\0\0\5\0\0\0\0\0\7abcde", "protocol error: "),  # data on a stream that nobody opened
        (b"\0\0\4\x05\4\0\0\0\1\0\0\0\2", "protocol error: "),  # a pushed stream
    ],
)
def test_a_server_that_breaks_the_protocol_is_left(data: bytes, reason: str) -> None:
    def script(server: ScriptedServer, number: int) -> None:
        server.flush()
        server.transport.write(data)

    async def work() -> None:
        async with scripted_server(script) as (port, _), connected(port) as (c, endpoint):
            for turn in range(2):
                with pytest.raises(Disconnected) as caught:
                    await c.unary(UNARY, b"", HANG_S)
                assert str(caught.value).startswith(reason)
                assert endpoint.connections == turn + 1

    run_with_deadline(work())


def test_a_ping_is_answered() -> None:
    def script(server: ScriptedServer, number: int) -> None:
        server.h2.ping(b"12345678")

    async def work() -> None:
        async with scripted_server(script) as (port, made), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            await stream.send(b"")
            await until(lambda: made and made[0].pongs)
            assert made[0].pongs == [b"12345678"]
            stream.cancel()

    run_with_deadline(work())


def test_a_request_of_several_frames_that_are_never_acknowledged() -> None:
    """The window ends, and the rest waits; nothing else is sent."""

    async def work() -> None:
        async with scripted_server(stop_reading=True) as (port, _), connected(port) as (c, endpoint):
            stream = await c.stream(ECHO)
            sending = asyncio.create_task(stream.send(bytes(MEGABYTE)))
            await until(lambda: endpoint.up > 65_535)
            for _ in range(10):
                await asyncio.sleep(0)  # turns of the loop, in which it could send more
            assert endpoint.up < 66_200
            sending.cancel()
            assert (await failure_of(stream.receive())).status is Status.CANCELLED

    run_with_deadline(work())


def test_a_socket_that_takes_no_more_stops_the_sender() -> None:
    """However large the window is: what waits in memory is bounded."""

    def script(server: ScriptedServer, number: int) -> None:
        server.h2.increment_flow_control_window(2**30)
        server.h2.increment_flow_control_window(2**30, number)
        server.transport.pause_reading()

    async def work() -> None:
        async with scripted_server(script) as (port, made), connected(port) as (c, endpoint):
            stream = await c.stream(ECHO)
            sending = asyncio.create_task(stream.send(bytes(48 * MEGABYTE)))
            await until(lambda: c._http is not None and c._http._writing_paused)
            for _ in range(10):
                await asyncio.sleep(0)  # turns of the loop, in which it could send more
            assert c._http._transport.get_write_buffer_size() < MEGABYTE  # type: ignore[union-attr]
            assert not sending.done()
            before = endpoint.up
            made[0].transport.resume_reading()
            await until(lambda: endpoint.up >= before + 4 * MEGABYTE)  # it goes on
            sending.cancel()

    run_with_deadline(work())


def test_streams_beyond_the_servers_limit_wait() -> None:
    present, peak = 0, 0

    def answer(server: ScriptedServer, number: int) -> None:
        nonlocal present
        present -= 1
        server.answer(number, message_reader.frame_message(b"x"))
        server.flush()

    def script(server: ScriptedServer, number: int) -> None:
        nonlocal present, peak
        present += 1
        peak = max(peak, present)
        asyncio.get_running_loop().call_later(0.005, answer, server, number)

    async def work() -> None:
        async with scripted_server(script) as (port, _), connected(port) as (c, endpoint):
            assert await c.unary(UNARY, b"", HANG_S) == b"x"  # the limit is known now
            assert await asyncio.gather(*(c.unary(UNARY, b"", HANG_S) for _ in range(20))) == [b"x"] * 20
            assert (peak, endpoint.connections) == (LIMIT, 1)

    run_with_deadline(work())
