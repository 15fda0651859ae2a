"""The loop of an evaluation: failures that are counted, a run that can be cut anywhere, modes by their names."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.options import DecodingOptions
from outrider.errors import AudioError, DecodingError, SettingsError
from outrider.evals import runner
from outrider.evals.manifest import Item
from outrider.evals.modes import NAMES, Inapplicable, ItemResult, select_modes, unsupported_reason
from outrider.evals.runner import answer, count_steps, rotate_modes, run, warm_up
from outrider.evals.store import Store
from outrider.evals.summary import failures, summarise

pytestmark = pytest.mark.network

ABOUT = {"configuration": {}}
ITEMS = [Item(f"i{n}", prompt="x") for n in range(4)]


class Fake:
    """A mode whose answers are known. fails: items that fail; skips: items that it does not take."""

    def __init__(self, name: str, fails: tuple[str, ...] = (), skips: tuple[str, ...] = ()) -> None:
        self.name, self.fails, self.skips = name, fails, skips
        self.calls: list[str] = []

    def run(self, item: Item) -> ItemResult:
        self.calls.append(item.id)
        if item.id in self.fails:
            raise AudioError(f"{item.id} is no recording")
        if item.id in self.skips:
            raise Inapplicable("not this one")
        result = {"token_ids": [len(item.id), len(self.name)], "text": f"{item.id} “{self.name}”", "stats": {}}
        return ItemResult(result, {"ttft_s": 0.1, "total_s": 0.2 + len(self.calls)})


class Killed(BaseException):
    """kill -9, as far as the loop is concerned."""


def fakes() -> list[Fake]:
    return [Fake("a"), Fake("bb", fails=("i1",)), Fake("ccc", skips=("i2",))]


def tracer(item: Item) -> dict[str, Any]:
    if item.id == "i3":
        raise DecodingError("no trace of this")
    return {"id": item.id, "target": [1]}


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("results.jsonl", "traces.jsonl")}


# The loop ---------------------------------------------------------------------------------------------------


def test_every_mode_comes_first_equally_often_and_each_runs_once() -> None:
    modes = fakes()
    orders = [[mode.name for mode in rotate_modes(modes, n)] for n in range(6)]
    assert Counter(order[0] for order in orders) == {"a": 2, "bb": 2, "ccc": 2}
    assert all(sorted(order) == ["a", "bb", "ccc"] for order in orders)
    assert rotate_modes([], 3) == []


def test_modes_are_interleaved_item_by_item_after_one_warm_up_each(tmp_path: Path) -> None:
    log: list[tuple[str, str]] = []

    class Logged(Fake):
        def run(self, item: Item) -> ItemResult:
            log.append((item.id, self.name))
            return super().run(item)

    with Store(tmp_path, ABOUT) as store:
        run(ITEMS[:2], [Logged("a"), Logged("bb")], store)
    warm, measured = log[:2], log[2:]
    assert warm == [("i0", "a"), ("i0", "bb")]
    assert measured == [("i0", "a"), ("i0", "bb"), ("i1", "bb"), ("i1", "a")]


def test_a_mode_that_fails_on_the_first_item_is_warmed_up_on_the_next() -> None:
    mode = Fake("a", fails=("i0",))
    warm_up(ITEMS, [mode])
    assert mode.calls == ["i0", "i1"]


def test_failures_and_skipped_items_are_lines_and_are_counted(tmp_path: Path) -> None:
    advanced: list[int] = []
    with Store(tmp_path, ABOUT) as store:
        run(ITEMS, fakes(), store, tracer, lambda: advanced.append(1))
        rows, timings = store.results.rows, store.timings.rows
    assert len(advanced) == count_steps(ITEMS, fakes(), tracer) == 16
    assert rows["i1", "bb"]["error"] == {"type": "AudioError", "message": "i1 is no recording"}
    assert rows["i2", "ccc"]["skipped"] == "not this one"
    assert rows["i3", "trace"]["error"]["type"] == "DecodingError"
    assert len(rows) == 4 * 3 + 1
    assert set(timings) == {key for key, row in rows.items() if "token_ids" in row}
    found = summarise(["a", "bb", "ccc"], rows, timings)
    assert [(one["items"], one["failures"], one["skipped"]) for one in found.values()] == [
        (4, 0, 0),
        (4, 1, 0),
        (4, 0, 1),
    ]
    assert failures(rows) == 2


def test_what_is_no_failure_of_an_item_ends_the_run(tmp_path: Path) -> None:
    class Broken(Fake):
        def run(self, item: Item) -> ItemResult:
            raise ZeroDivisionError

    with Store(tmp_path, ABOUT) as store, pytest.raises(ZeroDivisionError):
        run(ITEMS, [Broken("a")], store)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory")])
def test_memory_that_runs_out_is_a_failure_of_the_item(error: Exception) -> None:
    class Greedy(Fake):
        def run(self, item: Item) -> ItemResult:
            raise error

    assert answer(Greedy("a"), ITEMS[0])[0]["error"]["type"] == type(error).__name__


def test_only_what_failed_is_tried_again(tmp_path: Path) -> None:
    with Store(tmp_path, ABOUT) as store:
        run(ITEMS, fakes(), store)
    mended = [Fake("a"), Fake("bb"), Fake("ccc", skips=("i2",))]
    with Store(tmp_path, ABOUT) as store:
        store.forget_failures()
        run(ITEMS, mended, store)
        assert failures(store.results.rows) == 0
    assert [mode.calls for mode in mended] == [[], ["i0", "i1"], []], "a warm-up, and what failed"


TORN = b'{"id": "i3", "mode": "a", "text": "\xe8\xaf\xb4", "token_ids": [1]}\n'
KILLS = st.tuples(
    st.integers(0, 20),  # steps until then
    st.sampled_from(["results", "timings", "traces"]),  # the file that is torn
    st.integers(-len(TORN) + 1, 40),  # bytes of another line in it, or of its last line that are missing
)


@settings(max_examples=40)
@given(kills=st.lists(KILLS, max_size=4))
def test_a_run_that_is_killed_anywhere_and_torn_anywhere_ends_in_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, kills: list[tuple[int, str, int]]
) -> None:
    whole, folder = (tmp_path_factory.mktemp(name) for name in ("whole", "killed"))
    with Store(whole, ABOUT) as store:
        run(ITEMS, fakes(), store, tracer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "warm_up", lambda *_: None)
        for steps_until, file, size in kills:
            killed_after(folder, steps_until)
            tear(folder / f"{file}.jsonl", size)
        killed_after(folder, 99)
    assert files(folder) == files(whole)


def killed_after(folder: Path, count: int) -> None:
    left = iter(range(count))

    def advance() -> None:
        if next(left, None) is None:
            raise Killed

    modes = fakes()
    with Store(folder, ABOUT) as store, suppress(Killed):
        there = set(store.results.rows)
        run(ITEMS, modes, store, tracer, advance)
    assert not there & {(item, mode.name) for mode in modes for item in mode.calls}, "what was there is done again"


def tear(path: Path, size: int) -> None:
    """As a write that was cut leaves it: with less of its last line (size > 0), or with part of one more."""
    if not path.exists():
        return
    data = path.read_bytes()
    last = len(data[:-1]) - data[:-1].rfind(b"\n")
    path.write_bytes(data[: len(data) - min(size, last)] if size > 0 else data + TORN[:-size])


# Which modes ------------------------------------------------------------------------------------------------

HAS = {"options": DecodingOptions(gate="entropy:1"), "edge": True, "cloud": "local"}


def test_all_modes_run_with_a_pair_in_this_process_and_a_gate() -> None:
    assert select_modes([], lambda name: unsupported_reason(name, **HAS)) == (list(NAMES), {})


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"options": DecodingOptions()}, {"edge-only", "cloud-only", "exact", "plain", "assisted"}),
        ({"options": DecodingOptions(accept="rank:5")}, set(NAMES)),
        ({"cloud": "none"}, {"edge-only"}),
        ({"edge": False}, {"cloud-only", "plain"}),
        ({"cloud": "grpc"}, {"edge-only", "cloud-only", "exact", "gated"}),
        ({"limited": True}, set(NAMES) - {"assisted"}),
    ],
)
def test_modes_that_cannot_be_had_are_left_out_with_a_reason_or_refused(change: dict[str, Any], left: set[str]) -> None:
    names, left_out = select_modes([], lambda name: unsupported_reason(name, **{**HAS, **change}))
    assert set(names) == left == set(NAMES) - set(left_out)
    for name, reason in left_out.items():
        with pytest.raises(SettingsError, match=f"mode {name}: {reason[:20]}"):
            select_modes([name], lambda name: unsupported_reason(name, **{**HAS, **change}))


def test_modes_are_in_canonical_order_and_must_be_known() -> None:
    assert select_modes(["plain", "exact"], lambda _: None)[0] == ["exact", "plain"]
    with pytest.raises(SettingsError, match="mode 'fast': expected any of edge-only"):
        select_modes(["fast"], lambda _: None)
