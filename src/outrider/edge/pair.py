"""Who decodes with whom: both sides as they describe themselves, and a cloud that is not there yet."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from outrider.config import GenerationSettings, OnCloudLoss
from outrider.edge.cancellation import Cancellation, follow
from outrider.engines.base import Engine, Prompt
from outrider.errors import CloudLost, OutriderError, PromptError, StateError
from outrider.prompts.audio import check_length
from outrider.verifiers.base import Description, Distant, Verifier, shared_vocabulary
from outrider.verifiers.local import describe

log = logging.getLogger(__name__)


class Pair:
    """Drafter and verifier, at least one of them. Each is described once: a description lists the whole vocabulary.

    sides: drafter, then verifier, as far as they are there. draft_vocabulary, target_vocabulary: how many ids the one
    may draft and the other emit. on_loss: where the verifier cannot be reached, "fail" raises, "wait" asks on, and
    "edge-only" leaves the drafter on its own until `meet` succeeds. reader: who writes the verifier's prompts where
    there is no drafter. lazy: nobody is asked before the first `meet`.

    Raises: as `meet`, unless it is lazy.
    """

    def __init__(
        self,
        draft: Engine | None,
        verifier: Verifier | None,
        on_loss: OnCloudLoss,
        *,
        reader: Engine | None = None,
        lazy: bool = False,
    ) -> None:
        self._verifier, self._on_loss = verifier, on_loss
        self.sides = [describe(draft)] if draft is not None else []
        self._edge = describe(reader) if reader is not None and draft is None else next(iter(self.sides), None)
        self.met = verifier is None
        if self.sides:
            self.draft_vocabulary = self.target_vocabulary = self.sides[0].vocab_size
        self._lock = threading.Lock()
        self._meeting: Future[None] | None = None
        if not lazy:
            self.meet()

    @property
    def target(self) -> Description:
        """Whose output it is to be."""
        return self.sides[-1]

    def meet(self, cancellation: Cancellation | None = None) -> bool:
        """Whether all are there; asks a verifier that was not. Who asks meanwhile waits for the same answer.

        Raises:
            CloudLost: on "fail".
            VocabularyMismatch: they do not share a vocabulary.
            CancelledError: it was cancelled.
        """
        told = False
        while not self.met:
            try:
                self._attempt(cancellation or Cancellation())
            except CloudLost as lost:
                if self._on_loss == "fail":
                    raise
                if not told:
                    log.warning("%s; %s", lost, "asking on" if self._on_loss == "wait" else "the edge begins alone")
                told = True
                if self._on_loss == "edge-only":
                    return False
        return True

    def _attempt(self, cancellation: Cancellation) -> None:
        """One attempt, in a thread of its own if it may take its time: who waits for it must be free to leave."""
        with self._lock:
            if self.met:
                return
            mine = self._meeting is None
            meeting = self._meeting = self._meeting or Future()
        if mine and isinstance(self._verifier, Distant):
            threading.Thread(target=self._hold, args=(meeting,), name="outrider-meeting", daemon=True).start()
        elif mine:
            self._hold(meeting)
        cancellation.wait(follow(meeting))

    def _hold(self, meeting: Future[None]) -> None:
        outcome: OutriderError = StateError("the verifier could not be asked who it is: a bug, told where it happened")
        try:
            self._greet()
        except OutriderError as error:
            outcome = error
        finally:
            with self._lock:
                self._meeting = None
            if self.met:
                meeting.set_result(None)
            else:
                meeting.set_exception(outcome)

    def _greet(self) -> None:
        assert self._verifier is not None  # else it was met
        cloud, edge = self._verifier.describe(self._edge), self._edge
        vocabularies = shared_vocabulary(edge, cloud) if edge is not None else (cloud.vocab_size, cloud.vocab_size)
        self.draft_vocabulary, self.target_vocabulary = vocabularies
        self.sides.append(cloud)
        self.met = True

    # What they can take -------------------------------------------------------------------------------------

    def check(self, prompt: Prompt, settings: GenerationSettings) -> None:
        """Both models must be able to read the prompt, and to hold what follows.

        Raises:
            PromptError, AudioError: they are not.
        """
        highest, limit = max(prompt.ids), self.target.row_count
        if highest >= limit:
            raise PromptError(f"{self.target.name} cannot read token {highest}: it has {limit} rows")
        if prompt.audio is not None:
            if not self.target.audio_seconds:
                raise PromptError(f"{self.target.name} takes no audio, so it cannot verify what was heard")
            check_length(prompt.audio, self.target.audio_seconds, self.target.name)
        total = len(prompt.ids) + settings.max_new_tokens
        for side in self.sides:
            if side.max_length is not None and total > side.max_length:
                raise PromptError(
                    f"a prompt of {len(prompt.ids)} tokens and max_new_tokens {settings.max_new_tokens} make {total}: "
                    f"{side.name} holds {side.max_length}"
                )
