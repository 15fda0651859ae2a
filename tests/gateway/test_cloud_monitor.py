"""The first talk with a cloud, which may not be there yet."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.link_thread import LinkThread
from outrider import CloudLost, SpeculativeDecoder, VocabularyMismatch, connect, local, prompt_lookup
from outrider.gateway import cloud_monitor as meetings
from outrider.gateway.cloud_monitor import UNKNOWN_NAME, CloudMonitor
from outrider.verifiers.base import ModelInfo
from tests.support.cloud_server import Served, serving
from tests.support.fake_llm_server import Model, connect_servers, draft_engine, target_engine
from tests.support.fake_vllm import VllmServer
from tests.support.fakes import HashRows, ScriptedEngine, ScriptedVerifier
from tests.support.processes import HANG_S, wait_until
from tests.support.tokenized_models import model_of

V = 32


class Late(ScriptedVerifier):
    """A verifier that is there from the n-th time on that it is asked."""

    def __init__(self, there: int, size: int = V) -> None:
        super().__init__([1], size)
        self.there, self.asked, self.gone = there, 0, 0

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        self.asked += 1
        if self.asked < self.there:
            raise CloudLost("nobody is there")
        return super().describe()

    def probe(self) -> None: ...

    def disconnect(self) -> None:
        self.gone += 1


def engine() -> ScriptedEngine:
    return ScriptedEngine(HashRows(1, V), V)


def test_a_cloud_that_is_there_is_known_at_once() -> None:
    verifier = Late(1)
    meeting = CloudMonitor(engine(), verifier)
    assert meeting.wait(HANG_S)
    assert meeting.name == verifier.describe().name
    meeting.close()
    assert (verifier.asked, verifier.gone) == (2, 1), "the second time was ours"


def test_an_unreachable_cloud_is_waited_for_once_and_then_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "RETRY_DELAY_S", 0.05)
    verifier = Late(4)
    meeting = CloudMonitor(engine(), verifier)
    assert not meeting.wait(HANG_S)
    assert meeting.name == UNKNOWN_NAME
    wait_until(lambda: meeting.name != UNKNOWN_NAME)
    assert verifier.asked == 4
    meeting.close()


def test_an_incompatible_cloud_is_reported() -> None:
    meeting = CloudMonitor(engine(), Late(1, size=V + 1000))
    with pytest.raises(VocabularyMismatch):
        meeting.wait(HANG_S)
    assert meeting.name == UNKNOWN_NAME
    meeting.close()


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    for delay in ("CHECK_INTERVAL_S", "RETRY_DELAY_S", "REFUSED_DELAY_S"):
        monkeypatch.setattr(meetings, delay, 0.02, raising=False)


class OtherWeights(ScriptedEngine):
    identity = "other weights"


@pytest.mark.network
@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize("other", [OtherWeights(HashRows(2, V), V), ScriptedEngine(HashRows(1, 300), 300)])
def test_another_model_behind_the_address_is_reported_until_the_first_one_is_back(other: ScriptedEngine) -> None:
    first = engine()
    with serving(first) as served:
        verifier: Any = connect(f"grpc://{served.address}", patience=HANG_S)
        with closing(CloudMonitor(engine(), verifier, [("127.0.0.1", served.port)])) as monitor:
            assert monitor.wait(HANG_S)
            assert monitor.trouble is None
            for _ in range(2):
                replace_engine(served, other)
                wait_until(lambda: "another model than" in (monitor.trouble or ""))
                replace_engine(served, first)
                wait_until(lambda: monitor.trouble is None)


@pytest.mark.network
@pytest.mark.usefixtures("_often")
def test_a_cloud_that_does_not_fit_may_be_replaced_by_one_that_does() -> None:
    other = ScriptedEngine(HashRows(1, 300), 300)
    with serving(other) as served:
        reached: Any = [connect(f"grpc://{served.address}", patience=HANG_S) for _ in range(2)]
        decoder = SpeculativeDecoder(engine(), reached[0], lazy=True)
        with reached[0], closing(CloudMonitor(engine(), reached[1])) as monitor:
            with pytest.raises(VocabularyMismatch):
                monitor.wait(HANG_S)
            with pytest.raises(VocabularyMismatch):
                decoder.generate([1, 2, 3], max_new_tokens=3)
            assert monitor.trouble
            replace_engine(served, engine())
            wait_until(lambda: monitor.trouble is None)
            assert decoder.generate([1, 2, 3], max_new_tokens=3).guarantee == "exact"


def replace_engine(served: Served, engine: ScriptedEngine) -> None:
    served.service.engine = engine
    served.restart()


class Bounded(Late):
    """A verifier with a window of 64 positions."""

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        return replace(super().describe(edge), max_length=64)


@pytest.mark.parametrize(("edge", "both"), [(32, 32), (64, 64), (128, 64), (None, 64)])
def test_the_window_is_the_smaller_one_once_the_cloud_is_known(edge: int | None, both: int) -> None:
    drafter = engine()
    drafter.max_length = edge
    with closing(CloudMonitor(drafter, Bounded(2))) as monitor:
        assert not monitor.wait(HANG_S)
        assert monitor.max_length == edge
    with closing(CloudMonitor(drafter, Bounded(1))) as monitor:
        assert monitor.wait(HANG_S)
        assert monitor.max_length == both


@pytest.mark.network
@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize("change", ["name", "length", "weights"])
def test_another_model_on_a_vllm_server_is_reported_until_the_first_one_is_back(change: str) -> None:
    first = Model(target_engine())
    others = {
        "name": {"name": "another"},
        "length": {"length": 256},
        "weights": {"model": Model(target_engine(seed=3))},
    }
    with VllmServer(first, max_logprobs=-1) as server, connect_servers(server) as verifier:
        before = {"name": server.name, "length": server.length, "model": first}
        with closing(CloudMonitor(draft_engine(), verifier, [("127.0.0.1", server.port)])) as monitor:
            assert monitor.wait(HANG_S)
            assert monitor.trouble is None
            for values, reason in ((others[change], "serves "), (before, "None")):
                server.stop()
                vars(server).update(values)
                server.start()
                wait_until(lambda reason=reason: reason in str(monitor.trouble))


def test_a_cloud_with_another_tokenizer_is_compatible_if_its_tokenizer_is_known() -> None:
    edge, target = model_of("byte level", "the", " dog"), model_of("llama", "the", " dog", name="large")
    for tokenizer, fits in ((None, False), (target.tokenizer, True), (edge.tokenizer, False)):
        reader = None if tokenizer is None else prompt_lookup(tokenizer)
        meeting = CloudMonitor(edge, local(target), target_tokenizer=reader)
        if fits:
            assert meeting.wait(HANG_S)
            assert meeting.name == "large"
        else:
            with pytest.raises(VocabularyMismatch):
                meeting.wait(HANG_S)
        meeting.close()


def test_the_wait_is_bounded_and_closing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[object] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    with LinkThread("127.0.0.1", 9) as link:
        link.stall(10 * HANG_S)
        verifier = connect(f"grpc://127.0.0.1:{link.port}", patience=10 * HANG_S, deadline=10 * HANG_S)
        assert verifier is not None
        meeting = CloudMonitor(engine(), verifier)
        started = time.monotonic()
        assert not meeting.wait(0.2)
        meeting.close()
        assert time.monotonic() - started < HANG_S, "neither lasts as long as the stall"
    for thread in threading.enumerate():
        if thread.name == "outrider-handshake":
            thread.join(HANG_S)  # its exception would reach the hook before its end
    assert faults == []
