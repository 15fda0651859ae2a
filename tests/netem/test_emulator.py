"""The relay on loopback: every byte in order, times as ordered, memory bounded, nothing left behind.

Times, sleeps included, are those of a virtual clock, the same on a busy machine; only threads have real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import statistics
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic as real_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.link_thread import LinkThread
from outrider import SettingsError
from outrider.netem import connection, delay_line, link_state
from outrider.netem.conditions import Conditions, parse_conditions
from outrider.netem.emulator import EmulatedNetwork
from outrider.netem.link import Link
from outrider.netem.link_state import BOTTLENECK_BUFFER, LinkState
from tests.support import virtual_time
from tests.support.ports import ReservedPort
from tests.support.processes import HANG_S
from tests.support.virtual_time import monotonic

READ = 256 * 1024  # bytes that asyncio reads at once
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """`run` collects garbage every time; what tests before made need not be searched."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _virtual_clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        virtual_time.install(patch, connection, delay_line, link_state)
        yield


class Server:
    """Serves until its block ends; echoes unless told otherwise."""

    def __init__(self, handler: Handler | None = None) -> None:
        self.received = self.sent = 0
        self._handler = handler or self.echo
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self._handler(reader, writer)
        await shut(writer)
        self._tasks.discard(task)

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(READ):
            self.received += len(data)
            writer.write(data)
            self.sent += len(data)
            await writer.drain()


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def linked(port: int, wanted: str = "none", seed: int = 0) -> AsyncIterator[Link]:
    link = Link("127.0.0.1", port, parse_conditions(wanted), seed=seed)
    await link.start()
    try:
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def client(port: int | None) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    try:
        yield reader, writer
    finally:
        await shut(writer)


@asynccontextmanager
async def echoing(
    wanted: str = "none",
) -> AsyncIterator[tuple[Server, Link, asyncio.StreamReader, asyncio.StreamWriter]]:
    async with Server() as server, linked(server.port, wanted) as link, client(link.port) as (reader, writer):
        yield server, link, reader, writer


async def ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes = b"x") -> float:
    """The seconds from a message to its echo."""
    start = monotonic()
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    return round(monotonic() - start, 9)


async def is_reset(reader: asyncio.StreamReader) -> bool:
    try:
        await asyncio.wait_for(reader.read(1), 2)
    except ConnectionResetError:
        return True
    return False


def run(scenario: Awaitable[None]) -> None:
    """Run it, then fail on a task, a transport or a socket that is left (an unclosed one warns, and warnings raise)."""

    async def watched() -> None:
        complaints: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await asyncio.wait_for(scenario, 9)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        assert not complaints

    virtual_time.run(watched())
    gc.collect()


# ---------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("wanted", ["none", "rtt=4ms,jitter=2ms", "rtt=2ms,jitter=1ms,up=40Mbit,down=90Mbit"])
@settings(max_examples=3)
@given(sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_bytes_are_intact_and_counted_exactly(wanted: str, sizes: list[int], seed: int) -> None:
    async def scenario() -> None:
        async with Server() as server, linked(server.port, wanted, seed) as link, client(link.port) as (reader, writer):
            chunks = [random.Random(seed + at).randbytes(size) for at, size in enumerate(sizes)]
            for chunk in chunks:
                writer.write(chunk)
                await asyncio.sleep(0.0005)
            writer.write_eof()
            assert await reader.read() == b"".join(chunks)
            assert (link.up, link.down) == (server.received, server.sent) == (sum(sizes), sum(sizes))
            assert link.buffered_bytes == 0

    run(scenario())


def test_large_transfers_both_ways_at_once() -> None:
    async def scenario() -> None:
        data = random.Random(1).randbytes(8_000_000)
        async with echoing() as (_, link, reader, writer):
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
            assert (link.up, link.down) == (len(data), len(data))

    run(scenario())


def test_conditions_under_way_keep_the_order() -> None:
    async def scenario() -> None:
        data = random.Random(2).randbytes(300_000)
        async with echoing() as (_, link, reader, writer):
            for at in range(0, len(data), 10_000):
                link.conditions = parse_conditions(
                    ["rtt=20ms,jitter=9ms", "none", "bw=50Mbit", "rtt=1ms"][at // 10_000 % 4]
                )
                writer.write(data[at : at + 10_000])
                await asyncio.sleep(0.002)
            link.stall(0.02)
            assert await reader.readexactly(len(data)) == data

    run(scenario())


def test_half_close_comes_after_the_bytes_and_leaves_the_other_way_open() -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.read()
        await asyncio.sleep(0.02)
        writer.write(asked + b" was all")

    async def scenario() -> None:
        wanted = "rtt=20ms,bw=1Mbit"
        async with Server(late) as server, linked(server.port, wanted) as link, client(link.port) as (reader, writer):
            writer.write(b"this")
            writer.write_eof()
            assert await reader.read() == b"this was all"

    run(scenario())


def test_the_target_may_speak_and_end_first() -> None:
    async def greeting(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")

    async def scenario() -> None:
        async with Server(greeting) as server, linked(server.port, "rtt=40ms") as link:
            start = monotonic()
            async with client(link.port) as (reader, _):
                assert await reader.read() == b"hello"
            assert 0.080 <= round(monotonic() - start, 9) < 0.115  # handshake, the last ACK of it, and the way back

    run(scenario())


# ---------------------------------------------------------------------------------------------------- times


def test_round_trip_is_what_was_ordered() -> None:
    async def scenario() -> None:
        async with echoing("rtt=50ms") as (_, _, reader, writer):
            assert 0.100 <= await ping(reader, writer) < 0.14  # the handshake first
            assert 0.050 <= await ping(reader, writer) < 0.053

    run(scenario())


def test_jitter_spreads_the_round_trip() -> None:
    async def scenario() -> None:
        async with echoing("rtt=20ms,jitter=8ms") as (_, _, reader, writer):
            await ping(reader, writer)
            times = [0.02]
            while len(times) < 99 and not (min(times) < 0.017 and max(times) > 0.023):
                times.append(await ping(reader, writer))
            assert 0.004 <= min(times) < 0.017
            assert max(times) > 0.023

    run(scenario())


def test_jitter_is_reproducible() -> None:
    def delays(seed: int) -> list[float]:
        medium = LinkState(Conditions(rtt=0.02, jitter=0.01), seed)
        return [way.delay() for _ in range(20) for way in (medium.up, medium.down)]

    assert delays(1) == delays(1) != delays(2)
    assert all(0 <= delay <= 0.02 for delay in delays(1))


@pytest.mark.parametrize("way", ["up", "down"])
def test_bandwidth_is_what_was_ordered(way: str) -> None:
    async def scenario() -> None:
        async with echoing() as (_, link, reader, writer):
            await ping(reader, writer)
            link.conditions = parse_conditions(f"{way}=8Mbit")
            assert 0.85 * 0.3 < await ping(reader, writer, bytes(300_000)) < 1.15 * 0.3

    run(scenario())


def test_connections_share_the_bandwidth() -> None:
    async def scenario() -> None:
        async with echoing() as (_, link, reader, writer), client(link.port) as two:
            await asyncio.gather(ping(reader, writer), ping(*two))
            link.conditions = parse_conditions("up=8Mbit")
            times = await asyncio.gather(ping(reader, writer, bytes(100_000)), ping(*two, bytes(100_000)))
            assert 0.17 < max(times) < 0.3

    run(scenario())


def test_what_waits_at_a_bottleneck_obeys_new_conditions() -> None:
    async def scenario() -> None:
        async with echoing("up=10kbit") as (_, link, reader, writer):
            asyncio.get_running_loop().call_later(0.05, setattr, link, "conditions", Conditions())
            assert await ping(reader, writer, bytes(200_000)) < 0.3  # it would have been 160 s

    run(scenario())


def test_a_stall_holds_everything_and_loses_nothing() -> None:
    async def scenario() -> None:
        async with echoing() as (_, link, reader, writer):
            await ping(reader, writer)
            link.stall(0.15)
            link.stall(0.01)
            assert 0.15 <= await ping(reader, writer, bytes(100_000)) < 0.22
            assert await ping(reader, writer) < 0.02
            link.conditions = parse_conditions("rtt=40ms")
            asyncio.get_running_loop().call_later(0.01, link.stall, 0.1)  # in mid-flight
            assert 0.130 <= await ping(reader, writer) < 0.17  # it arrives as the stall ends, and has the way back

    run(scenario())


def test_stalls_recur() -> None:
    async def scenario() -> None:
        async with echoing("stall=100ms:60ms") as (_, _, reader, writer):
            start, times = monotonic(), []
            while monotonic() - start < 0.35:
                times.append(await ping(reader, writer))
                await asyncio.sleep(0.002)
            assert 2 <= len([t for t in times if t > 0.04]) <= 4
            assert max(times) < 0.1

    run(scenario())


def test_a_stall_is_a_time() -> None:
    with pytest.raises(SettingsError, match="a stall of"):
        Link("127.0.0.1", 1).stall(float("nan"))


# ---------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("wanted", ["none", "rtt=20ms,bw=1Mbit"])
def test_a_cut_resets_present_connections_and_lets_new_ones_in(wanted: str) -> None:
    async def scenario() -> None:
        async with echoing(wanted) as (_, link, reader, writer):
            await ping(reader, writer)
            writer.write(bytes(50_000))
            await asyncio.sleep(0.01)
            link.cut()
            assert await drained_then_reset(reader)
            async with client(link.port) as again:
                await ping(*again)
            assert link.connections == 2

    run(scenario())


async def drained_then_reset(reader: asyncio.StreamReader) -> bool:
    try:
        while await asyncio.wait_for(reader.read(READ), 2):
            pass
    except ConnectionResetError:
        return True
    return False


def test_connections_are_cut_in_time() -> None:
    async def scenario() -> None:
        async with echoing("cut=80ms") as (_, link, reader, writer):
            start = monotonic()
            await ping(reader, writer)
            assert await is_reset(reader)
            assert 0.078 <= round(monotonic() - start, 9) < 0.13
            link.conditions = Conditions()
            async with client(link.port) as two:
                await ping(*two)
                link.conditions = parse_conditions("cut=1ms")  # present ones, too
                assert await is_reset(two[0])

    run(scenario())


def test_a_block_lets_nobody_in() -> None:
    async def scenario() -> None:
        async with echoing() as (_, link, reader, writer):
            await ping(reader, writer)
            link.block(True)
            assert await is_reset(reader)
            link.conditions = parse_conditions("cut=1s")
            async with client(link.port) as (refused, _):
                assert await is_reset(refused)
            link.block(False)
            async with client(link.port) as again:
                await ping(*again)

    run(scenario())


@pytest.mark.parametrize("wanted", ["none", "rtt=20ms"])
def test_a_target_that_is_down_resets_the_client(wanted: str) -> None:
    async def scenario() -> None:
        with ReservedPort() as port:
            async with linked(port, wanted) as link, client(link.port) as (reader, writer):
                writer.write(b"anyone?")
                assert await is_reset(reader)

    run(scenario())


def test_a_target_that_cannot_be_named_resets_the_client() -> None:
    async def scenario() -> None:
        link = Link("no.such.host.invalid", 1)
        await link.start()
        async with client(link.port) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.read(1), HANG_S)
        await link.close()

    asyncio.run(scenario())  # names are looked up in a thread, which has no part in virtual time


@pytest.mark.parametrize("wanted", ["none", "rtt=10ms"])
def test_a_target_that_dies_resets_the_client(wanted: str) -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + bytes(7))
        writer.transport.abort()

    async def scenario() -> None:
        async with Server(dies) as server, linked(server.port, wanted) as link, client(link.port) as (reader, writer):
            writer.write(bytes(1000))
            assert await is_reset(reader)

    run(scenario())


@pytest.mark.parametrize("wanted", ["none", "rtt=10ms,up=400kbit", "rtt=200ms"])
def test_a_client_that_dies_resets_the_target(wanted: str) -> None:
    async def scenario() -> None:
        async with Server() as server, linked(server.port, wanted) as link:
            _, writer = await asyncio.open_connection("127.0.0.1", link.port)
            writer.write(bytes(1000))
            await asyncio.sleep(0.03)
            writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + bytes(7))
            writer.transport.abort()
            await asyncio.sleep(0.15)
            assert not link._open_connections  # an RTT of 200 ms: it left before the target was dialled
            assert server.received == (0 if "200" in wanted else 1000)

    run(scenario())


def test_memory_is_bounded_when_the_target_reads_slowly_or_not_at_all() -> None:
    async def deaf(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(9)

    async def scenario(wanted: str, bound: int) -> None:
        async with Server(deaf) as server, linked(server.port, wanted) as link, client(link.port) as (_, writer):
            writer.write(bytes(64_000_000))  # more than sockets hold
            peak = 0
            for _ in range(10):
                await asyncio.sleep(0.01)
                (connection,) = link._open_connections
                unsent = connection._target.transport.get_write_buffer_size() if connection._target.transport else 0
                peak = max(peak, link.buffered_bytes + unsent)
            assert 0 < peak <= bound
            assert writer.transport.get_write_buffer_size() > 2_000_000  # the client itself has to wait
            writer.transport.abort()

    run(scenario("none", 2 * READ))
    run(scenario("rtt=20ms,bw=1Mbit", BOTTLENECK_BUFFER + 2500 + READ))
    run(scenario("rtt=2ms,bw=10Gbit", BOTTLENECK_BUFFER + 2_500_000 + 2 * READ))


@pytest.mark.parametrize("wanted", ["none", "rtt=300ms", "rtt=10ms,bw=100kbit"])
@pytest.mark.parametrize("turns", range(6))
def test_close_leaves_nothing_whenever_it_comes(wanted: str, turns: int) -> None:
    async def scenario() -> None:
        async with Server() as server, linked(server.port, wanted) as link:
            sockets = [socket.create_connection(("127.0.0.1", link.port or 0)) for _ in range(3)]
            sockets[0].sendall(bytes(10_000))
            for _ in range(turns):
                await asyncio.sleep(0)
            await link.close()
            await link.close()
            assert not link._open_connections
            for one in sockets:
                one.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", link.port)

    run(scenario())


def test_a_port_is_checked_when_it_is_given() -> None:
    with pytest.raises(SettingsError, match="port 65536: expected 1 to 65535"):
        Link("127.0.0.1", 65536)


# ---------------------------------------------------------------------------------------------------- sockets, threads


@asynccontextmanager
async def through(link: Link) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection(sock=await link.connect())
    try:
        yield reader, writer
    finally:
        await shut(writer)


def test_a_connection_without_a_listener_is_like_any_other() -> None:
    async def scenario() -> None:
        async with Server() as server:
            link = Link("127.0.0.1", server.port, parse_conditions("rtt=10ms"))
            start = monotonic()
            async with through(link) as (reader, writer):
                assert 0.01 <= round(monotonic() - start, 9) < 0.02, "one round trip"
                await ping(reader, writer)
                assert 0.01 <= await ping(reader, writer, b"abc") < 0.02
                assert (link.port, link.up, link.down, link.connections) == (None, 4, 4, 1)
                link.cut()
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            async with through(link) as again:
                await ping(*again)
            assert link.connections == 2
            await link.close()
            assert not link._open_connections

    run(scenario())


@pytest.mark.parametrize("wanted", ["none", "rtt=20ms"])
def test_a_connection_without_a_listener_fails_as_the_target_does(wanted: str) -> None:
    async def scenario() -> None:
        with ReservedPort() as port:
            link = Link("127.0.0.1", port, parse_conditions(wanted))
            with pytest.raises(ConnectionRefusedError):
                await link.connect()
            link.block(True)
            with pytest.raises(ConnectionAbortedError):
                await link.connect()
            await link.close()
            assert not link._open_connections

    run(scenario())


@pytest.mark.parametrize("by", ["cancel", "cut", "close"])
def test_a_connection_that_is_given_up_while_it_is_made_leaves_nothing(by: str) -> None:
    async def scenario() -> None:
        async with Server() as server:
            link = Link("127.0.0.1", server.port, parse_conditions("rtt=1s"))
            connecting = asyncio.create_task(link.connect())
            await asyncio.sleep(0.1)
            assert link.connections == 1
            if by == "cancel":
                connecting.cancel()
            elif by == "cut":
                link.cut()
            else:
                await link.close()
            with pytest.raises(asyncio.CancelledError if by == "cancel" else ConnectionAbortedError):
                await connecting
            await asyncio.sleep(0.01)
            assert not link._open_connections
            await link.close()

    run(scenario())


def test_a_network_has_a_link_for_each_host() -> None:
    async def scenario() -> None:
        async with Server() as one, Server() as other:
            network = EmulatedNetwork(parse_conditions("rtt=10ms"))
            for server in (one, one, other):
                reader, writer = await asyncio.open_connection(sock=await network.connect("127.0.0.1", server.port))
                await ping(reader, writer)
                assert 0.01 <= await ping(reader, writer) < 0.02
                await shut(writer)
            assert [link.connections for link in network._links.values()] == [2, 1]
            await network.close()

    run(scenario())


@contextmanager
def echo_thread() -> Iterator[int]:
    """The port of an echo server for synchronous clients."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_echo_all, args=(listener,))
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def _echo_all(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(ConnectionError):
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while data := peer.recv(65536):
                    peer.sendall(data)


def knock(peer: socket.socket, data: bytes = b"x") -> float:
    start = real_time()
    peer.sendall(data)
    assert peer.recv(len(data)) == data
    return real_time() - start


def test_a_link_in_a_thread_is_controlled_from_outside() -> None:
    with echo_thread() as port, LinkThread("127.0.0.1", port) as link:
        with socket.create_connection(("127.0.0.1", link.port or 0)) as peer:
            knock(peer)
            link.conditions = parse_conditions("rtt=20ms")
            assert 0.02 <= knock(peer, b"abc") < HANG_S
            link.conditions = Conditions()
            link.stall(0.05)
            assert 0.045 <= knock(peer) < HANG_S
            assert (link.up, link.down, link.connections, link.conditions) == (5, 5, 1, Conditions())
            link.cut()
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
        link.block(True)
        with socket.create_connection(("127.0.0.1", link.port or 0)) as peer, pytest.raises(ConnectionResetError):
            peer.recv(1)


def test_a_thread_that_cannot_listen_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(_: Link) -> None:
        raise OSError("no file descriptor is left")

    monkeypatch.setattr(Link, "start", start)
    with pytest.raises(OSError, match="no file descriptor is left"):
        LinkThread("127.0.0.1", 1).__enter__()


def test_passing_through_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    def median(port: int | None) -> float:
        with socket.create_connection(("127.0.0.1", port or 0)) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return statistics.median([knock(peer, bytes(200)) for _ in range(300)])

    with echo_thread() as port, LinkThread("127.0.0.1", port) as link:
        direct, relayed = median(port), median(link.port)
    with capsys.disabled():
        print(f"\nlink, no conditions: {(relayed - direct) * 1e6:.0f} µs added to a {direct * 1e6:.0f} µs round trip")  # noqa: T201
    assert relayed < HANG_S
