"""One identity at its limits does not stall the others: places, engine time and turns are shared."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cloud.identity_semaphore import IdentitySemaphore, Pace
from outrider.cloud.sessions import SessionEntry
from outrider.decoding.actions import Verify
from outrider.engines.fair_share import FairShare, limit_to_share, round_robin
from outrider.protocol import schema
from outrider.protocol.messages import ErrorCode, FrameError, unpack_ids
from outrider.sampling.acceptance import Verdict
from tests.support.batcher import RecordingEngine, long_prompt, running_batcher, session_entry, submit_together
from tests.support.processes import HANG_S

jobs = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 96)), max_size=40)


def name(job: tuple[str, int]) -> str:
    return job[0]


@given(jobs)
def test_round_robin_is_fair_at_every_prefix(items: list[tuple[str, int]]) -> None:
    order = round_robin(items, name, {})
    assert sorted(order) == sorted(items)
    for each in "abc":
        assert [item for item in order if item[0] == each] == [item for item in items if item[0] == each]
    totals = Counter(map(name, items))
    for end in range(len(order)):
        given_ = Counter(map(name, order[:end]))
        assert all(given_[a] <= given_[b] + 1 for a in "abc" for b in "abc" if given_[b] < totals[b])


def test_identities_that_hold_slots_come_later() -> None:
    assert round_robin(["a1", "a2", "b1"], lambda item: item[0], {"a": 1}) == ["b1", "a1", "a2"]
    assert round_robin(["a1", "a2", "b1"], lambda item: item[0], {"b": 2}) == ["a1", "a2", "b1"]


@given(jobs)
def test_a_step_is_shared(items: list[tuple[str, int]]) -> None:
    kept = limit_to_share(items, name, lambda item: item[1], 96)
    demand, used = Counter[str](), Counter[str]()
    for item in items:
        demand[item[0]] += item[1]
    for item in kept:
        used[item[0]] += item[1]
    assert set(used) == set(demand), "each identity has something read"
    for each in demand:
        others = max((demand[other] for other in demand if other != each), default=10**9)
        assert used[each] <= max(96, others)
    if len(demand) == 1:
        assert kept == items


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.01, 1.0)), max_size=50))
def test_heavy_work_takes_half_of_the_time_at_most(steps: list[tuple[str, float]]) -> None:
    """`a` asks for heavy work all the time, and `b` has short requests all the time."""
    shares, heavy, light = FairShare(), 0.0, 0.0
    for _, seconds in steps:
        used = {"b": 0.05}
        light += 0.05
        if "a" in shares.permitted({"a"}, {"b"}):
            shares.charge("a", seconds)
            used["a"] = seconds
            heavy += seconds
        shares.repay(used)
        assert heavy <= light + 1.0, "one piece ahead at most"


def test_an_identity_in_debt_goes_on_where_nobody_else_can() -> None:
    shares = FairShare()
    shares.charge("a", 2.0)
    shares.charge("b", 1.0)
    assert shares.permitted({"a"}, ()) == {"a"}
    assert shares.permitted({"a"}, {"a"}) == {"a"}
    assert shares.permitted({"a", "b"}, ()) == {"b"}
    assert shares.permitted({"a"}, {"b"}) == set()
    assert shares.permitted({"a", "c"}, ()) == {"c"}
    shares.repay({"a": 0.5, "c": 2.0})
    assert shares.permitted({"a", "b"}, {"c"}) == {"a", "b"}


# In the batcher -------------------------------------------------------------------------------------------------


def of(identity: str, engine: RecordingEngine, prompt: list[int]) -> SessionEntry:
    made = session_entry(engine, prompt)
    made.identity = identity
    return made


def test_a_newcomer_does_not_wait_behind_hundreds_of_requests() -> None:
    engine, done = RecordingEngine(), []
    with running_batcher(engine, 4) as batcher:
        work = [(of("greedy", engine, [n % 32, 1, *long_prompt(300)]), Verify(1, 302, (), ())) for n in range(60)]
        work.append((of("modest", engine, [9]), Verify(1, 1, (), ())))
        answers = submit_together(batcher, *work)
        for n, answer in enumerate(answers):
            answer.add_done_callback(lambda _, n=n: done.append(n))  # type: ignore[misc]
        for answer in answers:
            answer.result(HANG_S)
    assert done.index(60) <= 1


def test_a_newcomer_gets_a_slot_though_one_identity_fills_them_with_long_prefills() -> None:
    engine, done = RecordingEngine(), []
    with running_batcher(engine, 3) as batcher:
        started: Future[None] = Future()
        engine.before = lambda feeds: started.done() or started.set_result(None)
        greedy = [(of("greedy", engine, [n, *long_prompt(3000)]), Verify(1, 3001, (), ())) for n in range(3)]
        answers = submit_together(batcher, *greedy)
        started.result(HANG_S)
        modest = of("modest", engine, [9])
        answers.append(batcher.submit(modest, Verify(1, 1, (), ())))
        for n, answer in enumerate(answers):
            answer.add_done_callback(lambda _, n=n: done.append(n))  # type: ignore[misc]
        for answer in answers:
            answer.result(HANG_S)
    assert done[0] == 3
    assert sorted(done) == [0, 1, 2, 3], "who gave way is answered, too"


def test_the_identity_with_the_most_slots_gives_way() -> None:
    engine = RecordingEngine()
    with running_batcher(engine, 4) as batcher:
        mine = of("modest", engine, [9])
        batcher.submit(mine, Verify(1, 1, (), ())).result(HANG_S)
        for n in range(20):
            batcher.submit(of("greedy", engine, [n]), Verify(1, 1, (), ())).result(HANG_S)
        assert mine in batcher.slot_pool


def test_everyone_is_answered_whatever_is_heavy() -> None:
    """Debts and shares never leave a request without an end."""
    engine = RecordingEngine()
    with running_batcher(engine, 2) as batcher:
        answers: list[Future[Verdict]] = []
        for n in range(30):
            prompt = [n, *long_prompt((n * 37) % 700)]
            answers.append(batcher.submit(of("abc"[n % 3], engine, prompt), Verify(1, len(prompt), (), ())))
        for answer in answers:
            answer.result(HANG_S)


# On the event loop ----------------------------------------------------------------------------------------------


def test_frames_of_one_identity_take_turns_and_others_are_not_behind_them() -> None:
    order: list[str] = []

    async def use(semaphore: IdentitySemaphore, identity: str) -> None:
        async with semaphore.hold(identity):
            order.append(identity)

    async def scenario() -> None:
        semaphore = IdentitySemaphore(1)
        many = [asyncio.create_task(use(semaphore, "greedy")) for _ in range(100)]
        await asyncio.sleep(0)  # one turn of the loop: all of them have begun
        await use(semaphore, "modest")
        await asyncio.gather(*many)
        await asyncio.sleep(0)  # one turn of the loop: the last has let go
        assert not len(semaphore)

    asyncio.run(scenario())
    assert order.index("modest") <= 3


def test_what_is_beyond_the_burst_waits_for_the_rate_in_order_and_for_its_identity_alone() -> None:
    now, done = [0.0], list[tuple[str, float]]()

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    async def use(pace: Pace, identity: str) -> None:
        await pace.wait(identity)
        done.append((identity, round(now[0], 6)))

    async def scenario() -> None:
        pace = Pace(10, 2, lambda: now[0], sleep)
        await asyncio.gather(*[use(pace, "greedy") for _ in range(4)])
        await use(pace, "modest")

    asyncio.run(scenario())
    assert done == [("greedy", 0.0), ("greedy", 0.0), ("greedy", 0.1), ("greedy", 0.2), ("modest", 0.2)]


def test_one_waiting_task_of_an_identity_looks_at_the_clock() -> None:
    asleep = list[float]()

    async def sleep(seconds: float) -> None:
        asleep.append(seconds)
        await asyncio.Event().wait()

    async def scenario() -> None:
        pace = Pace(1, 1, lambda: 0.0, sleep)
        await pace.wait("greedy")
        many = [asyncio.create_task(pace.wait("greedy")) for _ in range(100)]
        for _ in range(5):
            await asyncio.sleep(0)  # turns of the loop, in which more could look
        for each in many:
            each.cancel()
        await asyncio.gather(*many, return_exceptions=True)

    asyncio.run(scenario())
    assert asleep == [1.0]


class Counted(list[int]):
    """Ids whose length may be asked for, and which must not be looked at."""

    def __iter__(self) -> object:  # type: ignore[override]
        raise AssertionError("millions of ids were looked at before they were counted")


@pytest.mark.parametrize("counted", [False, True])
def test_too_many_ids_are_refused_by_their_number_alone(counted: bool) -> None:
    class Packed:
        token = Counted([1] * 5000)
        count = Counted([1] * 5000 if counted else [])

    with pytest.raises(FrameError, match="5000 tokens") as caught:
        unpack_ids(Packed(), 4096, "a prompt")  # type: ignore[arg-type]
    assert caught.value.code == ErrorCode.PROMPT


def test_the_sum_of_counts_is_bounded_too() -> None:
    with pytest.raises(FrameError, match="4294967297"):
        unpack_ids(schema.Ids(token=[1, 2], count=[2**32 - 1, 2]), 4096, "a prompt")
