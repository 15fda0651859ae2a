"""A generation goes by who was there when it began, whatever comes later."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from outrider import SpeculativeDecoder
from outrider.decoding.actions import Verify
from outrider.edge import model_pair, verifier_session
from outrider.edge.model_pair import ModelPair
from outrider.errors import CloudLost, PromptError
from outrider.sampling.acceptance import Verdict
from outrider.transport.byte_counts import ByteCounts
from outrider.verifiers.base import ModelInfo
from outrider.verifiers.local import LocalVerifier
from tests.support.fakes import exhaust
from tests.support.tiny_text_models import engine


class Late(LocalVerifier):
    """Not there until it is told to be."""

    there = False

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        if not self.there:
            raise CloudLost("nobody answers")
        return super().describe(edge)

    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        answer: Future[Verdict] = Future()
        answer.set_result(self.verify(session, request))
        return answer

    def byte_counts(self, session: int) -> ByteCounts:
        return ByteCounts()


def test_a_verifier_that_connects_later_does_not_join_a_running_generation() -> None:
    draft, cloud = engine("qwen2"), Late(engine("qwen2"))
    decoder = SpeculativeDecoder(draft, cloud, on_cloud_loss="edge-only", k=3)
    early = decoder.stream([3, 4, 5], max_new_tokens=8, ignore_eos=True)
    cloud.there = True
    assert decoder.generate([3, 4, 5], max_new_tokens=8, ignore_eos=True).guarantee == "exact"
    result = exhaust(early)
    assert (result.guarantee, result.stats.cloud_lost, result.stats.cloud_tokens) == ("edge-only", True, 0)


def test_an_earlier_handshake_does_not_change() -> None:
    cloud = Late(engine("qwen2"))
    pair = ModelPair(engine("qwen2"), cloud, "edge-only")
    before = pair.connect()
    cloud.there = True
    after = pair.connect()
    assert (len(before.models), before.is_complete, len(after.models), after.is_complete) == (1, False, 2, True)
    assert pair.connect() is after


class Clock:
    """Stands in for the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Patient(Late):
    """Takes its time to find out that nobody is there: on a clock that stands still otherwise."""

    def __init__(self, target: Any, clock: Clock) -> None:
        super().__init__(target)
        self._clock, self.asked = clock, 0

    def describe(self, edge: Any = None) -> Any:
        self.asked += 1
        if not self.there:
            self._clock.now += 20.0
        return super().describe(edge)


@pytest.mark.parametrize("on_loss", ["edge-only", "fail"])
def test_not_every_generation_waits_for_a_cloud_that_is_away(on_loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(model_pair, "time", clock)
    cloud = Patient(engine("qwen2"), clock)
    decoder = SpeculativeDecoder(engine("qwen2"), cloud, on_cloud_loss=on_loss, k=3, lazy=True)
    asked = partial(decoder.generate, [3, 4, 5], max_new_tokens=8, ignore_eos=True)

    def waits() -> bool:
        before = cloud.asked
        with suppress(CloudLost):
            assert asked().stats.cloud_lost
        return cloud.asked > before

    assert waits()
    assert waits() == (on_loss == "fail")
    cloud.there = True
    clock.now += model_pair.OUTAGE_FACTOR * 20.0 + 1.0
    assert asked().guarantee == "exact"


def test_a_cloud_that_is_lost_on_the_way_is_not_waited_for_at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (model_pair, verifier_session):
        monkeypatch.setattr(module, "time", clock)
    draft, cloud = engine("qwen2"), Late(engine("qwen2"))
    cloud.there = True
    decoder = SpeculativeDecoder(draft, cloud, on_cloud_loss="edge-only", k=3)
    asked = partial(decoder.generate, [3, 4, 5], max_new_tokens=8, ignore_eos=True)

    def away(*_: Any) -> Any:
        clock.now += 20.0  # three times as long it is not asked again
        raise CloudLost("away")

    for name in ("submit", "verify"):
        monkeypatch.setattr(cloud, name, away, raising=False)
    verdicts = asked()
    assert (verdicts.stats.cloud_lost, verdicts.stats.wait_s) == (True, 20.0)
    alone = asked()
    assert (alone.stats.cloud_lost, alone.stats.wait_s, alone.stats.rounds) == (True, 0.0, 0)
    assert alone.token_ids == verdicts.token_ids


def test_both_must_hold_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = engine("qwen2"), engine("llama")
    monkeypatch.setattr(small, "max_length", 10)
    pair = ModelPair(small, LocalVerifier(large), "fail")
    with pytest.raises(PromptError, match="holds 10"):
        SpeculativeDecoder(small, LocalVerifier(large)).generate([1, 2, 3], max_new_tokens=8)
    assert len(pair.state.models) == 2
