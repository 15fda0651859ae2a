"""A run's folder: no line is lost, whatever happened while it was written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import DataError, OutriderError, SettingsError
from outrider.evals.store import JsonLinesFile, Store, difference, pair_key

ABOUT = {"configuration": {"modes": ["a", "b"], "generation": {"seed": 0, "stop": []}}, "hardware": {"cores": 2}}


def row(item: str, mode: str = "a", **more: object) -> dict[str, object]:
    return {"id": item, "mode": mode, "token_ids": [1, 2], **more}


def fill(store: Store, *pairs: tuple[str, str]) -> None:
    for item, mode in pairs:
        store.add(row(item, mode), {"id": item, "mode": mode, "total_s": 0.5})


TEXTS = st.text(st.characters() | st.sampled_from("\u2028\x85\n\r\ud800"), max_size=8)
LINES = st.lists(TEXTS, min_size=1, max_size=5).map(lambda texts: [row(f"i{n}", text=t) for n, t in enumerate(texts)])


@given(LINES, st.data())
def test_a_file_that_is_torn_anywhere_goes_on_to_the_same_bytes(tmp_path_factory, lines, data) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("journal") / "results.jsonl"
    journal = JsonLinesFile(path, pair_key)
    for line in lines:
        journal.add(line)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])

    again = JsonLinesFile(path, pair_key)
    assert list(again.rows.values()) == lines[: whole[:cut].count(b"\n")], "exactly the lines that ended are there"
    for line in lines:
        if pair_key(line) not in again.rows:
            again.add(line)
    assert path.read_bytes() == whole
    assert list(JsonLinesFile(path, pair_key).rows.values()) == lines


@pytest.mark.parametrize("damage", [b"{}\n", b"nonsense\n", b"[1]\n", b"\n", b"\xff\n"])
def test_a_damaged_line_before_the_end_is_named_and_not_dropped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "results.jsonl"
    JsonLinesFile(path, pair_key).add(row("one"))
    path.write_bytes(path.read_bytes() + damage + path.read_bytes().replace(b"one", b"two"))
    with pytest.raises(DataError, match=r"results\.jsonl, line 2"):
        JsonLinesFile(path, pair_key)


def test_a_line_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    JsonLinesFile(path, pair_key).add(row("one"))
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DataError, match="line 2: one a appears twice"):
        JsonLinesFile(path, pair_key)


def test_a_line_is_on_the_disk_before_it_counts_and_the_timing_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "run", ABOUT) as store:
        synced: list[tuple[str, bytes]] = []

        def fsync(file: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{file}"))
            synced.append((path.name, path.read_bytes()))
            assert not store.is_done("one", "a")

        monkeypatch.setattr(os, "fsync", fsync)
        fill(store, ("one", "a"))
        assert [name for name, _ in synced] == ["timings.jsonl", "results.jsonl"]
        assert all(data.endswith(b"\n") for _, data in synced)
        assert store.is_done("one", "a")


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    journal = JsonLinesFile(tmp_path / "results.jsonl", pair_key)
    journal.path = Path("/dev/full")
    with pytest.raises(OutriderError, match="/dev/full cannot be written"):
        journal.add(row("one"))


def test_halves_of_answers_are_done_again(tmp_path: Path) -> None:
    with Store(tmp_path, ABOUT) as store:
        fill(store, ("one", "a"), ("two", "a"))
        store.timings.add({"id": "three", "mode": "a"})  # killed between the two
        store.results.add({"id": "four", "mode": "a", "error": {"type": "X", "message": ""}})  # has no timing
    (tmp_path / "timings.jsonl").write_bytes((tmp_path / "timings.jsonl").read_bytes().split(b"\n", 1)[1])
    with Store(tmp_path, ABOUT) as store:
        assert [store.is_done(item, "a") for item in ("one", "two", "three", "four")] == [False, True, False, True]
        assert list(store.timings.rows) == [("two", "a")]


def test_the_order_at_the_end_is_that_of_items_and_modes(tmp_path: Path) -> None:
    with Store(tmp_path, ABOUT) as store:
        fill(store, ("two", "b"), ("one", "a"), ("two", "a"), ("one", "b"))
        store.traces.add({"id": "two"})
        store.traces.add({"id": "one"})
        store.finish(["one", "two"], ["a", "b"])
    for name in ("results", "timings"):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [pair_key(line) for line in lines] == [("one", "a"), ("one", "b"), ("two", "a"), ("two", "b")]
    assert (tmp_path / "traces.jsonl").read_text(encoding="utf-8") == '{"id": "one"}\n{"id": "two"}\n'


def test_failures_are_kept_until_they_are_to_be_tried_again(tmp_path: Path) -> None:
    with Store(tmp_path, ABOUT) as store:
        fill(store, ("one", "a"))
        store.add({"id": "two", "mode": "a", "error": {"type": "X", "message": "m"}})
    with Store(tmp_path, ABOUT) as store:
        assert store.is_done("two", "a")
        store.forget_failures()
        assert not store.is_done("two", "a")
        assert store.is_done("one", "a")


def test_two_writers_are_not_let_in_and_a_lock_that_was_left_is_no_lock(tmp_path: Path) -> None:
    with Store(tmp_path, ABOUT), pytest.raises(SettingsError, match=f"written by process {os.getpid()}"):
        Store(tmp_path, ABOUT)
    assert (tmp_path / "lock").exists()
    Store(tmp_path, ABOUT).close()


def test_a_refused_folder_is_not_left_locked(tmp_path: Path) -> None:
    Store(tmp_path, ABOUT).close()
    with pytest.raises(SettingsError, match="another run"):
        Store(tmp_path, {**ABOUT, "versions": {"torch": "9"}})
    Store(tmp_path, ABOUT).close()


def test_another_configuration_is_refused_by_its_first_field(tmp_path: Path) -> None:
    Store(tmp_path, ABOUT).close()
    changed = json.loads(json.dumps(ABOUT))
    changed["configuration"]["generation"]["seed"] = 1
    changed["hardware"]["cores"] = 4
    with pytest.raises(SettingsError, match=r"configuration\.generation\.seed is 0 there and 1 now"):
        Store(tmp_path, changed)


def test_results_without_a_configuration_and_strange_configurations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no run\.json"):
        Store(tmp_path, ABOUT)
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"run\.json: not valid JSON"):
        Store(tmp_path, ABOUT)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SettingsError, match="cannot be used"):
        Store(tmp_path / "file" / "run", ABOUT)


VALUES = st.recursive(
    st.none() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text("ab", min_size=1, max_size=2), VALUES), st.dictionaries(st.text("ab", min_size=1), VALUES)
)
def test_a_difference_is_found_exactly_where_there_is_one(old: dict[str, object], new: dict[str, object]) -> None:
    assert difference(old, old) is None
    assert (difference(old, new) is None) == (old == new)


def test_what_says_nothing_about_the_results_is_not_compared(tmp_path: Path) -> None:
    one = {"configuration": {"data": {"name": "a/set.jsonl", "hash": "1"}}, "hardware": {"memory_bytes": 1}}
    other = {"configuration": {"data": {"name": "../set.jsonl", "hash": "1"}}, "hardware": {"memory_bytes": 2}}
    assert difference(one, other) is None
