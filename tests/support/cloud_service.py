"""What the tests of the service share: an engine that can be held, and what it would say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import grpc
from torch import Tensor

from outrider.engines.base import SequenceInput
from outrider.protocol import schema
from tests.support.cloud_server import Served, serving
from tests.support.fakes import HashRows, ScriptedEngine, reference_output
from tests.support.processes import HANG_S, wait_until
from tests.support.raw_stream import opening

V, EOS = 32, 31
PROMPT = (3, 1, 4, 1, 5)
TARGET = HashRows(2, V)


class HeldEngine(ScriptedEngine):
    """An engine that can be held before a forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(TARGET, V, eos_ids=(EOS,), **options)
        self.entered, self.go = threading.Event(), threading.Event()
        self.go.set()

    def hold(self) -> None:
        self.entered.clear()
        self.go.clear()

    def forward_many(self, feeds: Seq[SequenceInput]) -> list[Tensor]:
        self.entered.set()
        assert self.go.wait(HANG_S)
        return super().forward_many(feeds)


def open_request(prompt: Seq[int] = PROMPT, **options: Any) -> schema.Request:
    return opening(prompt, V, **options)


def change_open(**values: Any) -> Callable[[schema.Open], None]:
    """Spoils an Open."""

    def spoil(frame: schema.Open) -> None:
        for name, value in values.items():
            setattr(frame, name, value)

    return spoil


def target_output(count: int, prompt: Seq[int] = PROMPT, **options: Any) -> tuple[int, ...]:
    """The target's own tokens."""
    return tuple(reference_output(TARGET, prompt, V, max_new_tokens=count, **options))


def wrong_token(token: int) -> int:
    return (token + 1) % V


def error_name(number: int) -> str:
    return schema.Error.Code.Name(number)


def metric_total(served: Served, name: str) -> float:
    """A metric, summed over its labels."""
    lines = [line.rsplit(" ", 1) for line in served.server.metrics.text().splitlines() if not line.startswith("#")]
    return sum(float(value) for label, value in lines if label.split("{")[0] == name)


def clear(served: Served) -> None:
    """End every session, and see that nothing is left of them."""
    wait_until(lambda: served.service.streams == 0)

    async def drop() -> None:
        for entry in served.service.sessions:
            served.service.sessions.drop(entry)

    served.run(drop())
    engine: Any = served.service.engine
    wait_until(lambda: not engine.open_slots)
    assert served.service._pending_media == 0


@contextmanager
def reached(engine: Any, **options: Any) -> Iterator[tuple[Served, grpc.Channel]]:
    """A service of its own, and a channel to it."""
    with serving(engine, **options) as served, grpc.insecure_channel(served.address) as channel:
        yield served, channel
