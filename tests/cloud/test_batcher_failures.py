"""Nobody harms another, nobody is forgotten, and nothing is kept of who has left."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import Tensor

from outrider.cloud.batcher import Batcher
from outrider.cloud.jobs import Job
from outrider.cloud.metrics import Metrics
from outrider.decoding.actions import Verify
from outrider.engines.base import SequenceInput
from outrider.errors import DecodingError, StateError
from outrider.protocol.messages import ErrorCode, FrameError
from outrider.sampling.acceptance import Verdict
from tests.support.batcher import (
    TARGET,
    Edge,
    EngineHold,
    RecordingEngine,
    V,
    long_prompt,
    running_batcher,
    session_entry,
    submit_together,
    target_tokens,
)
from tests.support.cloud_service import wrong_token
from tests.support.processes import HANG_S

# Failures -------------------------------------------------------------------------------------------------------


def broken_rows(prefix: tuple[int, ...]) -> Tensor:
    """Nothing but NaN for whatever begins with 13."""
    return torch.full((V,), float("nan")) if prefix[0] == 13 else TARGET(prefix)


def test_a_failing_session_fails_no_other_in_its_batch() -> None:
    engine = RecordingEngine(broken_rows)
    with running_batcher(engine, 4) as batcher:
        nan, base, good = session_entry(engine, [13, 1]), session_entry(engine, [2, 2]), session_entry(engine, [3, 3])
        residual = session_entry(engine, [4, 4], "residual")
        answers = submit_together(
            batcher,
            (nan, Verify(1, 2, (), (5,))),
            (base, Verify(1, 3, (), (5,))),
            (residual, Verify(1, 2, (), (5,))),
            (good, Verify(1, 2, (), (wrong_token(target_tokens([3, 3], 1)[0]),))),
        )
        with pytest.raises(DecodingError):
            answers[0].result(HANG_S)
        with pytest.raises(StateError, match="base length is 3, but this session has 2 tokens"):
            answers[1].result(HANG_S)
        with pytest.raises(Exception, match="residual acceptance needs"):
            answers[2].result(HANG_S)
        assert answers[3].result(HANG_S) == Verdict(1, 0, target_tokens([3, 3], 1)[0])
        assert batcher.submit(base, Verify(1, 2, (), ())).result(HANG_S).next_token == target_tokens([2, 2], 1)[0]
        assert not batcher._scheduler.requests


def test_a_request_out_of_place_costs_no_slot_and_disturbs_no_cache() -> None:
    engine = RecordingEngine()
    with running_batcher(engine, 1) as batcher:
        one, other = session_entry(engine, [1]), session_entry(engine, [2])
        batcher.submit(one, Verify(1, 1, (), ())).result(HANG_S)
        with pytest.raises(StateError):
            batcher.submit(other, Verify(1, 7, (), ())).result(HANG_S)
        batcher.submit(one, Verify(2, 2, (), ())).result(HANG_S)
    assert engine.refed == 0
    assert len(engine.opened) == 1


@pytest.mark.parametrize("when", ["before", "half way"])
def test_sessions_recover_from_a_failed_forward_by_being_rebuilt(when: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = RecordingEngine()

    def fail(feeds: list[SequenceInput]) -> None:
        if when == "half way":  # one cache has moved on, the other has not
            engine.forward(feeds[0].slot, feeds[0].ids)
        raise RuntimeError("out of memory")

    with running_batcher(engine, 4) as batcher:
        edges = [Edge(engine, [n, 1]) for n in range(3)]
        for wave in range(3):
            requests = [edge.next([], [None, wrong_token(5)]) for edge in edges]
            for again in range(2 if wave == 1 else 1):
                engine.before = fail if wave == 1 and not again else lambda feeds: None
                answers = submit_together(batcher, *((e.entry, r) for e, r in zip(edges, requests, strict=True)))
                if engine.before is fail:
                    for answer in answers:
                        with pytest.raises(RuntimeError, match="out of memory"):
                            answer.result(HANG_S)
                    continue
                for edge, answer in zip(edges, answers, strict=True):
                    edge.check(answer.result(HANG_S))
        assert "outrider_sessions_rebuilt_total 3.0" in batcher._metrics.text()
    assert [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.ERROR] == ["the engine failed"]


def test_a_failure_of_the_batcher_itself_leaves_the_thread_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = RecordingEngine()
    with running_batcher(engine) as batcher:
        one = session_entry(engine, [1])
        monkeypatch.setattr("outrider.engines.scheduler.group_by_width", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batcher.submit(one, Verify(1, 1, (), ())).result(HANG_S)
        monkeypatch.undo()
        assert batcher.submit(one, Verify(1, 1, (), ())).result(HANG_S).next_token == target_tokens([1], 1)[0]
    assert "the engine failed" in caplog.text


# Life and death -------------------------------------------------------------------------------------------------


def test_a_session_that_leaves_gives_its_slot_back() -> None:
    engine = RecordingEngine()
    with running_batcher(engine, 2) as batcher:
        one, other = session_entry(engine, [1]), session_entry(engine, [2])
        for each in submit_together(batcher, (one, Verify(1, 1, (), ())), (other, Verify(1, 1, (), ()))):
            each.result(HANG_S)
        batcher.release(one)
        batcher.submit(other, Verify(2, 2, (), ())).result(HANG_S)
        assert len(engine.open_slots) == len(batcher.slot_pool) == 1


def test_a_session_that_leaves_while_it_is_read_is_refused_and_forgotten() -> None:
    engine = RecordingEngine()
    held = EngineHold(engine)
    with running_batcher(engine, 2) as batcher:
        closed, other = session_entry(engine, long_prompt(700)), session_entry(engine, [2])
        lost, good = submit_together(batcher, (closed, Verify(1, 700, (), ())), (other, Verify(1, 1, (), ())))
        held.wait()
        batcher.release(closed)
        held.release()
        with pytest.raises(FrameError) as caught:
            lost.result(HANG_S)
        assert caught.value.code == ErrorCode.UNKNOWN_SESSION
        assert good.result(HANG_S)
        batcher.submit(other, Verify(2, 2, (), ())).result(HANG_S)
        assert len(engine.open_slots) == 1
        assert not batcher.slot_pool._evicted_ids


def test_what_is_cancelled_before_it_was_looked_at_is_never_read() -> None:
    engine = RecordingEngine()
    held = EngineHold(engine)
    with running_batcher(engine, 2) as batcher:
        first = batcher.submit(session_entry(engine, [1]), Verify(1, 1, (), ()))
        held.wait()
        second = batcher.submit(session_entry(engine, [2]), Verify(1, 1, (), ()))
        assert second.cancel()
        held.release()
        assert first.result(HANG_S)
    assert engine.forwards == 1


@pytest.mark.parametrize("slots", [1, 3])
def test_stopping_leaves_no_future_hanging(slots: int) -> None:
    """One in a forward, some that wait for a slot, some that nobody has looked at, and one that comes late."""
    engine = RecordingEngine()
    held = EngineHold(engine)
    with running_batcher(engine, slots) as batcher:
        entries = [session_entry(engine, long_prompt(500)) for _ in range(5)]
        answers = submit_together(batcher, *((each, Verify(1, 500, (), ())) for each in entries[:3]))
        held.wait()
        answers += submit_together(batcher, *((each, Verify(1, 500, (), ())) for each in entries[3:]))
        assert batcher.queued >= 2
        stopping = threading.Thread(target=batcher.stop)
        stopping.start()
        held.release()
        stopping.join(HANG_S)
        answers.append(batcher.submit(entries[0], Verify(1, 500, (), ())))
        for answer in answers:
            with pytest.raises(FrameError) as caught:
                answer.result(HANG_S)
            assert caught.value.code == ErrorCode.DRAINING
        batcher.stop()


def test_a_batcher_that_never_started_can_be_stopped() -> None:
    batcher = Batcher(RecordingEngine(), 1, Metrics())
    answer = batcher.submit(session_entry(batcher._engine, [1]), Verify(1, 1, (), ()))
    batcher.stop()
    with pytest.raises(FrameError):
        answer.result(HANG_S)


def test_the_least_recently_used_gives_way() -> None:
    engine = RecordingEngine()
    with running_batcher(engine, 2) as batcher:
        entries = [session_entry(engine, [n]) for n in range(3)]
        for n, (which, round_) in enumerate([(0, 1), (1, 1), (0, 2), (2, 1), (0, 3)]):
            batcher.submit(entries[which], Verify(round_, round_, (), ())).result(HANG_S)
            entries[which].last_used = float(n + 1)
        assert len(engine.opened) == 3  # 2 took the slot of 1, and 0 kept its own
        batcher.submit(entries[1], Verify(2, 2, (), ())).result(HANG_S)
        assert len(engine.opened) == 4
        text = batcher._metrics.text()
    assert "outrider_evictions_total 2.0" in text
    assert "outrider_sessions_rebuilt_total 1.0" in text


def test_waiting_jobs_are_planned_once() -> None:
    """A thousand sessions that wait for a slot must not cost a pass over their tokens in every step."""
    engine = RecordingEngine()
    with running_batcher(engine, 1) as batcher:
        entries = [session_entry(engine, [n % V]) for n in range(50)]
        asked: list[Job] = []
        plan = batcher._plan
        batcher._plan = lambda job: (asked.append(job), plan(job))[1]  # type: ignore[func-returns-value, method-assign]
        for answer in submit_together(batcher, *((each, Verify(1, 1, (), ())) for each in entries)):
            answer.result(HANG_S)
    assert len(asked) == 50
