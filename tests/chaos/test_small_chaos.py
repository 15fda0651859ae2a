"""What may happen to a generation on the way, in small: each at its place, and the output is the undisturbed one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.link_thread import LinkThread
from outrider import Audio, CloudLost, Result, SpeculativeDecoder, connect, local
from outrider.engines.load import BUNDLED
from tests.support.chaos_cases import CLIPS, Case, check_counters, check_edge_continuation, comparable
from tests.support.forked_clouds import Cloud
from tests.support.locked_engine import LockedEngine
from tests.support.wiretap import Wiretap

pytestmark = pytest.mark.network

MAGIC = b"fLaC"
DRIVERS = ("sequential", "pipelined")
TEXT = "说话很慢, a calm voice"
CLIP = Audio(BUNDLED / "clips" / CLIPS[7]["file"], lang="en", task="concise")
PROMPTS: dict[str, Any] = {"text": TEXT, "audio": CLIP}
SETTINGS: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0.7, "seed": 5}
POINTS = 9  # places at which a connection is cut, each way

prompts = pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
drivers = pytest.mark.parametrize("driver", DRIVERS)


@contextmanager
def connected(address: str, **options: Any) -> Iterator[Any]:
    verifier: Any = connect(address, **{"deadline": 2.0, "patience": 3.0, **options})
    try:
        yield verifier
    finally:
        verifier.disconnect()


def undisturbed(edge: LockedEngine, target: LockedEngine, prompt: Any, **options: Any) -> Result:
    return SpeculativeDecoder(edge, local(target), **options).generate(prompt, **SETTINGS)


def watched(decoder: SpeculativeDecoder, prompt: Any, at: int, strike: Callable[[], None]) -> Result:
    """Generate, and strike once when the `at`-th token is confirmed."""
    stream = decoder.stream(prompt, **SETTINGS)
    confirmed = 0
    while True:
        try:
            event = next(stream)
        except StopIteration as end:
            result: Result = end.value
            check_counters(result)
            return result
        confirmed += event.kind != "provisional"
        if confirmed == at:
            strike()
            at = -1


# The server dies ------------------------------------------------------------------------------------------------------


@drivers
@prompts
@pytest.mark.parametrize("at", [1, 9])
def test_a_server_that_is_killed_and_comes_back(
    cloud: Cloud, edge: LockedEngine, target: LockedEngine, prompt: Any, driver: Any, at: int
) -> None:
    with Wiretap(cloud.port) as tap, connected(tap.address) as verifier:
        decoder = SpeculativeDecoder(edge, verifier, driver=driver, on_cloud_loss="wait")
        result = watched(decoder, prompt, at, cloud.restart)
        assert cloud.starts == 2
        assert comparable(result) == comparable(undisturbed(edge, target, prompt))
        assert result.guarantee == "exact"
        assert tap.connections == 2 or at > 1, "a pipelined request may have all the rest in it"
        assert tap.up.count(MAGIC) == (tap.connections if prompt is CLIP else 0), "the recording, for each server once"


@drivers
def test_a_server_that_is_away_for_longer_than_patience(
    cloud: Cloud, edge: LockedEngine, target: LockedEngine, driver: Any
) -> None:
    def strike() -> None:
        cloud.kill()
        threading.Timer(1.5, cloud.start).start()

    with connected(cloud.address, deadline=0.5, patience=0.5) as verifier:
        decoder = SpeculativeDecoder(edge, verifier, driver=driver, on_cloud_loss="wait")
        assert comparable(watched(decoder, CLIP, 4, strike)) == comparable(undisturbed(edge, target, CLIP))


@drivers
@prompts
def test_a_server_that_does_not_come_back(
    cloud: Cloud, edge: LockedEngine, target: LockedEngine, prompt: Any, driver: Any
) -> None:
    with connected(cloud.address, deadline=0.4, patience=0.4) as verifier:
        alone = SpeculativeDecoder(edge, verifier, driver=driver, on_cloud_loss="edge-only")
        failing = SpeculativeDecoder(edge, verifier, driver=driver, on_cloud_loss="fail")
        result = watched(alone, prompt, 1, cloud.kill)
        case = Case(0, prompt, driver, settings=SETTINGS)
        check_edge_continuation(case, result, undisturbed(edge, target, prompt), edge)
        assert result.stats.cloud_tokens >= 1
        started = time.monotonic()
        with pytest.raises(CloudLost):
            failing.generate(prompt, **SETTINGS)
        assert time.monotonic() - started < 60, "only a hang takes that long"


def test_cloud_only_over_a_killed_server(cloud: Cloud, target: LockedEngine) -> None:
    prompt = [30, 40, 50]
    expected = SpeculativeDecoder(None, local(target)).generate(prompt, **SETTINGS)
    with connected(cloud.address) as verifier:
        decoder = SpeculativeDecoder(None, verifier, on_cloud_loss="wait")
        result = watched(decoder, prompt, 7, cloud.restart)
        assert (result.token_ids, result.guarantee) == (expected.token_ids, "exact")


# The connection is cut ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "driver"), [(TEXT, "sequential"), (CLIP, "pipelined")], ids=DRIVERS)
def test_a_connection_that_is_cut_at_any_byte(
    cloud: Cloud, edge: LockedEngine, target: LockedEngine, prompt: Any, driver: Any
) -> None:
    """Between frames and within them, each way."""
    expected = comparable(undisturbed(edge, target, prompt))
    with Wiretap(cloud.port) as tap, connected(tap.address) as verifier:
        decoder = SpeculativeDecoder(edge, verifier, driver=driver, on_cloud_loss="wait")
        before = len(tap.up), len(tap.down)
        assert comparable(decoder.generate(prompt, **SETTINGS)) == expected
        sizes = {"cut_up": len(tap.up) - before[0], "cut_down": len(tap.down) - before[1]}
        for way, size in sizes.items():
            for n in range(POINTS):
                passed = len(tap.up) if way == "cut_up" else len(tap.down)
                sent, cuts = tap.up.count(MAGIC), tap.cuts
                setattr(tap, way, passed + 1 + n * size // POINTS)
                result = decoder.generate(prompt, **SETTINGS)
                setattr(tap, way, None)
                assert comparable(result) == expected, f"{way} at {n}/{POINTS}"
                check_counters(result)
                assert tap.up.count(MAGIC) - sent <= 1 + tap.cuts - cuts, f"{way} at {n}/{POINTS}"


@drivers
@prompts
def test_a_connection_that_is_cut_at_every_round(
    cloud: Cloud, edge: LockedEngine, target: LockedEngine, prompt: Any, driver: Any
) -> None:
    """The session is resumed each time: the recording crosses once."""
    with Wiretap(cloud.port) as tap, connected(tap.address) as verifier:
        decoder = SpeculativeDecoder(edge, verifier, driver=driver, on_cloud_loss="wait", k=3)
        stream = decoder.stream(prompt, **SETTINGS)
        try:
            while True:
                if next(stream).kind != "provisional":
                    tap.cut()
        except StopIteration as end:
            result: Result = end.value
        assert comparable(result) == comparable(undisturbed(edge, target, prompt, k=3))
        assert tap.connections > (3 if driver == "sequential" else 1)
        assert tap.up.count(MAGIC) == (prompt is CLIP)
        check_counters(result)


@drivers
def test_a_stalled_link_and_a_slow_one(cloud: Cloud, edge: LockedEngine, target: LockedEngine, driver: Any) -> None:
    """A stall longer than the deadline is a loss; a delay shorter than it is none."""
    expected = comparable(undisturbed(edge, target, CLIP))
    with LinkThread("127.0.0.1", cloud.port) as link, connected(f"grpc://127.0.0.1:{link.port}", deadline=1.0) as far:
        decoder = SpeculativeDecoder(edge, far, driver=driver, on_cloud_loss="wait")
        assert comparable(watched(decoder, CLIP, 1, lambda: link.stall(2.0))) == expected
        link.conditions = type(link.conditions)(rtt=0.1)
        connections = link.connections
        assert comparable(decoder.generate(CLIP, **SETTINGS)) == expected
        assert link.connections == connections, "nobody gave up"


def test_a_recording_that_takes_longer_than_the_deadline_crosses_once(
    cloud: Cloud, edge: LockedEngine, target: LockedEngine
) -> None:
    with Wiretap(cloud.port) as tap, connected(tap.address, net="bw=150kbit", deadline=1.0, patience=1.0) as verifier:
        result = SpeculativeDecoder(edge, verifier).generate(CLIP, **SETTINGS)
        assert comparable(result) == comparable(undisturbed(edge, target, CLIP))
        assert result.stats.media_bytes_up * 8 / 150_000 > 1.0, "the clip is too small to show anything"
        assert tap.up.count(MAGIC) == 1
