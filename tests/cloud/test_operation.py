"""Running a service: who may come in, limits, its orderly end, and what it tells of all that."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fakes import HashRows, ScriptedEngine
from outrider.cloud import logs
from outrider.cloud.limits import MESSAGE_OVERHEAD, Limits
from outrider.cloud.security import Tokens
from outrider.cloud.server import Server, Serving, run
from outrider.errors import SettingsError
from outrider.wire import schema
from outrider.wire.tls import ServerTls
from tests.certificates import Authority
from tests.cloud.common import PROMPT, SOON, Held, clear, code, eventually, figure, open_, said
from tests.cloud.raw import CLOSE, RawStream, generating, opening, resuming, verifying
from tests.cloud.serving import Served, serving

LAB, HOME = "l" * 20, "h" * 20


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def health(channel: grpc.Channel, service: str = "") -> int:
    return (
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=SOON).status
    )


# Identity -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    file = tmp_path / "tokens"
    file.write_text(f"lab {LAB}\nhome {HOME}\n")
    file.chmod(0o600)
    return Tokens.load(file)


def test_a_session_is_its_owners(tokens: Tokens) -> None:
    with serving(Held(), tokens=tokens) as served, grpc.insecure_channel(served.address) as channel:
        with RawStream(channel, bearer(LAB)) as mine:
            id_ = mine.opened(open_())
            with RawStream(channel, bearer(HOME)) as other:
                assert code(other.refused(resuming(id_, PROMPT)).code) == "UNKNOWN_SESSION"
            assert mine.verdict(verifying(1, 5)).next_token == said(1)[0]
        with RawStream(channel, bearer(LAB)) as mine:
            mine.opened(resuming(id_, (*PROMPT, said(1)[0])))


@pytest.mark.parametrize("metadata", [[], bearer("x" * 20), [("authorization", LAB)]])
def test_nobody_comes_in_without_a_token(tokens: Tokens, metadata: list[tuple[str, str]]) -> None:
    with serving(Held(), tokens=tokens) as served, grpc.insecure_channel(served.address) as channel:
        with RawStream(channel, metadata) as stream:
            stream.send(open_())
            with pytest.raises(grpc.RpcError) as caught:
                stream.receive()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for call in ("unary_unary", "unary_stream"):
            method = f"/{schema.SERVICE}/{'Describe' if call == 'unary_unary' else 'Vocabulary'}"
            with pytest.raises(grpc.RpcError) as caught:
                answer = getattr(channel, call)(method)(b"", timeout=SOON, metadata=metadata)
                list(answer)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert figure(served, "outrider_errors_total") == 3
        assert len(served.service.sessions) == 0


def test_mutual_tls_and_tokens(tmp_path: Path, tokens: Tokens) -> None:
    authority = Authority(tmp_path)
    server, client = authority.server(), authority.client("edge-7")
    tls = ServerTls(server.cert, server.key, authority.ca)
    ca = authority.ca.read_bytes()
    with serving(Held(), tls=tls, tokens=tokens) as served:
        known = grpc.ssl_channel_credentials(ca, client.key.read_bytes(), client.cert.read_bytes())
        with grpc.secure_channel(f"localhost:{served.port}", known) as channel:
            with RawStream(channel, bearer(LAB)) as stream:
                stream.opened(open_())
                assert stream.verdict(verifying(1, 5, said(2))).accepted == 2
                assert [record.identity for record in served.service.sessions] == ["lab"]
            with RawStream(channel) as stream, pytest.raises(grpc.RpcError) as caught:
                stream.receive()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with grpc.secure_channel(f"localhost:{served.port}", grpc.ssl_channel_credentials(ca)) as channel:
            with RawStream(channel, bearer(LAB)) as stream, pytest.raises(grpc.RpcError) as caught:
                stream.receive()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# Limits ---------------------------------------------------------------------------------------------------------


def test_haste_is_told_when_to_come_back() -> None:
    with serving(Held(), limits=Limits(max_rate=8, burst=3)) as served:
        with grpc.insecure_channel(served.address) as channel:
            with RawStream(channel) as stream:
                id_ = stream.opened(open_())
                a = said(4)
                stream.verdict(verifying(1, 5))
                stream.verdict(verifying(2, 6))
                error = stream.refused(verifying(3, 7))
                assert code(error.code) == "LIMIT"
                assert 0 < error.retry_after_ms <= 126
            threading.Event().wait(error.retry_after_ms / 1000)
            with RawStream(channel) as stream:
                stream.opened(resuming(id_, (*PROMPT, *a[:2])))
                assert stream.verdict(verifying(3, 7)).next_token == a[2]


def test_opening_counts_as_a_request() -> None:
    """It costs the service more than a block does."""
    with serving(Held(), limits=Limits(max_rate=0.01, burst=2)) as served:
        with grpc.insecure_channel(served.address) as channel:
            for _ in range(2):
                with RawStream(channel) as stream:
                    stream.opened(open_())
            with RawStream(channel) as stream:
                assert code(stream.refused(open_()).code) == "LIMIT"


@pytest.mark.parametrize("limit", ["max_sessions", "max_sessions_per_identity"])
def test_so_many_sessions(limit: str) -> None:
    with serving(Held(), limits=Limits(**{limit: 2})) as served, grpc.insecure_channel(served.address) as channel:
        with RawStream(channel) as one, RawStream(channel) as two, RawStream(channel) as three:
            one.opened(open_())
            two.opened(open_())
            error = three.refused(open_())
            assert (code(error.code), error.retry_after_ms) == ("LIMIT", 1000)
            one.send(CLOSE)
            eventually(lambda: len(served.service.sessions) == 1)
            with RawStream(channel) as four:
                four.opened(open_())


def test_a_prompt_has_so_many_tokens_but_what_followed_it_may_come_along() -> None:
    """A session that was lost is opened again with its output: the prompt's limit is not about that."""
    with serving(Held(), limits=Limits(max_prompt_tokens=5)) as served:
        with grpc.insecure_channel(served.address) as channel:
            with RawStream(channel) as stream:
                assert code(stream.refused(open_((*PROMPT, 1))).code) == "PROMPT"
            with RawStream(channel) as stream:
                stream.opened(open_(committed=said(40)))
                assert stream.verdict(verifying(1, 45)).next_token == said(41)[-1]


def test_a_message_that_is_too_large_ends_its_stream_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(max_media_bytes=1000, max_media_total=1000, max_message_bytes=1000 + MESSAGE_OVERHEAD)
    with serving(Held(), limits=limits) as served, grpc.insecure_channel(served.address) as channel:
        with RawStream(channel) as bystander, RawStream(channel) as stream:
            bystander.opened(open_((1, 2)))
            id_ = stream.opened(open_())
            stream.send(bytes(limits.max_message_bytes + 1))
            with pytest.raises(grpc.RpcError) as caught:
                stream.receive()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            bystander.verdict(verifying(1, 2))
            eventually(lambda: served.service.streams == 1)
            with RawStream(channel) as again:
                again.opened(resuming(id_, PROMPT))
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


# The end --------------------------------------------------------------------------------------------------------


def test_draining_takes_nobody_new_and_lets_those_at_work_finish() -> None:
    with serving(Held(), grace=20.0) as served, grpc.insecure_channel(served.address) as channel:
        with RawStream(channel) as one, RawStream(channel) as waiting:
            id_ = one.opened(open_())
            one.verdict(verifying(1, 5))
            drained = served.submit(served.server.drain())
            eventually(lambda: served.service.draining)
            for name in ("", schema.SERVICE):
                assert health(channel, name) == health_pb2.HealthCheckResponse.NOT_SERVING
            error = waiting.refused(open_())
            assert code(error.code) == "DRAINING"
            assert error.retry_after_ms > 0
            with RawStream(channel) as other:
                assert code(other.refused(resuming(id_, PROMPT)).code) == "DRAINING"
            assert one.verdict(verifying(2, 6, said(4)[1:3])).accepted == 2
            assert not drained.done()
            one.send(CLOSE)
            one.finish()
            drained.result(SOON)
        assert not served.service.engine.open_slots  # type: ignore[attr-defined]


def test_not_serving_is_said_before_anybody_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Held()) as served:
        said_: list[tuple[int, bool]] = []
        tell = served.server._serve_health

        async def watched(status: int) -> None:
            said_.append((status, served.service.draining))
            await tell(status)

        monkeypatch.setattr(served.server, "_serve_health", watched)
        served.run(served.server.drain())
        assert said_ == [(health_pb2.HealthCheckResponse.NOT_SERVING, False)]


def test_grace_ends() -> None:
    with serving(Held(), grace=0.3) as served, grpc.insecure_channel(served.address) as channel:
        with RawStream(channel) as idle:
            idle.opened(open_())
            served.run(served.server.drain())
            with pytest.raises(grpc.RpcError):
                idle.receive()
        assert not served.service.engine.open_slots  # type: ignore[attr-defined]


def test_stopping_while_a_verdict_is_being_computed(caplog: pytest.LogCaptureFixture) -> None:
    engine = Held()
    with serving(engine) as served, grpc.insecure_channel(served.address) as channel, RawStream(channel) as stream:
        stream.opened(open_())
        engine.hold()
        stream.send(verifying(1, 5))
        assert engine.entered.wait(SOON)
        stopping = served.submit(served.server.stop())
        with pytest.raises(grpc.RpcError):
            stream.receive()
        engine.go.set()
        stopping.result(SOON)
        assert not engine.open_slots
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_a_service_can_be_restarted_at_its_port() -> None:
    with serving(Held()) as served:
        port = served.port
        for _ in range(2):
            with grpc.insecure_channel(served.address) as channel, RawStream(channel) as stream:
                stream.opened(open_())
                stream.verdict(verifying(1, 5))
            served.restart()
            assert served.port == port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
def test_where_it_listens(host: str) -> None:
    """ "" is every interface, as in --listen :7070, which gRPC itself cannot bind."""
    with serving(Held(), host=host) as served, grpc.insecure_channel(f"localhost:{served.port}") as channel:
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING


def test_metrics_that_cannot_be_served_leave_nothing_behind() -> None:
    with serving(Held()) as served, pytest.raises(SettingsError, match="metrics cannot be served"):
        with serving(Held(), metrics_at=("127.0.0.1", served.port)):
            pass


def test_an_address_that_is_taken_is_named() -> None:
    with serving(Held()) as served:
        with pytest.raises(SettingsError, match=rf"cannot listen on 127.0.0.1:{served.port}"):
            with serving(Held(), port=served.port):
                pass


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_drains_and_a_second_one_ends_it_at_once(signals: int) -> None:
    """With a stream open, one signal waits for the grace to end."""
    engine, grace = Held(), 1.0 if signals == 1 else 60.0
    engine.reserve(2000, 256)
    outcome: Future[Any] = Future()

    def edge(server: Server) -> None:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel, RawStream(channel) as stream:
                stream.opened(open_())
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGTERM)
                    eventually(lambda: server.service.draining)
                outcome.set_result(next(stream.call, None))
        except BaseException as error:
            outcome.set_exception(error)

    def listening(server: Server) -> None:
        threading.Thread(target=edge, args=(server,)).start()

    asyncio.run(run(engine, Serving("127.0.0.1", 0, budget=2000, max_length=256, grace=grace), listening))
    with pytest.raises(grpc.RpcError):
        outcome.result(SOON)
    assert not engine.open_slots


def test_the_command_serves_drains_on_sigterm_and_ends_with_0() -> None:
    command = [sys.executable, "-m", "outrider", "cloud", "demo", "--listen", "127.0.0.1:0", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        address = json.loads(process.stdout.readline())["listening"]
        with grpc.insecure_channel(address) as channel:
            data = channel.unary_unary(f"/{schema.SERVICE}/Describe")(b"", timeout=SOON)
            described = schema.DescribeAnswer.FromString(data)

            def fits(frame: schema.Open) -> None:
                frame.fingerprint, frame.model = described.fingerprint, described.model

            with RawStream(channel) as one, RawStream(channel) as two:
                frame = opening(PROMPT, described.vocab_size, change=fits)
                one.opened(frame)
                first = one.verdict(verifying(1, 5))
                process.send_signal(signal.SIGTERM)
                eventually(lambda: health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING)
                assert code(two.refused(frame).code) == "DRAINING"
                assert one.verdict(verifying(2, 6, (first.next_token,))).round == 2
                one.send(CLOSE)
                one.finish()
                _, spoken = process.communicate(timeout=30)
        assert process.returncode == 0, spoken
        assert spoken.splitlines() == [f"outrider: serving demo:cloud at grpc://{address}"]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


# What is told ---------------------------------------------------------------------------------------------------

BIG = 60_000
SECRET = (48_213, 51_904, 57_331)  # no other figure of a log looks like these


@pytest.fixture
def told() -> Iterator[list[logging.LogRecord]]:
    """Every record of every logger of ours."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("outrider"), Keep(logging.DEBUG)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(before)


def talk(served: Served, channel: grpc.Channel) -> bytes:
    """A session with everything in it, and a few that are refused."""
    rows = served.service.engine.rows  # type: ignore[attr-defined]
    first = int(rows(SECRET).argmax())
    with RawStream(channel) as stream:
        id_ = stream.opened(opening(SECRET, BIG, repetition_penalty=1.5))
        stream.verdict(verifying(1, 3, (first, SECRET[0])))
    with RawStream(channel) as stream:
        stream.opened(resuming(id_, SECRET))
        stream.verdict(verifying(2, 4, (), new=(SECRET[1],)))
        stream.send(generating(3, 5))
        for _ in range(3):
            stream.receive()
        stream.cancel()
    for frames in (
        [opening(SECRET, BIG), verifying(1, SECRET[0])],
        [opening(SECRET, BIG), verifying(1, 3, (BIG + SECRET[0],))],
        [opening((*SECRET, BIG + SECRET[1]), BIG)],
        [opening(SECRET, BIG, change=lambda frame: setattr(frame, "accept", "秘密"))],
    ):
        with RawStream(channel) as stream:
            stream.send(*frames)
            assert [schema.Answer.FromString(data) for data in stream.call][-1].error.code
    return id_


def test_the_log_holds_no_token_and_no_text(told: list[logging.LogRecord]) -> None:
    stream = StringIO()
    handlers, level, propagate = list(logs.log.handlers), logs.log.level, logs.log.propagate
    logs.configure("debug", json=True, stream=stream)
    logs.log.propagate = True
    try:
        with serving(ScriptedEngine(HashRows(1, BIG), BIG)) as served:
            with grpc.insecure_channel(served.address) as channel:
                id_ = talk(served, channel)
                with RawStream(channel) as other:
                    other.opened(opening((1,), BIG))
                    other.send(CLOSE)
                    other.finish()
                    assert next(other.call, None) is None
            eventually(lambda: served.service.streams == 0)
    finally:
        logs.log.handlers[:], logs.log.propagate = handlers, propagate
        logs.log.setLevel(level)
    events = {record.getMessage() for record in told}
    assert {"session opened", "session resumed", "session closed", "refused", "stopped"} <= events
    written = stream.getvalue() + "".join(str(vars(record)) for record in told)
    for secret in (*map(str, SECRET), "秘密", str(BIG + SECRET[0]), str(BIG + SECRET[1]), id_.hex(), str(id_)):
        assert secret not in written
    assert "withheld" not in stream.getvalue()
    closed = next(record for record in told if record.getMessage() == "session closed")
    assert closed.session != "-"  # type: ignore[attr-defined]


def test_metrics_after_a_session() -> None:
    with serving(Held()) as served, grpc.insecure_channel(served.address) as channel:
        a = said(9, ignore_eos=True)
        with RawStream(channel) as stream:
            stream.opened(open_(max_new_tokens=9, ignore_eos=True))
            stream.verdict(verifying(1, 5, a[:3]))
            stream.send(generating(2, 9))
            for _ in range(5):
                stream.receive()
            stream.refused(verifying(9, 99))
        clear(served)
        sent = {name: figure(served, f"outrider_{name}_total") for name in ("verdicts", "drafts", "accepted")}
        assert sent == {"verdicts": 6, "drafts": 3, "accepted": 3}
        assert figure(served, "outrider_generated_total") == 5
        assert figure(served, "outrider_sessions_opened_total") == 1
        assert figure(served, "outrider_errors_total") == 1
        assert figure(served, "outrider_forward_seconds_count") == 6
        assert figure(served, "outrider_bytes_total") > 50


def test_upkeep_reports_and_expires() -> None:
    with serving(Held(), limits=Limits(idle_seconds=0.2)) as served:
        with grpc.insecure_channel(served.address) as channel, RawStream(channel) as stream:
            stream.opened(open_())
            stream.verdict(verifying(1, 5))
            eventually(lambda: figure(served, "outrider_sessions_expired_total") == 1)
            assert len(served.service.sessions) == 0
            eventually(lambda: figure(served, "outrider_slots_total") == 8)
            assert code(stream.refused(verifying(2, 6)).code) == "UNKNOWN_SESSION"
