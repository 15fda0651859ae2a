"""What gRPC does before our code sees a call: compression, keepalive, idle connections, and what strangers cost."""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest

from outrider.cloud import channel_options
from outrider.cloud.limits import Limits
from outrider.protocol import schema
from outrider.serving.tokens import Tokens
from tests.support.cloud_server import serving
from tests.support.cloud_service import HeldEngine, metric_total, open_request, reached, target_output, wait_until
from tests.support.http2_client import PlainHttp2, gzip_of_zeros, message
from tests.support.raw_stream import RawStream, verifying

SESSION = f"/{schema.SERVICE}/Session"
DESCRIBE = f"/{schema.SERVICE}/Describe"
CHECK = "/grpc.health.v1.Health/Check"
TOKENS = Tokens({"lab": hashlib.sha256(b"l" * 20).digest()})
BEARER = ("authorization", "Bearer " + "l" * 20)
PEAK = Path("/proc/self/clear_refs")
A_STRANGER = 100 * 2**10  # bytes that a connection may cost before it is known


def peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(not PEAK.exists(), reason="needs Linux's account of a process's memory")
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("encoding", ["gzip", "identity", None])
@pytest.mark.parametrize("method", [SESSION, DESCRIBE, CHECK])
def test_a_compressed_message_is_not_inflated(method: str, encoding: str | None, known: bool) -> None:
    bomb = gzip_of_zeros(200 * 2**20)
    headers = [("grpc-encoding", encoding)] if encoding else []
    with serving(HeldEngine(), tokens=TOKENS) as served, PlainHttp2(served.port) as client:
        PEAK.write_text("5")
        before = peak()
        call = client.call(method, *headers, *([BEARER] if known else []))
        client.send(call, message(bomb, compressed=True), last=True)
        status = client.outcome(call).get("grpc-status")
        if encoding == "gzip":
            assert status == "12", "unimplemented"
        assert peak() - before < 50 * 2**20


@pytest.mark.parametrize("method", [SESSION, DESCRIBE, f"/{schema.SERVICE}/Vocabulary", f"/{schema.SERVICE}/Tokenizer"])
def test_an_unauthenticated_call_is_refused_before_its_request_arrives(method: str) -> None:
    """So nothing is kept of it."""
    with serving(HeldEngine(), tokens=TOKENS) as served, PlainHttp2(served.port) as client:
        call = client.call(method)
        client.send(call, message(bytes(400_000))[:1000])
        assert client.outcome(call)["grpc-status"] == "16"


def test_a_client_may_ping_every_second_for_as_long_as_it_likes() -> None:
    """gRPC's default closes the connection for "too many pings" after the third, an open session included."""
    options = [("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_permit_without_calls", 1)]
    with serving(HeldEngine()) as served, grpc.insecure_channel(served.address, options=options) as channel:
        states: list[grpc.ChannelConnectivity] = []
        with RawStream(channel) as stream:
            stream.opened(open_request())
            channel.subscribe(states.append)
            time.sleep(5.5)  # gRPC's own clock sets the pings' times; a busy machine sends fewer, and none are too many
            assert stream.verdict(verifying(1, 5)).next_token == target_output(1)[0]
        assert grpc.ChannelConnectivity.IDLE not in states


def test_pings_without_a_call_are_allowed_and_a_flood_is_not() -> None:
    with serving(HeldEngine()) as served, PlainHttp2(served.port) as client:
        for _ in range(2):
            client.h2.ping(b"12345678")
            client.flush()
            client.receive()
            time.sleep(1.0)  # scripted: the client's time between two pings, which may only be longer
        assert client.terminated is None
        for _ in range(50):
            client.h2.ping(b"12345678")
        client.flush()
        while client.terminated is None:
            client.receive()


def test_a_connection_without_a_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_options, "IDLE_MS", 200)
    with serving(HeldEngine()) as served, PlainHttp2(served.port) as idle, PlainHttp2(served.port) as used:
        call = used.call(SESSION)
        used.send(call, message(open_request().SerializeToString()))
        while idle.terminated is None:
            idle.receive()
        used.send(call, message(verifying(1, 5).SerializeToString()), last=True)
        assert used.outcome(call)["grpc-status"] == "0"


def test_a_connection_that_never_speaks_http2_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_options, "HANDSHAKE_MS", 200)
    with serving(HeldEngine()) as served, PlainHttp2.silent(served.port) as client:
        while client.recv(1000):
            pass


def test_the_server_takes_no_connection_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_options, "MAX_CONNECTIONS", 3)
    with serving(HeldEngine()) as served, ExitStack() as stack:
        clients = [stack.enter_context(PlainHttp2(served.port)) for _ in range(3)]
        for client in clients:
            client.receive()
        with PlainHttp2(served.port) as late:
            while late.terminated is None:
                late.receive()
        clients[0].socket.close()
        wait_until(lambda: comes_in(served.port))


def comes_in(port: int) -> bool:
    with PlainHttp2(port) as client:
        client.receive()
        return client.terminated is None


def test_an_unauthenticated_client_costs_little_memory() -> None:
    """Connections that say nothing, and some that open streams without a token and do not read the answers."""
    count, calls = 100, 5
    process = psutil.Process()
    with serving(HeldEngine(), tokens=TOKENS) as served, ExitStack() as stack:
        with PlainHttp2(served.port) as first:
            first.receive()
        sockets = [PlainHttp2.greeting(served.port) for _ in range(count)]
        for each in sockets:
            stack.callback(each.close)
        before = process.memory_info().rss
        others = [PlainHttp2.greeting(served.port, strangers=calls) for _ in range(count)]
        for each in others:
            stack.callback(each.close)
        wait_until(lambda: metric_total(served, "outrider_errors_total") >= count * calls)
        assert process.memory_info().rss - before < count * A_STRANGER


def test_an_identity_has_so_many_streams_over_all_its_connections() -> None:
    limits = Limits(max_sessions=1, max_sessions_per_identity=1)
    assert limits.max_streams_per_identity == 18
    with reached(HeldEngine(), limits=limits) as (served, channel), ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(RawStream(channel))
        with grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            for _ in range(9):
                stack.enter_context(RawStream(other))
            wait_until(lambda: served.service.streams == 18)
            with RawStream(other) as late:
                answer = late.receive()
                assert answer.error.code == schema.Error.LIMIT
                assert "18 streams" in answer.error.message
