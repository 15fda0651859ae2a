"""Who is served: limits, expiry, ownership; and that whoever has gone is forgotten."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cloud.limits import Limits
from outrider.cloud.sessions import SessionEntry, SessionMedia, Sessions
from outrider.config import GenerationSettings
from outrider.engines.base import Prompt
from outrider.protocol import schema
from outrider.protocol.messages import ErrorCode, FrameError
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import open_session
from tests.support.fakes import HashRows, ScriptedEngine

V = 16
ENGINE = ScriptedEngine(HashRows(1, V), V)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Somebody:
    """A stream that notes whether it was told that it lost its session."""

    lost = False
    entry: SessionEntry | None = None

    def on_detached(self) -> None:
        self.lost = True


class Kept:
    """Sessions under limits, a clock to turn, and who has gone."""

    def __init__(self, **limits: Any) -> None:
        self.clock = Clock()
        self.gone: list[SessionEntry] = []
        self.sessions = Sessions(Limits(**limits), self.gone.append, self.clock)

    def add(self, identity: str = "me", media: int = 0) -> SessionEntry:
        prompt, settings = Prompt((1, 2)), GenerationSettings()
        session = open_session(ENGINE, prompt, SessionParams(settings, "exact", V))
        entry = SessionEntry(identity, session, settings, lambda: prompt, SessionMedia(schema.AUDIO, bytes(media)))
        entry.stream = Somebody()
        self.sessions.add(entry)
        return entry


def full() -> Any:
    return pytest.raises(FrameError, check=lambda r: r.code == ErrorCode.LIMIT and r.retry_after > 0)


def busy(entry: SessionEntry) -> Future[Any]:
    entry.pending = Future()
    return entry.pending


def test_the_service_takes_so_many_sessions() -> None:
    kept = Kept(max_sessions=3)
    entries = [kept.add(f"edge {n}") for n in range(3)]
    with full():
        kept.add("another")
    kept.sessions.drop(entries[1])
    kept.add("another")
    assert len(kept.sessions) == 3


def test_an_identity_has_so_many_sessions_and_others_are_not_concerned() -> None:
    kept = Kept(max_sessions_per_identity=2)
    first, _ = kept.add("a"), kept.add("a")
    with full():
        kept.add("a")
    kept.add("b")
    kept.sessions.drop(first)
    kept.add("a")


def test_a_session_is_found_by_its_owner_only() -> None:
    kept = Kept()
    entry = kept.add("a")
    assert kept.sessions.find(entry.id, "a") is entry
    messages = set()
    for id_, identity in [(entry.id, "b"), (b"x" * 16, "a"), (b"", "a"), (entry.id[:15], "a")]:
        with pytest.raises(FrameError) as caught:
            kept.sessions.find(id_, identity)
        assert caught.value.code == ErrorCode.UNKNOWN_SESSION
        messages.add(str(caught.value))
    assert len(messages) == 1  # nobody learns whether it is somebody else's


def test_ids_cannot_be_guessed_and_logs_do_not_tell_them() -> None:
    kept = Kept()
    entries = [kept.add() for _ in range(50)]
    assert len({entry.id for entry in entries}) == 50
    assert all(len(entry.id) == 16 and len(entry.name) == 8 for entry in entries)


def test_idle_sessions_expire() -> None:
    kept = Kept(idle_seconds=60)
    idle, used = kept.add(), kept.add()
    kept.clock.now += 40
    kept.sessions.touch(used)
    kept.clock.now += 40
    assert kept.sessions.expire() == 1
    assert kept.gone == [idle]
    assert idle not in kept.sessions
    assert used in kept.sessions


def test_a_session_expires_after_its_verdicts_too_but_not_during_one() -> None:
    """A done verdict once kept its session for ever."""
    kept = Kept(idle_seconds=60)
    entry = kept.add()
    verdict = busy(entry)
    kept.clock.now += 61
    assert kept.sessions.expire() == 0
    verdict.set_result(None)
    assert kept.sessions.expire() == 1


def test_a_session_that_ended_stays_so() -> None:
    """Touching one that was dropped once brought it back, past all limits."""
    kept = Kept()
    entry = kept.add()
    entry.stream = Somebody()
    kept.sessions.drop(entry)
    assert entry.stream is None
    kept.sessions.touch(entry)
    assert len(kept.sessions) == 0
    kept.sessions.drop(entry)
    assert kept.gone == [entry]


# Media ----------------------------------------------------------------------------------------------------------


def media_limits(total: int) -> dict[str, int]:
    return {"max_media_bytes": 100, "max_media_total": total}


def test_media_makes_room_by_ending_the_longest_idle() -> None:
    kept = Kept(**media_limits(250))
    first, text, second = kept.add(media=100), kept.add(), kept.add(media=100)
    kept.sessions.touch(first)
    third = kept.add(media=100)
    assert kept.gone == [second]
    assert all(entry in kept.sessions for entry in (first, text, third))


def test_sessions_without_media_evict_no_other() -> None:
    kept = Kept(**media_limits(100))
    kept.add(media=100)
    kept.add()
    assert not kept.gone


def test_a_session_at_work_keeps_its_media() -> None:
    kept = Kept(**media_limits(200))
    first, second = kept.add(media=100), kept.add(media=100)
    verdict = busy(first)
    kept.add(media=100)
    assert kept.gone == [second]
    verdict.set_result(None)
    kept.add(media=100)
    assert kept.gone == [second, first]


def test_media_that_cannot_fit_evicts_no_session() -> None:
    kept = Kept(**media_limits(200))
    entries = [kept.add(media=100), kept.add(media=60), kept.add(media=40)]
    busy(entries[0]), busy(entries[1])
    with full():
        kept.add(media=100)
    assert not kept.gone


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "drop", "touch", "expire", "work", "rest"]), st.integers(0, 9)), max_size=60
    )
)
def test_whatever_happens_the_limits_hold(moves: list[tuple[str, int]]) -> None:
    kept = Kept(max_sessions=6, max_sessions_per_identity=4, idle_seconds=20, **media_limits(250))
    added: list[SessionEntry] = []
    for move, n in moves:
        kept.clock.now += n
        if move == "add":
            with suppress(FrameError):
                added.append(kept.add("ab"[n % 2], 10 * n))
        elif move == "expire":
            kept.sessions.expire()
        elif added:
            entry = added[n % len(added)]
            match move:
                case "drop":
                    kept.sessions.drop(entry)
                case "touch":
                    kept.sessions.touch(entry)
                case "work":
                    busy(entry)
                case _:
                    entry.pending = None
        now = list(kept.sessions)
        assert len(now) <= 6
        assert all(sum(entry.identity == name for entry in now) <= 4 for name in "ab")
        assert sum(entry.media_bytes for entry in now) <= 250
        assert [entry.last_used for entry in now] == sorted(entry.last_used for entry in now)
        assert len({entry.id for entry in kept.gone}) == len(kept.gone)
        assert sorted(entry.id for entry in added) == sorted(entry.id for entry in (*now, *kept.gone))


def test_closed_sessions_are_freed_without_the_garbage_collector() -> None:
    kept = Kept()
    kept.gone = []
    kept.sessions = Sessions(Limits(), lambda entry: None, kept.clock)
    gc.collect()
    gc.disable()  # reference counts alone must do
    try:
        gone = []
        for _ in range(100):
            entry = kept.add(media=10)
            entry.stream = Somebody()
            entry.stream.entry = entry  # a stream knows its session
            gone.append(weakref.ref(entry))
            kept.sessions.drop(entry)
            del entry
        assert not [ref for ref in gone if ref() is not None]
    finally:
        gc.enable()
    assert len(kept.sessions) == 0


# Shares ---------------------------------------------------------------------------------------------------------


def test_media_of_one_identity_evicts_no_session_of_another() -> None:
    kept = Kept(**media_limits(500))
    mine = kept.add("me", media=100)
    for _ in range(50):
        kept.add("greedy", media=100)
    assert mine in kept.sessions
    assert {entry.identity for entry in kept.gone} == {"greedy"}


def test_an_identity_that_took_all_the_room_gives_way_even_at_work() -> None:
    kept = Kept(**media_limits(500))
    theirs = [kept.add("greedy", media=100) for _ in range(5)]
    for entry in theirs:
        busy(entry)
    kept.add("me", media=100)
    assert kept.gone == theirs[:1]
    kept.add("me", media=100)
    assert kept.gone == theirs[:2]
    kept.add("me", media=100)  # now it would have more than the other, and makes room itself
    assert [entry.identity for entry in kept.gone] == ["greedy", "greedy", "me"]


def test_an_identity_that_took_all_places_gives_way() -> None:
    kept = Kept(max_sessions=4, max_sessions_per_identity=4)
    theirs = [kept.add("greedy") for _ in range(4)]
    mine = [kept.add("me"), kept.add("me")]
    assert kept.gone == theirs[:2]
    with full():
        kept.add("me")
    assert all(entry in kept.sessions for entry in mine)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100)), max_size=30))
def test_an_identity_that_loses_a_recording_had_more_than_the_newcomer(additions: list[tuple[str, int]]) -> None:
    kept = Kept(max_sessions=99, **media_limits(300))
    for identity, size in additions:
        kept.gone.clear()
        with suppress(FrameError):
            kept.add(identity, size)
        after = Counter(dict.fromkeys("abc", 0))
        for entry in kept.sessions:
            after[entry.identity] += entry.media_bytes
        for entry in {entry.identity: entry for entry in kept.gone}.values():
            assert entry.identity == identity or after[entry.identity] + entry.media_bytes > after[identity]


# Orphans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits", [{"max_sessions": 3, "max_sessions_per_identity": 9}, {"max_sessions_per_identity": 3}]
)
def test_where_all_places_are_taken_the_longest_idle_without_a_stream_gives_way(limits: dict[str, int]) -> None:
    kept = Kept(**limits)
    one, two, _ = (kept.add() for _ in range(3))
    two.stream = None
    kept.add()
    assert kept.gone == [two]
    with full():
        kept.add()
    assert kept.gone == [two], "those that a stream uses stay"
    one.stream = None
    busy(one)
    with full():
        kept.add()


def test_an_identity_does_not_take_anothers_place_under_its_own_limit() -> None:
    kept = Kept(max_sessions=9, max_sessions_per_identity=2)
    theirs = kept.add("they")
    mine = [kept.add("me"), kept.add("me")]
    theirs.stream = mine[0].stream = None
    kept.add("me")
    assert kept.gone == [mine[0]]
    assert theirs in kept.sessions


# What a review found --------------------------------------------------------------------------------------------


def test_a_detached_stream_is_marked_lost() -> None:
    kept = Kept()
    entry = kept.add()
    first, second = entry.stream, Somebody()
    entry.attach(second)
    assert first.lost
    assert not second.lost
    kept.sessions.drop(entry)
    assert second.lost


def test_a_refused_session_evicts_no_other() -> None:
    """At its own limit, an identity takes no orphan of another's away; nor does one whose media finds no room."""
    kept = Kept(max_sessions=3, max_sessions_per_identity=2, max_media_total=8 * 2**20)
    orphan = kept.add("they")
    orphan.stream = None
    kept.add("me")
    kept.add("me")
    with full():
        kept.add("me")
    with full():
        kept.sessions.check_capacity("me")
    kept = Kept(max_sessions=1, max_media_total=8 * 2**20)
    kept.add("they").stream = None
    with full():
        kept.add("me", media=9 * 2**20)
    assert not kept.gone
