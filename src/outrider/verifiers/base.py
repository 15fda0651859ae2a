"""What can give a verdict: the contract, and who a verifier says it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import VocabularyMismatch
from outrider.sampling.acceptance import Verdict

MAX_EXTRA_TOKENS = 128  # as in llama.cpp: vocabularies may differ in size by this much, beyond equal strings


@dataclass(frozen=True)
class ModelInfo:
    """What the edge must know of a verifier before it drafts for it.

    vocab_size: tokens that have a name. row_count: ids that can be read, padding included. max_length: positions that
    a sequence may have, if limited. audio_seconds: the longest recording that it takes; 0 where it takes none.
    placeholder: the token that stands for recordings in a prompt. read_vocabulary: fetches the token strings by id;
    asked only where fingerprints differ, for there may be many. decode: ids as text, special tokens included.
    special_ids: tokens that mark something instead of being text, as the ends of other models of the family do.
    """

    name: str
    vocab_size: int
    row_count: int
    eos_ids: tuple[int, ...]
    fingerprint: str
    max_length: int | None
    audio_seconds: float = 0.0
    placeholder: int | None = None
    read_vocabulary: Callable[[], list[str]] = field(default=list, repr=False, compare=False)
    decode: Callable[[Sequence[int]], str] | None = field(default=None, repr=False, compare=False)
    special_ids: tuple[int, ...] = field(default=(), repr=False)

    @property
    def vocabulary(self) -> list[str]:
        """Token strings by id; empty where the model came without a tokenizer."""
        return self.read_vocabulary()


@dataclass(frozen=True)
class SessionParams:
    """How a session decodes. vocab_size: the ids that the target may emit. hides_audio: there is a recording, and the
    verifier does not get it (`--privacy tokens`)."""

    settings: GenerationSettings
    accept: str
    vocab_size: int
    hides_audio: bool = False


class Verifier(Protocol):
    """Judges blocks of drafts. Sessions are independent; a repeated request is answered again, never applied twice."""

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        """Who it is. edge: who asks, if it drafts; some verifiers can only say what they are compared with it."""
        ...

    def open(self, prompt: Prompt, params: SessionParams) -> int:
        """A session for one sequence. Nothing is computed before its first request."""
        ...

    def verify(self, session: int, request: Verify) -> Verdict:
        """The verdict on request.draft_ids, which follow the session's tokens and request.new_ids."""
        ...

    def generate(self, session: int) -> Iterator[Verdict]:
        """Cloud-only: the target's own tokens, one verdict each, for as long as the caller asks."""
        ...

    def close(self, session: int) -> None: ...


@runtime_checkable
class Connectable(Protocol):
    """A verifier that may not be there."""

    def probe(self) -> None:
        """Find out now whether anyone answers.

        Raises:
            CloudError: nobody does, or not as a verifier.
        """
        ...

    def disconnect(self) -> None:
        """Close what is open, and the connection."""
        ...


def disconnect(verifier: Verifier | None) -> None:
    """Close the connection, where the verifier has one."""
    if isinstance(verifier, Connectable):
        verifier.disconnect()


def match_vocabularies(edge: ModelInfo, cloud: ModelInfo) -> tuple[int, int]:
    """How many ids the drafter may draft, and how many the target may emit.

    The target keeps every token that its tokenizer names, or its output would not be its own; the drafter must be able
    to read them all, be it as padding rows.

    Raises:
        VocabularyMismatch: two ids differ (the first is named), the sizes differ by more than 128, or the drafter has
            no row for a token that the target may emit.
    """
    names: list[str] = []
    if edge.fingerprint != cloud.fingerprint:
        names = _check_names(edge, cloud)
        _check_extra(edge, cloud)
    if cloud.vocab_size > edge.row_count:
        token = edge.row_count
        name = f" ({names[token]!r})" if names else ""
        raise VocabularyMismatch(
            f"the target {cloud.name} may emit token {token}{name}, which the drafter {edge.name} cannot read: it has "
            f"{token} rows"
        )
    return min(edge.vocab_size, cloud.vocab_size), cloud.vocab_size


def _check_names(edge: ModelInfo, cloud: ModelInfo) -> list[str]:
    """The target's token strings, which are the drafter's as far as both go. None have names without tokenizers."""
    ours, theirs = edge.vocabulary, cloud.vocabulary
    for which, side, names, other in (("drafter", edge, ours, theirs), ("target", cloud, theirs, ours)):
        if len(names) != side.vocab_size and (names or other):
            raise VocabularyMismatch(
                f"{format_pair(edge.name, cloud.name)} cannot be compared: the {which} names {len(names)} of its "
                f"{side.vocab_size} tokens"
            )
    for token, (first, second) in enumerate(zip(ours, theirs, strict=False)):
        if first != second:
            raise VocabularyMismatch(
                f"{format_pair(edge.name, cloud.name)} do not share a vocabulary: "
                f"token {token} is {first!r} in the first "
                f"and {second!r} in the second"
            )
    return theirs


def format_pair(edge: str, cloud: str) -> str:
    """Both by name, and which is which: models of one class have one name."""
    return f"the drafter {edge} and the target {cloud}"


def _check_extra(edge: ModelInfo, cloud: ModelInfo) -> None:
    extra = abs(edge.vocab_size - cloud.vocab_size)
    if extra > MAX_EXTRA_TOKENS:
        named = [f"the drafter {edge.name}", f"the target {cloud.name}"]
        larger, smaller = named if edge.vocab_size > cloud.vocab_size else reversed(named)
        raise VocabularyMismatch(
            f"{larger} has {extra} tokens more than {smaller}, the first of them "
            f"{min(edge.vocab_size, cloud.vocab_size)}: at most {MAX_EXTRA_TOKENS} are taken for padding"
        )
