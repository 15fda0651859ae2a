"""Who is served when: nobody waits for long, whatever the others ask for."""

from __future__ import annotations

from concurrent.futures import Future

from outrider.cloud.batcher import Batcher
from outrider.cloud.sessions import SessionEntry
from outrider.decoding.actions import Verify
from outrider.sampling.acceptance import Verdict
from tests.support.batcher import RecordingEngine, long_prompt, running_batcher, session_entry, submit_together
from tests.support.processes import HANG_S


def test_short_requests_are_answered_before_a_long_prefill_ends() -> None:
    engine = RecordingEngine()
    done: list[str] = []
    with running_batcher(engine, 4) as batcher:
        shorts = [session_entry(engine, [n]) for n in range(3)]
        jobs = [
            (session_entry(engine, long_prompt()), Verify(1, 2000, (), (3,))),
            *((r, Verify(1, 1, (), ())) for r in shorts),
        ]
        answers = submit_together(batcher, *jobs)
        for name, answer in zip(["long", *"abc"], answers, strict=True):
            answer.add_done_callback(lambda _, name=name: done.append(name))  # type: ignore[misc]
        for answer in answers:
            answer.result(HANG_S)
    assert done[-1] == "long"
    assert [len(batch[0].ids) for batch in engine.batches] == [1, *[256] * 7, 2001 - 7 * 256]
    assert [batch[0].logits_to_keep for batch in engine.batches[1:]] == [1] * 7 + [2]


def keep_asking(batcher: Batcher, each: SessionEntry, until: Future[Verdict], answered: list[SessionEntry]) -> None:
    """A session that asks for the next token as soon as it has one."""

    def ask(_: object = None) -> None:
        if not until.done() and len(answered) < 500:
            answered.append(each)
            ids = each.session.ids
            batcher.submit(each, Verify(each.session.rounds + 1, len(ids), (), ())).add_done_callback(ask)

    ask()


def test_a_long_prefill_moves_on_under_a_continuous_load_of_short_requests() -> None:
    engine = RecordingEngine()
    answered: list[SessionEntry] = []
    with running_batcher(engine, 4) as batcher:
        with batcher._wake:
            long = batcher.submit(session_entry(engine, long_prompt()), Verify(1, 2000, (), ()))
            for n in range(3):
                keep_asking(batcher, session_entry(engine, [n]), long, answered)
        long.result(HANG_S)
    chunks = [batch[0].slot for batch in engine.batches if len(batch[0].ids) > 96 or batch[0].logits_to_keep > 50]
    assert len(chunks) == 8
    assert 3 * 8 <= len(answered) <= 3 * 10  # one block of each beside every chunk


def test_a_session_without_a_slot_gets_one_though_all_others_keep_asking() -> None:
    engine = RecordingEngine()
    answered: list[SessionEntry] = []
    with running_batcher(engine, 2) as batcher:
        never: Future[Verdict] = Future()
        with batcher._wake:
            for n in range(2):
                keep_asking(batcher, session_entry(engine, [n]), never, answered)
        waited: list[int] = []
        with batcher._wake:
            before = len(answered)
            late = batcher.submit(session_entry(engine, [9]), Verify(1, 1, (), ()))
        late.add_done_callback(lambda _: waited.append(len(answered) - before))
        assert late.result(HANG_S)
        never.cancel()
    assert waited[0] <= 8  # a few steps


def test_slots_are_granted_in_order_of_arrival() -> None:
    engine = RecordingEngine()
    done: list[int] = []
    with running_batcher(engine, 1) as batcher:
        jobs = [(session_entry(engine, [n, *long_prompt(300)]), Verify(1, 301, (), ())) for n in range(5)]
        answers = submit_together(batcher, *jobs)
        for n, answer in enumerate(answers):
            answer.add_done_callback(lambda _, n=n: done.append(n))  # type: ignore[misc]
        for answer in answers:
            answer.result(HANG_S)
    assert done == [0, 1, 2, 3, 4]


def test_two_long_prefills_share_the_chunk_and_a_third_waits() -> None:
    engine = RecordingEngine()
    done: list[int] = []
    with running_batcher(engine, 3) as batcher:
        answers = submit_together(
            batcher, *((session_entry(engine, [n, *long_prompt(600)]), Verify(1, 601, (), ())) for n in range(3))
        )
        for n, answer in enumerate(answers):
            answer.add_done_callback(lambda _, n=n: done.append(n))  # type: ignore[misc]
        for answer in answers:
            answer.result(HANG_S)
    assert engine.batches[0][0].ids[0] == 0
    assert all(sum(len(feed.ids) for feed in batch) <= 256 for batch in engine.batches)
    assert [len(batch) for batch in engine.batches[:4]] == [2, 2, 2, 2]
    assert done[-1] == 2


def test_active_sessions_keep_their_slots() -> None:
    """Three ask for two slots: the first to come takes one, and one slot, not two, changes hands."""
    engine = RecordingEngine()
    with running_batcher(engine, 2) as batcher:
        one, two, late = (session_entry(engine, [n]) for n in range(3))
        for each in (one, two):
            batcher.submit(each, Verify(1, 1, (), ())).result(HANG_S)
        before = len(engine.opened)
        jobs = [(late, Verify(1, 1, (), ())), (one, Verify(2, 2, (), ())), (two, Verify(2, 2, (), ()))]
        for answer in submit_together(batcher, *jobs):
            answer.result(HANG_S)
        assert len(engine.opened) - before == 2, "one for who came, one for who gave way and asked again"
