"""The Python entry point: `SpeculativeDecoder`, and `local` to give it a verifier in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from typing import Any

from outrider.config import DEFAULT_K, DriverName, GenerationSettings, OnCloudLoss, OnLoop, Privacy, Scope
from outrider.decoding.actions import Plan
from outrider.decoding.decoder import Decoder
from outrider.decoding.detokenizer import get_detokenizer
from outrider.decoding.draft_length import parse_draft_length
from outrider.decoding.events import Event
from outrider.decoding.events import StreamEvent as StreamEvent
from outrider.decoding.gate import Calibrated, Gate
from outrider.decoding.incremental_text import IncrementalDetokenizer
from outrider.decoding.loop_detection import DEFAULT_LOOP_RULE
from outrider.decoding.options import DecodingOptions
from outrider.decoding.result import GuaranteeTracker, Result
from outrider.decoding.stopping import StopRules
from outrider.edge.cancellation import Cancellation
from outrider.edge.drafter import Drafter
from outrider.edge.drivers import pipelined, sequential
from outrider.edge.model_pair import Handshake, ModelPair
from outrider.edge.round_observer import RoundObserver
from outrider.edge.thread_guard import ThreadGuard
from outrider.edge.verifier_session import PipelinedVerifier, VerifierSession
from outrider.engines.base import CachedSequence, Prompt
from outrider.errors import PromptError, SettingsError
from outrider.prompts.audio import Audio, is_silent
from outrider.prompts.chat import PromptLike, encode
from outrider.sampling.policy import Policy
from outrider.transport.byte_counts import ByteCounts
from outrider.verifiers.base import ModelInfo, SessionParams, Verifier
from outrider.verifiers.local import LocalVerifier

IDS_ONLY = (
    "without a drafter, a cloud across a network takes token ids (--prompt-ids): texts and recordings need an edge "
    "model to prepare them"
)

CAPTIONS_ONLY = (
    "{} only writes captions of recordings: its answer to a text or an instruction is meaningless, whatever the "
    "guarantee"
)
NO_TEXTS = (
    "{} only writes captions of recordings: caption a recording, or give text models as --edge and --cloud (token ids, "
    "as --prompt-ids, are accepted)"
)


class SpeculativeDecoder:
    """Drafts with one model, verifies with another.

    Args:
        draft: the edge engine; None leaves everything to the verifier (cloud-only).
        verifier: judges the drafts; None leaves everything to the edge (edge-only).
        gate: which blocks are verified ("always": the output is exact); see `outrider.gate`.
        k: tokens per block, 1 to 64, or "auto" for an adaptive draft length.
        accept: the acceptance rule, "exact" unless told otherwise.
        scope: the treatment of skipped tokens that the verifier later disagrees with: "block" leaves and counts them,
        "repair" rolls back to the first.
        loop_rule: the definition of a loop in the output, "period=32,tail=8,extra=4"
            (see `outrider.decoding.loop_detection`).
        on_loop: the reaction to a loop in the output: "escalate" the next block (the default with a verifier),
            "sample" one token (the default without), "stop", or "ignore".
        driver: "sequential" waits for each verdict; "pipelined" drafts on meanwhile, with the same output.
        on_cloud_loss: the policy for an unreachable cloud: "fail" with CloudLost (the default for exact gates),
            go on "edge-only" (the default for gates that skip), or "wait".
        privacy: the most that leaves the edge: "tokens" (the verifier then knows less than the drafter, and the
            result says so), "features" (the drafter's features of a recording), or "audio".
        watch: report the drafter's confidence with each event, also without a gate.
        reader: without a drafter, the engine whose tokenizer encodes prompts and decodes texts.
        lazy: connect to the verifier at the first generation, not now.

    A decoder generates for one thread at a time. A second thread gets a StateError while a generation of the first is
    unfinished. On engines that serve several threads (`outrider.gateway.shared_engine`) it takes any number of them.

    Raises:
        SettingsError: settings that contradict each other.
        VocabularyMismatch: the two models do not share a vocabulary.
        CloudLost: the cloud is not there, and on_cloud_loss is "fail".
    """

    def __init__(
        self,
        draft: Any = None,
        verifier: Verifier | None = None,
        *,
        gate: str | Gate = "always",
        k: int | str = DEFAULT_K,
        accept: str = "exact",
        scope: Scope = "block",
        on_loop: OnLoop | None = None,
        loop_rule: str = DEFAULT_LOOP_RULE,
        driver: DriverName = "sequential",
        on_cloud_loss: OnCloudLoss | None = None,
        privacy: Privacy = "audio",
        watch: bool = False,
        reader: Any = None,
        lazy: bool = False,
    ) -> None:
        _check_types(draft, verifier)
        options = DecodingOptions(
            gate=gate,
            k=k,
            accept=accept,
            scope=scope,
            on_loop=on_loop,
            loop_rule=loop_rule,
            driver=driver,
            on_cloud_loss=on_cloud_loss,
            privacy=privacy,
        )
        sides = {"has_drafter": draft is not None, "has_verifier": verifier is not None}
        self.options = options.resolve(**sides, remote=isinstance(verifier, PipelinedVerifier))
        self.draft, self.verifier, self._reader, self._watch = draft, verifier, reader, watch
        self.draft_length = parse_draft_length(k) if draft is not None else None
        self._guarantees, self._lock = GuaranteeTracker(self.options.gate), threading.Lock()
        self._pair = ModelPair(draft, verifier, self.options.on_cloud_loss, reader=reader, lazy=lazy)
        self._thread_guard = ThreadGuard(draft, getattr(verifier, "engine", None))

    # Generating ---------------------------------------------------------------------------------------------

    def generate(self, prompt: PromptLike, **settings: Any) -> Result:
        """Generate to the end.

        Args:
            prompt: text, a list of token ids, chat messages, or `outrider.Audio`.
            settings: the fields of `GenerationSettings` by name.

        Raises:
            InputError: a setting, prompt or recording that cannot be used; nothing was computed.
            StateError: another thread's generation is unfinished, and the engines serve one thread at a time.
        """
        run = self._start(prompt, settings)
        for _ in run.events():
            pass
        return run.result()

    def stream(
        self, prompt: PromptLike, *, cancellation: Cancellation | None = None, **settings: Any
    ) -> Generator[StreamEvent, None, Result]:
        """Generate, with an event for each change of a token. The `Result` is the generator's return value.

        Raises at once, as `generate` does. The texts of the tokens that stay make up the result's.
        cancellation: ends it from another thread, with `concurrent.futures.CancelledError` in this one.
        """
        return self._start(prompt, settings, cancellation).stream()

    @property
    def lossless(self) -> bool:
        """Whether an output that verdicts decided throughout is the target's own.

        A residual verdict keeps the target's distribution only if what is verified was not chosen by a gate.
        """
        rule = self.options.acceptance_rule
        return rule.lossless and (self.options.gate.exact or not rule.needs_q)

    def check_audio_support(self) -> None:
        """Raise PromptError unless recordings can be prompts."""
        encoder = self._encoder
        if isinstance(encoder, _IdsOnly):
            raise PromptError(IDS_ONLY)
        if encoder.audio is None:
            raise PromptError(f"{encoder.name} takes no audio: give an audio-language model as --edge, or as the draft")

    @property
    def captions_only(self) -> bool:
        """Return whether the checkpoint is for recordings alone (`outrider_tasks` in its config.json)."""
        return bool(getattr(self._encoder, "captions_only", False))

    def check_accepts_text(self) -> None:
        """Raise PromptError if the models accept texts but only caption recordings."""
        if self.captions_only:
            raise PromptError(NO_TEXTS.format(self._encoder.name))

    @property
    def audio_seconds(self) -> float:
        """The longest recording that the models accept, in seconds; 0 if they accept none."""
        audio_encoder = self._encoder.audio
        if audio_encoder is None:
            return 0.0
        target = self._target.audio_seconds
        return min(audio_encoder.max_seconds, target) if target else float(audio_encoder.max_seconds)

    @property
    def tokenizer(self) -> Any:
        """The pair's tokenizer, or None."""
        return self._encoder.tokenizer

    def decode(self, ids: list[int]) -> str:
        """Token ids as text, without special tokens; empty where there is no tokenizer."""
        return _decode(self.tokenizer, ids, skip_special=True)

    def summary(self) -> str:
        """One line that says what was resolved: models, number formats, block length, gate and rule."""
        sides = [f"edge {_describe_engine(self.draft)}" if self.draft is not None else "edge none"]
        sides.append(f"cloud {self._describe_cloud()}")
        k, gate, accept, on_loop = self.options.k, self.options.gate, self.options.accept, self.options.on_loop
        return " · ".join([*sides, f"k {k}", f"gate {gate}", f"accept {accept}", f"loop {on_loop}"])

    def _describe_cloud(self) -> str:
        if self.verifier is None:
            return "none"
        if isinstance(self.verifier, LocalVerifier):
            return _describe_engine(self.verifier.engine)
        name = self._target.name if self._pair.state.is_complete else "not there"
        options = self.options
        return f"{name}, {options.driver}, on loss {options.on_cloud_loss}, privacy {options.privacy}"

    def encode(self, prompt: PromptLike) -> Prompt:
        """The prompt as the models read it."""
        encoder = self._encoder
        if isinstance(encoder, _IdsOnly) and (isinstance(prompt, str) or not _is_ids(prompt)):
            raise PromptError(IDS_ONLY)
        return encode(encoder, prompt)

    @property
    def _target(self) -> ModelInfo:
        return self._pair.state.target

    @property
    def _encoder(self) -> Any:
        if self.draft is not None or self._reader is not None:
            return self.draft if self.draft is not None else self._reader
        return self.verifier.engine if isinstance(self.verifier, LocalVerifier) else _IdsOnly(self._target)

    def _start(
        self, prompt: PromptLike, values: dict[str, Any], cancellation: Cancellation | None = None
    ) -> _Generation:
        settings = GenerationSettings.build(values)
        handshake = self._pair.connect(cancellation)
        encoded = self.encode(prompt)
        handshake.check(encoded, settings)
        rules = self._rules(settings, handshake)
        if rules.needs_text and self.tokenizer is None:
            raise SettingsError("stop strings and sentences need a tokenizer, and the model came without one")
        has_instruction = isinstance(prompt, Audio) and prompt.instruction is not None
        is_misused = self.captions_only and not _is_ids(prompt) and (has_instruction or not encoded.has_audio)
        notes = [CAPTIONS_ONLY.format(self._encoder.name)] if is_misused else []
        return _Generation(self, encoded, settings, rules, handshake, cancellation, notes)

    def _rules(self, settings: GenerationSettings, handshake: Handshake) -> StopRules:
        eos = () if settings.ignore_eos else handshake.target.eos_ids
        return StopRules(settings.max_new_tokens, eos, settings.stop, settings.sentences, settings.min_new_tokens)

    def _plan(self, rules: StopRules, prompt: Prompt, seed: int) -> Plan:
        options, gate, has_verifier = self.options, self.options.gate, self.verifier is not None
        if isinstance(gate, Calibrated):
            gate = gate.with_audit_key(seed, prompt.ids, b"" if prompt.audio is None else prompt.audio.tobytes())
        rule, loop_rule = options.acceptance_rule, options.parsed_loop_rule
        return Plan(rules, gate, rule, self.draft_length, has_verifier, options.on_loop, options.scope, loop_rule)

    def _drafter(
        self, prompt: Prompt, settings: GenerationSettings, handshake: Handshake, cancellation: Cancellation | None
    ) -> Drafter | None:
        if self.draft is None or self.draft_length is None:
            return None
        policy = Policy.build(settings, handshake.target.eos_ids, handshake.draft_vocabulary, len(prompt.ids))
        needs = {
            "needs_signals": self._watch or self.options.gate.needs_signals or self.draft_length.needs_signals,
            "needs_q": self.options.acceptance_rule.needs_q and self.verifier is not None,
        }
        return Drafter(CachedSequence(self.draft, prompt, "drafter"), policy, **needs, cancellation=cancellation)

    def _open_session(
        self, prompt: Prompt, settings: GenerationSettings, handshake: Handshake, cancellation: Cancellation | None
    ) -> VerifierSession | None:
        if self.verifier is None or not handshake.is_complete:
            return None
        sent_prompt = self._redact_prompt(prompt)
        params = SessionParams(settings, self.options.accept, handshake.target_vocabulary, self.hides_audio(prompt))
        on_loss = self.options.on_cloud_loss
        return VerifierSession(
            self.verifier, lambda verifier: verifier.open(sent_prompt, params), on_loss, cancellation
        )

    def _redact_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt as far as `privacy` lets it leave the edge."""
        if prompt.audio is None or self.options.privacy == "audio":
            return prompt
        if self.options.privacy == "tokens":
            return Prompt(prompt.ids)
        return Prompt(prompt.ids, features=self._encoder.audio.features(prompt.audio))

    def share_state_with(self, other: SpeculativeDecoder) -> None:
        """Share what is learnt on the way (audits, the pace of k "auto") with a decoder of the same settings."""
        self.draft_length, self._guarantees, self._lock = other.draft_length, other._guarantees, other._lock

    def hides_audio(self, prompt: Prompt) -> bool:
        """Whether the verifier sees less of this prompt than the drafter does."""
        return self.verifier is not None and self.options.privacy == "tokens" and prompt.has_audio


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and not any(isinstance(part, dict) for part in prompt)


class _IdsOnly:
    """What stands in for an edge model where there is none, only a cloud across a network: ids in, ids out."""

    tokenizer = None
    audio = None

    def __init__(self, target: ModelInfo) -> None:
        self.name, self.vocab_size, self.max_length = target.name, target.vocab_size, target.max_length


class _Generation:
    """One generation: decoder, drafter and session, opened together and closed together."""

    def __init__(
        self,
        owner: SpeculativeDecoder,
        prompt: Prompt,
        settings: GenerationSettings,
        rules: StopRules,
        handshake: Handshake,
        cancellation: Cancellation | None,
        notes: list[str],
    ) -> None:
        self._notes = notes
        self._owner, self._prompt, self._settings, self._rules = owner, prompt, settings, rules
        self._handshake, self._cancellation = handshake, cancellation
        plan = owner._plan(rules, prompt, settings.seed)
        self._decoder = Decoder(prompt.ids, plan, self._decode if rules.needs_text else None)
        self._byte_counts = ByteCounts()
        if not handshake.is_complete:
            self._decoder.on_verifier_lost()

    def events(self) -> Generator[Event, None, None]:
        """Run the loop; time it; close what was opened, whatever happens."""
        owner, stats = self._owner, self._decoder.stats
        started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(owner._thread_guard.generation())
            drafter = owner._drafter(self._prompt, self._settings, self._handshake, self._cancellation)
            if drafter is not None:
                stack.callback(drafter.close)
            session = owner._open_session(self._prompt, self._settings, self._handshake, self._cancellation)
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
                owner._pair.record_outage(session.loss_wait_s)
                self._byte_counts = session.byte_counts()

    def _run_driver(self, drafter: Drafter | None, session: VerifierSession | None) -> Iterator[Event]:
        observer = RoundObserver(self._decoder, lock=self._owner._lock)
        if drafter is not None and session is not None and self._owner.options.driver == "pipelined":
            return pipelined(self._decoder, drafter, session, observer)
        verify = None if session is None else (session.verify if drafter is not None else session.generate)
        return sequential(self._decoder, drafter, verify, observer)

    def stream(self) -> Generator[StreamEvent, None, Result]:
        transcript = IncrementalDetokenizer(self._owner.decode)
        with closing(self.events()) as events:  # not left to the garbage collector: Python 3.12 takes its time
            for event in events:
                if event.index < len(transcript.ids) and event.kind == "revised":
                    transcript.truncate(event.index)
                if event.index == len(transcript.ids):
                    transcript.append(event.token)
                yield StreamEvent.of(event, transcript.pieces[event.index])
        return self.result()

    def result(self) -> Result:
        decoder, stats = self._decoder, self._decoder.stats
        action = decoder.next()
        sources = list(decoder.sequence.sources)
        ties = sorted(index for index in decoder.near_ties if index < len(sources))
        stats.count_sources(sources)
        stats.near_ties = len(ties)
        stats.bytes_up, stats.bytes_down = self._byte_counts.up.total(), self._byte_counts.down.total()
        stats.media_bytes_up = self._byte_counts.up["media"]
        ids = decoder.sequence.generated
        sides = self._handshake.models
        with self._owner._lock:
            report = self._owner._guarantees.report(
                stats, self._lossy(), self._owner.options, sides, self._settings, decoder.audit_trail()
            )
        return Result(
            text=self._owner.decode(ids) if self._owner.tokenizer is not None else None,
            token_ids=ids,
            finish_reason=action.reason,  # type: ignore[union-attr]
            guarantee=report.guarantee,
            prompt_tokens=len(self._prompt.ids),
            stats=stats,
            sources=sources,
            near_ties=ties,
            warnings=[*self._warnings(), *report.warnings],
            risk=report.risk,
            ledger=self._byte_counts.to_json(),
        )

    def _lossy(self) -> list[str]:
        """Return the reasons for which verdicts are not lossless, as a calibrated gate's warnings word them."""
        reasons = [] if self._owner.lossless else [f"with accept exact, not {self._owner.options.accept}"]
        if self._owner.hides_audio(self._prompt):
            reasons.append("for a cloud that gets the recording, not with privacy tokens")
        return reasons

    def _warnings(self) -> list[str]:
        reasons = [*self._notes, *self._prompt.warnings]
        if self._prompt.audio is not None and is_silent(self._prompt.audio):
            reasons.append("the recording is silent: there is no speech to describe")
        if self._owner.hides_audio(self._prompt) and self._decoder.stats.cloud_tokens:
            reasons.append(
                "the cloud did not get the recording (privacy tokens): its verdicts are about the text alone"
            )
        if self._decoder.stats.cloud_lost:
            decided = self._decoder.stats.cloud_tokens
            reasons.append(f"the cloud was lost after it had decided {decided} tokens: the rest is the edge's own")
        return reasons

    def _decode(self, ids: list[int]) -> str:
        return _decode(self._owner.tokenizer, ids, skip_special=False)


def _decode(tokenizer: Any, ids: list[int], *, skip_special: bool) -> str:
    if tokenizer is None:
        return ""
    return get_detokenizer(tokenizer)(ids, skip_special=skip_special)


def _describe_engine(engine: Any) -> str:
    """A model's name, number format and device."""
    return f"{engine.name} ({str(engine.dtype).removeprefix('torch.')}, {engine.device})"


def _check_types(draft: Any, verifier: Any) -> None:
    if draft is not None and not hasattr(draft, "forward_many"):
        raise SettingsError(f"draft is an engine, as from load_engine(…), not {type(draft).__name__}")
    if verifier is not None and not hasattr(verifier, "describe"):
        raise SettingsError(f"verifier is one from local(…) or connect(…), not {type(verifier).__name__}")


def local(engine: Any) -> LocalVerifier:
    """A verifier in this process.

    Raises:
        SettingsError: `engine` is no engine.
    """
    if not hasattr(engine, "forward_many"):
        raise SettingsError(f"local() takes an engine, as from load_engine(…), not {type(engine).__name__}")
    return LocalVerifier(engine)
