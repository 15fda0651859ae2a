"""A batcher and records to give it: what its tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.cloud.batcher import Batcher
from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import SessionEntry
from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import LAST_SAMPLED, Prompt, SequenceInput
from outrider.sampling.acceptance import Verdict
from outrider.sampling.policy import Policy
from outrider.sampling.sampler import SampledRows
from outrider.verifiers.base import SessionParams
from outrider.verifiers.local import LocalVerifier, open_session
from tests.support.fakes import HashRows, ScriptedEngine, greedy_tokens
from tests.support.processes import HANG_S

V = 32
TARGET = HashRows(5, V)


class RecordingEngine(ScriptedEngine):
    """Notes who was read in which forward, and can be told to wait or to fail before one."""

    def __init__(self, rows: Any = TARGET) -> None:
        super().__init__(rows, V)
        self.batches: list[list[SequenceInput]] = []
        self.before: Callable[[list[SequenceInput]], None] = lambda feeds: None

    def forward_many(self, feeds: Seq[SequenceInput]) -> list[Tensor]:
        self.before(list(feeds))
        self.batches.append(list(feeds))
        return super().forward_many(feeds)


def session_entry(engine: Any, prompt: Seq[int], accept: str = "exact", **options: Any) -> SessionEntry:
    asked = Prompt(tuple(prompt))
    conditions = SessionParams(GenerationSettings(**options), accept, engine.vocab_size)
    return SessionEntry(
        "me",
        open_session(engine, asked, conditions),
        conditions.settings,
        lambda: asked,
    )


@contextmanager
def running_batcher(engine: Any, slots: int = 4, **options: Any) -> Iterator[Batcher]:
    """A running batcher. No forward of it uses more slots than there are, and none is left at the end."""
    engine.reserve(slots * engine.position_bytes * 4096, 4096)
    batcher = Batcher(engine, slots, Metrics(), **options)
    batcher.start()
    try:
        yield batcher
    finally:
        batcher.stop()
        assert not getattr(engine, "open_slots", [])


def submit_together(batcher: Batcher, *jobs: tuple[SessionEntry, Verify]) -> list[Future[Verdict]]:
    """Ask for all of them within one step."""
    with batcher._wake:
        return [batcher.submit(entry, request) for entry, request in jobs]


def target_tokens(ids: Seq[int], count: int, rows: Any = TARGET) -> list[int]:
    """The next tokens that the target would say."""
    return greedy_tokens(rows, ids, count)


def long_prompt(count: int = 2000) -> list[int]:
    return [n % V for n in range(count)]


class EngineHold:
    """Holds the engine in its next forward until it is released."""

    def __init__(self, engine: RecordingEngine) -> None:
        self.entered, self._release = threading.Event(), threading.Event()
        engine.before = self._wait

    def _wait(self, _: list[SequenceInput]) -> None:
        self.entered.set()
        assert self._release.wait(HANG_S)

    def wait(self) -> None:
        assert self.entered.wait(HANG_S)

    def release(self) -> None:
        self._release.set()


class Edge:
    """One session's edge, and the verdicts that it must get: those of a verifier that serves nobody else."""

    def __init__(self, engine: Any, prompt: Seq[int], **options: Any) -> None:
        self.entry = session_entry(engine, prompt, **options)
        self.alone = LocalVerifier(ScriptedEngine(TARGET, V))
        conditions = SessionParams(GenerationSettings(**options), "exact", V)
        self.session = self.alone.open(Prompt(tuple(prompt)), conditions)
        self.ids, self.round = list(prompt), 0
        self.request: Verify | None = None

    def next(self, skipped: Seq[int | None], drafts: Seq[int | None]) -> Verify:
        """A new request. None stands for what the target would say next."""
        ids = list(self.ids)
        for token in (*skipped, *drafts):
            ids += target_tokens(ids, 1) if token is None else [token]
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


class _LateOutputs:
    """The outputs of a launched forward: not ready before they are waited for."""

    def __init__(self, rows: list[SampledRows]) -> None:
        self._rows = rows

    def ready(self) -> bool:
        return False

    def result(self) -> list[SampledRows]:
        return self._rows


class AsyncEngine(RecordingEngine):
    """Samples tokens like a GPU: a launch returns before its results are known, and the next may build on them.

    unread: launches whose results were not asked for. deepest: the most that there were at once.
    """

    samples_on_device = True

    def __init__(self, rows: Any = TARGET) -> None:
        super().__init__(rows)
        self._last: dict[int, int] = {}
        self.unread: list[_LateOutputs] = []
        self.deepest = 0

    def sample_many(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> list[SampledRows]:
        return self.launch(inputs, policies).result()

    def launch(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> _LateOutputs:
        known = [replace(each, ids=self._known(each)) for each in inputs]
        rows = [
            self._sampled(each, logits, policy)
            for each, logits, policy in zip(known, self.forward_many(known), policies, strict=True)
        ]
        self._last |= {each.slot: sampled.tokens[-1] for each, sampled in zip(inputs, rows, strict=True)}
        outputs = _LateOutputs(rows)
        self.unread.append(outputs)
        self.deepest = max(self.deepest, len(self.unread))
        outputs.result = lambda: (self.unread.remove(outputs), rows)[1]  # type: ignore[func-returns-value, method-assign]
        return outputs

    def _known(self, seq_input: SequenceInput) -> list[int]:
        return [self._last[seq_input.slot] if token == LAST_SAMPLED else token for token in seq_input.ids]

    def _sampled(self, seq_input: SequenceInput, logits: Tensor, policy: Policy) -> SampledRows:
        ids = self.slots[seq_input.slot].tokens
        first = len(ids) - seq_input.logits_to_keep + 1
        found = [policy.distribution(row, ids, first + n) for n, row in enumerate(logits)]
        margins = [each.top2_margin for each in found]
        return SampledRows([each.token for each in found], margins, [0.0] * len(found))
