"""Twenty thousand frames that no edge would send. The service refuses them by name, and a bystander notices nothing.

A failure names the stream; `frames(SEED, stream, …)` makes the same frames again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.support.cloud_server import serving
from tests.support.frame_fuzzer import V, frames
from tests.support.processes import HANG_S
from tests.support.raw_stream import CLOSE, RawStream, opening
from tests.support.service_fuzzer import (
    LIMITS,
    MAX_LENGTH,
    NAMES,
    SEED,
    SLOTS,
    SOCKET,
    TOKENS,
    Bystander,
    Tally,
    engine,
    fuzz_directly,
)

# What must hold -------------------------------------------------------------------------------------------------


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


# Without a socket -----------------------------------------------------------------------------------------------


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
            try:
                while tally.read < SOCKET and not standing.done():
                    one_socket_stream(channel, number, tally)
                    number += 1
            finally:
                over.append(True)
            standing.result(HANG_S)
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
