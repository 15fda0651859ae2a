"""Twenty thousand frames that no edge would send. The service refuses them by name, and a bystander notices nothing.

A failure names the stream; `frames(SEED, stream, …)` makes the same frames again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from fakes import ScriptedAudioEncoder, ScriptedEngine
from outrider.cloud.batcher import Batcher
from outrider.cloud.limits import Limits
from outrider.cloud.metrics import Metrics
from outrider.cloud.service import Service
from outrider.protocol import schema
from outrider.serving.tokens import Tokens
from tests.cloud.fuzzing import ROWS, V, frames, said
from tests.cloud.raw import CLOSE, RawStream, opening, verifying
from tests.cloud.serving import serving
from tests.processes import until

SEED = 20_261_128
DIRECT, SOCKET = 19_000, 1_000  # frames that the service has read
SLOTS, MAX_LENGTH = 4, 64
MOST = 24  # sessions that the fuzz may have
LIMITS = Limits(max_sessions=64, max_sessions_per_identity=MOST, max_media_bytes=20_000, max_media_total=100_000)
NAMES = {"fuzz": "f" * 20, "bystander": "b" * 20}
TOKENS = Tokens({name: hashlib.sha256(token.encode()).digest() for name, token in NAMES.items()})
PATIENCE = 120.0  # s; only a hang takes that long


# What must hold -------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of the frames."""

    read: int = 0
    answers: dict[str, int] = field(default_factory=dict)

    def check(self, data: bytes, where: str) -> None:
        answer = schema.Answer.FromString(data)
        kind = str(answer.WhichOneof("frame"))
        if kind == "error":
            kind = schema.Error.Code.Name(answer.error.code)
            assert kind not in ("INTERNAL", "UNSPECIFIED"), f"{where}: {answer}"
            assert len(answer.error.message) < 400, f"{where}: {answer}"
            assert not any(word in answer.error.message for word in ("Traceback", ".py", "Error(")), (
                f"{where}: {answer}"
            )
        self.answers[kind] = self.answers.get(kind, 0) + 1

    def check_breadth(self) -> None:
        """The fuzz reached what it is meant to reach."""
        expected = {"opened", "verdict", "INVALID", "SETTINGS", "PROMPT", "CONDITIONING", "UNKNOWN_SESSION"}
        assert expected | {"BASE_LENGTH", "PROTOCOL"} <= set(self.answers), self.answers


class Bystander:
    """A session that goes on while all this happens; every verdict is the right one."""

    def __init__(self) -> None:
        self.ids, self.round, self.verdicts = [7, 7], 0, 0
        self.fresh = True

    def next(self) -> schema.Request:
        """The next request, with two good drafts and a bad one."""
        self.round += 1
        self.block = said(self.ids, 3)
        return verifying(self.round, len(self.ids), (*self.block[:2], (self.block[2] + 1) % V))

    def check(self, data: bytes) -> None:
        verdict = schema.Answer.FromString(data).verdict
        assert (verdict.round, verdict.accepted, verdict.next_token) == (self.round, 2, self.block[2])
        self.ids += self.block
        self.verdicts += 1

    @property
    def full(self) -> bool:
        return len(self.ids) > MAX_LENGTH - 4

    def restart(self) -> None:
        self.ids, self.round = [7, 7], 0


@pytest.fixture
def quiet() -> Iterator[None]:
    """No warning, no error, no traceback in any log."""
    loud: list[str] = []

    class Listen(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            loud.append(f"{entry.name}: {entry.getMessage()} {entry.exc_info}")

    handler = Listen(logging.WARNING)
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)
    assert not loud, loud[:3]


def engine() -> ScriptedEngine:
    made = ScriptedEngine(ROWS, V)
    made.audio = ScriptedAudioEncoder()
    return made


class Context:
    """What the service asks of grpc.aio's context."""

    def __init__(self, name: str) -> None:
        self._metadata = (("authorization", f"Bearer {NAMES[name]}"),)

    def auth_context(self) -> dict[str, Any]:
        return {}

    def invocation_metadata(self) -> Any:
        return self._metadata


# Without a socket -----------------------------------------------------------------------------------------------


async def fed(data: list[bytes], tally: Tally) -> AsyncIterator[bytes]:
    for frame in data:
        tally.read += 1
        yield frame


async def one_stream(service: Service, number: int, tally: Tally, seed: int = SEED) -> None:
    live = {entry.id: list(entry.session.ids) for entry in service.sessions if entry.identity == "fuzz"}
    data = frames(seed, number, live)
    where = f"stream {number} of seed {seed}: {[frame.hex() for frame in data]}"
    answers = service.session(fed(data, tally), Context("fuzz"))  # type: ignore[arg-type]
    seen = 0
    try:
        async with asyncio.timeout(PATIENCE):
            async for answer in answers:
                tally.check(answer, where)
                seen += 1
                if seen > 12:  # a client that has heard enough goes
                    break
    except TimeoutError:
        raise AssertionError(f"no answer to {where}") from None
    await answers.aclose()  # type: ignore[attr-defined]
    own = [entry for entry in service.sessions if entry.identity == "fuzz"]
    assert len(own) <= MOST, where
    assert service.streams == 1, where  # the bystander's
    for entry in own if len(own) == MOST and number % 20 == 0 else []:
        service.sessions.drop(entry)


async def stand_by(service: Service, over: asyncio.Event, bystander: Bystander) -> None:
    while not over.is_set():
        bystander.restart()

        async def ask() -> AsyncIterator[bytes]:
            yield opening(bystander.ids, V).SerializeToString()
            while not bystander.full and not over.is_set():
                await asyncio.sleep(0.002)  # scripted: the bystander's time between two requests
                yield bystander.next().SerializeToString()
            yield CLOSE.SerializeToString()

        answers = service.session(ask(), Context("bystander"))  # type: ignore[arg-type]
        assert schema.Answer.FromString(await anext(answers)).opened.session  # type: ignore[arg-type]
        async for answer in answers:
            bystander.check(answer)


async def fuzz_directly(
    tally: Tally, bystander: Bystander, seed: int = SEED, enough: Callable[[Tally], bool] = lambda t: t.read >= DIRECT
) -> None:
    model, metrics = engine(), Metrics()
    slots = model.reserve(SLOTS * MAX_LENGTH, MAX_LENGTH)
    batcher = Batcher(model, slots, metrics)
    service = Service(model, batcher, limits=LIMITS, metrics=metrics, tokens=TOKENS, max_length=MAX_LENGTH)  # type: ignore[arg-type]
    batcher.start()
    over = asyncio.Event()
    standing = asyncio.create_task(stand_by(service, over, bystander))
    await until(lambda: service.streams == 1)  # the bystander's
    try:
        number = 0
        while not enough(tally):
            await one_stream(service, number, tally, seed)
            number += 1
            if standing.done():
                break
        over.set()
        await standing
        for entry in service.sessions:
            service.sessions.drop(entry)
        await until(lambda: not model.open_slots)
        assert service._pending_media == 0
        assert not batcher.slot_pool._evicted_ids
        assert not len(service.sessions)
    finally:
        await asyncio.to_thread(batcher.stop)


@pytest.mark.network
@pytest.mark.usefixtures("quiet")
def test_frames_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.cloud.sessions.secrets.token_bytes", random.Random(SEED).randbytes)
    tally, bystander = Tally(), Bystander()
    asyncio.run(fuzz_directly(tally, bystander))
    assert bystander.verdicts > 100
    tally.check_breadth()


# Over a socket --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet")
def test_frames_of_all_kinds_over_a_socket() -> None:
    tally, bystander = Tally(), Bystander()
    options = {"limits": LIMITS, "tokens": TOKENS, "slots": SLOTS, "max_length": MAX_LENGTH}
    with serving(engine(), **options) as served, grpc.insecure_channel(served.address) as channel:
        with ThreadPoolExecutor(1) as pool:
            over: list[bool] = []
            standing = pool.submit(stand_by_socket, channel, over, bystander)
            number = 10**6
            while tally.read < SOCKET and not standing.done():
                one_socket_stream(channel, number, tally)
                number += 1
            over.append(True)
            standing.result(PATIENCE)
        assert bystander.verdicts > 20

        async def drop() -> int:
            for entry in served.service.sessions:
                served.service.sessions.drop(entry)
            return served.service.streams

        while served.run(drop()) or served.service.engine.open_slots:  # type: ignore[attr-defined]
            pass


def one_socket_stream(channel: grpc.Channel, number: int, tally: Tally) -> None:
    data = frames(SEED, number, {})
    tally.read += len(data)
    where = f"stream {number} of seed {SEED}: {[frame.hex() for frame in data]}"
    with RawStream(channel, [("authorization", f"Bearer {NAMES['fuzz']}")]) as stream:
        stream.send(*data)
        stream.finish()
        for seen, answer in enumerate(stream.call):
            tally.check(answer, where)
            if seen > 12:
                return
        assert stream.call.code() is grpc.StatusCode.OK, where


def stand_by_socket(channel: grpc.Channel, over: list[bool], bystander: Bystander) -> None:
    while not over:
        bystander.restart()
        with RawStream(channel, [("authorization", f"Bearer {NAMES['bystander']}")]) as stream:
            stream.opened(opening(bystander.ids, V))
            while not bystander.full and not over:
                stream.send(bystander.next())
                bystander.check(next(stream.call))
            stream.send(CLOSE)
            stream.finish()
            assert next(stream.call, None) is None
