"""The Python entry point: `SpeculativeDecoder`, and `local` to give it a verifier in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from typing import Any

from outrider.config import DriverName, GenerationSettings, OnCloudLoss, OnLoop, Privacy, Scope
from outrider.core.acceptance import rule
from outrider.core.actions import Plan
from outrider.core.decoder import Decoder
from outrider.core.detokenizer import detokenizer
from outrider.core.events import Event
from outrider.core.events import StreamEvent as StreamEvent
from outrider.core.gate import Calibrated, Gate
from outrider.core.gate import gate as parse_gate
from outrider.core.lookahead import lookahead
from outrider.core.loops import DEFAULT_LOOP_RULE
from outrider.core.loops import loop_rule as parse_loop_rule
from outrider.core.modes import check_modes, settled_loss
from outrider.core.outcome import Oversight, Result
from outrider.core.policy import Policy
from outrider.core.stopping import StopRules
from outrider.core.text import Transcript
from outrider.edge.cancellation import Cancellation
from outrider.edge.drafter import Drafter
from outrider.edge.drivers import pipelined, sequential
from outrider.edge.lessons import Lessons
from outrider.edge.link import Link, PipelinedVerifier
from outrider.edge.pair import Met, Pair
from outrider.edge.turns import Turns
from outrider.engines.base import Prompt, Reader
from outrider.errors import PromptError, SettingsError
from outrider.prompts.audio import Audio, is_silent
from outrider.prompts.chat import PromptLike, encode
from outrider.verifiers.base import Conditions, Description, Verifier
from outrider.verifiers.local import LocalVerifier
from outrider.wire.ledger import Ledger

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
        loop_rule: the definition of a loop in the output, "period=32,tail=8,extra=4" (see `outrider.core.loops`).
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
    unfinished. On engines that serve several threads (`outrider.gateway.sharing`) it takes any number of them.

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
        k: int | str = 5,
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
        _check_kinds(draft, verifier)
        self.draft, self.verifier, self._reader, self._watch = draft, verifier, reader, watch
        self.gate = parse_gate(gate) if isinstance(gate, str) else gate
        self._oversight, self._lock = Oversight(self.gate), threading.Lock()
        self.accept, self._rule = accept, rule(accept)
        self.k = k
        self.lookahead = lookahead(k) if draft is not None else None
        self.on_loop: OnLoop = on_loop or ("escalate" if verifier is not None else "sample")
        self.loop_rule = parse_loop_rule(loop_rule)
        self.scope: Scope = scope
        self.driver: DriverName = driver
        self.privacy: Privacy = privacy
        sides = {"has_drafter": draft is not None, "has_verifier": verifier is not None}
        remote = isinstance(verifier, PipelinedVerifier)
        check_modes(self.gate, self._rule, scope, on_loop, driver, on_cloud_loss, privacy, **sides, remote=remote)
        self.on_cloud_loss = settled_loss(on_cloud_loss, self.gate, has_drafter=draft is not None)
        self._pair = Pair(draft, verifier, self.on_cloud_loss, reader=reader, lazy=lazy)
        self._turns = Turns(draft, getattr(verifier, "engine", None))

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
        return self._rule.lossless and (self.gate.exact or not self._rule.needs_q)

    def check_hears(self) -> None:
        """Raise PromptError unless recordings can be prompts."""
        encoder = self._encoder
        if isinstance(encoder, _Nameless):
            raise PromptError(IDS_ONLY)
        if encoder.audio is None:
            raise PromptError(f"{encoder.name} takes no audio: give an audio-language model as --edge, or as the draft")

    @property
    def captions_only(self) -> bool:
        """Return whether the checkpoint is for recordings alone (`outrider_tasks` in its config.json)."""
        return bool(getattr(self._encoder, "captions_only", False))

    def check_takes_text(self) -> None:
        """Raise PromptError if the models accept texts but only caption recordings."""
        if self.captions_only:
            raise PromptError(NO_TEXTS.format(self._encoder.name))

    @property
    def audio_seconds(self) -> float:
        """The longest recording that the models accept, in seconds; 0 if they accept none."""
        front = self._encoder.audio
        if front is None:
            return 0.0
        target = self._target.audio_seconds
        return min(front.max_seconds, target) if target else float(front.max_seconds)

    @property
    def tokenizer(self) -> Any:
        """The pair's tokenizer, or None."""
        return self._encoder.tokenizer

    def decode(self, ids: list[int]) -> str:
        """Token ids as text, without special tokens; empty where there is no tokenizer."""
        return _decode(self.tokenizer, ids, visible_only=True)

    def summary(self) -> str:
        """One line that says what was resolved: models, number formats, block length, gate and rule."""
        sides = [f"edge {_place(self.draft)}" if self.draft is not None else "edge none"]
        sides.append(f"cloud {self._cloud_place()}")
        return " · ".join([*sides, f"k {self.k}", f"gate {self.gate}", f"accept {self.accept}", f"loop {self.on_loop}"])

    def _cloud_place(self) -> str:
        if self.verifier is None:
            return "none"
        if isinstance(self.verifier, LocalVerifier):
            return _place(self.verifier.engine)
        name = self._target.name if self._pair.now.whole else "not there"
        return f"{name}, {self.driver}, on loss {self.on_cloud_loss}, privacy {self.privacy}"

    def encode(self, prompt: PromptLike) -> Prompt:
        """The prompt as the models read it."""
        encoder = self._encoder
        if isinstance(encoder, _Nameless) and (isinstance(prompt, str) or not _is_ids(prompt)):
            raise PromptError(IDS_ONLY)
        return encode(encoder, prompt)

    @property
    def _target(self) -> Description:
        return self._pair.now.target

    @property
    def _encoder(self) -> Any:
        if self.draft is not None or self._reader is not None:
            return self.draft if self.draft is not None else self._reader
        return self.verifier.engine if isinstance(self.verifier, LocalVerifier) else _Nameless(self._target)

    def _start(self, prompt: PromptLike, values: dict[str, Any], cancellation: Cancellation | None = None) -> _Run:
        settings = GenerationSettings.build(values)
        met = self._pair.meet(cancellation)
        encoded = self.encode(prompt)
        met.check(encoded, settings)
        rules = self._rules(settings, met)
        if rules.needs_text and self.tokenizer is None:
            raise SettingsError("stop strings and sentences need a tokenizer, and the model came without one")
        instructed = isinstance(prompt, Audio) and prompt.instruction is not None
        misused = self.captions_only and not _is_ids(prompt) and (instructed or not encoded.heard)
        notes = [CAPTIONS_ONLY.format(self._encoder.name)] if misused else []
        return _Run(self, encoded, settings, rules, met, cancellation, notes)

    def _rules(self, settings: GenerationSettings, met: Met) -> StopRules:
        eos = () if settings.ignore_eos else met.target.eos_ids
        return StopRules(settings.max_new_tokens, eos, settings.stop, settings.sentences, settings.min_new_tokens)

    def _plan(self, rules: StopRules, prompt: Prompt, seed: int) -> Plan:
        gate, has_verifier = self.gate, self.verifier is not None
        if isinstance(gate, Calibrated):
            gate = gate.keyed(seed, prompt.ids, b"" if prompt.audio is None else prompt.audio.tobytes())
        return Plan(rules, gate, self._rule, self.lookahead, has_verifier, self.on_loop, self.scope, self.loop_rule)

    def _drafter(
        self, prompt: Prompt, settings: GenerationSettings, met: Met, cancellation: Cancellation | None
    ) -> Drafter | None:
        if self.draft is None or self.lookahead is None:
            return None
        policy = Policy.build(settings, met.target.eos_ids, met.draft_vocabulary, len(prompt.ids))
        needs = {
            "needs_signals": self._watch or self.gate.needs_signals or self.lookahead.needs_signals,
            "needs_q": self._rule.needs_q and self.verifier is not None,
        }
        return Drafter(Reader(self.draft, prompt, "drafter"), policy, **needs, cancellation=cancellation)

    def _link(
        self, prompt: Prompt, settings: GenerationSettings, met: Met, cancellation: Cancellation | None
    ) -> Link | None:
        if self.verifier is None or not met.whole:
            return None
        shared = self._shared(prompt)
        conditions = Conditions(settings, self.accept, met.target_vocabulary, self.withholds(prompt))
        return Link(self.verifier, lambda verifier: verifier.open(shared, conditions), self.on_cloud_loss, cancellation)

    def _shared(self, prompt: Prompt) -> Prompt:
        """The prompt as far as `privacy` lets it leave the edge."""
        if prompt.audio is None or self.privacy == "audio":
            return prompt
        if self.privacy == "tokens":
            return Prompt(prompt.ids)
        return Prompt(prompt.ids, features=self._encoder.audio.features(prompt.audio))

    def learn_with(self, other: SpeculativeDecoder) -> None:
        """Share what is learnt on the way (audits, the pace of k "auto") with a decoder of the same settings."""
        self.lookahead, self._oversight, self._lock = other.lookahead, other._oversight, other._lock

    def withholds(self, prompt: Prompt) -> bool:
        """Whether the verifier sees less of this prompt than the drafter does."""
        return self.verifier is not None and self.privacy == "tokens" and prompt.heard


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and not any(isinstance(part, dict) for part in prompt)


class _Nameless:
    """What stands in for an edge model where there is none, only a cloud across a network: ids in, ids out."""

    tokenizer = None
    audio = None

    def __init__(self, target: Description) -> None:
        self.name, self.vocab_size, self.max_length = target.name, target.vocab_size, target.max_length


class _Run:
    """One generation: decoder, drafter and link, opened together and closed together."""

    def __init__(
        self,
        owner: SpeculativeDecoder,
        prompt: Prompt,
        settings: GenerationSettings,
        rules: StopRules,
        met: Met,
        cancellation: Cancellation | None,
        notes: list[str],
    ) -> None:
        self._notes = notes
        self._owner, self._prompt, self._settings, self._rules = owner, prompt, settings, rules
        self._met, self._cancellation = met, cancellation
        plan = owner._plan(rules, prompt, settings.seed)
        self._decoder = Decoder(prompt.ids, plan, self._decode if rules.needs_text else None)
        self._ledger = Ledger()
        if not met.whole:
            self._decoder.lose_verifier()

    def events(self) -> Generator[Event, None, None]:
        """Run the loop; time it; close what was opened, whatever happens."""
        owner, stats = self._owner, self._decoder.stats
        started = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(owner._turns.generating())
            drafter = owner._drafter(self._prompt, self._settings, self._met, self._cancellation)
            if drafter is not None:
                stack.callback(drafter.close)
            link = owner._link(self._prompt, self._settings, self._met, self._cancellation)
            if link is not None:
                stack.callback(link.close)
            for event in self._drive(drafter, link):
                if not stats.ttft_s and event.kind != "provisional":
                    stats.ttft_s = time.perf_counter() - started
                yield event
            stats.total_s = time.perf_counter() - started
            if drafter is not None:
                stats.draft_s, stats.prefill_s = drafter.seconds, drafter.prefill_seconds
            if link is not None:
                stats.wait_s = link.seconds
                owner._pair.lose(link.lost_after)
                self._ledger = link.ledger()

    def _drive(self, drafter: Drafter | None, link: Link | None) -> Iterator[Event]:
        lessons = Lessons(self._decoder, lock=self._owner._lock)
        if drafter is not None and link is not None and self._owner.driver == "pipelined":
            return pipelined(self._decoder, drafter, link, lessons)
        judge = None if link is None else (link.verify if drafter is not None else link.generate)
        return sequential(self._decoder, drafter, judge, lessons)

    def stream(self) -> Generator[StreamEvent, None, Result]:
        transcript = Transcript(self._owner.decode)
        with closing(self.events()) as events:  # not left to the garbage collector: Python 3.12 takes its time
            for event in events:
                if event.index < len(transcript.ids) and event.kind == "revised":
                    transcript.rewind(event.index)
                if event.index == len(transcript.ids):
                    transcript.push(event.token)
                yield StreamEvent.of(event, transcript.pieces[event.index])
        return self.result()

    def result(self) -> Result:
        decoder, stats = self._decoder, self._decoder.stats
        action = decoder.next()
        sources = list(decoder.sequence.sources)
        ties = sorted(index for index in decoder.near_ties if index < len(sources))
        stats.count_sources(sources)
        stats.near_ties = len(ties)
        stats.bytes_up, stats.bytes_down = self._ledger.up.total(), self._ledger.down.total()
        stats.media_bytes_up = self._ledger.up["media"]
        ids = decoder.sequence.generated
        sides = self._met.sides
        with self._owner._lock:
            judged = self._owner._oversight.judge(
                stats,
                self._lossy(),
                self._owner.k,
                sides,
                self._settings,
                self._owner.scope,
                decoder.trail(),
                self._owner.loop_rule,
            )
        return Result(
            text=self._owner.decode(ids) if self._owner.tokenizer is not None else None,
            token_ids=ids,
            finish_reason=action.reason,  # type: ignore[union-attr]
            guarantee=judged.guarantee,
            prompt_tokens=len(self._prompt.ids),
            stats=stats,
            sources=sources,
            near_ties=ties,
            warnings=[*self._warnings(), *judged.warnings],
            risk=judged.risk,
            ledger=self._ledger.to_json(),
        )

    def _lossy(self) -> list[str]:
        """Return the reasons for which verdicts are not lossless, as a calibrated gate's warnings word them."""
        found = [] if self._owner.lossless else [f"with accept exact, not {self._owner.accept}"]
        if self._owner.withholds(self._prompt):
            found.append("for a cloud that gets the recording, not with privacy tokens")
        return found

    def _warnings(self) -> list[str]:
        found = [*self._notes, *self._prompt.warnings]
        if self._prompt.audio is not None and is_silent(self._prompt.audio):
            found.append("the recording is silent: there is no speech to describe")
        if self._owner.withholds(self._prompt) and self._decoder.stats.cloud_tokens:
            found.append("the cloud did not get the recording (privacy tokens): its verdicts are about the text alone")
        if self._decoder.stats.cloud_lost:
            decided = self._decoder.stats.cloud_tokens
            found.append(f"the cloud was lost after it had decided {decided} tokens: the rest is the edge's own")
        return found

    def _decode(self, ids: list[int]) -> str:
        return _decode(self._owner.tokenizer, ids, visible_only=False)


def _decode(tokenizer: Any, ids: list[int], *, visible_only: bool) -> str:
    if tokenizer is None:
        return ""
    return detokenizer(tokenizer)(ids, visible_only=visible_only)


def _place(engine: Any) -> str:
    """A model's name, number format and device."""
    return f"{engine.name} ({str(engine.dtype).removeprefix('torch.')}, {engine.device})"


def _check_kinds(draft: Any, verifier: Any) -> None:
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
