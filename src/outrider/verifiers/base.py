"""What can give a verdict: the contract, and who a verifier says it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from outrider.config import GenerationSettings
from outrider.core.acceptance import Verdict
from outrider.core.decoder import Verify
from outrider.engines.base import Prompt
from outrider.errors import VocabularyMismatch

MAX_EXTRA_TOKENS = 128  # as in llama.cpp: vocabularies may differ in size by this much, beyond equal strings


@dataclass(frozen=True)
class Description:
    """What the edge must know of a verifier before it drafts for it. vocabulary: token strings by id, or empty."""

    name: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    fingerprint: str
    max_length: int | None
    vocabulary: list[str] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Conditions:
    """How a session decodes. vocab_size: the vocabulary that both models share."""

    settings: GenerationSettings
    accept: str
    vocab_size: int


class Verifier(Protocol):
    """Judges blocks of drafts. Sessions are independent; a repeated request is answered again, never applied twice."""

    def describe(self) -> Description: ...

    def open(self, prompt: Prompt, conditions: Conditions) -> int:
        """A session for one sequence. Nothing is computed before its first request."""
        ...

    def verify(self, session: int, request: Verify) -> Verdict:
        """The verdict on request.draft_ids, which follow the session's tokens and request.new_ids."""
        ...

    def generate(self, session: int) -> Iterator[Verdict]:
        """Cloud-only: the target's own tokens, one verdict each, for as long as the caller asks."""
        ...

    def close(self, session: int) -> None: ...


def shared_vocabulary(edge: Description, cloud: Description) -> int:
    """How many token ids mean the same to both models.

    Raises:
        VocabularyMismatch: two ids differ (the first is named), or the sizes do by more than 128.
    """
    size = min(edge.vocab_size, cloud.vocab_size)
    if edge.fingerprint == cloud.fingerprint:
        return size
    if edge.vocabulary and cloud.vocabulary:
        for token, (ours, theirs) in enumerate(zip(edge.vocabulary, cloud.vocabulary, strict=False)):
            if ours != theirs:
                raise VocabularyMismatch(
                    f"{edge.name} and {cloud.name} do not share a vocabulary: token {token} is {ours!r} there and "
                    f"{theirs!r} here"
                )
    extra = abs(edge.vocab_size - cloud.vocab_size)
    if extra > MAX_EXTRA_TOKENS:
        larger, smaller = (edge, cloud) if edge.vocab_size > cloud.vocab_size else (cloud, edge)
        raise VocabularyMismatch(
            f"{larger.name} has {extra} tokens more than {smaller.name}, the first of them {size}: "
            f"at most {MAX_EXTRA_TOKENS} are taken for padding"
        )
    return size
