"""One generation of a `SpeculativeDecoder`: decoder, drafter and verifier session, opened and closed together."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.config import GenerationSettings
from outrider.decoding.acceptance_model import AcceptanceModel
from outrider.decoding.actions import Plan
from outrider.decoding.calibrated_gate import Calibrated
from outrider.decoding.decoder import Decoder
from outrider.decoding.detokenizer import Tokenizer, get_detokenizer
from outrider.decoding.draft_length import DraftLength
from outrider.decoding.events import Event, StreamEvent
from outrider.decoding.incremental_text import IncrementalDetokenizer
from outrider.decoding.ngram_index import NgramIndex
from outrider.decoding.options import ResolvedOptions
from outrider.decoding.result import GuaranteeTracker, Result
from outrider.decoding.stopping import StopRules
from outrider.decoding.token_logprob import TokenLogprob
from outrider.edge.cancellation import Cancellation
from outrider.edge.drafter import Drafter, Proposer
from outrider.edge.drivers import pipelined, sequential
from outrider.edge.lookup_drafter import CombinedDrafter, LookupDrafter
from outrider.edge.model_pair import Handshake, ModelPair
from outrider.edge.round_observer import RoundObserver
from outrider.edge.text_codec import TextCodec
from outrider.edge.thread_guard import ThreadGuard
from outrider.edge.translated_drafter import TranslatedDrafter, edge_settings
from outrider.edge.verifier_session import VerifierSession
from outrider.engines.base import Engine, Prompt
from outrider.engines.grammars import compile_grammar
from outrider.engines.prefix_cache import open_sequence
from outrider.engines.prompt_lookup import PromptLookup
from outrider.errors import SettingsError
from outrider.prompts.audio import is_silent
from outrider.sampling.logprobs import Logprobs
from outrider.sampling.policy import Policy
from outrider.transport.byte_counts import ByteCounts
from outrider.verifiers.base import SessionParams, Verifier

if TYPE_CHECKING:  # a module that loads transformers
    from outrider.engines.torch.model_families import AudioFeatures

ENDED_EARLY = (GeneratorExit, CancelledError)  # the caller ended the generation between two forwards


@dataclass(frozen=True)
class GenerationContext:
    """The parts of a `SpeculativeDecoder` that all its generations use.

    lock: guards `guarantees`, `acceptance` and the controller of `draft_length`, which learn from every generation.
    tokenizer, audio_encoder: those of the engine that encodes prompts, or None. codecs: the tokenizers of drafter and
    verifier, if they differ.
    """

    options: ResolvedOptions
    draft: Engine | None
    lookup: PromptLookup | None
    verifier: Verifier | None
    draft_length: DraftLength | None
    acceptance: AcceptanceModel
    with_signals: bool
    pair: ModelPair
    thread_guard: ThreadGuard
    guarantees: GuaranteeTracker
    lock: threading.Lock
    tokenizer: Tokenizer | None
    audio_encoder: AudioFeatures | None
    codecs: tuple[TextCodec, TextCodec] | None = None

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids, empty without a tokenizer."""
        return "" if self.tokenizer is None else get_detokenizer(self.tokenizer)(ids, skip_special=skip_special)

    def split_text(self, ids: list[int]) -> list[str]:
        """Return the text of each token, which together make up `decode(ids)`. Empty without a tokenizer."""
        if self.tokenizer is None:
            return []
        transcript = IncrementalDetokenizer(self.decode)
        return [transcript.append(token) for token in ids]

    @property
    def verifies_all(self) -> bool:
        """Return whether no token can be committed without a verdict."""
        options = self.options
        return self.verifier is not None and options.gate.exact and options.on_cloud_loss != "edge-only"

    def describe_logprobs(self, logprobs: Logprobs) -> TokenLogprob:
        """Return the log-probabilities at one position with the texts of their tokens."""
        to_bytes = None if self.tokenizer is None else get_detokenizer(self.tokenizer).token_bytes
        return TokenLogprob.build(logprobs, to_bytes)

    def hides_audio(self, prompt: Prompt) -> bool:
        """Return whether the verifier gets less of the prompt than the drafter."""
        return self.verifier is not None and self.options.privacy == "tokens" and prompt.has_audio


class Generation:
    """One generation.

    handshake: the models at its start, used until its end. warnings: for the result.

    Raises:
        SettingsError: a stop rule needs a tokenizer, log-probabilities are requested of drafts that have none, or the
            grammar cannot be compiled.
    """

    def __init__(
        self,
        context: GenerationContext,
        prompt: Prompt,
        settings: GenerationSettings,
        handshake: Handshake,
        cancellation: Cancellation | None,
        warnings: list[str],
    ) -> None:
        self.prompt = prompt
        self._context, self._settings = context, settings
        self._handshake, self._cancellation, self._warnings = handshake, cancellation, warnings
        eos = () if settings.ignore_eos else handshake.target.eos_ids
        rules = StopRules(settings.max_new_tokens, eos, settings.stop, settings.sentences, settings.min_new_tokens)
        if rules.needs_text and context.tokenizer is None:
            name = "stop" if settings.stop else "sentences"
            raise SettingsError(f"{name} needs a tokenizer, and the model came without one")
        if settings.logprobs is not None and context.codecs is not None and not context.verifies_all:
            raise SettingsError(
                "logprobs are not available for unverified tokens of a drafter with another tokenizer: use gate "
                "always, and on_cloud_loss fail or wait"
            )
        self._decoder = Decoder(prompt.ids, self._plan(rules), self._decode if rules.needs_text else None)
        self._grammar = None
        if settings.grammar is not None and context.tokenizer is not None:  # otherwise only the cloud compiles it
            self._grammar = compile_grammar(settings.grammar, context.tokenizer, handshake.target.eos_ids)
        self._byte_counts = ByteCounts()
        if not handshake.is_complete:
            self._decoder.on_verifier_lost()

    def events(self) -> Generator[Event, None, None]:
        """Run the decoding loop, measure its times, and close drafter and session in the end."""
        context, stats = self._context, self._decoder.stats
        started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(context.thread_guard.generation())
            drafter = self.open_drafter()
            if drafter is not None:
                stats.edge_cached_tokens = drafter.cached_len
                stack.push(lambda error, *_: drafter.close(keep=error is None or issubclass(error, ENDED_EARLY)))
            session = self._open_session()
            if session is not None:
                stack.callback(session.close)
            for event in self._run_driver(drafter, session):
                if not stats.ttft_s and event.kind != "provisional":
                    stats.ttft_s = time.perf_counter() - started
                yield event
            stats.total_s = time.perf_counter() - started
            if drafter is not None:
                stats.draft_s, stats.prefill_s = drafter.seconds, drafter.prefill_seconds
            if session is not None:
                stats.wait_s = session.seconds
                context.pair.record_outage(session.loss_wait_s)
                self._byte_counts = session.byte_counts()

    def stream(self) -> Generator[StreamEvent, None, Result]:
        """Run the decoding loop and yield its events with their texts. The return value is the result."""
        transcript = IncrementalDetokenizer(self._context.decode)
        with closing(self.events()) as events:  # not left to the garbage collector, which is late in Python 3.12
            for event in events:
                if event.index < len(transcript.ids) and event.kind == "revised":
                    transcript.truncate(event.index)
                if event.index == len(transcript.ids):
                    transcript.append(event.token)
                kind, text = event.kind, transcript.pieces[event.index]
                logprob = None if event.logprobs is None else self._context.describe_logprobs(event.logprobs)
                yield StreamEvent(
                    kind, event.index, event.token, text, event.source, event.signals, event.settled, logprob
                )
        return self.result()

    def result(self) -> Result:
        """Return the result. The decoding loop must have ended."""
        context, decoder, stats = self._context, self._decoder, self._decoder.stats
        action = decoder.next()
        sources = list(decoder.sequence.sources)
        ties = sorted(index for index in decoder.near_ties if index < len(sources))
        stats.count_sources(sources)
        stats.near_ties = len(ties)
        stats.bytes_up, stats.bytes_down = self._byte_counts.up.total(), self._byte_counts.down.total()
        stats.media_bytes_up = self._byte_counts.up["media"]
        ids = decoder.sequence.generated
        with context.lock:
            report = context.guarantees.report(
                stats, self._lossy(), context.options, self._handshake.models, self._settings, decoder.audit_trail()
            )
        return Result(
            text=context.decode(ids) if context.tokenizer is not None else None,
            token_ids=ids,
            finish_reason=action.reason,  # type: ignore[union-attr]
            guarantee=report.guarantee,
            prompt_tokens=len(self.prompt.ids),
            stats=stats,
            sources=sources,
            near_ties=ties,
            warnings=[*self._all_warnings(), *report.warnings],
            risk=report.risk,
            ledger=self._byte_counts.to_json(),
            pieces=context.split_text(ids),
            logprobs=[context.describe_logprobs(each) for each in decoder.logprobs()],
        )

    # Opening ------------------------------------------------------------------------------------------------

    def _plan(self, rules: StopRules) -> Plan:
        options, gate, prompt = self._context.options, self._context.options.gate, self.prompt
        if isinstance(gate, Calibrated):
            recording = b"" if prompt.audio is None else prompt.audio.tobytes()
            gate = gate.with_audit_key(self._settings.seed, prompt.ids, recording)
        return Plan(
            rules,
            gate,
            options.acceptance_rule,
            self._context.draft_length,
            self._context.verifier is not None,
            options.on_loop,
            options.scope,
            options.parsed_loop_rule,
        )

    def open_drafter(self) -> Proposer | None:
        """Return the drafter on a new sequence, or None in cloud-only decoding."""
        context, handshake, options = self._context, self._handshake, self._context.options
        if context.draft_length is None:
            return None
        needs_q = options.acceptance_rule.needs_q and context.verifier is not None
        policy = Policy.build(
            self._settings,
            handshake.target.eos_ids,
            handshake.draft_vocabulary,
            len(self.prompt.ids),
            self._grammar,
        )
        lookup = None if context.lookup is None else self._open_lookup(context.lookup, policy, needs_q=needs_q)
        if context.draft is None:
            return lookup
        per_token = not self._decoder.plan.is_block_invariant
        model: Proposer
        if context.codecs is None:
            model = self._open_model(context.draft, self.prompt, policy, needs_q=needs_q)
        else:
            model = self._open_translated(context.draft, context.codecs, policy, per_token=per_token)
        if lookup is None:
            return model
        controller = context.draft_length.controller
        prefers_lookup = context.acceptance.prefers_lookup if controller is None else controller.prefers_lookup
        return CombinedDrafter(model, lookup, prefers_lookup, per_token=per_token)

    def _open_model(self, engine: Engine, prompt: Prompt, policy: Policy, *, needs_q: bool) -> Drafter:
        context = self._context
        needs_signals = context.with_signals or context.options.gate.needs_signals
        assert context.draft_length is not None  # set whenever there is a drafter
        return Drafter(
            open_sequence(engine, prompt, "drafter"),
            policy,
            needs_signals=needs_signals or context.draft_length.needs_signals,
            needs_q=needs_q,
            cancellation=self._cancellation,
        )

    def _open_translated(
        self, engine: Engine, codecs: tuple[TextCodec, TextCodec], policy: Policy, *, per_token: bool
    ) -> TranslatedDrafter:
        settings = edge_settings(self._settings, greedy=self._context.options.gate.exact)

        def open_model(ids: list[int]) -> Drafter:
            edge_policy = Policy.build(settings, engine.eos_ids, engine.vocab_size, len(ids))
            prompt = Prompt(tuple(ids), cache_salt=self.prompt.cache_salt)
            return self._open_model(engine, prompt, edge_policy, needs_q=False)

        return TranslatedDrafter(
            codecs,
            self.prompt.ids,
            open_model,
            policy,
            edge_eos_ids=engine.eos_ids,
            target_eos_ids=self._handshake.target.eos_ids,
            max_length=engine.max_length,
            per_token=per_token,
        )

    def _open_lookup(self, lookup: PromptLookup, policy: Policy, *, needs_q: bool) -> LookupDrafter:
        index, placeholder = NgramIndex(lookup.min_ngram, lookup.max_ngram), self._handshake.target.placeholder
        return LookupDrafter(index, policy, placeholder=placeholder, needs_q=needs_q)

    def _open_session(self) -> VerifierSession | None:
        context, options = self._context, self._context.options
        if context.verifier is None or not self._handshake.is_complete:
            return None
        prompt = self._redacted_prompt()
        vocabulary, hides_audio = self._handshake.target_vocabulary, context.hides_audio(self.prompt)
        fingerprint = self._handshake.target.fingerprint
        params = SessionParams(self._settings, options.accept, vocabulary, hides_audio, self._grammar, fingerprint)
        return VerifierSession(
            context.verifier, lambda verifier: verifier.open(prompt, params), options.on_cloud_loss, self._cancellation
        )

    def _redacted_prompt(self) -> Prompt:
        """Return the part of the prompt that `privacy` lets leave the edge."""
        prompt, privacy = self.prompt, self._context.options.privacy
        if prompt.audio is None or privacy == "audio":
            return prompt
        if privacy == "tokens":
            return replace(prompt, audio=None)
        encoder = self._context.audio_encoder
        assert encoder is not None  # it encoded the recording
        return replace(prompt, audio=None, features=encoder.features(prompt.audio))

    def _run_driver(self, drafter: Proposer | None, session: VerifierSession | None) -> Iterator[Event]:
        context = self._context
        acceptance = None if context.lookup is None else context.acceptance
        in_bursts = context.codecs is not None
        observer = RoundObserver(self._decoder, lock=context.lock, acceptance=acceptance, in_bursts=in_bursts)
        if drafter is not None and session is not None and self._context.options.driver == "pipelined":
            return pipelined(self._decoder, drafter, session, observer)
        return sequential(self._decoder, drafter, None if session is None else session.verify, observer)

    # Reporting ----------------------------------------------------------------------------------------------

    def _lossy(self) -> list[str]:
        """Return the reasons for which verdicts are not lossless, as a calibrated gate's warnings word them."""
        options = self._context.options
        reasons = [] if options.lossless else [f"with accept exact, not {options.accept}"]
        if self._context.hides_audio(self.prompt):
            reasons.append("for a cloud that gets the recording, not with privacy tokens")
        return reasons

    def _all_warnings(self) -> list[str]:
        stats, warnings = self._decoder.stats, [*self._warnings, *self.prompt.warnings]
        if self.prompt.audio is not None and is_silent(self.prompt.audio):
            warnings.append("the recording is silent: there is no speech to describe")
        if self._context.hides_audio(self.prompt) and stats.cloud_tokens:
            warnings.append(
                "the cloud did not get the recording (privacy tokens): its verdicts are about the text alone"
            )
        if stats.cloud_lost:
            warnings.append(
                f"the cloud was lost after it had decided {stats.cloud_tokens} tokens: the rest is the edge's own"
            )
        return warnings

    def _decode(self, ids: list[int]) -> str:
        return self._context.decode(ids, skip_special=False)
