"""Cloud-only decoding as one job of the batcher: the output of a verifier that serves one session alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cloud.batcher import Batcher
from outrider.cloud.jobs import Generation
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import OutOfSync
from outrider.protocol.messages import ErrorCode, FrameError
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier
from tests.support.batcher import (
    TARGET,
    AsyncEngine,
    EngineHold,
    RecordingEngine,
    V,
    running_batcher,
    session_entry,
    submit_together,
    target_tokens,
)
from tests.support.fakes import ScriptedEngine
from tests.support.processes import HANG_S

ENGINES = {"cpu": RecordingEngine, "gpu": AsyncEngine}
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}]


class Listener:
    """A session that generates, and the verdicts that reached its client."""

    def __init__(self, engine: Any, prompt: Seq[int], **options: Any) -> None:
        self.prompt, self.options = list(prompt), options
        self.entry = session_entry(engine, prompt, **options)
        self.verdicts: list[Verdict] = []
        self.job: Generation | None = None

    def start(self, batcher: Batcher, limit: int, ends: Seq[int] = ()) -> Generation:
        session = self.entry.session
        request = Verify(session.rounds + 1, len(session.ids), (), ())
        self.job = batcher.generate(self.entry, request, limit, ends, self.verdicts.append)
        return self.job

    @property
    def tokens(self) -> list[int]:
        return [verdict.next_token for verdict in self.verdicts]

    def expected(self, limit: int, ends: Seq[int] = ()) -> list[Verdict]:
        """The verdicts of a verifier that serves this session alone."""
        alone = LocalVerifier(ScriptedEngine(TARGET, V))
        conditions = SessionParams(GenerationSettings(**self.options), "exact", V)
        out: list[Verdict] = []
        for verdict in alone.generate(alone.open(Prompt(tuple(self.prompt)), conditions)):
            out.append(verdict)
            if len(out) == limit or verdict.next_token in ends:
                return out
        raise AssertionError("a generation has no end")


@given(
    kind=st.sampled_from(sorted(ENGINES)),
    sessions=st.lists(
        st.tuples(
            st.lists(st.integers(0, V - 1), min_size=1, max_size=130),
            st.sampled_from(OPTIONS),
            st.integers(1, 12),  # limit
            st.sets(st.integers(0, V - 1), max_size=6),  # ends
            st.lists(st.integers(1, 5), max_size=4),  # grants
            st.none() | st.integers(0, 6),  # after how many of its tokens it is cancelled
        ),
        min_size=1,
        max_size=5,
    ),
    slots=st.integers(1, 4),
)
@settings(max_examples=80)
def test_outputs_are_those_of_a_verifier_that_serves_one_session(kind: str, sessions: list[Any], slots: int) -> None:
    """Ends at every place, limits, late grants, cancels and evictions included."""
    engine: Any = ENGINES[kind]()
    with running_batcher(engine, slots, chunk=100) as batcher:
        listeners = [Listener(engine, prompt, **options) for prompt, options, *_ in sessions]
        jobs = []
        for listener, (_, _, limit, ends, grants, cancel_after) in zip(listeners, sessions, strict=True):
            job = listener.start(batcher, limit, sorted(ends))

            def hear(verdict: Verdict, job: Any = job, own: Any = listener, after: int | None = cancel_after) -> None:
                own.verdicts.append(verdict)
                if after is not None and len(own.verdicts) > after:
                    batcher.cancel(job)

            job.on_verdict = hear
            jobs.append((job, grants))
        for job, grants in jobs:
            for grant in (*grants, 12):
                batcher.grant(job, grant)
        for job, _ in jobs:
            assert job.future.result(HANG_S) is None
        for listener, (_, _, limit, ends, _, cancel_after) in zip(listeners, sessions, strict=True):
            expected = listener.expected(limit, sorted(ends))
            if cancel_after is not None:
                expected = expected[: cancel_after + 1]
            assert listener.verdicts[: len(expected)] == expected
            assert len(listener.verdicts) == len(expected)
            assert listener.entry.session.ids == listener.prompt + listener.tokens
        for listener in listeners:  # what is cached fits the tokens: the next verdict is right
            ids = listener.entry.session.ids
            verdict = batcher.submit(listener.entry, Verify(listener.entry.session.rounds + 1, len(ids), (), ()))
            alone = listener.expected(len(ids) - len(listener.prompt) + 1)
            assert verdict.result(HANG_S).next_token == alone[-1].next_token


def test_the_next_forward_is_launched_before_the_last_is_read() -> None:
    engine = AsyncEngine()
    with running_batcher(engine) as batcher:
        listener = Listener(engine, [1, 2, 3])
        job = listener.start(batcher, 20)
        batcher.grant(job, 20)
        job.future.result(HANG_S)
    assert engine.deepest == 2
    assert engine.forwards == 20
    assert listener.tokens == target_tokens([1, 2, 3], 20)


def test_an_end_costs_one_forward_that_is_rolled_back() -> None:
    engine = AsyncEngine()
    output = target_tokens([1, 2, 3], 8)
    end = next(token for token in output[2:] if output.index(token) >= 2)
    with running_batcher(engine) as batcher:
        listener = Listener(engine, [1, 2, 3])
        job = listener.start(batcher, 20, [end])
        batcher.grant(job, 20)
        job.future.result(HANG_S)
        assert listener.tokens == output[: output.index(end) + 1]
        (slot,) = engine.open_slots
        batcher.submit(listener.entry, Verify(99, 3 + len(listener.tokens), (), ())).result(HANG_S)
        assert engine.kv_len(slot) == 3 + len(listener.tokens)
    assert engine.forwards == len(listener.tokens) + 2


@pytest.mark.parametrize("kind", ENGINES)
def test_a_generation_that_waits_for_its_client_keeps_no_slot_from_others(kind: str) -> None:
    engine: Any = ENGINES[kind]()
    with running_batcher(engine, 1) as batcher:
        slow, other = Listener(engine, [1]), session_entry(engine, [2])
        job = slow.start(batcher, 10)
        batcher.grant(job, 3)
        for n in range(4):  # a parked generation is no running request
            batcher.submit(other, Verify(n + 1, 1 + n, (), ())).result(HANG_S)
        assert not job.future.done()
        assert len(slow.verdicts) <= 3
        batcher.grant(job, 7)
        job.future.result(HANG_S)
        assert slow.tokens == target_tokens([1], 10)


@pytest.mark.parametrize("kind", ENGINES)
def test_sessions_that_generate_take_turns_if_there_are_too_few_slots(kind: str) -> None:
    engine: Any = ENGINES[kind]()
    with running_batcher(engine, 1) as batcher:
        first, second = Listener(engine, [1]), Listener(engine, [2])
        with batcher._wake:
            jobs = [listener.start(batcher, 6) for listener in (first, second)]
            for job in jobs:
                batcher.grant(job, 6)
        for job in jobs:
            job.future.result(HANG_S)
    assert (first.tokens, second.tokens) == (target_tokens([1], 6), target_tokens([2], 6))
    assert len(engine.opened) == 12, "one token each, in turn"


def test_blocks_and_generated_tokens_share_a_forward() -> None:
    engine = AsyncEngine()
    held = EngineHold(engine)
    with running_batcher(engine) as batcher:
        listener, other = Listener(engine, [1]), session_entry(engine, [2])
        job = listener.start(batcher, 5)
        batcher.grant(job, 5)
        held.wait()
        (answer,) = submit_together(batcher, (other, Verify(1, 1, (), (3, 4))))
        held.release()
        answer.result(HANG_S)
        job.future.result(HANG_S)
    assert [len(each.ids) for batch in engine.batches if len(batch) == 2 for each in batch] in ([1, 3], [3, 1])


@pytest.mark.parametrize("kind", ENGINES)
def test_a_generation_of_a_session_that_ends_is_refused(kind: str) -> None:
    engine: Any = ENGINES[kind]()
    with running_batcher(engine) as batcher:
        listener = Listener(engine, [1])
        job = listener.start(batcher, 5)
        batcher.grant(job, 2)
        batcher.release(listener.entry)
        with pytest.raises(FrameError) as caught:
            job.future.result(HANG_S)
        assert caught.value.code == ErrorCode.UNKNOWN_SESSION
        assert not batcher._parked
        other = session_entry(engine, [2])
        batcher.submit(other, Verify(1, 1, (), ())).result(HANG_S)
        assert len(engine.open_slots) == 1


def test_a_wrong_base_fails_the_generation_alone() -> None:
    engine = AsyncEngine()
    with running_batcher(engine) as batcher:
        good, bad = Listener(engine, [1]), Listener(engine, [2])
        job = good.start(batcher, 3)
        wrong = batcher.generate(bad.entry, Verify(1, 9, (), ()), 3, (), bad.verdicts.append)
        for each in (job, wrong):
            batcher.grant(each, 3)
        with pytest.raises(OutOfSync):
            wrong.future.result(HANG_S)
        job.future.result(HANG_S)
        assert good.tokens == target_tokens([1], 3)


@pytest.mark.parametrize("kind", ENGINES)
def test_stopping_refuses_generations_that_run_and_that_wait(kind: str) -> None:
    engine: Any = ENGINES[kind]()
    held = EngineHold(engine)
    with running_batcher(engine) as batcher:
        jobs = [Listener(engine, [n]).start(batcher, 100) for n in range(3)]
        batcher.grant(jobs[0], 100)
        held.wait()
        batcher.grant(jobs[1], 100)  # and jobs[2] waits for its client
        stopping = threading.Thread(target=batcher.stop)
        stopping.start()
        while batcher._running:
            stopping.join(0.001)
        held.release()
        stopping.join(HANG_S)
        jobs.append(Listener(engine, [9]).start(batcher, 1))
        for job in jobs:
            with pytest.raises(FrameError) as caught:
                job.future.result(HANG_S)
            assert caught.value.code == ErrorCode.DRAINING


def test_a_repeated_first_request_is_answered_from_memory() -> None:
    engine = AsyncEngine()
    with running_batcher(engine) as batcher:
        listener = Listener(engine, [1])
        first = Verify(1, 1, (), ())
        batcher.submit(listener.entry, first).result(HANG_S)
        job = batcher.generate(listener.entry, first, 4, (), listener.verdicts.append)
        batcher.grant(job, 4)
        job.future.result(HANG_S)
    assert listener.tokens == target_tokens([1], 4)
    assert engine.forwards == 4


def test_a_failed_forward_ends_the_generation_and_its_session_recovers(caplog: pytest.LogCaptureFixture) -> None:
    engine = AsyncEngine()

    def fail(batch: list[Any]) -> None:
        if len(engine.batches) == 3:
            engine.before = lambda _: None
            raise RuntimeError("out of memory")

    engine.before = fail
    with running_batcher(engine) as batcher:
        listener = Listener(engine, [1])
        job = listener.start(batcher, 9)
        batcher.grant(job, 9)
        with pytest.raises(RuntimeError, match="out of memory"):
            job.future.result(HANG_S)
        before = list(listener.entry.session.ids)
        again = batcher.submit(listener.entry, Verify(listener.entry.session.rounds + 1, len(before), (), ()))
        assert again.result(HANG_S).next_token == target_tokens(before, 1)[0]
    assert "the engine failed" in caplog.text
