"""One engine for many threads: the same rows as alone, read together, and nobody pays for another's mistake."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.decoding.actions import Proposal
from outrider.engines.base import Prompt, SequenceInput, as_device_sampler, forward_or_sample
from outrider.engines.scheduler import PREFILL_CHUNK
from outrider.engines.shared_engine import SharedEngine
from outrider.engines.torch.engine import TorchEngine
from outrider.errors import ModelError, StateError
from outrider.sampling.policy import Policy
from outrider.sampling.sampler import SampledToken
from tests.support.cloud_service import wait_until
from tests.support.fakes import HashRows, ScriptedEngine
from tests.support.processes import HANG_S
from tests.support.tiny_text_models import engine as tiny
from tests.support.tiny_text_models import model

V = 32
ROWS = HashRows(7, V, memory=6)
THREADS = 4


class Held(ScriptedEngine):
    """An engine that can be held in a forward. batches: the slots and widths of each. bad: a token it fails on."""

    def __init__(self, bad: int | None = None) -> None:
        super().__init__(ROWS, V)
        self.batches: list[dict[int, int]] = []
        self.bad = bad
        self.entered, self.go = threading.Event(), threading.Event()
        self.go.set()

    def hold(self) -> None:
        self.entered.clear()
        self.go.clear()

    def forward_many(self, feeds: Seq[SequenceInput]) -> list[Tensor]:
        self.batches.append({feed.slot: len(feed.ids) for feed in feeds})
        self.entered.set()
        assert self.go.wait(HANG_S)
        rows = []
        for feed in feeds:
            if self.bad in feed.ids:
                raise IndexError(f"token {self.bad}")  # after others of the batch were read
            rows.append(self.forward(feed.slot, feed.ids, feed.logits_to_keep))
        return rows


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


class Held6:
    """A held engine with its first forward under way, and six slots."""

    def __init__(self, threads: ThreadPoolExecutor, **options: Any) -> None:
        self.engine = Held(**options)
        self.shared = SharedEngine(self.engine)
        self.slots = [self.shared.open(Prompt((1,))) for _ in range(6)]
        self._threads = threads
        self.engine.hold()
        self.first = self.ask(0, [1])
        assert self.engine.entered.wait(HANG_S)
        self.engine.batches.clear()

    def ask(self, n: int, ids: Seq[int], rows: int = 1) -> Future[Tensor]:
        """One more that waits."""
        before = len(self.shared._scheduler.requests)
        future = self._threads.submit(self.shared.forward, self.slots[n], ids, rows)
        wait_until(
            lambda: len(self.shared._scheduler.requests) > before or future.done() or not self.shared._busy or n == 0
        )
        return future


def row(*prefix: int) -> Tensor:
    return ROWS(prefix)


# Together ---------------------------------------------------------------------------------------------------------


def test_waiting_requests_share_one_forward(threads: ThreadPoolExecutor) -> None:
    held = Held6(threads)
    others = [held.ask(n, [1, n]) for n in range(1, 6)]
    held.engine.go.set()
    assert [torch.equal(future.result(HANG_S)[0], row(1, n)) for n, future in enumerate(others, 1)] == [True] * 5
    assert torch.equal(held.first.result(HANG_S)[0], row(1))
    assert held.engine.batches == [dict.fromkeys(held.slots[1:], 2)]


def test_feeds_of_very_different_width_are_not_padded_to_the_widest(threads: ThreadPoolExecutor) -> None:
    held = Held6(threads)
    widths = [1, 16, 40, 80, 3]
    others = [held.ask(n, [1] * width) for n, width in enumerate(widths, 1)]
    held.engine.go.set()
    for future in others:
        future.result(HANG_S)
    assert [sorted(batch.values()) for batch in held.engine.batches] == [[1, 3, 16], [40, 80]]


def test_short_steps_come_between_the_chunks_of_a_long_prompt(threads: ThreadPoolExecutor) -> None:
    held = Held6(threads)
    long = held.ask(1, [1] * (3 * PREFILL_CHUNK + 10), rows=2)
    short = [held.ask(n, [1, n]) for n in range(2, 6)]
    held.engine.go.set()
    assert torch.equal(long.result(HANG_S)[1], row(*[1] * 6))
    for future in short:
        future.result(HANG_S)
    widths = [sorted(batch.values()) for batch in held.engine.batches]
    assert widths[:3] == [[PREFILL_CHUNK], [2] * 4, [PREFILL_CHUNK]]
    assert sum(map(sum, widths)) == 3 * PREFILL_CHUNK + 10 + 8


def test_the_last_part_of_a_long_feed_has_all_the_rows_that_are_wanted() -> None:
    engine = Held()
    shared = SharedEngine(engine)
    slot = shared.open(Prompt((1,)))
    rows = shared.forward(slot, [1] * (PREFILL_CHUNK + 44), rows=PREFILL_CHUNK + 20)
    assert len(rows) == PREFILL_CHUNK + 20
    assert shared.kv_len(slot) == PREFILL_CHUNK + 44
    assert [list(batch.values()) for batch in engine.batches] == [[24], [PREFILL_CHUNK + 20]]


def test_rolling_back_and_asking_for_the_length_do_not_wait(threads: ThreadPoolExecutor) -> None:
    held = Held6(threads)
    held.engine.go.set()
    held.ask(1, [1, 2, 3]).result(HANG_S)
    held.engine.hold()
    busy = held.ask(0, [5])
    held.shared.truncate(held.slots[1], 1)
    assert held.shared.kv_len(held.slots[1]) == 1
    held.engine.go.set()
    busy.result(HANG_S)
    assert torch.equal(held.ask(1, [7]).result(HANG_S)[0], row(1, 7))


def test_the_oldest_request_is_in_the_next_forward(threads: ThreadPoolExecutor) -> None:
    """The oldest is always in the next forward, however many that would fit together have come after it."""
    held = Held6(threads)
    wide = held.ask(1, [1] * 60)
    narrow = [held.ask(n, [1, n]) for n in range(2, 6)]
    held.engine.go.set()
    for future in (wide, *narrow):
        future.result(HANG_S)
    assert [sorted(batch.values()) for batch in held.engine.batches] == [[60], [2] * 4]


# Failures ---------------------------------------------------------------------------------------------------------


def test_a_failing_input_fails_no_other_request(threads: ThreadPoolExecutor) -> None:
    held = Held6(threads, bad=31)
    good = [held.ask(n, [1, n]) for n in (1, 2)]
    bad = held.ask(3, [1, 31])
    late = [held.ask(n, [1, n]) for n in (4, 5)]
    held.engine.go.set()
    with pytest.raises(IndexError, match="token 31"):
        bad.result(HANG_S)
    for n, future in zip((1, 2, 4, 5), good + late, strict=True):
        assert torch.equal(future.result(HANG_S)[0], row(1, n))
    assert [held.shared.kv_len(slot) for slot in held.slots] == [1, 2, 2, 0, 2, 2]
    assert torch.equal(held.ask(3, [1, 3]).result(HANG_S)[0], row(1, 3)), "its slot is as it was"
    assert not held.shared._busy


def test_a_long_feed_that_fails_on_its_way_leaves_the_slot_as_it_was() -> None:
    engine = Held(bad=31)
    shared = SharedEngine(engine)
    slot = shared.open(Prompt((1,)))
    shared.forward(slot, [1, 2])
    with pytest.raises(IndexError):
        shared.forward(slot, [*[1] * (PREFILL_CHUNK + 1), 31], 1)
    assert shared.kv_len(slot) == 2
    assert torch.equal(shared.forward(slot, [4])[0], row(1, 2, 4))


def test_an_engine_that_cannot_open_a_slot_says_so_and_goes_on() -> None:
    class Full(Held):
        def open(self, prompt: Prompt) -> int:
            if len(self.slots) == 1:
                raise StateError("all 1 slots are in use")
            return super().open(prompt)

    shared = SharedEngine(Full())
    slot = shared.open(Prompt((1,)))
    with pytest.raises(StateError, match="in use"):
        shared.open(Prompt((1,)))
    shared.close(slot)
    assert torch.equal(shared.forward(shared.open(Prompt((1,))), [1])[0], row(1))


def test_the_contract_is_the_engines() -> None:
    shared = SharedEngine(Held())
    slot = shared.open(Prompt((1,)))
    shared.forward(slot, [1, 2])
    for wrong in (
        lambda: shared.truncate(slot, 3),
        lambda: shared.truncate(slot, -1),
        lambda: shared.kv_len(slot + 1),
        lambda: shared.close(slot + 1),
        lambda: shared.forward(slot, []),
        lambda: shared.forward_many([SequenceInput(slot, [1], 1), SequenceInput(slot, [1], 1)]),
    ):
        with pytest.raises(StateError):
            wrong()
    shared.close(slot)
    with pytest.raises(StateError):
        shared.forward(slot, [1])
    assert (shared.name, shared.vocab_size, shared.row_count) == ("scripted", V, V)
    assert as_device_sampler(shared) is None


# Engines that choose ----------------------------------------------------------------------------------------------


class Choosing(Held):
    """One that chooses where the logits are."""

    samples_on_device = True

    def sample_many(self, feeds: Seq[SequenceInput], policies: Seq[Policy]) -> list[list[SampledToken]]:
        return [[SampledToken(int(row.argmax()), 1.0) for row in rows] for rows in self.forward_many(feeds)]

    def draft(self, slot: int, ids: Seq[int], count: int, policy: Policy, *, with_signals: bool) -> list[Proposal]:
        out: list[Proposal] = []
        for _ in range(count):
            token = int(self.forward(slot, ids, 1)[0].argmax())
            out.append(Proposal(token))
            ids = [token]
        return out


def test_choosing_and_drafting_pass_through(threads: ThreadPoolExecutor) -> None:
    engine = Choosing()
    shared = SharedEngine(engine)
    assert as_device_sampler(shared) is shared  # type: ignore[comparison-overlap]
    policy: Any = None
    slots = [shared.open(Prompt((1,))) for _ in range(8)]
    prompt = [1] * (PREFILL_CHUNK + 5)
    blocks = list(threads.map(lambda slot: shared.draft(slot, prompt, 3, policy, with_signals=False), slots))
    alone, expected = Choosing(), [Proposal(int(row(*[1] * 6).argmax()))]
    expected = alone.draft(alone.open(Prompt((1,))), prompt, 3, policy, with_signals=False)
    assert blocks == [expected] * 8
    assert [shared.kv_len(slot) for slot in slots] == [PREFILL_CHUNK + 7] * 8
    shared.truncate(slots[0], PREFILL_CHUNK + 6)
    wanted: Any = object()
    (picks,) = forward_or_sample(shared, [SequenceInput(slots[0], [expected[1].token], 1)], [wanted])
    assert picks == [SampledToken(expected[2].token, 1.0)]


# Any schedule -----------------------------------------------------------------------------------------------------

STEP = st.one_of(
    st.tuples(st.just("read"), st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(1, 9)),
    st.tuples(st.just("truncate"), st.floats(0.0, 1.0), st.just(0)),
    st.tuples(st.just("reopen"), st.just(()), st.just(0)),
)
PLANS = st.lists(st.lists(STEP, min_size=1, max_size=8), min_size=2, max_size=THREADS)
SINGLE = tiny("qwen2")
SHARED = SharedEngine(TorchEngine(model("qwen2")))


def follow(engine: Any, plan: Any, pause: Callable[[], None]) -> list[Tensor]:
    """All rows that come of a plan."""
    slot, out = engine.open(Prompt((1,))), []
    for kind, value, rows in plan:
        pause()
        if kind == "read":
            out.append(engine.forward(slot, value, min(rows, len(value))))
        elif kind == "truncate":
            engine.truncate(slot, int(value * engine.kv_len(slot)))
        else:
            engine.close(slot)
            slot = engine.open(Prompt((1,)))
    engine.close(slot)
    return out


@settings(max_examples=40)
@given(plans=PLANS, seed=st.integers(0, 9))
def test_any_schedule_reads_what_it_would_read_alone(plans: Any, seed: int) -> None:
    dice = random.Random(seed)
    barrier = threading.Barrier(len(plans))

    def pause() -> None:
        if dice.random() < 0.3:
            threading.Event().wait(0.0005)

    def run(plan: Any) -> list[Tensor]:
        barrier.wait(HANG_S)
        return follow(SHARED, plan, pause)

    with ThreadPoolExecutor(len(plans)) as threads:
        found = list(threads.map(run, plans))
    for plan, rows in zip(plans, found, strict=True):
        expected = follow(SINGLE, plan, lambda: None)
        for ours, theirs in zip(rows, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert not SHARED._lengths
    assert not SHARED._busy


def test_many_threads_at_once_are_all_answered() -> None:
    engine = Held()
    shared = SharedEngine(engine)

    def work(n: int) -> bool:
        slot, ids, right = shared.open(Prompt((1,))), [1], True
        for step in range(60):
            right = right and torch.equal(shared.forward(slot, ids[shared.kv_len(slot) :], 1)[0], row(*ids[-6:]))
            if step % 7 == 0:
                shared.truncate(slot, max(0, len(ids) - 2))
            ids.append((n * step) % V)
        shared.close(slot)
        return right

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(work, range(16)))
    assert not engine.slots
    assert max(map(len, engine.batches)) > 1


def test_long_prompts_of_many_threads_are_computed_to_their_end() -> None:
    engine = ScriptedEngine(ROWS, V)
    shared = SharedEngine(engine)

    def work(n: int) -> bool:
        slot = shared.open(Prompt((1,)))
        for count in (300 + 100 * n, 5, 700, 256 + n):
            shared.truncate(slot, 0)
            ids = [1, *((n * i) % V for i in range(1, count))]
            rows = shared.forward(slot, ids, 2)
            if shared.kv_len(slot) != count or not torch.equal(rows, torch.stack([row(*ids[-7:-1]), row(*ids[-6:])])):
                return False
        shared.close(slot)
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    assert not engine.slots
    assert not shared._busy


def test_closing_frees_the_engines_slot_at_once() -> None:
    engine = Held()
    shared = SharedEngine(engine)
    for _ in range(3):
        shared.close(shared.open(Prompt((1,))))
    assert not engine.slots


def test_a_model_error_keeps_its_type() -> None:
    class Broken(Held):
        def forward_many(self, feeds: Seq[SequenceInput]) -> list[Tensor]:
            raise ModelError("broken")

    shared = SharedEngine(Broken())
    slot = shared.open(Prompt((1,)))
    with pytest.raises(ModelError, match="broken"):
        shared.forward(slot, [1])
    assert not shared._busy
