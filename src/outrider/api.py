"""The Python entry point: `SpeculativeDecoder`, and `local`, which makes a verifier in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import cast, overload

from outrider.aio import AsyncStream as AsyncStream
from outrider.aio import run_in_executor
from outrider.batch import Batch, as_batch, check_results, run_batch, share_engines
from outrider.chat import Conversation as Conversation
from outrider.config import DEFAULT_K, DriverName, OnCloudLoss, OnLoop, Privacy, Scope, check_type
from outrider.decoding.acceptance_model import AcceptanceModel
from outrider.decoding.detokenizer import Tokenizer
from outrider.decoding.draft_length import parse_draft_length
from outrider.decoding.draft_source import DraftSource
from outrider.decoding.events import StreamEvent as StreamEvent
from outrider.decoding.gate import Gate
from outrider.decoding.loop_detection import DEFAULT_LOOP_RULE
from outrider.decoding.options import DecodingOptions
from outrider.decoding.result import GuaranteeTracker, Result
from outrider.edge.arguments import build_settings, check_arguments, describe_engine, read_ids
from outrider.edge.cancellation import Cancellation
from outrider.edge.generation import Generation, GenerationContext
from outrider.edge.model_pair import ModelPair
from outrider.edge.prompt_reader import PromptReader, is_ids
from outrider.edge.thread_guard import ThreadGuard
from outrider.edge.verifier_session import PipelinedVerifier
from outrider.engines.base import Engine, Prompt
from outrider.engines.prompt_lookup import PromptLookup
from outrider.errors import PromptError, SettingsError, quote
from outrider.numeric import as_integer, is_integer
from outrider.prompts.audio import Audio
from outrider.prompts.chat import PromptLike
from outrider.prompts.chat_template import Messages
from outrider.verifiers.base import ModelInfo, Verifier
from outrider.verifiers.local import LocalVerifier

CAPTIONS_ONLY = (
    "{} only writes captions of recordings: its answer to a text or an instruction is meaningless, whatever the "
    "guarantee"
)


class SpeculativeDecoder:
    """Speculative decoding: a small model drafts tokens, a large one verifies them.

    Args:
        draft: the edge engine, or `outrider.prompt_lookup()`, which drafts without a model. None leaves all tokens to
            the verifier (cloud-only).
        lookup: with an edge engine as `draft`, an `outrider.prompt_lookup()`, which drafts where its tokens are
            accepted at least as often as the engine's.
        verifier: verifies the drafts. None leaves all tokens to the drafter (edge-only).
        gate: the blocks that are verified ("always": the output is exact). See `outrider.gate`.
        k: tokens per block, 1 to 64, or "auto" for an adaptive draft length, 0 while the target alone is faster.
        accept: the acceptance rule: "exact", "residual" (rejection sampling), "rank:N", "margin:D" or "typical:E".
        scope: the treatment of skipped tokens that the verifier later disagrees with: "block" leaves and counts them,
            "repair" rolls back to the first.
        loop_rule: the definition of a loop in the output, "period=32,tail=8,extra=4"
            (see `outrider.decoding.loop_detection`).
        on_loop: the reaction to a loop in the output: "escalate" the next block (the default with a verifier),
            "sample" one token (the default without), "stop", or "ignore".
        driver: "sequential" waits for each verdict. "pipelined" drafts during the wait, with the same output.
        on_cloud_loss: the policy for an unreachable cloud: "fail" with CloudLost (the default for exact gates),
            go on "edge-only" (the default for gates that skip), or "wait".
        privacy: the most that leaves the edge: "tokens" (the verifier then has less input than the drafter, and
            the result's guarantee accounts for it), "features" (the drafter's features of a recording), or "audio".
        watch: report the drafter's confidence with each event, also without a gate.
        reader: without a draft model, the engine or prompt lookup whose tokenizer encodes prompts and decodes texts.
            With a draft model of another tokenizer than the target's, `outrider.prompt_lookup(DIRECTORY)` with the
            target's: drafts are then translated through their text, and verdicts decide on the target's ids. A verifier
            in this process needs none, and an `outrider cloud` sends its tokenizer.
        lazy: connect to the verifier at the first generation, not at construction.
        slots: generations of batches and asyncio tasks that run at the same time. Each holds a KV cache.

    Batches and asyncio tasks run in threads of the decoder, and share forward passes. `generate` of one prompt and
    `stream` are for one thread at a time: another thread, a batch or a task gets a StateError while such a generation
    is unfinished. On engines that serve several threads (`outrider.engines.shared_engine`) any number can run.

    Raises:
        SettingsError: settings contradict each other.
        VocabularyMismatch: the two models have different tokenizers, and the target's is not known here.
        CloudLost: the cloud cannot be reached, and on_cloud_loss is "fail".
    """

    def __init__(
        self,
        draft: Engine | PromptLookup | None = None,
        verifier: Verifier | None = None,
        *,
        lookup: PromptLookup | None = None,
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
        reader: Engine | PromptLookup | None = None,
        lazy: bool = False,
        slots: int = 8,
    ) -> None:
        check_arguments(draft, verifier, lookup, reader, watch=watch, lazy=lazy)
        k, slots = as_integer(k), as_integer(slots)
        if not is_integer(slots) or slots < 1:
            raise SettingsError(f"slots is a whole number, 1 or more, not {quote(slots)}")
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
        model, lookup = (None, draft) if isinstance(draft, PromptLookup) else (draft, lookup)
        self.options = options.resolve(
            has_drafter=model is not None,
            has_verifier=verifier is not None,
            remote=isinstance(verifier, PipelinedVerifier),
            uses_lookup=lookup is not None,
        )
        self._model, self.draft, self.lookup, self.verifier, self._watch = model, draft, lookup, verifier, watch
        self._reader = PromptReader(model, lookup, verifier, reader, lambda: self._target)
        self._reader.check_accept(accept, needs_q=self.options.acceptance_rule.needs_q)
        sides = {DraftSource.MODEL: model, DraftSource.LOOKUP: lookup}
        sources = [source for source, side in sides.items() if side is not None]
        self.draft_length = parse_draft_length(k, sources) if sources else None
        controller = None if self.draft_length is None else self.draft_length.controller
        self._acceptance = AcceptanceModel() if controller is None else controller.acceptance
        self._guarantees, self._lock = GuaranteeTracker(self.options.gate), threading.Lock()
        self._pair = ModelPair(
            model,
            verifier,
            self.options.on_cloud_loss,
            reader=self._reader.side,
            translates=self._reader.codecs is not None,
            find_reader=self._find_reader,
            lazy=lazy,
        )
        self._thread_guard = ThreadGuard(model, getattr(verifier, "engine", None))
        self._shared_guard, self._uses_shared = self._thread_guard.group(), False
        self._executor = ThreadPoolExecutor(slots, "outrider-generation")  # starts no thread before it is used

    def _find_reader(self, target: ModelInfo) -> PromptLookup | None:
        """Return the tokenizer that the cloud sends if its vocabulary differs from the drafter's, or None."""
        reader = self._reader.adopt(target)
        self._reader.check_accept(self.options.accept, needs_q=self.options.acceptance_rule.needs_q)
        return reader

    # Generating ---------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: PromptLike, *, cache_salt: str = "", **settings: object) -> Result: ...

    @overload
    def generate(self, prompt: Batch, *, cache_salt: str = "", **settings: object) -> list[Result]: ...

    def generate(
        self, prompt: PromptLike | Batch, *, cache_salt: str = "", **settings: object
    ) -> Result | list[Result]:
        """Generate to the end and return the result. For a batch, return the results in the order of the prompts.

        Args:
            prompt: text, a list of token ids, chat messages, or `outrider.Audio`. A list of such prompts is a batch.
                A list of integers is one prompt of token ids, and a list of dictionaries is one chat.
                Edge and cloud keep the KV caches of earlier generations, so that only what follows the longest common
                prefix is sent and computed.
            cache_salt: only prompts with equal ones share KV caches, so that no user's times depend on another's.
            settings: the fields of `GenerationSettings` by name, for all prompts of a batch.

        Raises:
            InputError: a setting, prompt or recording cannot be used. Nothing was computed.
            StateError: another thread's generation is unfinished, and the engines serve one thread at a time.
            BatchError: a prompt of a batch failed. Raised after the others have ended, with their results in `results`.
        """
        prompts = as_batch(prompt)
        if prompts is None:
            return self._generate(cast(PromptLike, prompt), settings, cache_salt)
        build_settings(settings, cache_salt)
        with self._shared_guard.generation():
            self._pair.connect()
            return run_batch(
                self._executor, lambda each, cancel: self._generate(each, settings, cache_salt, cancel, True), prompts
            )

    def stream(
        self, prompt: PromptLike, *, cancellation: Cancellation | None = None, cache_salt: str = "", **settings: object
    ) -> Generator[StreamEvent, None, Result]:
        """Generate and yield an event for each change of a token. The generator's return value is the `Result`.

        Raise at once, as `generate` does. The texts of the tokens that stay make up the result's text.
        cancellation: ends the generation from another thread. This one gets `concurrent.futures.CancelledError`.
        """
        check_type("cancellation", cancellation, (Cancellation, NoneType), "a Cancellation")
        return self._start(prompt, settings, cancellation, cache_salt=cache_salt).stream()

    @overload
    async def agenerate(self, prompt: PromptLike, *, cache_salt: str = "", **settings: object) -> Result: ...

    @overload
    async def agenerate(self, prompt: Batch, *, cache_salt: str = "", **settings: object) -> list[Result]: ...

    async def agenerate(
        self, prompt: PromptLike | Batch, *, cache_salt: str = "", **settings: object
    ) -> Result | list[Result]:
        """Do as `generate`, in asyncio, for any number of tasks. `slots` generations run at the same time.

        The cancellation of the awaiting task cancels the generation before its next forward pass. CancelledError is
        raised when its slot and its session are free.
        """
        build_settings(settings, cache_salt)
        prompts = as_batch(prompt)
        if prompts is None:
            work = partial(self._generate, cast(PromptLike, prompt), settings, cache_salt, is_shared=True)
            return await run_in_executor(self._executor, work)
        with self._shared_guard.generation():
            tasks = [self.agenerate(each, cache_salt=cache_salt, **settings) for each in prompts]
            return check_results(await asyncio.gather(*tasks, return_exceptions=True))

    def astream(self, prompt: PromptLike, *, cache_salt: str = "", **settings: object) -> AsyncStream:
        """Return the events of a generation for `async for`, and then its result. See `outrider.AsyncStream`.

        Raises (here: SettingsError, in the iteration: all others): as `generate`.
        """
        build_settings(settings, cache_salt)
        start = partial(self._start, prompt, settings, is_shared=True, cache_salt=cache_salt)
        return AsyncStream(self._executor, lambda cancel: start(cancel).stream())

    def chat(
        self, system: str | None = None, *, messages: Messages = (), cache_salt: str = "", **settings: object
    ) -> Conversation:
        """Return a conversation, which keeps its history. See `outrider.Conversation`.

        system: the system prompt. messages: an earlier history. cache_salt, settings: as for `generate`, for all turns.
        """
        build_settings(settings, cache_salt)
        return Conversation(self, system, messages, cache_salt=cache_salt, **settings)

    def _generate(
        self,
        prompt: PromptLike,
        settings: dict[str, object],
        cache_salt: str,
        cancellation: Cancellation | None = None,
        is_shared: bool = False,
    ) -> Result:
        generation = self._start(prompt, settings, cancellation, is_shared, cache_salt=cache_salt)
        for _ in generation.events():
            pass
        return generation.result()

    def _start(
        self,
        prompt: PromptLike,
        values: dict[str, object],
        cancellation: Cancellation | None = None,
        is_shared: bool = False,
        *,
        cache_salt: str = "",
    ) -> Generation:
        """Return a generation. is_shared: others may run in other threads at the same time."""
        if as_batch(prompt) is not None:
            raise PromptError("a batch of prompts has no stream: use generate, or a stream for each prompt")
        settings = build_settings(values, cache_salt)
        self._uses_shared |= is_shared  # from then on always, since the KV caches for later turns are there
        handshake = self._pair.connect(cancellation)
        encoded = replace(self.encode(prompt), cache_salt=cache_salt)
        handshake.check(encoded, settings)
        has_instruction = isinstance(prompt, Audio) and prompt.instruction is not None
        is_misused = self.captions_only and not is_ids(prompt) and (has_instruction or not encoded.has_audio)
        warnings = [CAPTIONS_ONLY.format(self._reader.encoder.name)] if is_misused else []
        return Generation(self._context(is_shared), encoded, settings, handshake, cancellation, warnings)

    def _context(self, is_shared: bool = False) -> GenerationContext:
        draft, verifier = self._model, self.verifier
        if self._uses_shared:
            draft, verifier = share_engines(draft, verifier)
        return GenerationContext(
            self.options,
            draft,
            self.lookup,
            verifier,
            self.draft_length,
            self._acceptance,
            self._watch,
            self._pair,
            self._shared_guard if is_shared else self._thread_guard,
            self._guarantees,
            self._lock,
            self.tokenizer,
            self._reader.audio_encoder,
            self._reader.codecs,
        )

    def share_state_with(self, other: SpeculativeDecoder) -> None:
        """Share the audits, the learnt draft length and acceptance rates with a decoder of the same settings."""
        check_type("other", other, SpeculativeDecoder, "a SpeculativeDecoder")
        self._acceptance = other._acceptance
        self.draft_length, self._guarantees, self._lock = other.draft_length, other._guarantees, other._lock

    # Prompts and texts --------------------------------------------------------------------------------------

    def encode(self, prompt: PromptLike) -> Prompt:
        """Return the prompt as the models read it."""
        return self._reader.encode(prompt)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids without special tokens, empty if there is no tokenizer."""
        return self._context().decode(read_ids(ids))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer, or None."""
        return self._reader.encoder.tokenizer

    @property
    def audio_seconds(self) -> float:
        """The longest recording that the models accept, in seconds, or 0 if they accept none."""
        return self._reader.audio_seconds

    def check_audio_support(self) -> None:
        """Raise PromptError unless recordings can be prompts."""
        self._reader.check_audio_support()

    @property
    def captions_only(self) -> bool:
        """True if the checkpoint is for recordings alone (`outrider_tasks` in its config.json)."""
        return self._reader.captions_only

    def check_accepts_text(self) -> None:
        """Raise PromptError if the models accept texts but only caption recordings."""
        self._reader.check_accepts_text()

    # Descriptions -------------------------------------------------------------------------------------------

    @property
    def lossless(self) -> bool:
        """True if an output that verdicts decide throughout has the target's distribution."""
        return self.options.lossless

    def summary(self) -> str:
        """Return one line with the resolved options: models, number formats, block length, gate and rule."""
        sides = [f"edge {self._describe_edge()}", f"cloud {self._describe_cloud()}"]
        k, gate, accept, on_loop = self.options.k, self.options.gate, self.options.accept, self.options.on_loop
        return " · ".join([*sides, f"k {k}", f"gate {gate}", f"accept {accept}", f"loop {on_loop}"])

    def _describe_edge(self) -> str:
        model = None if self._model is None else describe_engine(self._model)
        if model is not None and self._reader.codecs is not None:
            model = f"{model}, its drafts translated through text to {self._reader.encoder.name}"
        return " + ".join(part for part in (model, self.lookup and self.lookup.name) if part) or "none"

    def _describe_cloud(self) -> str:
        if self.verifier is None:
            return "none"
        if isinstance(self.verifier, LocalVerifier):
            return describe_engine(self.verifier.engine)
        name = self._target.label if self._pair.state.is_complete else "not there"
        options = self.options
        return f"{name}, {options.driver}, on loss {options.on_cloud_loss}, privacy {options.privacy}"

    @property
    def _target(self) -> ModelInfo:
        return self._pair.state.target


def local(engine: Engine) -> LocalVerifier:
    """Return a verifier that runs `engine` in this process.

    Raises:
        SettingsError: `engine` is not an engine.
    """
    if not hasattr(engine, "forward_many"):
        raise SettingsError(f"local() takes an engine, as from load_engine(…), not {type(engine).__name__}")
    return LocalVerifier(engine)
