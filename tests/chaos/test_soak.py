"""Many sessions on one real server with few cache slots: 64 at once, then 2,000 in turn. `make test-soak`.

The edge's engine is the bundled one behind a lock (see guarded.py), so that blocks, signals and recordings are real.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import psutil
import pytest

from outrider import Result, connect
from outrider.cli.subprocess_cloud import cloud_process
from tests.support.chaos_cases import Case, check_counters, comparable, draw_case, undisturbed_result
from tests.support.locked_engine import LockedEngine
from tests.support.ports import ReservedPort
from tests.support.processes import read_metric, wait_until

pytestmark = pytest.mark.soak

SLOTS, CONTEXT = 20, 320
AT_ONCE, IN_TURN, WARM_UP, THREADS = 64, 2000, 200, 8
RECONNECT = 25  # sessions of a thread after which it makes a new connection
SHORT = 5  # tokens at most of the sessions in turn
DIFFERENT = 60  # cases that the sessions in turn repeat
GROWTH, GROWTH_BYTES = 0.05, 20 * 2**20
POOL = 8  # threads that a server adds for openings which come at once; bounded by Python's executor
PATIENT = {"deadline": 300.0, "patience": 300.0}  # a verdict among 64 on two busy cores takes its time


class Service:
    """The real command, its process and its metrics."""

    def __init__(self, address: str, metrics_port: int) -> None:
        self.address, self._port = f"grpc://{address}", metrics_port
        (self.process,) = psutil.Process().children()

    def metric(self, name: str) -> float:
        return read_metric(f"http://127.0.0.1:{self._port}", name)

    def settle(self) -> None:
        """Until nobody is served any more; goodbyes are not waited for, and gauges are set every second."""
        wait_until(lambda: not self.metric("outrider_sessions") + self.metric("outrider_slots_used"))


@pytest.fixture(scope="module")
def service(target: LockedEngine) -> Iterator[Service]:
    budget = SLOTS * CONTEXT * target.position_bytes
    options = ["--kv-budget", str(budget), "--max-context", str(CONTEXT)]
    options += ["--idle", "10"]  # s until sessions that were kept for a next turn end
    with ReservedPort() as port, cloud_process("demo", *options, "--metrics", f"127.0.0.1:{port}") as address:
        yield Service(address, port)


def say(text: str) -> None:
    print(f"\nsoak: {text}", file=sys.stderr, flush=True)  # noqa: T201


# At once --------------------------------------------------------------------------------------------------------------


def test_64_sessions_at_once_are_each_as_if_alone(service: Service, edge: LockedEngine, target: LockedEngine) -> None:
    cases = list(map(draw_case, range(10**6, 10**6 + AT_ONCE)))
    begun = time.monotonic()
    expected = [undisturbed_result(case.seed, edge, target) for case in cases]
    alone, begun = time.monotonic() - begun, time.monotonic()
    together, over = threading.Barrier(AT_ONCE), threading.Event()
    peak = [0.0]

    def generate(case: Case) -> Result:
        verifier: Any = connect(service.address, **PATIENT)
        try:
            decoder = case.decoder(edge, verifier, driver=case.driver)
            together.wait(120)
            return decoder.generate(case.prompt, **case.settings)
        finally:
            verifier.disconnect()

    def observe() -> None:
        while not over.wait(0.5):
            peak[0] = max(peak[0], service.metric("outrider_sessions"))

    observer = threading.Thread(target=observe)
    observer.start()
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(generate, cases))
    finally:
        over.set()
        observer.join()
    evictions, rebuilt = (service.metric(f"outrider_{name}_total") for name in ("evictions", "sessions_rebuilt"))
    verdicts = service.metric("outrider_verdicts_total")
    say(
        f"{AT_ONCE} at once in {time.monotonic() - begun:.0f} s ({alone:.0f} s alone), at most {peak[0]:g} seen open, "
        f"{evictions:g} evictions, {rebuilt:g} caches rebuilt, {verdicts:g} verdicts"
    )
    for case, result, wanted in zip(cases, results, expected, strict=True):
        assert comparable(result) == comparable(wanted), f"{case}"
        check_counters(result)
    assert evictions > 0, "slots were short"
    assert rebuilt > 0
    assert peak[0] > SLOTS
    assert edge.open_slots == 0
    service.settle()


# In turn --------------------------------------------------------------------------------------------------------------


def test_2000_sessions_leave_nothing_behind(service: Service, edge: LockedEngine, target: LockedEngine) -> None:
    seeds = [2 * 10**6 + n for n in range(DIFFERENT)]
    expected = {seed: undisturbed_result(seed, edge, target, SHORT) for seed in seeds}
    numbers = count()
    connections: dict[int, Any] = {}

    def generate(_: int) -> None:
        number, me = next(numbers), threading.get_ident()
        if number % (RECONNECT * THREADS) < THREADS and me in connections:
            connections.pop(me).disconnect()
        if me not in connections:
            connections[me] = connect(service.address, **PATIENT)
        case = draw_case(seeds[number % DIFFERENT], longest=SHORT)
        decoder = case.decoder(edge, connections[me], driver=case.driver)
        result = decoder.generate(case.prompt, **case.settings)
        assert comparable(result) == comparable(expected[case.seed]), f"{case}"

    def run(sessions: int) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(generate, range(sessions)))
        for verifier in connections.values():
            verifier.disconnect()
        connections.clear()
        service.settle()

    run(WARM_UP)
    sides = {"server": service.process, "edge": psutil.Process()}
    before = {name: measured(process) for name, process in sides.items()}
    begun = time.monotonic()
    run(IN_TURN - WARM_UP)
    say(f"{IN_TURN - WARM_UP} in turn in {time.monotonic() - begun:.0f} s")
    for name, process in sides.items():
        check_growth(name, before[name], measured(process))
    assert edge.open_slots == 0


def measured(process: psutil.Process) -> dict[str, int]:
    """What a process holds; of this one, without what is free but was not given back by malloc."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)
    return {"rss": process.memory_info().rss, "fds": process.num_fds(), "threads": process.num_threads()}


def check_growth(name: str, before: dict[str, int], after: dict[str, int]) -> None:
    growth = after["rss"] - before["rss"]
    say(f"{name} {before['rss'] / 2**20:.1f} → {after['rss'] / 2**20:.1f} MiB, {before} → {after}")
    assert growth < GROWTH_BYTES
    assert growth < GROWTH * before["rss"]
    assert after["fds"] <= before["fds"]
    assert after["threads"] <= before["threads"] + (POOL if name == "server" else 0)
