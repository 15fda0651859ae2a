"""Damaged frames against a service, beside a session whose verdicts must stay right."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.cloud.batcher import Batcher, call_each
from outrider.cloud.limits import Limits
from outrider.cloud.metrics import Metrics
from outrider.cloud.service import Service
from outrider.protocol import schema
from outrider.serving.tokens import Tokens
from tests.support.fakes import ScriptedAudioEncoder, ScriptedEngine
from tests.support.frame_fuzzer import ROWS, V, frames, target_tokens
from tests.support.processes import HANG_S, until
from tests.support.raw_stream import CLOSE, opening, verifying

SEED = 20_261_128
DIRECT, SOCKET = 19_000, 1_000  # frames that the service has read
SLOTS, MAX_LENGTH = 4, 64
MOST = 24  # sessions that the fuzz may have
LIMITS = Limits(max_sessions=64, max_sessions_per_identity=MOST, max_media_bytes=20_000, max_media_total=100_000)
NAMES = {"fuzz": "f" * 20, "bystander": "b" * 20}
TOKENS = Tokens({name: hashlib.sha256(token.encode()).digest() for name, token in NAMES.items()})


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
        self.block = target_tokens(self.ids, 3)
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
        async with asyncio.timeout(HANG_S):
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
    loop = asyncio.get_running_loop()
    batcher.start(lambda outcomes: loop.call_soon_threadsafe(call_each, outcomes))
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
