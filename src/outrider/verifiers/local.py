"""The in-process verifier: an engine and its sessions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from outrider.decoding.actions import Verify
from outrider.engines.base import CachedSequence, Engine, Prompt, forward_or_sample
from outrider.engines.grammars import compile_grammar
from outrider.engines.prefix_cache import close_sequence, open_sequence
from outrider.engines.prompt_lookup import PromptLookup
from outrider.errors import PromptError
from outrider.sampling.acceptance import Verdict, parse_acceptance_rule
from outrider.sampling.policy import Policy
from outrider.verifiers.base import ModelInfo, SessionParams, SessionTable
from outrider.verifiers.session import Session


class LocalVerifier(SessionTable[tuple[Session, CachedSequence]]):
    """A verifier over an engine in this process (`--cloud local:MODEL`)."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        """Return the engine's description."""
        return describe(self.engine)

    def open(self, prompt: Prompt, params: SessionParams) -> int:
        """Open a session with a KV cache of its own."""
        session = open_session(self.engine, prompt, params)
        return self._add((session, open_sequence(self.engine, prompt, "verifier")))

    def verify(self, session: int, request: Verify) -> Verdict:
        """Run the engine over the block and verify it."""
        entry, cache = self._get(session)
        plan = entry.prepare(request)
        if isinstance(plan, Verdict):
            return plan
        started, cached = time.perf_counter(), 0 if entry.rounds else cache.cached_len
        cache.rollback_to(plan.start)
        (output,) = forward_or_sample(self.engine, [cache.next_input(plan.ids, plan.rows)], [entry.sampling_policy])
        verdict = entry.judge(plan, output, compute_s=time.perf_counter() - started)
        cache.rollback_to(len(entry.ids))
        return replace(verdict, cached=cached) if cached else verdict

    def generate(self, session: int) -> Iterator[Verdict]:
        """Yield the target's own tokens, one verdict for each token."""
        entry, _ = self._get(session)
        while True:
            yield self.verify(session, Verify(entry.rounds + 1, len(entry.ids), (), ()))

    def close(self, session: int) -> None:
        """Close the session. Its KV cache is kept for prompts that begin with the same tokens."""
        close_sequence(self._get(session)[1], keep=True)
        del self._sessions[session]


def open_session(engine: Engine, prompt: Prompt, params: SessionParams, committed: tuple[int, ...] = ()) -> Session:
    """Return the verifier's state of a sequence: `prompt`, followed by the `committed` tokens.

    Raises:
        PromptError: this engine would encode the prompt differently from the drafter.
        SettingsError: the grammar cannot be compiled.
    """
    check_conditioning(engine, prompt)
    prompt_length = len(prompt.ids)
    grammar = params.settings.grammar
    compiled = None if grammar is None else compile_grammar(grammar, engine.tokenizer, engine.eos_ids)
    policy = Policy.build(params.settings, engine.eos_ids, params.vocab_size, prompt_length, compiled)
    return Session((*prompt.ids, *committed), prompt_length, policy, parse_acceptance_rule(params.accept), engine.noise)


def describe(engine: Engine | PromptLookup) -> ModelInfo:
    """Return the description of an engine, or of prompt lookup's tokenizer."""
    audio_encoder = getattr(engine, "audio", None)
    return ModelInfo(
        engine.name,
        engine.vocab_size,
        engine.row_count,
        engine.eos_ids,
        engine.fingerprint,
        engine.max_length,
        audio_encoder.max_seconds if audio_encoder is not None else 0.0,
        audio_encoder.placeholder if audio_encoder is not None else None,
        lambda: list(getattr(engine, "vocabulary", [])),
        None if engine.tokenizer is None else lambda ids: str(engine.tokenizer.decode(list(ids))),
        tuple(getattr(engine.tokenizer, "all_special_ids", ())),
        captions_only=bool(getattr(engine, "captions_only", False)),
        quantization=getattr(engine, "quantization", None),
    )


def check_conditioning(engine: Engine, prompt: Prompt) -> None:
    """Refuse a prompt that this engine would encode differently from the drafter.

    Raises:
        PromptError: the prompt has audio and the engine takes none, or the engine makes another number of audio tokens
            of the recording.
    """
    if not prompt.has_audio:
        return
    audio_encoder = getattr(engine, "audio", None)
    if audio_encoder is None:
        raise PromptError(f"{engine.name} takes no audio, so it cannot verify drafts about a recording")
    expected, actual = audio_encoder.prompt_tokens(prompt), prompt.ids.count(audio_encoder.placeholder)
    if expected != actual:
        raise PromptError(f"{engine.name} makes {expected} audio tokens of the recording, the drafter {actual}")
