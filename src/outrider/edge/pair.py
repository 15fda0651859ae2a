"""Who decodes with whom: both sides as they describe themselves, and a cloud that is not there yet."""

from __future__ import annotations

import logging

from outrider.config import OnCloudLoss
from outrider.engines.base import Engine
from outrider.errors import CloudLost
from outrider.verifiers.base import Description, Verifier, shared_vocabulary
from outrider.verifiers.local import describe

log = logging.getLogger(__name__)


class Pair:
    """Drafter and verifier, at least one of them. Each is described once: a description lists the whole vocabulary.

    sides: drafter, then verifier, as far as they are there. draft_vocabulary, target_vocabulary: how many ids the one
    may draft and the other emit. on_loss: where the verifier cannot be reached, "fail" raises, "wait" asks on, and
    "edge-only" leaves the drafter on its own until `meet` succeeds.

    Raises:
        CloudLost: on "fail".
        VocabularyMismatch: they do not share a vocabulary.
    """

    def __init__(self, draft: Engine | None, verifier: Verifier | None, on_loss: OnCloudLoss) -> None:
        self._verifier, self._on_loss = verifier, on_loss
        self.sides = [describe(draft)] if draft is not None else []
        self.met = verifier is None
        if self.sides:
            self.draft_vocabulary = self.target_vocabulary = self.sides[0].vocab_size
        self.meet()

    @property
    def target(self) -> Description:
        """Whose output it is to be."""
        return self.sides[-1]

    def meet(self) -> bool:
        """Whether all are there; asks a verifier that was not. Raises as the class does."""
        told = False
        while not self.met:
            try:
                self._greet()
            except CloudLost as lost:
                if self._on_loss == "fail":
                    raise
                if not told:
                    log.warning("%s; %s", lost, "asking on" if self._on_loss == "wait" else "the edge begins alone")
                told = True
                if self._on_loss == "edge-only":
                    return False
        return True

    def _greet(self) -> None:
        assert self._verifier is not None  # else it was met
        cloud = self._verifier.describe(self.sides[0] if self.sides else None)
        vocabularies = shared_vocabulary(self.sides[0], cloud) if self.sides else (cloud.vocab_size, cloud.vocab_size)
        self.draft_vocabulary, self.target_vocabulary = vocabularies
        self.sides.append(cloud)
        self.met = True
