"""The cloud as a verifier: the handshake, and what an edge makes of a cloud that is slow, changed, or strange."""

from __future__ import annotations

import asyncio
import math
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.link_thread import LinkThread
from outrider import CloudLost, CloudRefused, SpeculativeDecoder, VocabularyMismatch, connect
from outrider.cloud.limits import Limits
from outrider.cloud.stream_handler import StreamHandler
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import DecodingError, PromptError, SettingsError, StateError
from outrider.protocol import schema
from outrider.transport.status import CallFailed, Disconnected, Status
from outrider.verifiers.base import SessionParams
from outrider.verifiers.remote.errors import map_call_error
from outrider.verifiers.remote.verifier import RemoteVerifier, _find_inconsistency
from outrider.verifiers.retry import Retryable
from tests.support.cloud_server import Served, serving
from tests.support.cloud_service import PROMPT, TARGET, V, target_output
from tests.support.fakes import HashRows, ScriptedEngine
from tests.support.processes import HANG_S, wait_until


def engine(rows: Any = TARGET, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(rows, V, **options)


class Named(ScriptedEngine):
    """An engine whose tokens have names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(TARGET, len(names))
        self.vocabulary = names

    @property
    def fingerprint(self) -> str:
        return str(hash(tuple(self.vocabulary)))[:16]


def connect_remote(served: Served, **options: Any) -> RemoteVerifier:
    verifier = connect(f"grpc://{served.address}", **{"patience": HANG_S, "deadline": HANG_S, **options})
    assert isinstance(verifier, RemoteVerifier)
    return verifier


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(engine()) as running:
        yield running


def conditions(accept: str = "exact", **settings: Any) -> SessionParams:
    return SessionParams(GenerationSettings(**settings), accept, V)


# Handshake ------------------------------------------------------------------------------------------------------


def test_the_first_token_that_differs_is_named() -> None:
    names = [f"word{n}" for n in range(5000)]
    theirs = [*names[:4321], "another", *names[4322:]]
    differs = pytest.raises(VocabularyMismatch, match=r"token 4321 is 'word4321' in the first and 'another'")
    with serving(Named(theirs), max_length=64) as served, connect_remote(served) as cloud, differs:
        SpeculativeDecoder(Named(names), cloud)


def test_the_vocabulary_is_not_fetched_where_fingerprints_agree(served: Served) -> None:
    with connect_remote(served) as cloud:
        SpeculativeDecoder(engine(), cloud)
        assert cloud.connection.endpoint.down < 600


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_cloud_describes_its_quantization(quantization: str | None) -> None:
    quantized = engine()
    quantized.quantization = quantization  # type: ignore[attr-defined]
    with serving(quantized, max_length=64) as served, connect_remote(served) as cloud:
        target = cloud.describe()
        assert target.quantization == quantization
        assert target.label == (target.name if quantization is None else f"{target.name} (int8)")
        assert target.label in SpeculativeDecoder(None, cloud).summary()


def test_another_protocol_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def describe(*_: object) -> schema.DescribeAnswer:
        return schema.DescribeAnswer(protocol=1)

    with connect_remote(served) as cloud:
        monkeypatch.setattr(cloud.connection, "describe", describe)
        with pytest.raises(CloudRefused, match=f"speaks protocol 1, this edge {schema.VERSION}"):
            cloud.describe()


GOOD = {
    "protocol": schema.VERSION,
    "name": "m",
    "vocab_size": 32,
    "row_count": 40,
    "eos_ids": [2],
    "fingerprint": b"f",
    "model": b"m",
}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"vocab_size": 2**32 - 1, "row_count": 2**32 - 1}, "vocab_size 4294967295"),
        ({"row_count": 31}, "row_count 31"),
        ({"row_count": 2**32 - 1}, "row_count 4294967295"),
        ({"eos_ids": [40]}, "eos_ids beyond"),
        ({"eos_ids": list(range(33))}, "33 eos_ids"),
        ({"max_length": 1}, "max_length 1"),
        ({"audio_seconds": -1.0}, "audio_seconds -1"),
        ({"audio_seconds": math.nan}, "audio_seconds nan"),
        ({"audio_seconds": math.inf}, "audio_seconds inf"),
        ({"name": ""}, "a name of 0"),
        ({"name": "x" * 10**6}, "a name of 1000000"),
        ({"name": "m\x1b]0;owned\x07"}, "a name that cannot be printed"),
        ({"fingerprint": b""}, "missing or invalid fingerprint"),
        ({"model": bytes(10**6)}, "model hash"),
    ],
)
def test_a_description_that_cannot_be_is_refused_by_name(
    served: Served, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], named: str
) -> None:
    answer = schema.DescribeAnswer(**{**GOOD, "max_drafts": schema.MAX_DRAFTS, **wrong})

    async def describe(*_: object) -> schema.DescribeAnswer:
        return answer

    with connect_remote(served) as cloud:
        monkeypatch.setattr(cloud.connection, "describe", describe)
        with pytest.raises(CloudRefused, match=f"invalid description of itself: .*{named}") as caught:
            SpeculativeDecoder(engine(), cloud)
        assert len(str(caught.value)) < 300
        assert "\x1b" not in str(caught.value)


@given(st.builds(dict, **{name: st.integers(0, 2**32 - 1) for name in ("vocab_size", "row_count", "max_length")}))
def test_any_description_is_refused_or_can_be_used(numbers: dict[str, int]) -> None:
    answer = schema.DescribeAnswer(**{**GOOD, **numbers})
    if _find_inconsistency(answer) is None:
        assert 0 < answer.vocab_size <= answer.row_count
        assert max(answer.eos_ids) < answer.row_count


def test_a_vocabulary_that_never_ends_is_not_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect_remote(served) as cloud:
        cloud.describe()
        parts = [schema.VocabularyPart(tokens=["x"] * 4096).SerializeToString()] * 10**6
        served.service.__dict__["_vocabulary"] = parts
        with pytest.raises(CloudRefused, match="more token names than its vocab_size of 32"):
            cloud._read_vocabulary()
        assert cloud.connection.endpoint.down < 2**23


def test_another_checkpoint_behind_the_address_is_refused_and_never_mixed_in(served: Served) -> None:
    class Other(ScriptedEngine):
        identity = "other"

    with connect_remote(served) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions())
        a = target_output(3)
        assert cloud.verify(session, Verify(1, 5, (), a[:2])).next_token == a[2]
        served.server.service.engine = Other(HashRows(2, V), V)
        served.restart()
        with pytest.raises(CloudRefused, match="another model"):
            cloud.verify(session, Verify(2, 8, (), (1,)))


@pytest.mark.parametrize(("first", "now"), [("int8", None), (None, "int8"), ("int8", "int8, fp8 KV cache")])
def test_another_quantization_behind_the_address_is_named(served: Served, first: str | None, now: str | None) -> None:
    class Quantized(ScriptedEngine):
        quantization: str | None = None

        @property
        def identity(self) -> str:
            return f"weights {self.quantization}"

    def serve(quantization: str | None) -> str:
        engine = Quantized(TARGET, V)
        engine.quantization = quantization
        served.server.service.engine = engine
        served.restart()
        return engine.name if quantization is None else f"{engine.name} ({quantization})"

    serve(first)
    with connect_remote(served) as cloud:
        then = cloud.describe().label
        session = cloud.open(Prompt(PROMPT), conditions())
        label = serve(now)
        with pytest.raises(CloudRefused) as error:
            cloud.probe()
        assert f"another model than at the handshake: {label} now, {then} then" in str(error.value)
        with pytest.raises(CloudRefused, match=re.escape(f"{label} is another model")):
            cloud.verify(session, Verify(1, 5, (), (1,)))


def test_a_session_of_an_earlier_handshake_is_not_opened_on_another_vocabulary(served: Served) -> None:
    with connect_remote(served) as cloud:
        first = cloud.describe()
        cloud.forget_model()
        served.server.service.engine = ScriptedEngine(HashRows(2, 300), 300)
        served.restart()
        second = cloud.describe()
        assert second.fingerprint != first.fingerprint
        with pytest.raises(VocabularyMismatch, match="another vocabulary than the edge compared with"):
            cloud.open(Prompt(PROMPT), replace(conditions(), fingerprint=first.fingerprint))
        cloud.open(Prompt(PROMPT), replace(conditions(), fingerprint=second.fingerprint))
        cloud.forget_model()
        assert cloud.describe() is second, "a model with sessions is not forgotten"


@pytest.mark.parametrize("theirs", [[], ["word0", "word1"]])
def test_a_vocabulary_that_cannot_be_compared_is_refused(theirs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"word{n}" for n in range(40)]
    cloud_engine = Named(names[:39])
    with serving(cloud_engine, max_length=64) as served, connect_remote(served) as cloud:
        cloud_engine.vocabulary = theirs
        with pytest.raises(VocabularyMismatch, match=f"cannot be compared: .* names {len(theirs)} of its 39"):
            SpeculativeDecoder(Named(names), cloud)


def test_a_fault_of_the_cloud_is_not_passed_off_as_the_edges(caplog: pytest.LogCaptureFixture) -> None:
    """A broken invariant over there is an internal error, and said aloud there."""

    class Broken(ScriptedEngine):
        def forward(self, slot: int, ids: Any, rows: int | None = None) -> Any:
            raise StateError("the cache holds more than the tokens")

    with serving(Broken(TARGET, V)) as served, connect_remote(served, patience=0.2) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions())
        with pytest.raises(CloudLost, match="internal error"):
            cloud.verify(session, Verify(1, 5, (), (1,)))
    assert any(record.levelname == "ERROR" for record in caplog.records)


def test_after_draining_the_next_connection_is_used() -> None:
    """As behind a balancer: the next connection may lead to another server."""
    with serving(engine()) as old, LinkThread("127.0.0.1", old.port) as balancer:
        cloud = connect(f"grpc://127.0.0.1:{balancer.port}", patience=HANG_S, deadline=HANG_S)
        assert isinstance(cloud, RemoteVerifier)
        with cloud:
            a = target_output(6)
            session = cloud.open(Prompt(PROMPT), conditions())
            assert cloud.verify(session, Verify(1, 5, (), a[:1])).next_token == a[1]
            before = balancer.connections
            old.service.draining = True
            other = cloud.open(Prompt(PROMPT), conditions())
            answer = cloud.submit(other, Verify(1, 5, (), ()))
            wait_until(lambda: balancer.connections > before)
            old.service.draining = False
            assert answer.result(HANG_S).next_token == a[0]
            assert cloud.verify(session, Verify(2, 7, (), a[2:3])).next_token == a[3], "those at work finish"


def test_a_passing_overload_is_waited_out_and_a_message_too_large_is_not(served: Served) -> None:
    assert isinstance(map_call_error("c", CallFailed(Status.RESOURCE_EXHAUSTED, "too many streams")), Retryable)
    size = CallFailed(Status.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (90070 vs. 65536)")
    assert isinstance(map_call_error("c", size), CloudRefused)


def test_a_real_connection_needs_no_emulator() -> None:
    code = (
        "import sys; from outrider import connect; connect('grpc://127.0.0.1:1').disconnect(); "
        "connect('vllm://127.0.0.1:1', net='none').disconnect(); "
        "print(*(name for name in sys.modules if name.startswith('outrider.netem.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) <= {"outrider.netem.conditions"}


# Answers --------------------------------------------------------------------------------------------------------


def test_verdicts_are_the_local_ones(served: Served) -> None:
    a = target_output(8)
    with connect_remote(served) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions())
        assert cloud.verify(session, Verify(1, 5, (), a[:3])).accepted == 3
        verdict = cloud.verify(session, Verify(2, 9, (), (a[4], (a[5] + 1) % V, 0)))
        assert (verdict.accepted, verdict.next_token) == (1, a[5])
        assert verdict == cloud.verify(session, Verify(2, 9, (), (a[4], (a[5] + 1) % V, 0))), "a repeat"
        assert 0 <= verdict.queue_s + verdict.compute_s < HANG_S


def test_cloud_only_decoding_survives_a_restart(served: Served) -> None:
    with connect_remote(served) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions(repetition_penalty=1.2))
        stream = cloud.generate(session)
        first = [verdict.next_token for verdict in islice(stream, 5)]
        served.restart()
        second = [verdict.next_token for verdict in islice(stream, 5)]
        assert tuple(first + second) == target_output(10, repetition_penalty=1.2)


@pytest.mark.parametrize("streamed", [1, 4])
def test_a_session_changes_between_streaming_and_verifying(served: Served, streamed: int) -> None:
    """The cloud may have streamed more tokens than the edge has taken. It rolls back to those that the edge has."""
    a = target_output(60)
    with connect_remote(served) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions(max_new_tokens=240))
        length, round_ = 0, 0
        for _ in range(4):
            verdicts = list(islice(cloud.generate(session), streamed))
            assert [verdict.next_token for verdict in verdicts] == list(a[length : length + streamed])
            length, round_ = length + streamed, verdicts[-1].round
            draft = (*a[length : length + 2], (a[length + 2] + 1) % V)
            verdict = cloud.verify(session, Verify(round_ + 1, len(PROMPT) + length, (), draft))
            assert (verdict.accepted, verdict.next_token) == (2, a[length + 2])
            length += 3
        assert len(served.service.sessions) == 1


@pytest.mark.parametrize(
    ("request_", "settings", "error", "named"),
    [
        (Verify(1, 9, (), (1,)), {}, StateError, "base length is 9, but this session has 5"),
        (Verify(1, 5, (), (V + 1,)), {}, CloudRefused, f"token {V + 1}"),
        (Verify(1, 5, (), (1,) * 300), {}, PromptError, "300 drafts"),
        (Verify(1, 5, (), ()), {"suppress_tokens": tuple(range(V))}, DecodingError, "banned"),
        (Verify(1, 5, (), ()), {"suppress_tokens": (V + 5,)}, SettingsError, "suppress_tokens"),
        (Verify(1, 5, (), (1, 2)), {"accept": "residual"}, SettingsError, "residual"),
    ],
)
def test_refusals_are_typed_errors_at_once(
    served: Served, request_: Verify, settings: dict[str, Any], error: type[Exception], named: str
) -> None:
    with connect_remote(served) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions(settings.pop("accept", "exact"), **settings))
        with pytest.raises(error, match=named):
            cloud.verify(session, request_)


def test_a_limit_is_waited_for_as_long_as_the_cloud_says() -> None:
    limits = Limits(max_rate=5.0, burst=1)
    with serving(engine(), limits=limits) as served, connect_remote(served) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions())
        a = target_output(6)
        for n in range(3):
            assert cloud.verify(session, Verify(n + 1, 5 + 2 * n, (), a[2 * n : 2 * n + 1])).accepted == 1
    with serving(engine(), limits=Limits(max_sessions=1)) as served, connect_remote(served, patience=0.3) as cloud:
        one, two = (cloud.open(Prompt(PROMPT), conditions()) for _ in range(2))
        cloud.verify(one, Verify(1, 5, (), ()))
        with pytest.raises(CloudLost, match="sessions of this service are in use"):
            cloud.verify(two, Verify(1, 5, (), ()))


# Strange clouds -------------------------------------------------------------------------------------------------


def test_a_cloud_that_never_answers_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cloud = connect(f"grpc://127.0.0.1:{listener.getsockname()[1]}", deadline=0.2, patience=0.5)
        assert isinstance(cloud, RemoteVerifier)
        with cloud, pytest.raises(CloudLost, match="cannot be reached"):
            cloud.describe()


@contextmanager
def stranger(meet: Callable[[socket.socket], object]) -> Iterator[str]:
    """Something that listens and is no cloud: what it does with each client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    meet(listener.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"grpc://127.0.0.1:{listener.getsockname()[1]}"


def say_ssh(client: socket.socket) -> None:
    with client:
        client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


def test_what_speaks_no_http2_is_no_cloud() -> None:
    with stranger(say_ssh) as address:
        cloud = connect(address, patience=HANG_S)
        assert isinstance(cloud, RemoteVerifier)
        with cloud, pytest.raises(CloudRefused, match=r"another protocol than gRPC, and began with .SSH-2\.0-O."):
            cloud.describe()


def test_closing_twice_and_using_what_is_closed(served: Served) -> None:
    cloud = connect_remote(served)
    session = cloud.open(Prompt(PROMPT), conditions())
    cloud.close(session)
    cloud.close(session)
    with pytest.raises(StateError, match="not open"):
        cloud.verify(session, Verify(1, 5, (), ()))
    cloud.disconnect()
    cloud.disconnect()


def test_a_silent_cloud_is_asked_again_though_patience_is_shorter_than_one_attempt() -> None:
    heard: list[socket.socket] = []
    with stranger(heard.append) as address:
        cloud = connect(address, deadline=0.4, patience=0.2)
        assert isinstance(cloud, RemoteVerifier)
        with cloud, pytest.raises(CloudLost):
            cloud.describe()
    assert len(heard) >= 2


def test_closing_while_tokens_are_still_coming_ends_them_and_the_session(served: Served) -> None:
    with connect_remote(served) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions(max_new_tokens=240))
        stream = cloud.generate(session)
        assert [verdict.next_token for verdict in islice(stream, 3)] == list(target_output(3))
        cloud.close(session)
        wait_until(lambda: all(entry.unused for entry in served.service.sessions))


@pytest.mark.parametrize("how", ["broken", "slow"])
def test_the_stream_on_which_a_session_was_to_be_closed_is_not_left_open(
    served: Served, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    opened: list[Any] = []

    async def send(data: bytes, *, last: bool = False) -> None:
        if how == "broken":
            raise Disconnected("on purpose")
        await asyncio.Event().wait()

    with connect_remote(served, deadline=0.5) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions(max_new_tokens=240))
        stream = cloud.generate(session)
        assert next(stream).next_token == target_output(1)[0]
        open_stream = cloud.connection.open_stream

        async def opening() -> Any:
            fresh = await open_stream()
            monkeypatch.setattr(fresh, "send", send)
            opened.append(fresh)
            return fresh

        monkeypatch.setattr(cloud.connection, "open_stream", opening)
        cloud.close(session)
        wait_until(lambda: opened and not opened[0]._local_open)
        assert len(opened) == 1
        assert not any((opened[0]._local_open, opened[0]._remote_open)), "it was cancelled"


def shortlist(*entries: tuple[int, float]) -> schema.Shortlist:
    return schema.Shortlist(ids=[token for token, _ in entries], logp=[value for _, value in entries])


@pytest.mark.parametrize(
    "logprobs",
    [
        [],
        [shortlist((1, -1.0))],
        [shortlist((1, -1.0))] * 3,
        [shortlist((1, -1.0)), shortlist((2, -1.0))],
        [shortlist((1, -1.0)), shortlist((1, 0.5))],
        [shortlist((1, -1.0)), shortlist((1, math.nan))],
        [shortlist((1, -1.0)), schema.Shortlist(ids=[1, 2], logp=[-1.0])],
        [shortlist((1, -1.0)), schema.Shortlist()],
    ],
)
def test_log_probabilities_that_do_not_fit_the_verdict_are_refused(
    served: Served, logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = schema.Verdict(round=1, accepted=1, next_token=1, logprobs=logprobs)
    with connect_remote(served) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions(logprobs=1))
        monkeypatch.setattr("outrider.cloud.stream_handler.pack_verdict", lambda *_: schema.Answer(verdict=verdict))
        with pytest.raises(CloudRefused, match="does not answer round 1"):
            cloud.verify(session, Verify(1, 5, (), (1, 2)))
        monkeypatch.undo()
        found = cloud.verify(session, Verify(1, 5, (), (1, 2)))
        assert len(found.logprobs) == found.accepted + 1


@pytest.mark.parametrize(
    "verdict",
    [
        schema.Verdict(round=2, accepted=0, next_token=1),
        schema.Verdict(round=1, accepted=3, next_token=1),
        schema.Verdict(round=1, accepted=1, next_token=V),
        schema.Verdict(round=1, accepted=1, next_token=1, near_ties=[5]),
        schema.Verdict(round=1, accepted=1, next_token=1, audited=1),
        schema.Verdict(round=1, accepted=1, next_token=1, disagreed=2),
    ],
)
def test_a_verdict_that_answers_nothing_that_was_asked_is_refused(
    served: Served, verdict: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect_remote(served) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions())
        monkeypatch.setattr("outrider.cloud.stream_handler.pack_verdict", lambda *_: schema.Answer(verdict=verdict))
        with pytest.raises(CloudRefused, match="does not answer round 1"):
            cloud.verify(session, Verify(1, 5, (), (1, 2)))
        monkeypatch.undo()
        assert cloud.verify(session, Verify(1, 5, (), (1, 2))).round == 1, "a new stream, and all is well"


class Held(ScriptedEngine):
    """An engine whose forwards wait for the event `go`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.go = threading.Event()

    def forward(self, slot: int, ids: Any, rows: int | None = None) -> Any:
        assert self.go.wait(HANG_S)
        return super().forward(slot, ids, rows)


def test_a_verdict_that_takes_longer_than_the_deadline_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts time out before the verdict exists. The repeated request awaits the same verdict."""
    held, resume, attempts = Held(TARGET, V), StreamHandler._resume, count(1)

    def resumed(*request: Any) -> Any:
        if next(attempts) == 2:
            held.go.set()
        return resume(*request)

    monkeypatch.setattr(StreamHandler, "_resume", resumed)
    with serving(held) as served, connect_remote(served, deadline=0.2, patience=HANG_S) as cloud:
        session = cloud.open(Prompt(PROMPT), conditions())
        assert cloud.verify(session, Verify(1, 5, (), ())).next_token == target_output(1)[0]
        assert held.forwards == 1
