"""The verifier in this process: an engine and its sessions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from outrider.core.acceptance import Verdict, rule
from outrider.core.actions import Verify
from outrider.core.policy import Policy
from outrider.engines.base import Engine, Prompt, Reader, read_many
from outrider.errors import PromptError, StateError
from outrider.verifiers.base import Conditions, Description
from outrider.verifiers.session import Session


class LocalVerifier:
    """Verdicts from an engine on this machine (`--cloud local:MODEL`)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._sessions: dict[int, tuple[Session, Reader]] = {}
        self._numbers = count(1)

    def describe(self, edge: Description | None = None) -> Description:
        return describe(self.engine)

    def open(self, prompt: Prompt, conditions: Conditions) -> int:
        session = open_session(self.engine, prompt, conditions)
        number = next(self._numbers)
        self._sessions[number] = session, Reader(self.engine, prompt, "verifier")
        return number

    def verify(self, session: int, request: Verify) -> Verdict:
        found, reader = self._find(session)
        reading = found.ask(request)
        if isinstance(reading, Verdict):
            return reading
        started = time.perf_counter()
        reader.settle(reading.start)
        (rows,) = read_many(self.engine, [reader.feed(reading.ids, reading.rows)], [found.picks_by])
        verdict = found.judge(reading, rows)
        reader.settle(len(found.ids))
        return replace(verdict, compute_s=time.perf_counter() - started)

    def generate(self, session: int) -> Iterator[Verdict]:
        found, _ = self._find(session)
        while True:
            yield self.verify(session, Verify(found.rounds + 1, len(found.ids), (), ()))

    def close(self, session: int) -> None:
        self._find(session)[1].close()
        del self._sessions[session]

    def _find(self, session: int) -> tuple[Session, Reader]:
        if session not in self._sessions:
            raise StateError(f"session {session} is not open")
        return self._sessions[session]


def open_session(engine: Engine, prompt: Prompt, conditions: Conditions, committed: tuple[int, ...] = ()) -> Session:
    """The verifier's half of a sequence that begins with `prompt`, and has `committed` after it already.

    Raises:
        PromptError: the prompt means something else to this engine than to the one that encoded it.
    """
    check_conditioning(engine, prompt)
    prompt_length = len(prompt.ids)
    policy = Policy.build(conditions.settings, engine.eos_ids, conditions.vocab_size, prompt_length)
    return Session((*prompt.ids, *committed), prompt_length, policy, rule(conditions.accept), engine.noise)


def describe(engine: Engine) -> Description:
    """An engine as the other side sees it."""
    front = getattr(engine, "audio", None)
    return Description(
        engine.name,
        engine.vocab_size,
        engine.row_count,
        engine.eos_ids,
        engine.fingerprint,
        engine.max_length,
        front.max_seconds if front is not None else 0.0,
        front.placeholder if front is not None else None,
        lambda: list(getattr(engine, "vocabulary", [])),
        None if engine.tokenizer is None else lambda ids: str(engine.tokenizer.decode(list(ids))),
        tuple(getattr(engine.tokenizer, "all_special_ids", ())),
    )


def check_conditioning(engine: Engine, prompt: Prompt) -> None:
    """Refuse a prompt that would mean something else to this engine than to the one that encoded it.

    Raises:
        PromptError: audio for a text model, or another number of audio tokens for the same recording.
    """
    if not prompt.heard:
        return
    front = getattr(engine, "audio", None)
    if front is None:
        raise PromptError(f"{engine.name} takes no audio, so it cannot verify what was heard")
    here, there = front.prompt_tokens(prompt), prompt.ids.count(front.placeholder)
    if here != there:
        raise PromptError(f"{engine.name} makes {here} audio tokens of the recording, the drafter {there}")
