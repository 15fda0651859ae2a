"""The pair of drafter and verifier, and the handshake with a cloud that may not be reachable yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from outrider.config import GenerationSettings, OnCloudLoss
from outrider.edge.cancellation import Cancellation, chain_future
from outrider.engines.base import Engine, Prompt
from outrider.engines.prompt_lookup import PromptLookup
from outrider.errors import (
    CloudLost,
    ContextError,
    OutriderError,
    PromptError,
    SettingsError,
    StateError,
    VocabularyMismatch,
    quote,
)
from outrider.prompts.audio import check_length
from outrider.verifiers.base import Connectable, ModelInfo, RemoteSessions, Verifier, match_vocabularies
from outrider.verifiers.local import describe

log = logging.getLogger(__name__)

BRIEF_OUTAGE_S = 0.5  # every generation waits this long for an unreachable cloud
OUTAGE_FACTOR = 3  # after a longer outage of t seconds, generations skip the cloud for OUTAGE_FACTOR · t seconds


@dataclass(frozen=True)
class Handshake:
    """The models that are connected. A generation relies on those at its start.

    models: drafter, then verifier, as far as connected. draft_vocabulary, target_vocabulary: the number of ids that the
    drafter may draft and the target may emit. is_complete: the verifier is connected, or there is none.
    """

    models: tuple[ModelInfo, ...]
    draft_vocabulary: int
    target_vocabulary: int
    is_complete: bool

    @property
    def target(self) -> ModelInfo:
        """The model that defines the output."""
        return self.models[-1]

    @property
    def max_length(self) -> int | None:
        """The most positions of prompt and output together that all models hold, None without a limit."""
        return min((side.max_length for side in self.models if side.max_length is not None), default=None)

    def check(self, prompt: Prompt, settings: GenerationSettings) -> None:
        """Check that all models can read the prompt and hold the output.

        Raises:
            PromptError, AudioError: a model cannot read the prompt.
            ContextError: prompt and output are longer than a model's context.
            SettingsError: suppress_tokens or logit_bias holds an id that the target does not have.
        """
        highest = max(prompt.ids)
        for side in reversed(self.models):
            if highest >= side.row_count:
                raise PromptError(f"{side.name} cannot read token {quote(highest)}: it has {side.row_count} rows")
        for name, tokens in (("suppress_tokens", settings.suppress_tokens), ("logit_bias", dict(settings.logit_bias))):
            if any(token >= self.target_vocabulary for token in tokens):
                raise SettingsError(f"{name}: ids go up to {self.target_vocabulary - 1}")
        if prompt.audio is not None:
            if not self.target.audio_seconds:
                raise PromptError(f"{self.target.name} takes no audio, so it cannot verify drafts about a recording")
            check_length(prompt.audio, self.target.audio_seconds, self.target.name)
        total = len(prompt.ids) + settings.max_new_tokens
        for side in self.models:
            if side.max_length is not None and total > side.max_length:
                raise ContextError(
                    f"a prompt of {len(prompt.ids)} tokens and max_new_tokens {quote(settings.max_new_tokens)} make "
                    f"{quote(total)}: {side.name} holds {side.max_length}"
                )


class ModelPair:
    """Drafter and verifier, at least one of them. Each is described once, because a description lists the vocabulary.

    state: the connected models. on_loss: the policy for an unreachable verifier. "fail" raises, "wait" retries, and
    "edge-only" decodes without it until `connect` succeeds, and after an outage does not retry for a while. reader: the
    engine that encodes the prompts without a draft model, or if the drafts are translated. translates: the drafter has
    another tokenizer than the verifier, and the reader has the verifier's. find_reader: returns a reader for a verifier
    with another vocabulary, or None. lazy: connect at the first `connect`, not at construction.

    Raises: as `connect`, unless it is lazy.
    """

    def __init__(
        self,
        draft: Engine | None,
        verifier: Verifier | None,
        on_loss: OnCloudLoss,
        *,
        reader: Engine | PromptLookup | None = None,
        translates: bool = False,
        find_reader: Callable[[ModelInfo], Engine | PromptLookup | None] = lambda _: None,
        lazy: bool = False,
    ) -> None:
        self._verifier, self._on_loss, self._find_reader = verifier, on_loss, find_reader
        sides: tuple[ModelInfo, ...] = () if draft is None else (describe(draft),)
        if reader is not None and translates:
            sides = tuple(_describe_translated(side, reader) for side in sides)
        self._edge = describe(reader) if reader is not None and draft is None else next(iter(sides), None)
        size = sides[0].vocab_size if sides else 0
        self.state = self._edge_only = Handshake(sides, size, size, is_complete=verifier is None)
        self._retry_at = 0.0  # by time.monotonic
        self._lock = threading.Lock()
        self._connecting: Future[None] | None = None
        if not lazy:
            self.connect()

    def connect(self, cancellation: Cancellation | None = None) -> Handshake:
        """Connect to the verifier if necessary, and return the connected models. Concurrent calls share one attempt.

        Raises:
            CloudLost: the verifier cannot be reached, and on_loss is "fail".
            VocabularyMismatch: the models do not share a vocabulary.
            CancelledError: the generation was cancelled.
        """
        warned, started = False, time.monotonic()
        if started < self._retry_at:
            return self._edge_only
        while not (state := self.state).is_complete:
            try:
                self._attempt(cancellation or Cancellation())
            except CloudLost as lost:
                if self._on_loss == "fail":
                    raise
                if not warned:
                    log.warning("%s; %s", lost, "retrying" if self._on_loss == "wait" else "the edge starts alone")
                warned = True
                if self._on_loss == "edge-only":
                    self.record_outage(time.monotonic() - started)
                    return state
        return state

    def record_outage(self, seconds: float) -> None:
        """Note an outage of `seconds`. With "edge-only", the next generations then start without the verifier."""
        if self._on_loss == "edge-only" and seconds > BRIEF_OUTAGE_S:
            self._retry_at = time.monotonic() + OUTAGE_FACTOR * seconds

    def _attempt(self, cancellation: Cancellation) -> None:
        """Make one attempt, in a thread of its own if it may be slow, so that waiting generations can be cancelled."""
        with self._lock:
            if self.state.is_complete:
                return
            is_first = self._connecting is None
            connecting = self._connecting = self._connecting or Future()
        if is_first and isinstance(self._verifier, Connectable):
            threading.Thread(
                target=self._run_handshake, args=(connecting,), name="outrider-handshake", daemon=True
            ).start()
        elif is_first:
            self._run_handshake(connecting)
        cancellation.wait(chain_future(connecting))

    def _run_handshake(self, connecting: Future[None]) -> None:
        failure: OutriderError = StateError("the handshake with the verifier failed unexpectedly")
        try:
            self._handshake()
        except OutriderError as error:
            failure = error
        finally:
            with self._lock:
                self._connecting = None
            if self.state.is_complete:
                connecting.set_result(None)
            else:
                connecting.set_exception(failure)

    def _handshake(self) -> None:
        assert self._verifier is not None  # otherwise the handshake was complete from the start
        try:
            self.state = self._match(self._verifier.describe(self._edge))
        except VocabularyMismatch:
            if isinstance(self._verifier, RemoteSessions):
                self._verifier.forget_model()
            raise

    def _match(self, cloud: ModelInfo) -> Handshake:
        edge, sides, vocabularies = self._edge, self.state.models, (cloud.vocab_size, cloud.vocab_size)
        if edge is not None:
            try:
                vocabularies = match_vocabularies(edge, cloud)
            except VocabularyMismatch:
                if (reader := self._find_reader(cloud)) is None:
                    raise
                vocabularies = match_vocabularies(describe(reader), cloud)
                sides = tuple(_describe_translated(side, reader) for side in sides)
        return Handshake((*sides, cloud), *vocabularies, is_complete=True)


def _describe_translated(drafter: ModelInfo, reader: Engine | PromptLookup) -> ModelInfo:
    """Return the description of a drafter whose drafts are translated: it reads what the reader encodes."""
    return replace(describe(reader), name=drafter.name, max_length=None, quantization=drafter.quantization)
