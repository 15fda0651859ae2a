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

from outrider.errors import CloudRefused
from outrider.sampling.top_logprobs import TopLogprobs
from outrider.transport.http_client import HttpResponse
from outrider.transport.status import Disconnected, UntrustedServer
from outrider.verifiers.llm_server import replicas as module
from outrider.verifiers.llm_server.backend import Capabilities
from outrider.verifiers.llm_server.replicas import AVOID_SECONDS, Replica, rendezvous_order, use_first_ready
from outrider.verifiers.retry import Retryable

KEYS = [f"session {n}" for n in range(3000)]


def rows(*values: float) -> tuple[TopLogprobs, ...]:
    return (TopLogprobs(np.arange(len(values)), np.array(values, np.float32), -np.inf),)


ABLE = Capabilities("a-model", 4096, "prompt_logprobs", 20, normalised=True, noise=0.0, sample=rows(-0.5, -1.7))


@dataclass
class FakeDialect:
    """What each probe finds, or fails with; the last one again and again."""

    found: list[Capabilities | Exception] = field(default_factory=lambda: [ABLE])
    scheme: str = "fake"
    probes: int = 0

    async def probe(self, client: FakeWeb) -> Capabilities:
        answer = self.found[min(self.probes, len(self.found) - 1)]
        self.probes += 1
        await asyncio.sleep(0)  # one turn of the loop, as any request takes
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class FakeWeb:
    name: str = "host:1"
    trouble: Exception | None = None
    posted: list[tuple[Any, ...]] = field(default_factory=list)
    endpoint: Any = field(default_factory=lambda: SimpleNamespace(connections=1))

    async def post(self, *request: Any) -> HttpResponse:
        self.posted.append(request)
        if self.trouble is not None:
            raise self.trouble
        return HttpResponse(200, {"fine": True})


def replica(*found: Capabilities | Exception, name: str = "host:1", trouble: Exception | None = None) -> Replica:
    backend: Any = FakeDialect(list(found) or [ABLE])
    client: Any = FakeWeb(name, trouble)
    return Replica(backend, client, deadline=3.0)


def probes(of: Replica) -> int:
    backend: Any = of._backend
    return int(backend.probes)


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
    order = [found.name for found in rendezvous_order(key, here)]
    assert sorted(order) == sorted(found.name for found in here)
    assert [found.name for found in rendezvous_order(key, there)] == order


@pytest.mark.parametrize("gone", range(4))
def test_without_a_replica_only_its_own_keys_move_each_to_its_second_choice(gone: int) -> None:
    everyone = several(4)
    left = [found for found in everyone if found is not everyone[gone]]
    moved = Counter()
    for key in KEYS:
        before, after = rendezvous_order(key, everyone), rendezvous_order(key, left)
        assert after == [found for found in before if found is not everyone[gone]]
        if before[0] is everyone[gone]:
            moved[after[0].name] += 1
    assert len(moved) == 3  # and not all to the same one
    assert max(moved.values()) < 1.5 * min(moved.values())


def test_keys_spread_evenly() -> None:
    first = Counter(rendezvous_order(key, several(3))[0].name for key in KEYS)
    assert sorted(first) == [f"fake://10.0.0.{n}:8000" for n in range(3)]
    assert all(abs(count - 1000) <= 150 for count in first.values())


def test_a_replica_that_failed_is_last_for_a_while(clock: SimpleNamespace) -> None:
    everyone = several(3)
    order = rendezvous_order("key", everyone)
    assert not any(found.is_avoided for found in everyone)
    order[0].mark_failed()
    for later in (0.0, AVOID_SECONDS - 0.01):
        clock.now = 1000.0 + later
        assert rendezvous_order("key", everyone) == [order[1], order[2], order[0]]
    clock.now = 1000.0 + AVOID_SECONDS
    assert rendezvous_order("key", everyone) == order


def test_where_all_failed_the_order_is_the_sessions_own(clock: SimpleNamespace) -> None:
    everyone = several(3)
    order = rendezvous_order("key", everyone)
    for found in reversed(order):
        found.mark_failed()
        clock.now += 0.1
    assert rendezvous_order("key", everyone) == order


def test_a_clock_near_zero_avoids_no_replica(clock: SimpleNamespace) -> None:
    clock.now = 0.0
    assert not replica().is_avoided


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
        asyncio.run(use_first_ready(everyone, key, use))
    except (Retryable, CloudRefused) as error:
        return asked, error
    return asked, None


@pytest.mark.parametrize("failing", range(4))
def test_replicas_are_tried_in_the_sessions_order_until_one_works(failing: int) -> None:
    everyone = several(4)
    failures = [Retryable(f"reason {n}") for n in range(failing)]
    for key in KEYS[:20]:
        assert tried(everyone, failures, key) == (rendezvous_order(key, everyone)[: failing + 1], None)


def test_the_last_ones_reason_is_told() -> None:
    everyone, failures = several(3), [Retryable(f"reason {n}", retry_after=n) for n in range(3)]
    assert tried(everyone, failures) == (rendezvous_order("key", everyone), failures[2])


def test_a_busy_one_is_not_moved_away_from() -> None:
    everyone, busy = several(3), Retryable("too many requests", 1.5, is_busy=True)
    assert tried(everyone, [busy]) == (rendezvous_order("key", everyone)[:1], busy)
    assert tried(everyone, [Retryable("away"), busy]) == (rendezvous_order("key", everyone)[:2], busy)


def test_a_refusal_is_final() -> None:
    everyone, refused = several(3), CloudRefused("no")
    assert tried(everyone, [refused]) == (rendezvous_order("key", everyone)[:1], refused)


# Getting ready --------------------------------------------------------------------------------------------------


def test_a_replica_is_probed_once() -> None:
    asked = replica()
    for _ in range(3):
        assert asyncio.run(asked.ensure_ready()) is ABLE
    assert probes(asked) == 1


def test_two_at_once_probe_once() -> None:
    asked = replica()

    async def both() -> list[Capabilities]:
        return await asyncio.gather(asked.ensure_ready(), asked.ensure_ready())

    assert asyncio.run(both()) == [ABLE, ABLE]
    assert probes(asked) == 1


def test_it_is_probed_again_after_it_was_away() -> None:
    shorter = replace(ABLE, top=5)
    asked = replica(ABLE, shorter)
    asyncio.run(asked.ensure_ready())
    asked.mark_failed()
    assert asyncio.run(asked.ensure_ready()) is shorter
    assert asked.capabilities is shorter
    asyncio.run(asked.ensure_ready())
    assert probes(asked) == 2


def test_a_probe_that_fails_is_made_again() -> None:
    asked = replica(Disconnected("refused"), Retryable("loading"), ABLE)
    for reason in ("fake://host:1: refused", "loading"):
        with pytest.raises(Retryable, match=reason):
            asyncio.run(asked.ensure_ready())
        assert asked.capabilities is None
    assert asyncio.run(asked.ensure_ready()) is ABLE


OTHERS = [
    replace(ABLE, model="another-model"),
    replace(ABLE, max_length=2048),
    replace(ABLE, max_length=None),
    replace(ABLE, sample=rows(-0.5, -7.0)),
    replace(ABLE, sample=(TopLogprobs(np.array([7, 8]), np.array([-0.5, -1.7], np.float32), -1.7),)),
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_changed_model_is_refused_on_every_attempt(other: Capabilities) -> None:
    asked = replica(ABLE, other, other, ABLE)
    asyncio.run(asked.ensure_ready())
    asked.mark_failed()
    for _ in range(2):
        with pytest.raises(CloudRefused, match="fake://host:1"):
            asyncio.run(asked.ensure_ready())
    assert asyncio.run(asked.ensure_ready()) is ABLE  # it came back as itself


@pytest.mark.parametrize("other", OTHERS)
def test_a_replica_with_another_model_is_refused(other: Capabilities) -> None:
    asked = replica(other)
    with pytest.raises(CloudRefused, match="fake://host:1"):
        asyncio.run(asked.ensure_ready(ABLE))
    assert asked.capabilities is None


def test_replicas_may_differ_in_irrelevant_fields() -> None:
    for same in (
        replace(ABLE, mode="per_prefix", top=5, noise=0.1, sample=rows(-0.6, -1.5)),
        replace(ABLE, normalised=False, sample=rows(17.5, 16.3)),  # the logits of the same rows
    ):
        assert asyncio.run(replica(same).ensure_ready(ABLE)) is same


def test_models_that_differ_are_both_named() -> None:
    with pytest.raises(CloudRefused, match="serves another-model, not a-model"):
        asyncio.run(replica(OTHERS[0]).ensure_ready(ABLE))


# Requests -------------------------------------------------------------------------------------------------------


def test_a_request_names_its_session() -> None:
    asked = replica()
    client: Any = asked.client
    assert asyncio.run(asked.post("/path", {"x": 1}, "a-session", 2.5)) == HttpResponse(200, {"fine": True})
    assert client.posted == [("/path", {"x": 1}, 2.5, {"X-Session-ID": "a-session"})]
    assert not asked.is_avoided


@pytest.mark.parametrize(
    ("trouble", "raised", "told", "avoided"),
    [
        (Disconnected("connection lost"), Retryable, "fake://host:1: connection lost", True),
        (TimeoutError(), Retryable, "fake://host:1: no answer in time", True),
        (UntrustedServer("its certificate: expired"), CloudRefused, "not trusted: its certificate: expired", False),
    ],
)
def test_the_transports_errors_become_ours(trouble: Exception, raised: Any, told: str, avoided: bool) -> None:
    calls: list[Callable[[Replica], Awaitable[Any]]] = [
        lambda asked: asked.ensure_ready(),
        lambda asked: asked.post("/path", {}, "s", 1.0),
    ]
    for call in calls:
        asked = replica(trouble, trouble=trouble)
        with pytest.raises(raised, match=told) as caught:
            asyncio.run(call(asked))  # type: ignore[arg-type]
        assert caught.value.__cause__ is trouble
        assert asked.is_avoided == avoided


def test_a_replica_that_failed_at_a_request_is_probed_again() -> None:
    asked = replica(trouble=Disconnected("gone"))
    asyncio.run(asked.ensure_ready())
    with pytest.raises(Retryable):
        asyncio.run(asked.post("/path", {}, "s", 1.0))
    asyncio.run(asked.ensure_ready())
    assert probes(asked) == 2
