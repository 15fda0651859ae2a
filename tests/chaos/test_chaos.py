"""200 generations in a hostile world, or as many as CHAOS_GENERATIONS says. -k "seed-17-" repeats one.

`make test-chaos` runs 40 of them, `make test-chaos-long` all.

While they run, the server is killed with SIGKILL, or ended, and started again on its port; the link is cut, blocked,
stalled and slowed down, at random moments that the seed fixes. No generation may hang, lose a token or get a wrong one:
it comes to the undisturbed output, or raises CloudLost where it was told to fail, or says that the edge went on alone,
and did.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.link_thread import LinkThread
from outrider import CloudLost, Result, connect
from outrider.netem.conditions import Conditions
from tests.support.chaos_cases import (
    Case,
    check_counters,
    check_edge_continuation,
    comparable,
    draw_case,
    undisturbed_result,
)
from tests.support.fakes import exhaust
from tests.support.forked_clouds import Cloud, CloudForker
from tests.support.locked_engine import LockedEngine
from tests.support.ports import ReservedPort

GENERATIONS = int(os.environ.get("CHAOS_GENERATIONS", "200"))
HANGS = 90.0  # s; what no generation may take
DEADLINE, PATIENCE = 2.0, 3.0
KINDS = ("kill", "kill", "end", "cut", "cut", "block", "stall", "delay")

pytestmark = pytest.mark.chaos
seen: Counter[str] = Counter()


@dataclass(frozen=True)
class Trouble:
    """at: seconds after the generation began, or after the trouble before. length: seconds that it lasts."""

    kind: str
    at: float
    length: float


def troubles(seed: int, random: Random) -> list[Trouble]:
    """Most are over soon; some outlast the client's patience. The first kinds go round, so that few seeds have all."""
    found: list[Trouble] = []
    for _ in range(random.randint(1, 3)):
        kind = random.choice(KINDS) if found else sorted(set(KINDS))[seed % len(set(KINDS))]
        length = random.uniform(3.5, 6) if random.random() < 0.3 else random.uniform(0, 0.8)
        found.append(Trouble(kind, random.uniform(0, 0.3), length))
    return found


class Tally:
    """What came up, over all of xdist's workers: each adds its own to a file; the last to finish sees all."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "chaos.jsonl"

    def close(self) -> None:
        """Raise AssertionError where the tests were not of what they are meant to be."""
        with self._file.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(seen) + "\n")
            file.seek(0)
            total: Counter[str] = sum((Counter(json.loads(line)) for line in file), Counter())
        print(f"\ntroubles and ends: {dict(total)}", file=sys.stderr)  # noqa: T201
        if total["generations"] < GENERATIONS:
            return
        expected = (*KINDS, "alone", "CloudLost") if GENERATIONS >= 200 else KINDS
        assert min(total[name] for name in expected) >= GENERATIONS // 40, dict(total)


class World:
    """A cloud behind a link, and what goes wrong with them."""

    def __init__(self, cloud: Cloud, link: LinkThread) -> None:
        self.cloud, self.link = cloud, link
        self.verifier: Any = None

    def connect(self, anew: bool) -> Any:
        """A verifier; the one from before, with whatever state its connection is in, unless `anew`."""
        if self.verifier is None or anew:
            self.close()
            self.verifier = connect(f"grpc://127.0.0.1:{self.link.port}", deadline=DEADLINE, patience=PATIENCE)
            self.verifier.describe()
        return self.verifier

    def close(self) -> None:
        if self.verifier is not None:
            self.verifier.disconnect()

    def suffer(self, coming: list[Trouble], over: threading.Event) -> None:
        """Everything in turn, until the generation is over; then all is well again."""
        for trouble in coming:
            if over.wait(trouble.at):
                break
            seen[trouble.kind] += 1
            getattr(self, "_" + trouble.kind)(trouble.length, over)
        self.link.conditions = Conditions()
        self.link.block(False)

    def _kill(self, length: float, over: threading.Event) -> None:
        self.cloud.kill()
        over.wait(length)
        self.cloud.start()

    def _end(self, length: float, over: threading.Event) -> None:
        self.cloud.stop()
        over.wait(length)
        self.cloud.start()

    def _cut(self, length: float, over: threading.Event) -> None:
        self.link.cut()

    def _block(self, length: float, over: threading.Event) -> None:
        self.link.block(True)
        over.wait(length)
        self.link.block(False)

    def _stall(self, length: float, over: threading.Event) -> None:
        self.link.stall(length)

    def _delay(self, length: float, over: threading.Event) -> None:
        self.link.conditions = Conditions(rtt=min(0.4, length), jitter=min(0.2, length / 2))


@pytest.fixture(scope="module")
def world(nursery: CloudForker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    base = tmp_path_factory.getbasetemp()
    tally = Tally(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
    cloud = nursery.cloud(slots=4)
    with LinkThread("127.0.0.1", cloud.port) as link:
        world = World(cloud, link)
        yield world
        world.close()
    cloud.close()
    tally.close()


@pytest.fixture(autouse=True)
def no_connection_is_left(world: World) -> Iterator[None]:
    """The world's verifier goes on from test to test; any other is closed by its own."""
    yield
    left = {thread for thread in threading.enumerate() if thread.name == "outrider-connection"}
    own = set() if world.verifier is None else {world.verifier.connection._thread}
    assert left <= own, "connections that nobody closed"


def outcome(case: Case, edge: LockedEngine, verifier: Any, on_loss: Any) -> Result | CloudLost:
    decoder = case.decoder(edge, verifier, driver=case.driver, on_cloud_loss=on_loss)
    try:
        return decoder.generate(case.prompt, **case.settings)
    except CloudLost as lost:
        return lost


def watch(work: Any, seed: int) -> Any:
    """The result of `work`, which may not take forever."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again by who watches
            found.append(error)

    thread = threading.Thread(target=run, daemon=True, name=f"generation-{seed}")
    thread.start()
    thread.join(HANGS)
    if thread.is_alive():
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail(f"seed {seed}: no end after {HANGS:g} s")
    if isinstance(found[0], BaseException) and not isinstance(found[0], CloudLost):
        raise found[0]
    return found[0]


@pytest.mark.parametrize("seed", range(GENERATIONS), ids=lambda seed: f"seed-{seed}-")
def test_output_is_the_undisturbed_one_under_random_faults(
    seed: int, world: World, edge: LockedEngine, target: LockedEngine
) -> None:
    case, random = draw_case(seed), Random(f"troubles of {seed}")
    on_loss = random.choice(("wait", "fail", "edge-only") if case.drafts else ("wait", "fail"))
    undisturbed = undisturbed_result(seed, edge, target)
    verifier = world.connect(anew=random.random() < 0.3)
    if random.random() < 0.7:
        world.link.conditions = Conditions(rtt=random.uniform(0.02, 0.08))
    over = threading.Event()
    saboteur = threading.Thread(target=world.suffer, args=(troubles(seed, random), over), daemon=True)
    saboteur.start()
    try:
        result = watch(lambda: outcome(case, edge, verifier, on_loss), seed)
    finally:
        over.set()
        saboteur.join()
    seen["generations"] += 1
    check(case, on_loss, result, undisturbed, edge)
    assert edge.open_slots == 0
    assert not verifier._sessions, "every session was let go"


def check(case: Case, on_loss: str, result: Any, undisturbed: Result, edge: LockedEngine) -> None:
    if isinstance(result, CloudLost):
        assert on_loss == "fail"
        seen["CloudLost"] += 1
        return
    check_counters(result)
    if result.stats.cloud_lost:
        assert on_loss == "edge-only"
        seen["alone"] += 1
        if case.options.get("accept") != "residual":  # its drafts are drawn otherwise
            check_edge_continuation(case, result, undisturbed, edge)
        return
    assert comparable(result) == comparable(undisturbed), f"{case}"
    seen["whole"] += 1


def test_the_real_command_killed_and_started_again(edge: LockedEngine, target: LockedEngine) -> None:
    """`outrider cloud demo`, twice on one port: a restart takes seconds, and waiting is worth it."""
    case = next(case for case in map(draw_case, range(10**6)) if case.heard and case.settings["max_new_tokens"] > 30)
    reserved = ReservedPort()
    port = reserved.number
    first = command(port)
    verifier: Any = connect(f"grpc://127.0.0.1:{port}", deadline=DEADLINE, patience=PATIENCE)
    decoder = case.decoder(edge, verifier, driver=case.driver, on_cloud_loss="wait")
    processes = [first]
    stream = decoder.stream(case.prompt, **case.settings)
    for event in stream:
        if event.kind != "provisional":
            break
    first.kill()
    first.wait()
    restart = threading.Thread(target=lambda: processes.append(command(port)))
    restart.start()
    try:
        result = exhaust(stream)
    finally:
        restart.join()
        verifier.disconnect()
        for process in processes:
            process.kill()
            process.communicate()
        reserved.release()
    assert comparable(result) == comparable(undisturbed_result(case.seed, edge, target))


def command(port: int) -> Any:
    """The process, once it listens."""
    words = [sys.executable, "-m", "outrider", "cloud", "demo", "--listen", f"127.0.0.1:{port}", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process
