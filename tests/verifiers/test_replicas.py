"""Which server a session is with, and what happens to it where that one is away, busy, or another than before."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.partial import PartialRow
from outrider.errors import CloudRefused
from outrider.verifiers import replicas as module
from outrider.verifiers.refusals import Again
from outrider.verifiers.replicas import AVOIDED, Replica, first_ready, rendezvous
from outrider.verifiers.server import Abilities
from outrider.wire.status import Disconnected, Untrusted
from outrider.wire.web import Reply

KEYS = [f"session {n}" for n in range(3000)]


def rows(*values: float) -> tuple[PartialRow, ...]:
    return (PartialRow(np.arange(len(values)), np.array(values, np.float32), -np.inf),)


ABLE = Abilities("a-model", 4096, "tail", 20, normalised=True, noise=0.0, sample=rows(-0.5, -1.7))


@dataclass
class FakeDialect:
    """What each probe finds, or fails with; the last one again and again."""

    found: list[Abilities | Exception] = field(default_factory=lambda: [ABLE])
    scheme: str = "fake"
    probes: int = 0

    async def probe(self, web: FakeWeb) -> Abilities:
        answer = self.found[min(self.probes, len(self.found) - 1)]
        self.probes += 1
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class FakeWeb:
    name: str = "host:1"
    trouble: Exception | None = None
    posted: list[tuple[Any, ...]] = field(default_factory=list)
    endpoint: Any = field(default_factory=lambda: SimpleNamespace(connections=1))

    async def post(self, *request: Any) -> Reply:
        self.posted.append(request)
        if self.trouble is not None:
            raise self.trouble
        return Reply(200, {"fine": True})


def replica(*found: Abilities | Exception, name: str = "host:1", trouble: Exception | None = None) -> Replica:
    dialect: Any = FakeDialect(list(found) or [ABLE])
    web: Any = FakeWeb(name, trouble)
    return Replica(dialect, web, deadline=3.0)


def probes(of: Replica) -> int:
    dialect: Any = of._dialect
    return int(dialect.probes)


def several(count: int) -> list[Replica]:
    return [replica(name=f"10.0.0.{n}:8000") for n in range(count)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Only this module's clock; `now` is set by hand."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


# The order of the replicas --------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.text(max_size=40), st.integers(1, 8), st.randoms())
def test_every_key_orders_all_replicas_the_same_way_on_every_edge(key: str, count: int, shuffler: Any) -> None:
    here, there = several(count), several(count)
    shuffler.shuffle(there)
    order = [found.name for found in rendezvous(key, here)]
    assert sorted(order) == sorted(found.name for found in here)
    assert [found.name for found in rendezvous(key, there)] == order


@pytest.mark.parametrize("gone", range(4))
def test_without_a_replica_only_its_own_keys_move_each_to_its_second_choice(gone: int) -> None:
    everyone = several(4)
    left = [found for found in everyone if found is not everyone[gone]]
    moved = Counter()
    for key in KEYS:
        before, after = rendezvous(key, everyone), rendezvous(key, left)
        assert after == [found for found in before if found is not everyone[gone]]
        if before[0] is everyone[gone]:
            moved[after[0].name] += 1
    assert len(moved) == 3  # and not all to the same one
    assert max(moved.values()) < 1.5 * min(moved.values())


def test_keys_spread_evenly() -> None:
    first = Counter(rendezvous(key, several(3))[0].name for key in KEYS)
    assert sorted(first) == [f"fake://10.0.0.{n}:8000" for n in range(3)]
    assert all(abs(count - 1000) <= 150 for count in first.values())


def test_a_replica_that_failed_is_last_for_a_while(clock: SimpleNamespace) -> None:
    everyone = several(3)
    order = rendezvous("key", everyone)
    assert not any(found.avoided for found in everyone)
    order[0].fail()
    for later in (0.0, AVOIDED - 0.01):
        clock.now = 1000.0 + later
        assert rendezvous("key", everyone) == [order[1], order[2], order[0]]
    clock.now = 1000.0 + AVOIDED
    assert rendezvous("key", everyone) == order


def test_where_all_failed_the_order_is_the_sessions_own(clock: SimpleNamespace) -> None:
    everyone = several(3)
    order = rendezvous("key", everyone)
    for found in reversed(order):
        found.fail()
        clock.now += 0.1
    assert rendezvous("key", everyone) == order


def test_a_clock_that_has_just_started_avoids_nobody(clock: SimpleNamespace) -> None:
    clock.now = 0.0
    assert not replica().avoided


# The first that can be used -------------------------------------------------------------------------------------


def tried(
    everyone: Sequence[Replica], failures: Sequence[Exception], key: str = "key"
) -> tuple[list[Replica], Exception | None]:
    """Who was tried, each with the next failure until these run out, and what came of it."""
    asked: list[Replica] = []

    async def use(found: Replica) -> None:
        asked.append(found)
        if len(asked) <= len(failures):
            raise failures[len(asked) - 1]

    try:
        asyncio.run(first_ready(everyone, key, use))
    except (Again, CloudRefused) as error:
        return asked, error
    return asked, None


@pytest.mark.parametrize("failing", range(4))
def test_replicas_are_tried_in_the_sessions_order_until_one_works(failing: int) -> None:
    everyone = several(4)
    failures = [Again(f"reason {n}") for n in range(failing)]
    for key in KEYS[:20]:
        assert tried(everyone, failures, key) == (rendezvous(key, everyone)[: failing + 1], None)


def test_the_last_ones_reason_is_told() -> None:
    everyone, failures = several(3), [Again(f"reason {n}", after=n) for n in range(3)]
    assert tried(everyone, failures) == (rendezvous("key", everyone), failures[2])


def test_a_busy_one_is_not_moved_away_from() -> None:
    everyone, busy = several(3), Again("too many requests", 1.5, busy=True)
    assert tried(everyone, [busy]) == (rendezvous("key", everyone)[:1], busy)
    assert tried(everyone, [Again("away"), busy]) == (rendezvous("key", everyone)[:2], busy)


def test_a_refusal_is_final() -> None:
    everyone, refused = several(3), CloudRefused("no")
    assert tried(everyone, [refused]) == (rendezvous("key", everyone)[:1], refused)


# Getting ready --------------------------------------------------------------------------------------------------


def test_a_replica_is_probed_once() -> None:
    asked = replica()
    for _ in range(3):
        assert asyncio.run(asked.ready()) is ABLE
    assert probes(asked) == 1


def test_two_at_once_probe_once() -> None:
    asked = replica()

    async def both() -> list[Abilities]:
        return await asyncio.gather(asked.ready(), asked.ready())

    assert asyncio.run(both()) == [ABLE, ABLE]
    assert probes(asked) == 1


def test_it_is_probed_again_after_it_was_away() -> None:
    shorter = replace(ABLE, top=5)
    asked = replica(ABLE, shorter)
    asyncio.run(asked.ready())
    asked.fail()
    assert asyncio.run(asked.ready()) is shorter
    assert asked.able is shorter
    asyncio.run(asked.ready())
    assert probes(asked) == 2


def test_a_probe_that_fails_is_made_again() -> None:
    asked = replica(Disconnected("refused"), Again("loading"), ABLE)
    for reason in ("fake://host:1: refused", "loading"):
        with pytest.raises(Again, match=reason):
            asyncio.run(asked.ready())
        assert asked.able is None
    assert asyncio.run(asked.ready()) is ABLE


OTHERS = [
    replace(ABLE, model="another-model"),
    replace(ABLE, max_length=2048),
    replace(ABLE, max_length=None),
    replace(ABLE, sample=rows(-0.5, -7.0)),
    replace(ABLE, sample=(PartialRow(np.array([7, 8]), np.array([-0.5, -1.7], np.float32), -1.7),)),
]


@pytest.mark.parametrize("other", OTHERS)
def test_another_than_before_is_refused_however_often(other: Abilities) -> None:
    asked = replica(ABLE, other, other, ABLE)
    asyncio.run(asked.ready())
    asked.fail()
    for _ in range(2):
        with pytest.raises(CloudRefused, match="fake://host:1"):
            asyncio.run(asked.ready())
    assert asyncio.run(asked.ready()) is ABLE  # it came back as itself


@pytest.mark.parametrize("other", OTHERS)
def test_another_than_the_other_replicas_is_refused(other: Abilities) -> None:
    asked = replica(other)
    with pytest.raises(CloudRefused, match="fake://host:1"):
        asyncio.run(asked.ready(ABLE))
    assert asked.able is None


def test_who_differs_in_what_does_not_matter_may_stay() -> None:
    for same in (
        replace(ABLE, way="spread", top=5, noise=0.1, sample=rows(-0.6, -1.5)),
        replace(ABLE, normalised=False, sample=rows(17.5, 16.3)),  # the logits of the same rows
    ):
        assert asyncio.run(replica(same).ready(ABLE)) is same


def test_models_that_differ_are_both_named() -> None:
    with pytest.raises(CloudRefused, match="serves another-model, not a-model"):
        asyncio.run(replica(OTHERS[0]).ready(ABLE))


# Requests -------------------------------------------------------------------------------------------------------


def test_a_request_names_its_session() -> None:
    asked = replica()
    web: Any = asked.web
    assert asyncio.run(asked.post("/path", {"x": 1}, "a-session", 2.5)) == Reply(200, {"fine": True})
    assert web.posted == [("/path", {"x": 1}, 2.5, {"X-Session-ID": "a-session"})]
    assert not asked.avoided


@pytest.mark.parametrize(
    ("trouble", "raised", "told", "avoided"),
    [
        (Disconnected("connection lost"), Again, "fake://host:1: connection lost", True),
        (TimeoutError(), Again, "fake://host:1: no answer in time", True),
        (Untrusted("its certificate: expired"), CloudRefused, "not trusted: its certificate: expired", False),
    ],
)
def test_the_transports_errors_become_ours(trouble: Exception, raised: Any, told: str, avoided: bool) -> None:
    calls: list[Callable[[Replica], Awaitable[Any]]] = [
        lambda asked: asked.ready(),
        lambda asked: asked.post("/path", {}, "s", 1.0),
    ]
    for call in calls:
        asked = replica(trouble, trouble=trouble)
        with pytest.raises(raised, match=told) as caught:
            asyncio.run(call(asked))  # type: ignore[arg-type]
        assert caught.value.__cause__ is trouble
        assert asked.avoided == avoided


def test_a_replica_that_failed_at_a_request_is_probed_again() -> None:
    asked = replica(trouble=Disconnected("gone"))
    asyncio.run(asked.ready())
    with pytest.raises(Again):
        asyncio.run(asked.post("/path", {}, "s", 1.0))
    asyncio.run(asked.ready())
    assert probes(asked) == 2
