"""The first talk with a cloud, which may not be there yet."""

from __future__ import annotations

import threading
import time

import pytest

from benchmarks.link_thread import LinkThread
from outrider import CloudLost, VocabularyMismatch, connect, local, prompt_lookup
from outrider.gateway import cloud_monitor as meetings
from outrider.gateway.cloud_monitor import UNKNOWN_NAME, CloudMonitor
from outrider.verifiers.base import ModelInfo
from tests.support.cloud_service import SOON
from tests.support.fakes import HashRows, ScriptedEngine, ScriptedVerifier
from tests.support.processes import wait_until
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
    assert meeting.wait(SOON)
    assert meeting.name == verifier.describe().name
    meeting.close()
    assert (verifier.asked, verifier.gone) == (2, 1), "the second time was ours"


def test_an_unreachable_cloud_is_waited_for_once_and_then_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "RETRY_DELAY_S", 0.05)
    verifier = Late(4)
    meeting = CloudMonitor(engine(), verifier)
    assert not meeting.wait(SOON)
    assert meeting.name == UNKNOWN_NAME
    wait_until(lambda: meeting.name != UNKNOWN_NAME)
    assert verifier.asked == 4
    meeting.close()


def test_an_incompatible_cloud_is_reported() -> None:
    meeting = CloudMonitor(engine(), Late(1, size=V + 1000))
    with pytest.raises(VocabularyMismatch):
        meeting.wait(SOON)
    assert meeting.name == UNKNOWN_NAME
    meeting.close()


def test_a_cloud_with_another_tokenizer_is_compatible_if_its_tokenizer_is_known() -> None:
    edge, target = model_of("byte level", "the", " dog"), model_of("llama", "the", " dog", name="large")
    for tokenizer, fits in ((None, False), (target.tokenizer, True), (edge.tokenizer, False)):
        reader = None if tokenizer is None else prompt_lookup(tokenizer)
        meeting = CloudMonitor(edge, local(target), target_tokenizer=reader)
        if fits:
            assert meeting.wait(SOON)
            assert meeting.name == "large"
        else:
            with pytest.raises(VocabularyMismatch):
                meeting.wait(SOON)
        meeting.close()


def test_the_wait_is_bounded_and_closing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: list[object] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    with LinkThread("127.0.0.1", 9) as link:
        link.stall(10 * SOON)
        verifier = connect(f"grpc://127.0.0.1:{link.port}", patience=10 * SOON, deadline=10 * SOON)
        assert verifier is not None
        meeting = CloudMonitor(engine(), verifier)
        started = time.monotonic()
        assert not meeting.wait(0.2)
        meeting.close()
        assert time.monotonic() - started < SOON, "neither lasts as long as the stall"
    for thread in threading.enumerate():
        if thread.name == "outrider-handshake":
            thread.join(SOON)  # its exception would reach the hook before its end
    assert faults == []
