"""The channel against gRPC's own server: calls, and what they cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from outrider.transport import http2, message_reader
from outrider.transport.channel import Channel
from outrider.transport.status import CallFailed, Status
from tests.support.grpc_server import (
    ECHO,
    MANY,
    MEGABYTE,
    UNARY,
    connected,
    echo_of,
    failure_of,
    run_with_deadline,
    serving,
    until,
    until_ended,
)
from tests.support.processes import HANG_S

# Calls ------------------------------------------------------------------------------------------------------


def test_unary_calls_share_a_connection() -> None:
    async def work() -> None:
        async with (
            serving() as (port, handler, _),
            connected(port, metadata=(("authorization", "Bearer t"),)) as (c, endpoint),
        ):
            for data in (b"", b"hello", bytes(range(256))):
                assert await c.unary(UNARY, data, HANG_S) == data
            assert endpoint.connections == 1
            assert all(seen["authorization"] == "Bearer t" for seen in handler.metadata)
            assert all(seen["user-agent"] == "outrider" for seen in handler.metadata)
            assert all(0 < left <= HANG_S for left in handler.left)

    run_with_deadline(work())


def test_a_stream_of_answers_in_order() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            got = [data async for data in c.unary_stream(MANY, b"1000", HANG_S)]
            assert got == [str(number).encode() for number in range(1000)]
            assert [data async for data in c.unary_stream(MANY, b"0", HANG_S)] == []

    run_with_deadline(work())


def test_a_status_after_answers() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            answers = c.unary_stream(MANY, b"3 0", HANG_S)
            assert [await anext(answers) for _ in range(3)] == [b"", b"", b""]
            with pytest.raises(CallFailed, match="data_loss: all empty"):
                await anext(answers)

    run_with_deadline(work())


def test_a_stream_of_answers_may_be_left_early() -> None:
    async def work() -> None:
        async with serving() as (port, handler, _), connected(port) as (c, _):
            answers = c.unary_stream(MANY, b"100000 1000", HANG_S)
            assert len(await anext(answers)) == 1000
            await answers.aclose()  # type: ignore[attr-defined]
            await until_ended(handler)
            assert await c.unary(UNARY, b"on", HANG_S) == b"on"

    run_with_deadline(work())


def test_echo_and_half_close() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            for number in range(20):
                await echo_of(stream, bytes(number))
            await stream.end()
            assert await stream.receive() == b"end"
            assert await stream.receive() is None
            assert await stream.receive() is None
            stream.cancel()
            last = await c.stream(ECHO)
            await last.send(b"x", last=True)
            assert [await last.receive() for _ in range(3)] == [b"x", b"end", None]

    run_with_deadline(work())


def test_several_messages_arrive_before_they_are_read() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            for number in range(100):
                await stream.send(str(number).encode())
            await until(lambda: len(stream._messages) == 100)
            assert [await stream.receive() for _ in range(100)] == [str(number).encode() for number in range(100)]
            stream.cancel()

    run_with_deadline(work())


def test_failed_calls_have_status_and_details() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            failure = await failure_of(c.unary(UNARY, b"abort", HANG_S))
            assert (failure.status, failure.details) == (Status.PERMISSION_DENIED, "not you: 100 % sure, 不行")
            assert failure.status == 7
            assert failure.status.name == "PERMISSION_DENIED"
            assert (await failure_of(c.unary(UNARY, b"raise", HANG_S))).status is Status.UNKNOWN
            assert (await failure_of(c.unary("/test/Nothing", b"", HANG_S))).status is Status.UNIMPLEMENTED
            stream = await c.stream(ECHO)
            await stream.send(b"abort")
            failure = await failure_of(stream.receive())
            assert (failure.status, failure.details) == (Status.RESOURCE_EXHAUSTED, "enough")
            await stream.send(b"into the void")  # the call is over: receive says so
            assert (await failure_of(stream.receive())).status is Status.RESOURCE_EXHAUSTED

    run_with_deadline(work())


def test_a_server_that_ends_while_we_send_is_heard() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            await stream.send(b"return")
            for _ in range(10):
                await stream.send(bytes(MEGABYTE))
            assert await stream.receive() is None
            stream.cancel()
            assert await c.unary(UNARY, b"on", HANG_S) == b"on"

    run_with_deadline(work())


def test_a_deadline_is_ours_and_the_servers() -> None:
    async def work() -> None:
        async with serving() as (port, handler, _), connected(port) as (c, _):
            failure = await failure_of(c.unary(UNARY, b"sleep", 1.0))
            assert failure.status is Status.DEADLINE_EXCEEDED
            assert handler.left[0] <= 1.0
            assert await c.unary(UNARY, b"on", HANG_S) == b"on"

    run_with_deadline(work())


@pytest.mark.parametrize("size", [65535, 5 * MEGABYTE])
def test_large_messages_both_ways(size: int) -> None:
    async def work() -> None:
        data = bytes(range(256)) * (size // 256)
        async with serving() as (port, _, _), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            await echo_of(stream, data)
            await echo_of(stream, data[:1000])
            assert await c.unary(UNARY, data, HANG_S) == data
            stream.cancel()

    run_with_deadline(work())


def test_a_message_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_reader, "MAX_MESSAGE_SIZE", 1000)

    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            assert len(await c.unary(UNARY, b"size1000", HANG_S)) == 1000
            failure = await failure_of(c.unary(UNARY, b"size1001", HANG_S))
            assert failure.status is Status.RESOURCE_EXHAUSTED
            assert await c.unary(UNARY, b"on", HANG_S) == b"on"

    run_with_deadline(work())


def test_two_hundred_streams_at_once() -> None:
    async def one(c: Channel, number: int) -> None:
        stream = await c.stream(ECHO)
        for turn in range(3):
            await echo_of(stream, bytes([number, turn]) * (number * 20))
        await stream.end()
        assert await stream.receive() == b"end"
        assert await stream.receive() is None

    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, endpoint):
            await asyncio.gather(*(one(c, number) for number in range(200)))
            assert endpoint.connections == 1

    run_with_deadline(work())


def test_a_stream_that_nobody_reads_does_not_stop_the_others() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, endpoint):
            idle = [c.unary_stream(MANY, b"5000 1000", HANG_S) for _ in range(3)]
            for answers in idle:
                await anext(answers)
            assert len(await c.unary(UNARY, b"size3000000", HANG_S)) == 3_000_000
            assert endpoint.down < 3 * (http2.WINDOW + 100_000) + 3_100_000  # each is held back by its own window
            for answers in idle:
                assert len([len(answer) async for answer in answers]) == 4999

    run_with_deadline(work())


# Bytes ------------------------------------------------------------------------------------------------------


def test_a_small_round_costs_a_frame_and_nothing_more() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, endpoint):
            stream = await c.stream(ECHO)
            for number in range(100):
                await echo_of(stream, bytes([number]) * 18)
            assert endpoint.up <= 100 * (9 + 5 + 18) + 300
            stream.cancel()

    run_with_deadline(work())


def test_headers_cost_little_the_second_time() -> None:
    async def work() -> None:
        token = (("authorization", "Bearer " + "s3cret" * 20),)
        async with serving() as (port, _, _), connected(port, metadata=token) as (c, endpoint):
            await c.unary(UNARY, b"", HANG_S)
            before = endpoint.up
            await c.unary(UNARY, b"", HANG_S)
            assert endpoint.up - before <= (9 + 12) + (9 + 5)  # an index per header

    run_with_deadline(work())


def test_small_messages_leave_in_one_write() -> None:
    async def work() -> None:
        async with serving() as (port, _, _), connected(port) as (c, _):
            stream = await c.stream(ECHO)
            writes: list[bytes] = []
            transport = c._http._transport  # type: ignore[union-attr]
            write = transport.write  # type: ignore[union-attr]
            c._http._transport = Recorder(writes, write)  # type: ignore[union-attr, assignment]
            await stream.send(b"a" * 18)
            await stream.send(b"b" * 18)
            assert await stream.receive() == b"a" * 18
            assert len(writes[0]) > 2 * (9 + 5 + 18)  # the preface and the headers came along
            assert len(writes) <= 3  # acknowledgements of the server's settings
            c._http._transport = transport  # type: ignore[union-attr]
            stream.cancel()

    run_with_deadline(work())


class Recorder:
    def __init__(self, writes: list[bytes], write: Callable[[bytes], None]) -> None:
        self._writes, self._write = writes, write

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._write(data)


def test_grpc_agrees_on_the_numbers() -> None:
    assert {status.name: status.value for status in Status} == {code.name: code.value[0] for code in grpc.StatusCode}
