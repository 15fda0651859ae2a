"""A service begins, drains and ends in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.cloud.server import Server, ServerConfig, check_bindable, run
from outrider.errors import SettingsError
from outrider.protocol import schema
from tests.support.cloud_server import serving
from tests.support.cloud_service import PROMPT, HeldEngine, error_name, open_request, reached, target_output, wait_until
from tests.support.http2_client import PlainHttp2
from tests.support.ports import ReservedPort
from tests.support.processes import HANG_S
from tests.support.raw_stream import CLOSE, RawStream, opening, resuming, verifying

pytestmark = pytest.mark.network


def health(channel: grpc.Channel, service: str = "") -> int:
    return (
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=HANG_S).status
    )


def test_draining_refuses_new_sessions_and_finishes_running_rounds() -> None:
    with reached(HeldEngine(), grace=20.0) as (served, channel):
        with RawStream(channel) as one, RawStream(channel) as waiting:
            id_ = one.opened(open_request())
            one.verdict(verifying(1, 5))
            drained = served.submit(served.server.drain())
            wait_until(lambda: served.service.draining)
            for name in ("", schema.SERVICE):
                assert health(channel, name) == health_pb2.HealthCheckResponse.NOT_SERVING
            error = waiting.refused(open_request())
            assert error_name(error.code) == "DRAINING"
            assert error.retry_after_ms > 0
            with RawStream(channel) as other:
                assert error_name(other.refused(resuming(id_, PROMPT)).code) == "DRAINING"
            assert one.verdict(verifying(2, 6, target_output(4)[1:3])).accepted == 2
            assert not drained.done()
            one.send(CLOSE)
            one.finish()
            drained.result(HANG_S)
        assert not served.service.engine.open_slots  # type: ignore[attr-defined]


def test_health_reports_not_serving_before_streams_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(HeldEngine()) as served:
        said_: list[tuple[int, bool]] = []
        tell = served.server._serve_health

        async def watched(status: int) -> None:
            said_.append((status, served.service.draining))
            await tell(status)

        monkeypatch.setattr(served.server, "_serve_health", watched)
        served.run(served.server.drain())
        assert said_ == [(health_pb2.HealthCheckResponse.NOT_SERVING, False)]


def test_streams_are_cut_when_the_grace_period_ends() -> None:
    with reached(HeldEngine(), grace=0.3) as (served, channel):
        with RawStream(channel) as idle:
            idle.opened(open_request())
            served.run(served.server.drain())
            with pytest.raises(grpc.RpcError):
                idle.receive()
        assert not served.service.engine.open_slots  # type: ignore[attr-defined]


def test_stopping_while_a_verdict_is_being_computed(caplog: pytest.LogCaptureFixture) -> None:
    engine = HeldEngine()
    with reached(engine) as (served, channel), RawStream(channel) as stream:
        stream.opened(open_request())
        engine.hold()
        stream.send(verifying(1, 5))
        assert engine.entered.wait(HANG_S)
        stopping = served.submit(served.server.stop())
        with pytest.raises(grpc.RpcError):
            stream.receive()
        engine.go.set()
        stopping.result(HANG_S)
        assert not engine.open_slots
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_a_service_can_be_restarted_at_its_port() -> None:
    with serving(HeldEngine()) as served:
        port = served.port
        for _ in range(2):
            with grpc.insecure_channel(served.address) as channel, RawStream(channel) as stream:
                stream.opened(open_request())
                stream.verdict(verifying(1, 5))
            served.restart()
            assert served.port == port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
def test_the_service_listens_on_the_given_host(host: str) -> None:
    """ "" is every interface, as in --listen :7070, which gRPC itself cannot bind."""
    with serving(HeldEngine(), host=host) as served, grpc.insecure_channel(f"localhost:{served.port}") as channel:
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING


def test_metrics_that_cannot_be_served_leave_nothing_behind() -> None:
    with serving(HeldEngine()) as served:
        taken = serving(HeldEngine(), metrics_address=("127.0.0.1", served.port))
        with pytest.raises(SettingsError, match="metrics cannot be served"):
            taken.__enter__()


def test_an_address_that_is_taken_is_named() -> None:
    with serving(HeldEngine()) as served:
        taken = serving(HeldEngine(), port=served.port)
        with pytest.raises(SettingsError, match=rf"cannot listen on 127.0.0.1:{served.port}"):
            taken.__enter__()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_drains_and_a_second_one_ends_it_at_once(signals: int) -> None:
    """With a stream open, one signal waits for the grace to end."""
    engine, grace = HeldEngine(), 1.0 if signals == 1 else 60.0
    engine.reserve(2000, 256)
    outcome: Future[Any] = Future()

    def edge(server: Server) -> None:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel, RawStream(channel) as stream:
                stream.opened(open_request())
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGTERM)
                    wait_until(lambda: server.service.draining)
                outcome.set_result(next(stream.call, None))
        except (AssertionError, grpc.RpcError) as error:
            outcome.set_exception(error)

    def listening(server: Server) -> None:
        threading.Thread(target=edge, args=(server,)).start()

    asyncio.run(run(engine, ServerConfig("127.0.0.1", 0, budget=2000, max_length=256, grace=grace), listening))
    with pytest.raises(grpc.RpcError):
        outcome.result(HANG_S)
    assert not engine.open_slots


def test_the_command_serves_drains_on_sigterm_and_ends_with_0() -> None:
    command = [sys.executable, "-m", "outrider", "cloud", "demo", "--listen", "127.0.0.1:0", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        address = json.loads(process.stdout.readline())["listening"]
        with grpc.insecure_channel(address) as channel:
            data = channel.unary_unary(f"/{schema.SERVICE}/Describe")(b"", timeout=HANG_S)
            described = schema.DescribeAnswer.FromString(data)

            def fits(frame: schema.Open) -> None:
                frame.fingerprint, frame.model = described.fingerprint, described.model

            with RawStream(channel) as one, RawStream(channel) as two:
                frame = opening(PROMPT, described.vocab_size, change=fits)
                one.opened(frame)
                first = one.verdict(verifying(1, 5))
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING)
                assert error_name(two.refused(frame).code) == "DRAINING"
                assert one.verdict(verifying(2, 6, (first.next_token,))).round == 2
                one.send(CLOSE)
                one.finish()
                _, spoken = process.communicate(timeout=120)
        assert process.returncode == 0, spoken
        assert spoken.splitlines()[-1] == f"outrider: serving demo:cloud at grpc://{address}"
        assert all(line.startswith("outrider: ") for line in spoken.splitlines())
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


SWALLOWS = """
import os, signal, sys
import outrider.engines.load as load
from outrider.cli import main

def never(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    except BaseException:
        print("swallowed", flush=True)  # as a library may that is being imported

load.load_engine = never
sys.argv = ["outrider", "cloud", "demo", "--listen", "127.0.0.1:0"]
main.main()
"""


def test_sigterm_while_the_model_is_loaded_ends_it_with_143() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == "outrider: loading the model demo:cloud\n"


def test_an_address_that_is_taken_is_refused_before_a_model_is_loaded() -> None:
    with ReservedPort() as port:
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(SettingsError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: Address already in use"),
        ):
            check_bindable("127.0.0.1", port)
        check_bindable("127.0.0.1", port)
    check_bindable("", 0)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_every_interface_is_both_families() -> None:
    with serving(HeldEngine(), host="") as served:
        for host in ("127.0.0.1", "::1"):
            with PlainHttp2(served.port, host) as client:
                client.receive()
                assert client.terminated is None
