"""How things end that were begun over a network: nothing hangs, nothing lives on, and errors have a type."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.link_thread import LinkThread
from outrider import CloudError, CloudLost, Result, SpeculativeDecoder, connect, local
from outrider.edge import model_pair
from outrider.netem.conditions import Conditions
from tests.support.chaos_cases import check_counters, comparable
from tests.support.forked_clouds import Cloud, CloudForker
from tests.support.locked_engine import LockedEngine
from tests.support.processes import HANG_S, wait_until

pytestmark = pytest.mark.network

TEXT = "a calm voice"
SETTINGS: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}


@pytest.fixture
def far(cloud: Cloud) -> Iterator[LinkThread]:
    with LinkThread("127.0.0.1", cloud.port) as link:
        yield link


def address(link: LinkThread) -> str:
    return f"grpc://127.0.0.1:{link.port}"


class Fails(LockedEngine):
    """A drafter whose engine gives up after so many forwards."""

    left = 10**9

    def forward(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the edge's engine failed")
        return super().forward(*args)


def test_a_drafter_that_fails_while_a_verdict_is_in_flight(cloud: Cloud, far: LinkThread, edge: LockedEngine) -> None:
    """The session is closed before its answer: it must not be opened again for a request that nobody waits for."""
    far.conditions = Conditions(rtt=0.2)
    drafter = Fails(edge._engine)
    verifier: Any = connect(address(far))
    decoder = SpeculativeDecoder(drafter, verifier, driver="pipelined")
    drafter.left = 20
    with pytest.raises(RuntimeError, match="engine failed"):
        decoder.generate(TEXT, **SETTINGS)
    time.sleep(1.5)  # gauges are set every second; a session that was opened again would stay for longer
    assert cloud.metric("outrider_sessions_opened_total") <= 1
    far.conditions = Conditions()
    drafter.left = 10**9
    assert decoder.generate(TEXT, **SETTINGS).guarantee == "exact"
    verifier.disconnect()


@pytest.mark.parametrize("driver", ["sequential", "pipelined"])
@pytest.mark.parametrize("on_loss", ["fail", "wait"])
def test_a_verifier_that_is_disconnected_under_a_generation(
    far: LinkThread, edge: LockedEngine, on_loss: Any, driver: Any
) -> None:
    verifier: Any = connect(address(far))
    decoder = SpeculativeDecoder(edge, verifier, driver=driver, on_cloud_loss=on_loss)
    far.stall(3600)
    ends: list[BaseException] = []

    def generate() -> None:
        try:
            decoder.generate(TEXT, **SETTINGS)
        except BaseException as error:  # noqa: BLE001 - looked at below
            ends.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    wait_until(lambda: far.connections)  # it waits for an answer now, which the stall keeps back
    verifier.disconnect()
    thread.join(HANG_S)
    assert not thread.is_alive(), "it waits for an answer that nobody can bring any more"
    assert isinstance(ends[0], CloudError), repr(ends[0])
    assert "disconnected" in str(ends[0])


def test_a_verifier_that_is_disconnected_before(far: LinkThread, edge: LockedEngine) -> None:
    verifier: Any = connect(address(far))
    decoder = SpeculativeDecoder(edge, verifier, on_cloud_loss="wait")
    verifier.disconnect()
    verifier.disconnect()
    with pytest.raises(CloudError, match="disconnected"):
        decoder.generate(TEXT, **SETTINGS)


def test_patience_ends_though_the_cloud_asks_for_more(nursery: CloudForker, edge: LockedEngine) -> None:
    """One request in a hundred seconds is all that this service allows."""
    cloud = nursery.cloud(limits={"max_rate": 0.01, "burst": 2})
    verifier: Any = connect(cloud.address, patience=1.0)
    decoder = SpeculativeDecoder(edge, verifier)
    started = time.monotonic()
    with pytest.raises(CloudLost, match="requests per second"):
        decoder.generate(TEXT, **SETTINGS)
    assert time.monotonic() - started < 60, "the cloud asks for 100 s"
    verifier.disconnect()
    cloud.close()


# A cloud that is away when a decoder is made --------------------------------------------------------------------------


def test_edge_only_begins_without_a_cloud_and_takes_it_when_it_comes(
    cloud: Cloud, edge: LockedEngine, target: LockedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pair, "BRIEF_OUTAGE_S", 10 * HANG_S)  # the next generation asks for the cloud again
    cloud.kill()
    verifier: Any = connect(cloud.address, deadline=0.5, patience=0.5)
    decoder = SpeculativeDecoder(edge, verifier, on_cloud_loss="edge-only")
    alone = decoder.generate(TEXT, **SETTINGS)
    check_counters(alone)
    assert (alone.guarantee, alone.stats.cloud_lost) == ("edge-only", True)
    assert alone.token_ids == SpeculativeDecoder(edge).generate(TEXT, **SETTINGS).token_ids
    assert "cloud was lost" in " ".join(alone.warnings)
    cloud.start()
    together: Result = decoder.generate(TEXT, **SETTINGS)
    assert comparable(together) == comparable(SpeculativeDecoder(edge, local(target)).generate(TEXT, **SETTINGS))
    assert together.guarantee == "exact"
    verifier.disconnect()


def test_waiting_begins_without_a_cloud(cloud: Cloud, edge: LockedEngine, target: LockedEngine) -> None:
    cloud.kill()
    verifier: Any = connect(cloud.address, deadline=0.5, patience=0.5)
    threading.Timer(1.5, cloud.start).start()
    result = SpeculativeDecoder(edge, verifier, on_cloud_loss="wait").generate(TEXT, **SETTINGS)
    assert comparable(result) == comparable(SpeculativeDecoder(edge, local(target)).generate(TEXT, **SETTINGS))
    verifier.disconnect()


def test_an_unreachable_cloud_fails_at_once(cloud: Cloud, edge: LockedEngine) -> None:
    cloud.kill()
    verifier: Any = connect(cloud.address, deadline=0.5, patience=0.5)
    with pytest.raises(CloudLost):
        SpeculativeDecoder(edge, verifier, on_cloud_loss="fail")
    verifier.disconnect()
