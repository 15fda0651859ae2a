"""A batcher and records to give it: what its tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from outrider.cloud.batcher import Batcher
from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt, SequenceInput
from outrider.sampling.acceptance import Verdict
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier, open_session
from tests.support.fakes import HashRows, ScriptedEngine

V = 32
TARGET = HashRows(5, V)
SOON = 60.0  # s; only a hang takes that long


class Watched(ScriptedEngine):
    """Notes who was read in which forward, and can be told to wait or to fail before one."""

    def __init__(self, rows: Any = TARGET) -> None:
        super().__init__(rows, V)
        self.batches: list[list[SequenceInput]] = []
        self.before: Callable[[list[SequenceInput]], None] = lambda feeds: None

    def forward_many(self, feeds: Seq[SequenceInput]) -> list[Tensor]:
        self.before(list(feeds))
        self.batches.append(list(feeds))
        return super().forward_many(feeds)


def entry(engine: Any, prompt: Seq[int], accept: str = "exact", **options: Any) -> SessionEntry:
    asked = Prompt(tuple(prompt))
    conditions = SessionParams(GenerationSettings(**options), accept, engine.vocab_size)
    return SessionEntry(
        "me",
        open_session(engine, asked, conditions),
        conditions.settings,
        lambda: asked,
    )


@contextmanager
def batching(engine: Any, slots: int = 4, **options: Any) -> Iterator[Batcher]:
    """A running batcher. No forward of it uses more slots than there are, and none is left at the end."""
    engine.reserve(slots * engine.position_bytes * 4096, 4096)
    batcher = Batcher(engine, slots, Metrics(), **options)
    batcher.start()
    try:
        yield batcher
    finally:
        batcher.stop()
        assert not getattr(engine, "open_slots", [])


def together(batcher: Batcher, *jobs: tuple[SessionEntry, Verify]) -> list[Future[Verdict]]:
    """Ask for all of them within one step."""
    with batcher._wake:
        return [batcher.submit(entry, request) for entry, request in jobs]


def wrong(token: int) -> int:
    return (token + 1) % V


def own(ids: Seq[int], count: int, rows: Any = TARGET) -> list[int]:
    """The next tokens that the target would say."""
    out = list(ids)
    for _ in range(count):
        out.append(int(rows(tuple(out)).argmax()))
    return out[len(ids) :]


def long_prompt(count: int = 2000) -> list[int]:
    return [n % V for n in range(count)]


class Held:
    """Holds the engine in its next forward until it is released."""

    def __init__(self, engine: Watched) -> None:
        self.entered, self._release = threading.Event(), threading.Event()
        engine.before = self._wait

    def _wait(self, _: list[SequenceInput]) -> None:
        self.entered.set()
        assert self._release.wait(SOON)

    def wait(self) -> None:
        assert self.entered.wait(SOON)

    def release(self) -> None:
        self._release.set()


class Edge:
    """One session's edge, and the verdicts that it must get: those of a verifier that serves nobody else."""

    def __init__(self, engine: Any, prompt: Seq[int], **options: Any) -> None:
        self.entry = entry(engine, prompt, **options)
        self.alone = LocalVerifier(ScriptedEngine(TARGET, V))
        conditions = SessionParams(GenerationSettings(**options), "exact", V)
        self.session = self.alone.open(Prompt(tuple(prompt)), conditions)
        self.ids, self.round = list(prompt), 0
        self.request: Verify | None = None

    def next(self, skipped: Seq[int | None], drafts: Seq[int | None]) -> Verify:
        """A new request. None stands for what the target would say next."""
        ids = list(self.ids)
        for token in (*skipped, *drafts):
            ids += own(ids, 1) if token is None else [token]
        self.round += 1
        base = len(self.ids) + len(skipped)
        self.request = Verify(self.round, base, tuple(ids[len(self.ids) : base]), tuple(ids[base:]))
        return self.request

    def check(self, verdict: Verdict) -> None:
        assert self.request is not None
        assert verdict == self.alone.verify(self.session, self.request)
        if len(self.ids) + len(self.request.new_ids) == self.request.base_length:  # else a repeat, applied before
            drafts = self.request.draft_ids[: verdict.accepted]
            self.ids += [*self.request.new_ids, *drafts, verdict.next_token]
        assert self.entry.session.ids == self.ids
