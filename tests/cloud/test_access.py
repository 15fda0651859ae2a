"""Who may use a service, and how much of it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import grpc
import pytest

from outrider.cloud.limits import MIN_MESSAGE_BYTES, Limits
from outrider.protocol import schema
from outrider.serving.tokens import Tokens
from outrider.transport.tls import ServerTls
from tests.support.certificates import Authority
from tests.support.cloud_server import serving
from tests.support.cloud_service import (
    PROMPT,
    HeldEngine,
    error_name,
    metric_total,
    open_request,
    reached,
    target_output,
    wait_until,
)
from tests.support.processes import HANG_S
from tests.support.raw_stream import CLOSE, RawStream, resuming, verifying

LAB, HOME = "l" * 20, "h" * 20


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


# Identity -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    file = tmp_path / "tokens"
    file.write_text(f"lab {LAB}\nhome {HOME}\n")
    file.chmod(0o600)
    return Tokens.load(file)


def test_a_session_is_its_owners(tokens: Tokens) -> None:
    with reached(HeldEngine(), tokens=tokens) as (_, channel):
        with RawStream(channel, bearer(LAB)) as mine:
            id_ = mine.opened(open_request())
            with RawStream(channel, bearer(HOME)) as other:
                assert error_name(other.refused(resuming(id_, PROMPT)).code) == "UNKNOWN_SESSION"
            assert mine.verdict(verifying(1, 5)).next_token == target_output(1)[0]
        with RawStream(channel, bearer(LAB)) as mine:
            mine.opened(resuming(id_, (*PROMPT, target_output(1)[0])))


@pytest.mark.parametrize("metadata", [[], bearer("x" * 20), [("authorization", LAB)]])
def test_calls_without_a_token_are_refused(tokens: Tokens, metadata: list[tuple[str, str]]) -> None:
    with reached(HeldEngine(), tokens=tokens) as (served, channel):
        with RawStream(channel, metadata) as stream:
            stream.send(open_request())
            with pytest.raises(grpc.RpcError) as caught:
                stream.receive()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        calls = {"Describe": "unary_unary", "Vocabulary": "unary_stream", "Tokenizer": "unary_stream"}
        for name, call in calls.items():
            method = f"/{schema.SERVICE}/{name}"
            with pytest.raises(grpc.RpcError) as caught:
                list(getattr(channel, call)(method)(b"", timeout=HANG_S, metadata=metadata))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert metric_total(served, "outrider_errors_total") == 4
        assert len(served.service.sessions) == 0


def test_mutual_tls_and_tokens(tmp_path: Path, tokens: Tokens) -> None:
    authority = Authority(tmp_path)
    server, client = authority.server(), authority.client("edge-7")
    tls = ServerTls(server.cert, server.key, authority.ca)
    ca = authority.ca.read_bytes()
    with serving(HeldEngine(), tls=tls, tokens=tokens) as served:
        known = grpc.ssl_channel_credentials(ca, client.key.read_bytes(), client.cert.read_bytes())
        with grpc.secure_channel(f"localhost:{served.port}", known) as channel:
            with RawStream(channel, bearer(LAB)) as stream:
                stream.opened(open_request())
                assert stream.verdict(verifying(1, 5, target_output(2))).accepted == 2
                assert [entry.identity for entry in served.service.sessions] == ["lab"]
            with RawStream(channel) as stream, pytest.raises(grpc.RpcError) as caught:
                stream.receive()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with grpc.secure_channel(f"localhost:{served.port}", grpc.ssl_channel_credentials(ca)) as channel:
            with RawStream(channel, bearer(LAB)) as stream, pytest.raises(grpc.RpcError) as caught:
                stream.receive()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# Limits ---------------------------------------------------------------------------------------------------------


def test_rate_limited_calls_are_given_a_retry_delay() -> None:
    clock = [0.0]
    with reached(HeldEngine(), limits=Limits(max_rate=8, burst=3)) as (served, channel):
        served.service._rate._clock = lambda: clock[0]
        with RawStream(channel) as stream:
            id_ = stream.opened(open_request())
            a = target_output(4)
            stream.verdict(verifying(1, 5))
            stream.verdict(verifying(2, 6))
            error = stream.refused(verifying(3, 7))
            assert error_name(error.code) == "LIMIT"
            assert 0 < error.retry_after_ms <= 126
        clock[0] += error.retry_after_ms / 1000
        with RawStream(channel) as stream:
            stream.opened(resuming(id_, (*PROMPT, *a[:2])))
            assert stream.verdict(verifying(3, 7)).next_token == a[2]


def test_opening_counts_as_a_request() -> None:
    """It costs the service more than a block does."""
    with reached(HeldEngine(), limits=Limits(max_rate=0.01, burst=2)) as (_, channel):
        for _ in range(2):
            with RawStream(channel) as stream:
                stream.opened(open_request())
        with RawStream(channel) as stream:
            assert error_name(stream.refused(open_request()).code) == "LIMIT"


@pytest.mark.parametrize("limit", ["max_sessions", "max_sessions_per_identity"])
def test_the_number_of_sessions_is_limited(limit: str) -> None:
    with (
        reached(HeldEngine(), limits=Limits(**{limit: 2})) as (served, channel),
        RawStream(channel) as one,
        RawStream(channel) as two,
        RawStream(channel) as three,
    ):
        one.opened(open_request())
        two.opened(open_request())
        error = three.refused(open_request())
        assert (error_name(error.code), error.retry_after_ms) == ("LIMIT", 1000)
        one.send(CLOSE)
        wait_until(lambda: len(served.service.sessions) == 1)
        with RawStream(channel) as four:
            four.opened(open_request())


def test_a_prompt_has_so_many_tokens_but_what_followed_it_may_come_along() -> None:
    """A session that was lost is opened again with its output: the prompt's limit is not about that."""
    with reached(HeldEngine(), limits=Limits(max_prompt_tokens=5)) as (_, channel):
        with RawStream(channel) as stream:
            assert error_name(stream.refused(open_request((*PROMPT, 1))).code) == "PROMPT"
        with RawStream(channel) as stream:
            stream.opened(open_request(committed=target_output(40)))
            assert stream.verdict(verifying(1, 45)).next_token == target_output(41)[-1]


def test_a_message_that_is_too_large_ends_its_stream_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(max_media_bytes=1000, max_media_total=1000, max_message_bytes=MIN_MESSAGE_BYTES)
    with (
        reached(HeldEngine(), limits=limits) as (served, channel),
        RawStream(channel) as bystander,
        RawStream(channel) as stream,
    ):
        bystander.opened(open_request((1, 2)))
        id_ = stream.opened(open_request())
        stream.send(bytes(limits.max_message_bytes + 1))
        with pytest.raises(grpc.RpcError) as caught:
            stream.receive()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        bystander.verdict(verifying(1, 2))
        wait_until(lambda: served.service.streams == 1)
        with RawStream(channel) as again:
            again.opened(resuming(id_, PROMPT))
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_a_stream_without_a_session_does_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cloud.service.FRAME_TIMEOUT_S", 1.0)
    with reached(HeldEngine()) as (served, channel), RawStream(channel) as used:
        used.opened(open_request())
        with RawStream(channel) as idle:  # it begins later, and ends for being idle
            assert error_name(idle.refused().code) == "INVALID"
        assert used.verdict(verifying(1, 5)).next_token == target_output(1)[0]
        wait_until(lambda: served.service.streams == 1)


def test_calls_are_limited_in_number() -> None:
    limits = Limits(max_sessions=1, max_sessions_per_identity=1)
    with reached(HeldEngine(), limits=limits) as (served, channel):
        method = channel.stream_stream(f"/{schema.SERVICE}/Session")
        calls = [method(iter(threading.Event().wait, None)) for _ in range(80)]
        wait_until(lambda: served.service.streams >= 18)
        with grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            other.unary_unary(f"/{schema.SERVICE}/Describe")(b"", timeout=HANG_S)  # more could have come before it
        most = served.service.streams
        for call in calls:
            call.cancel()
        assert most == 2 + 16, "of one connection"


class Noted:
    """A pace that lets everything through and notes the identity."""

    def __init__(self) -> None:
        self.identities: list[str] = []

    async def wait(self, identity: str) -> None:
        self.identities.append(identity)


def test_frames_without_engine_work_are_paced_for_each_identity(tokens: Tokens) -> None:
    pace = Noted()
    with reached(HeldEngine(), tokens=tokens) as (served, channel):
        served.service._free_work = pace  # type: ignore[assignment]
        with RawStream(channel, bearer(LAB)) as stream:
            stream.opened(open_request())
            assert pace.identities == ["lab"], "an opening"
            first = stream.verdict(verifying(1, 5))
            assert pace.identities == ["lab"], "a new request waits for the engine alone"
            assert stream.verdict(verifying(1, 5)).next_token == first.next_token
            assert pace.identities == ["lab"] * 2, "a repeat"
            assert stream.verdict(verifying(2, 6)).accepted == 0
            stream.send(CLOSE)
            stream.finish()
            assert next(stream.call, None) is None
    assert pace.identities == ["lab"] * 3


def test_callers_without_identities_are_not_paced() -> None:
    pace = Noted()
    with reached(HeldEngine()) as (served, channel):
        served.service._free_work = pace  # type: ignore[assignment]
        with RawStream(channel) as stream:
            stream.opened(open_request())
            stream.verdict(verifying(1, 5))
            stream.verdict(verifying(1, 5))
    assert not pace.identities
