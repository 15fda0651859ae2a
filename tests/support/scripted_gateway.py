"""A desk that plays scripts instead of models, and a gateway around it on a free port, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from outrider.api import StreamEvent
from outrider.decoding.result import Result, Stats
from outrider.decoding.sequence import Source
from outrider.decoding.stopping import FinishReason
from outrider.decoding.token_logprob import TokenLogprob
from outrider.gateway.access import Access
from outrider.gateway.app import GatewayInfo, build_overview, create_app
from outrider.gateway.connections import Listener
from outrider.gateway.defaults import Defaults
from outrider.gateway.handlers import Gateway
from outrider.gateway.metrics import Metrics
from outrider.gateway.server import bound, http_server
from outrider.gateway.tokenization import Tokenization
from tests.support.processes import HANG_S, until, wait_until


def event(
    index: int, text: str, kind: str = "confirmed", source: Source = Source.ACCEPTED, token: int | None = None
) -> StreamEvent:
    """An event; what is confirmed is settled."""
    settled = index + (kind != "provisional")
    known = 100 + index if token is None else token
    return StreamEvent(kind, index, known, text, source, None, settled)  # type: ignore[arg-type]


def spoken(*texts: str) -> list[list[StreamEvent]]:
    """Each text as a confirmed token, each in a batch of its own."""
    return [[event(index, text)] for index, text in enumerate(texts)]


def result_of(text: str, tokens: int, reason: FinishReason = "eos") -> Result:
    sources = [Source.ACCEPTED] * tokens
    stats = Stats(rounds=1, blocks=1, escalated=1, verified=tokens, ttft_s=0.01, total_s=0.05)
    stats.count_sources(sources)
    ids = [100 + n for n in range(tokens)]
    logprobs = [TokenLogprob(token, -0.5, b"t") for token in ids]
    pieces = [text, *[""] * (tokens - 1)][:tokens]
    return Result(text, ids, reason, "exact", 7, stats, sources, pieces=pieces, logprobs=logprobs)


@dataclass
class Script:
    """What one generation does: its batches, a pause before each, then a result or an error."""

    batches: Sequence[list[StreamEvent]] = field(default_factory=lambda: spoken("a", " b", " c"))
    end: Result | Exception = field(default_factory=lambda: result_of("a b c", 3))
    pause: float = 0.0
    refusal: Exception | None = None  # of the desk, before it begins
    hold: threading.Event | None = None  # the request has to wait for a slot until it is set


class ScriptedTask:
    def __init__(self, script: Script, gone: Callable[[ScriptedTask], None]) -> None:
        self._script, self._gone = script, gone
        self._left = list(script.batches)
        self.cancelled_after: int | None = None  # batches that were given

    def __aiter__(self) -> ScriptedTask:
        return self

    async def __anext__(self) -> list[StreamEvent]:
        await asyncio.sleep(self._script.pause)  # scripted: the time of a batch
        if self._left:
            return self._left.pop(0)
        self._gone(self)
        if isinstance(self._script.end, Exception):
            raise self._script.end
        raise StopAsyncIteration

    @property
    def result(self) -> Result:
        assert isinstance(self._script.end, Result)
        return self._script.end

    def cancel(self) -> None:
        if self.cancelled_after is None:
            self.cancelled_after = len(self._script.batches) - len(self._left)
        self._gone(self)


class ScriptedScheduler:
    """The interface of `RequestScheduler`. script: for all prompts, or for each. asked: the arguments of `start`."""

    waiting = 0
    room = 72

    def __init__(self, script: Script | Callable[[Any], Script]) -> None:
        self._script = script
        self.asked: list[tuple[str, Any, dict[str, Any], Any]] = []
        self.tasks: list[ScriptedTask] = []
        self._running: list[ScriptedTask] = []

    @property
    def active(self) -> int:
        return len(self._running)

    async def start(
        self, client: str, prompt: Any, settings: dict[str, Any], options: Any, *, queued: Callable[[], None], **_: Any
    ) -> ScriptedTask:
        self.asked.append((client, prompt, settings, options))
        script = self._script if isinstance(self._script, Script) else self._script(prompt)
        if script.hold is not None:
            queued()
            await until(script.hold.is_set)
        if script.refusal is not None:
            raise script.refusal
        task = ScriptedTask(script, self._gone)
        self.tasks.append(task)
        self._running.append(task)
        return task

    def _gone(self, task: ScriptedTask) -> None:
        if task in self._running:
            self._running.remove(task)

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()


@dataclass
class Running:
    """A gateway that serves."""

    url: str
    scheduler: ScriptedScheduler
    app: Any
    gateway: Gateway
    listener: Listener


@contextmanager
def serving(
    script: Script | Callable[[Any], Script] | None = None,
    access: Access | None = None,
    defaults: Defaults | None = None,
    origins: tuple[str, ...] = (),
    cloud: Callable[[], str] | None = None,
    engine: Any = None,
    max_length: int | None = None,
) -> Iterator[Running]:
    """A gateway on loopback whose desk plays the script."""
    scheduler = ScriptedScheduler(script or Script())
    defaults = defaults or Defaults(edge="scripted")
    metrics = Metrics(lambda: scheduler.active, lambda: scheduler.waiting, 8)
    tokenization = Tokenization(engine, lambda: max_length)
    gateway = Gateway(scheduler, access or Access(), defaults, metrics, tokenization)  # type: ignore[arg-type]
    app = create_app(gateway, GatewayInfo(build_overview(defaults, "none", 8), origins, cloud))
    with bound("127.0.0.1", 0) as on:
        server = http_server(app, on)
        server.config.timeout_graceful_shutdown = 1
        thread = threading.Thread(target=server.run, args=([on],))
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert server.started
            yield Running(f"http://127.0.0.1:{on.getsockname()[1]}", scheduler, app, gateway, on)
        finally:
            server.should_exit = True
            thread.join(HANG_S)
            assert not thread.is_alive()
