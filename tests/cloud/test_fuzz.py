"""Twenty thousand frames that no edge would send. The service refuses them by name, and a bystander notices nothing.

A failure names the stream; `frames(SEED, stream, …)` makes the same frames again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from fakes import HashRows, ScriptedEngine, ScriptedFront
from outrider.cloud.batcher import Batcher
from outrider.cloud.limits import Limits
from outrider.cloud.metrics import Metrics
from outrider.cloud.security import Tokens
from outrider.cloud.service import Service
from outrider.prompts.media import pack_audio, pack_features
from outrider.wire import schema
from tests.cloud.raw import CLOSE, RawStream, carrying, generating, opening, resuming, verifying
from tests.cloud.serving import serving

SEED = 20_261_128
DIRECT, SOCKET = 19_000, 1_000  # frames that the service has read
V, SLOTS, MAX_LENGTH = 32, 4, 64
ROWS = HashRows(3, V, memory=3)
MOST = 24  # sessions that the fuzz may have
LIMITS = Limits(max_sessions=64, max_sessions_per_identity=MOST, max_media_bytes=20_000, max_media_total=100_000)
NAMES = {"fuzz": "f" * 20, "bystander": "b" * 20}
TOKENS = Tokens({name: hashlib.sha256(token.encode()).digest() for name, token in NAMES.items()})
PATIENCE = 20.0

WAVE = (np.round(np.sin(np.arange(4800) / 9.0) * 9000) / 32768).astype(np.float32)
MEDIA = ((schema.AUDIO, pack_audio(WAVE)), (schema.FEATURES, pack_features(np.ones((4, 3), "f4"))))
HEARD = (5, 1, 1, 1, 6)


# Frames ---------------------------------------------------------------------------------------------------------

INTEGERS = (0, 1, 2, 3, 5, V - 1, V, 63, 64, 65, 256, 2**31 - 1, 2**31, 2**32 - 1)
DOUBLES = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-320, 1e308, math.inf, -math.inf, math.nan)
TEXTS = ("", "exact", "residual", "rank:3", "margin:0.5", "rank:" + "9" * 60, "rank:-1", "typical:nan", "词", "x" * 99)
Live = dict[bytes, list[int]]  # sessions that there are, and their tokens


def said(ids: list[int], count: int) -> list[int]:
    out = list(ids)
    for _ in range(count):
        out.append(int(ROWS(tuple(out)).argmax()))
    return out[len(ids) :]


def frames(seed: int, stream: int, live: Live) -> list[bytes]:
    """What one stream says."""
    rng = random.Random(f"{seed}:{stream}")
    script = rng.choice((talk, talk, hear, again, again, noise))(rng, live)
    made = [frame.SerializeToString() for frame in script]
    if rng.random() < 0.3:
        made.insert(rng.randrange(len(made) + 1), anything(rng).SerializeToString())
    if rng.random() < 0.2:
        rng.shuffle(made)
    if rng.random() < 0.8:
        at = rng.randrange(len(made))
        made[at] = mutated(rng, made[at], rng.choice(made))
    return made


def talk(rng: random.Random, live: Live) -> list[schema.Request]:
    """A session as it should be."""
    ids = [rng.randrange(V) for _ in range(rng.randint(1, 30))]
    accept = rng.choice(("", "", "rank:3", "typical:0.1", "residual"))
    warm = {"temperature": 1.0} if accept == "residual" or rng.random() < 0.2 else {}
    start = opening(ids, V, accept=accept, max_new_tokens=rng.choice((1, 9, 2**32 - 1)), **warm)
    return [start, *going_on(rng, ids), CLOSE][: rng.randint(1, 9)]


def going_on(rng: random.Random, ids: list[int], round_: int = 1) -> list[schema.Request]:
    made, ids = [], list(ids)
    for n in range(round_, round_ + rng.randint(0, 5)):
        new, drafts = said(ids, rng.choice((0, 0, 2))), rng.choice((0, 1, 3))
        ids += new
        block = said(ids, drafts + 1)
        made.append(verifying(n, len(ids), block[:-1], new))
        if rng.random() < 0.1:
            made[-1].verify.q.extend(schema.Shortlist(ids=[token], logp=[0.0]) for token in block[:-1])
        ids += block
    if rng.random() < 0.2:
        made.append(generating(99, len(ids)))
    return made


def hear(rng: random.Random, live: Live) -> list[schema.Request]:
    kind, data = rng.choice(MEDIA)
    if rng.random() < 0.5:
        data = mutated(rng, data, data)
    start = opening(HEARD, V, media=data, change=lambda frame: setattr(frame, "media", kind))
    return [start, *carrying(data, 2000), *going_on(rng, list(HEARD))]


def again(rng: random.Random, live: Live) -> list[schema.Request]:
    """A session that there is, or was."""
    if not live:
        return noise(rng, live)
    id_, ids = rng.choice(list(live.items()))
    kept = ids[: rng.choice((len(ids), len(ids) - 1, rng.randint(0, len(ids))))]
    return [resuming(id_, kept), *going_on(rng, kept, rng.choice((1, 2, 50)))]


def noise(rng: random.Random, live: Live) -> list[schema.Request]:
    return [anything(rng) for _ in range(rng.randint(1, 4))]


def anything(rng: random.Random) -> schema.Request:
    """A frame of some kind with any values that its types allow."""
    request = schema.Request()
    name = rng.choice(("open", "media", "verify", "generate", "resume", "close"))
    frame = getattr(request, name)
    frame.SetInParent()
    fill(rng, frame)
    if name == "open" and rng.random() < 0.8:  # let it get past the first checks
        frame.protocol, frame.vocab_size = 1, V
        frame.fingerprint, frame.model = b"scripted-32", b"scripted-weights"
    return request


def fill(rng: random.Random, message: Any) -> None:
    for field_ in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        if field_.is_repeated:
            count = rng.choice((1, 2, 5, 70, 300))
            target = getattr(message, field_.name)
            if field_.message_type is not None:
                for _ in range(min(count, 5)):
                    fill(rng, target.add())
            else:
                target.extend(value(rng, field_) for _ in range(count))
        elif field_.message_type is not None:
            fill(rng, getattr(message, field_.name))
        else:
            setattr(message, field_.name, value(rng, field_))


def value(rng: random.Random, field_: Any) -> Any:
    match field_.type:
        case field_.TYPE_DOUBLE | field_.TYPE_FLOAT:
            return rng.choice([d for d in DOUBLES if field_.type == field_.TYPE_DOUBLE or not 3e38 < abs(d) < math.inf])
        case field_.TYPE_BOOL:
            return rng.random() < 0.5
        case field_.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 8, 16, 900)))
        case field_.TYPE_STRING:
            return rng.choice(TEXTS)
        case field_.TYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 4, 77))
        case field_.TYPE_UINT64:
            return rng.choice((*INTEGERS, 2**64 - 1))
        case _:
            return rng.choice(INTEGERS)


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + other[rng.randrange(len(other) + 1) :]
        case 2:
            return data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at:]
        case 3:  # the largest varint, where one may stand
            return data[:at] + b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + data[at + 1 :]
        case 4:
            return rng.randbytes(rng.choice((0, 1, 10, 300)))
        case 5:
            return data[:at] + data[at + rng.randint(1, 4) :]
        case _:
            out = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8)) if out else 0):
                out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
            return bytes(out)


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
        assert expected | {"BASE_LENGTH", "PROTOCOL", "LIMIT"} <= set(self.answers), self.answers


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
        def emit(self, record: logging.LogRecord) -> None:
            loud.append(f"{record.name}: {record.getMessage()} {record.exc_info}")

    handler = Listen(logging.WARNING)
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)
    assert not loud, loud[:3]


def engine() -> ScriptedEngine:
    made = ScriptedEngine(ROWS, V)
    made.audio = ScriptedFront()
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


async def one_stream(service: Service, number: int, tally: Tally) -> None:
    live = {record.id: list(record.session.ids) for record in service.sessions if record.identity == "fuzz"}
    data = frames(SEED, number, live)
    where = f"stream {number} of seed {SEED}: {[frame.hex() for frame in data]}"
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
    own = [record for record in service.sessions if record.identity == "fuzz"]
    assert len(own) <= MOST, where
    assert service.streams == 1, where  # the bystander's
    for record in own if len(own) == MOST and number % 20 == 0 else []:
        service.sessions.drop(record)


async def stand_by(service: Service, over: asyncio.Event, bystander: Bystander) -> None:
    while not over.is_set():
        bystander.restart()

        async def ask() -> AsyncIterator[bytes]:
            yield opening(bystander.ids, V).SerializeToString()
            while not bystander.full and not over.is_set():
                await asyncio.sleep(0.002)
                yield bystander.next().SerializeToString()
            yield CLOSE.SerializeToString()

        answers = service.session(ask(), Context("bystander"))  # type: ignore[arg-type]
        assert schema.Answer.FromString(await anext(answers)).opened.session  # type: ignore[arg-type]
        async for answer in answers:
            bystander.check(answer)


async def fuzz_directly(tally: Tally, bystander: Bystander) -> None:
    model, metrics = engine(), Metrics()
    slots = model.reserve(SLOTS * MAX_LENGTH, MAX_LENGTH)
    batcher = Batcher(model, slots, metrics)
    service = Service(model, batcher, limits=LIMITS, metrics=metrics, tokens=TOKENS, max_length=MAX_LENGTH)  # type: ignore[arg-type]
    batcher.start()
    over = asyncio.Event()
    standing = asyncio.create_task(stand_by(service, over, bystander))
    await asyncio.sleep(0.01)
    try:
        number = 0
        while tally.read < DIRECT:
            await one_stream(service, number, tally)
            number += 1
            if standing.done():
                break
        over.set()
        await standing
        for record in service.sessions:
            service.sessions.drop(record)
        while model.open_slots:
            await asyncio.sleep(0.01)
        assert service._arriving == 0
        assert not batcher.seats._left
        assert not len(service.sessions)
    finally:
        await asyncio.to_thread(batcher.stop)


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
            for record in served.service.sessions:
                served.service.sessions.drop(record)
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
