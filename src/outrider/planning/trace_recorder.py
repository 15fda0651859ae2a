"""Recording of traces: the target generates alone, then the drafter reads its output in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from outrider.config import GenerationSettings
from outrider.decoding.actions import Plan
from outrider.decoding.decoder import Decoder
from outrider.decoding.detokenizer import get_detokenizer
from outrider.decoding.gate import Always, Signals, compute_signals
from outrider.decoding.stopping import StopRules
from outrider.edge.drivers import sequential
from outrider.edge.model_pair import ModelPair
from outrider.edge.verifier_session import VerifierSession
from outrider.engines.base import CachedSequence, Engine, Prompt
from outrider.engines.grammars import compile_grammar
from outrider.engines.prefix_cache import unique_salt
from outrider.errors import SettingsError
from outrider.planning.traces import Trace
from outrider.prompts.chat import PromptLike, encode
from outrider.protocol.media_messages import pack_media
from outrider.sampling.acceptance import Exact
from outrider.sampling.policy import Policy
from outrider.verifiers.base import SessionParams, Verifier

CHUNK = 256  # rows of logits in memory at once


def record(
    draft: Engine,
    target: Verifier,
    prompts: Seq[PromptLike],
    settings: GenerationSettings | None = None,
    names: Seq[str] | None = None,
) -> Iterator[Trace]:
    """Yield a trace of each prompt. target: any verifier, such as `local(engine)`.

    names: ids of the traces, by default 1, 2, ….

    Raises:
        InputError: a prompt that cannot be used, at its turn.
    """
    recorder = Recorder(draft, target, settings)
    for n, prompt in enumerate(prompts):
        yield recorder.trace(names[n] if names is not None else str(n + 1), prompt)


class Recorder:
    """Records traces of a pair under given settings.

    Raises:
        VocabularyMismatch: the two models do not share a vocabulary.
        SettingsError: stop strings or sentences without a tokenizer of the drafter.
    """

    def __init__(self, draft: Engine, target: Verifier, settings: GenerationSettings | None = None) -> None:
        settings = settings or GenerationSettings()
        self.draft, self.target, self.settings = draft, target, settings
        self.pair = ModelPair(draft, target, "fail").state
        eos = () if settings.ignore_eos else self.pair.target.eos_ids
        self.rules = StopRules(settings.max_new_tokens, eos, settings.stop, settings.sentences, settings.min_new_tokens)
        if self.rules.needs_text and draft.tokenizer is None:
            raise SettingsError("stop strings and sentences need a tokenizer, and the drafter came without one")

    def trace(self, name: str, prompt: PromptLike) -> Trace:
        """Record the trace of one prompt."""
        encoded = encode(self.draft, prompt)
        output = self.generate_target(encoded)
        return self.trace_output(name, encoded, output)

    def generate_target(self, prompt: Prompt) -> list[int]:
        """Return the output of the target alone, including the end token."""
        unshared = replace(prompt, cache_salt=unique_salt())
        link = VerifierSession(self.target, lambda verifier: verifier.open(unshared, self.params))
        plan = Plan(self.rules, Always(), Exact(), None, has_verifier=True, on_loop="ignore")
        decoder = Decoder(prompt.ids, plan, self._decode if self.rules.needs_text else None)
        try:
            for _ in sequential(decoder, None, link.verify):
                pass
        finally:
            link.close()
        return decoder.sequence.generated

    def trace_output(self, name: str, prompt: Prompt, output: Seq[int]) -> Trace:
        """Return the trace of an output: the drafter's proposal at each position, after the preceding tokens.

        One forward pass over the output gives the logits. In float32 they equal those of stepwise drafting up to
        rounding.
        """
        policy, ids = self.policy(prompt), [*prompt.ids, *output]
        proposals = [
            self._proposal(policy, row, ids, len(prompt.ids) + n)
            for n, row in enumerate(self._draft_logits(prompt, ids))
        ]
        tokens, signals = zip(*proposals, strict=True)
        media = len(pack_media(prompt, hides_audio=False)[1])
        return Trace(name, len(prompt.ids), tuple(output), tokens, signals, media)

    def _proposal(self, policy: Policy, row: Tensor, ids: list[int], length: int) -> tuple[int, Signals]:
        token = policy.distribution(row, ids, length).token
        return token, compute_signals(row[: policy.vocab_size], token, policy.sampling.temperature)

    def _draft_logits(self, prompt: Prompt, ids: list[int]) -> Iterator[Tensor]:
        """Yield the drafter's logits for each token after the prompt, computed in chunks."""
        reader, start = CachedSequence(self.draft, prompt, "recorder"), len(prompt.ids)
        try:
            for at in range(start, len(ids), CHUNK):
                end = min(at + CHUNK, len(ids))
                yield from reader.extend(ids[: end - 1], end - at)
        finally:
            reader.close()

    @property
    def params(self) -> SessionParams:
        """Return the session parameters for the verifier."""
        return SessionParams(self.settings, "exact", self.pair.target_vocabulary)

    def policy(self, prompt: Prompt) -> Policy:
        """Return the drafter's decoding policy for a prompt."""
        pair = self.pair
        grammar, eos_ids = self.settings.grammar, pair.target.eos_ids
        compiled = None if grammar is None else compile_grammar(grammar, self.draft.tokenizer, eos_ids)
        return Policy.build(self.settings, eos_ids, pair.draft_vocabulary, len(prompt.ids), compiled)

    def _decode(self, ids: list[int]) -> str:
        return get_detokenizer(self.draft.tokenizer)(ids)
