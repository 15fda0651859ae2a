"""Extents of the KV cache: contents as in a plain model, memory in proportion to the tokens, failed moves undone."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engines.torch import kv_cache
from outrider.engines.torch.extents import Layout, Move, make_room
from outrider.engines.torch.kv_cache import SlotKVCache
from outrider.errors import StateError

HEADS, DIM = 2, 3
CPU = torch.device("cpu")
LIKE = torch.zeros(1, dtype=torch.float64)


class Checked:
    """A cache of one layer beside a plain model of it, a list of numbers per open slot."""

    def __init__(self, limit: int | None = None, *, on_device: bool = False) -> None:
        self.cache = SlotKVCache(1, max_positions=limit)
        self.written: dict[int, list[int]] = {}
        self._count = 0
        self._on_device = on_device

    def open(self) -> None:
        self.written[self.cache.allocate()] = []

    @torch.inference_mode()
    def append(self, slots: list[int], counts: list[int]) -> None:
        """Run a forward. Its keys and values are entries that say which token of all they belong to."""
        self._poison()
        positions = self.cache.prepare_append(slots, counts, CPU)
        if self._on_device:
            self.cache.ensure_capacity(HEADS, DIM, LIKE)
        new = torch.zeros(positions.shape, dtype=torch.int64)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            tokens = range(self._count, self._count + count)
            self._count += count
            assert positions[row, :count].tolist() == list(
                range(len(self.written[slot]), len(self.written[slot]) + count)
            )
            self.written[slot] += tokens
            new[row, :count] = torch.tensor(tokens)
        if self.cache.tokens is not None:  # as kernels do
            self.cache.append_plan.store(self.cache.tokens[None, :, None], new[:, None, :, None].to(torch.int32))
        keys, values = self.cache.layers[0].update(entries(new), entries(new) + 0.5)
        self.cache.commit_append()
        for row, slot in enumerate(slots):
            expected = entries(torch.tensor([self.written[slot]]))[0]
            assert torch.equal(keys[row, :, : expected.shape[1]], expected)
            assert torch.equal(values[row, :, : expected.shape[1]], expected + 0.5)
        assert keys.isfinite().all()
        assert values.isfinite().all()

    def truncate(self, slot: int, length: int) -> None:
        self.cache.truncate(slot, length)
        del self.written[slot][length:]

    def close(self, slot: int) -> None:
        self.cache.release(slot)
        del self.written[slot]

    def check(self) -> None:
        """Compare everything that the cache holds with the model."""
        layout = self.cache.layout
        assert {slot: self.cache.lengths[slot] for slot in self.written} == {s: len(w) for s, w in self.written.items()}
        extents = sorted(layout.extents.values(), key=lambda extent: (extent.base, extent.end))
        assert all(one.end <= other.base for one, other in pairwise(extents))
        assert all(extent.size > 0 for extent in extents)
        assert all(extent.base >= 0 and extent.end <= layout.total for extent in extents)
        for slot, tokens in self.written.items():
            if tokens and self.cache._buffer_layout is layout:
                at = slice(self.cache.base(slot), self.cache.base(slot) + len(tokens))
                assert torch.equal(self.cache.buffers[0][:, at], entries(torch.tensor([tokens]))[0])
            if tokens and self._on_device:
                self.cache.ensure_capacity(HEADS, DIM, LIKE)
                assert self.cache.token_ids(torch.tensor([self.cache.base(slot)]), len(tokens))[0].tolist() == tokens
                pointers = [buffer.data_ptr() for buffer in self.cache.buffers]
                assert self.cache.addresses is not None
                assert self.cache.addresses[0, :3].tolist() == [*pointers, layout.total]

    def _poison(self) -> None:
        """Fill all entries with NaN that no open sequence has written."""
        for buffer in self.cache._buffers:
            kept = torch.zeros(buffer.layout.total, dtype=torch.bool)
            for slot, tokens in self.written.items():
                if tokens:
                    base = buffer.layout.extents[slot].base
                    kept[base : base + len(tokens)] = True
            buffer.data[:, ~kept] = torch.nan


def entries(tokens: Tensor) -> Tensor:
    """Return distinct entries for tokens [B, T]: float64 [B, HEADS, T, DIM]."""
    heads, dims = torch.arange(HEADS)[:, None, None], torch.arange(DIM)
    return (tokens[:, None, :, None] * 100 + heads * 10 + dims).double()


OPEN = ("open", 0, 1, 1)
TO_NOTHING = [  # slot 0 is rolled back to length 0, all are packed, slot 1 grows over its place, slot 2 into that
    *(OPEN, OPEN, OPEN, ("append", 1, 1, 1), ("append", 0, 1, 1), ("truncate", 0, 1, 1)),
    *(("append", 1, 126, 1), ("append", 1, 200, 2)),
]
steps = st.tuples(
    st.sampled_from(["open", "append", "append", "truncate", "close"]),
    st.integers(0, 99),
    st.integers(1, 400),
    st.integers(1, 4),
)


@pytest.mark.parametrize("on_device", [False, True])
@settings(max_examples=60, deadline=None)
@given(schedule=st.lists(steps, max_size=40), limit=st.none() | st.integers(500, 6000))
@example(schedule=TO_NOTHING, limit=None)
def test_contents_are_those_of_a_list_per_slot(
    on_device: bool, schedule: list[tuple[str, int, int, int]], limit: int | None
) -> None:
    checked = Checked(limit, on_device=on_device)
    for action, pick, size, width in schedule:
        chosen = sorted(checked.written)[pick % max(1, len(checked.written)) :][:width]
        if action == "open":
            checked.open()
        elif chosen and action == "append":
            counts = [1 + size * (n + 1) % 400 for n in range(len(chosen))]
            needed = sum(counts) + sum(map(len, checked.written.values()))
            if limit is None or needed <= limit:
                checked.append(chosen, counts)
            else:
                with pytest.raises(StateError, match=f"holds {limit} positions, and {needed} are needed"):
                    checked.append(chosen, counts)
        elif chosen and action == "truncate":
            checked.truncate(chosen[0], len(checked.written[chosen[0]]) * size // 400)
        elif chosen:
            checked.close(chosen[0])
        checked.check()
        assert limit is None or checked.cache.layout.total <= limit


@pytest.mark.parametrize("lengths", ["uniform", "log-uniform"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_mix_of_sessions_takes_at_most_1_3_times_what_its_tokens_need(lengths: str, seed: int) -> None:
    """64 sessions or more of 200 to 8,000 tokens: opened, grown token by token, rolled back, closed, opened again."""
    rng, cache = random.Random(seed), SlotKVCache(1)
    slots: list[int] = []

    def check() -> None:
        needed = sum(cache.lengths[slot] for slot in slots)
        assert len(slots) < 64 or cache.layout.total <= 1.3 * needed

    def append(rows: list[int], counts: list[int]) -> None:
        cache.reserve(rows, counts)
        cache.commit_append()
        check()

    def open_one() -> None:
        slots.append(cache.allocate())
        length = rng.randint(200, 8000) if lengths == "uniform" else round(200 * 40 ** rng.random())
        for start in range(0, length, 512):
            append(slots[-1:], [min(512, length - start)])

    for _ in range(64):
        open_one()
    for _ in range(3):
        for _ in range(rng.randint(1, 150)):
            rows = rng.sample(slots, rng.randint(1, len(slots)))
            append(rows, [rng.randint(1, 6) for _ in rows])
        for slot in rng.sample(slots, 15):
            cache.truncate(slot, rng.randint(200, cache.lengths[slot]))
            check()
        for _ in range(rng.randint(1, 40)):
            cache.release(slots.pop(rng.randrange(len(slots))))
            check()
        while len(slots) < 64 + rng.randint(0, 8):
            open_one()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("failing", [1, 2])
def test_when_memory_runs_out_during_a_move_no_sequence_is_lost(
    failing: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = Checked(on_device=on_device)
    for count in (30, 50):
        checked.open()
        checked.append([max(checked.written)], [count])
    calls, move = 0, kv_cache._Buffer.move

    def fail(self: kv_cache._Buffer, *args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise torch.OutOfMemoryError("out of memory")
        move(self, *args)  # type: ignore[arg-type]

    total = checked.cache.layout.total
    with monkeypatch.context() as patched:
        patched.setattr(kv_cache._Buffer, "move", fail)
        with pytest.raises(torch.OutOfMemoryError):
            checked.cache.prepare_append([0], [3000], CPU)
    assert checked.cache.layout.total == total
    checked.append([0, 1], [1, 2])
    checked.check()
    checked.append([1], [2000])
    checked.check()


def test_a_shrink_without_memory_for_the_copy_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Checked()
    for _ in range(2):
        checked.open()
        checked.append([max(checked.written)], [8000])
    with monkeypatch.context() as patched:
        patched.setattr(kv_cache._Buffer, "move", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        checked.close(0)
    total = checked.cache.layout.total
    checked.truncate(1, 7999)
    assert checked.cache.layout.total < 0.6 * total
    checked.append([1], [1])


def test_an_extent_grows_in_place_then_moves_then_all_are_packed() -> None:
    layout = make_room(Layout(1024, {}), {0: 100, 1: 100}, [0, 1], None)
    assert [(extent.base, extent.size) for extent in layout.extents.values()] == [(0, 192), (192, 192)]
    grown = make_room(layout, {0: 100, 1: 300}, [1], None)
    assert (grown.extents[1].base, grown.extents[1].size) == (192, 384)
    moved = make_room(grown, {0: 250, 1: 300}, [0], None)
    assert (moved.extents[0].base, moved.extents[0].size) == (576, 384)
    packed = make_room(Layout(704, moved.without(1).extents | {2: moved.extents[1]}), {0: 110, 2: 400}, [2], 704)
    assert sorted((extent.base, slot) for slot, extent in packed.extents.items()) == [(0, 2), (512, 0)]


def test_an_extent_moves_in_place_to_where_another_was() -> None:
    lengths = {0: 300, 1: 100}
    old = make_room(Layout(2048, {}), lengths, [0, 1], None)
    new = make_room(old, {0: 700, 1: 250}, [0, 1], None)
    assert new.extents[1].base == old.extents[0].base != new.extents[0].base
    move = Move.between(old, new, lengths.__getitem__)
    assert move.in_place
    assert [run.source for run in move.runs] == [old.extents[0].base, old.extents[1].base]


@pytest.mark.parametrize(("sessions", "context", "k"), [(128, 1000, 3), (32, 1000, 5), (64, 500, 5), (128, 200, 5)])
def test_rounds_of_drafts_seldom_copy_the_whole_cache(
    sessions: int, context: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions of equal length grow together, by one to k + 1 tokens a round. Rejected drafts are rolled back."""
    rng, cache = random.Random(0), SlotKVCache(1)
    cache.prepare_append([cache.allocate()], [1], CPU)
    cache.layers[0].update(entries(torch.zeros(1, 1)), entries(torch.zeros(1, 1)))
    slots = [cache.allocate() for _ in range(sessions)]
    for slot in slots:
        cache.reserve([slot], [context])
        cache.commit_append()
    copies, between = 0, Move.between

    def count(*args: Any) -> Move:
        nonlocal copies
        move = between(*args)
        copies += not move.in_place
        return move

    monkeypatch.setattr(Move, "between", count)
    for _ in range(120):
        cache.reserve(slots, [k + 1] * sessions)
        cache.commit_append()
        for slot in slots:
            rejected = next((n for n in range(k) if rng.random() < 0.5), k)
            cache.truncate(slot, cache.lengths[slot] - rejected)
    assert copies <= 5


def test_without_space_to_spare_extents_share_what_is_left() -> None:
    layout = make_room(Layout(0, {}), {0: 300, 1: 500}, [0, 1], 820)
    assert layout.total == 820
    assert [extent.size for extent in layout.extents.values()] == [310, 510]
