"""The verifier interface, the model description, and the vocabulary check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from outrider.config import GenerationSettings
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt
from outrider.errors import StateError, VocabularyMismatch
from outrider.sampling.acceptance import Verdict
from outrider.sampling.grammar import CompiledGrammar

MAX_EXTRA_TOKENS = 128  # tokens by which vocabulary sizes may differ beyond the shared ids, as in llama.cpp


@dataclass(frozen=True)
class ModelInfo:
    """The properties of a model that the other side requires before drafting begins.

    vocab_size: tokens that the tokenizer names. row_count: rows of the embedding, padding included. max_length: most
    positions of a sequence, None without a limit. audio_seconds: length of the longest accepted recording, 0 without
    audio support. placeholder: the token that stands for a recording in a prompt. read_vocabulary: fetches the token
    strings in order of their ids, and is called only when fingerprints differ, because they can be many. decode: turns
    ids into text, special tokens included. special_ids: the tokenizer's special tokens. read_tokenizer: fetches the
    packed files of the tokenizer (`protocol.tokenizer_files`). It is None if the server sends none. captions_only: the
    checkpoint was trained for recordings alone. quantization: what loading changed, such as "int8, fp8 KV cache", or
    None if the model is the checkpoint's, or if this is unknown.
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
    read_tokenizer: Callable[[], bytes] | None = field(default=None, repr=False, compare=False)
    captions_only: bool = False
    quantization: str | None = None

    @property
    def label(self) -> str:
        """Return the name together with the quantisation, for messages."""
        return label_model(self.name, self.quantization)

    @property
    def vocabulary(self) -> list[str]:
        """Return the token strings in order of their ids. The list is empty without a tokenizer."""
        return self.read_vocabulary()


def label_model(name: str, quantization: str | None) -> str:
    """Return a model's name together with its quantisation, for messages."""
    return f"{name} ({quantization})" if quantization else name


@dataclass(frozen=True)
class SessionParams:
    """The decoding parameters of a session.

    vocab_size: number of ids that the target may emit. hides_audio: the prompt has a recording that the edge does not
    send to the verifier (`--privacy tokens`). grammar: that of the settings, compiled for the edge's vocabulary, for
    verifiers without a tokenizer. fingerprint: of the target's vocabulary at the handshake, or empty.
    """

    settings: GenerationSettings
    accept: str
    vocab_size: int
    hides_audio: bool = False
    grammar: CompiledGrammar | None = None
    fingerprint: str = ""


class Verifier(Protocol):
    """Verifies blocks of drafted tokens in independent sessions.

    Requests are idempotent: a repeated request gets the same verdict and is not applied twice.
    """

    def describe(self, edge: ModelInfo | None = None) -> ModelInfo:
        """Return the target's description.

        edge: the drafter's description. A verifier without a vocabulary list compares its tokens with the drafter's.
        """
        ...

    def open(self, prompt: Prompt, params: SessionParams) -> int:
        """Open a session for one sequence and return its number. Computation starts with the first request."""
        ...

    def verify(self, session: int, request: Verify) -> Verdict:
        """Return the verdict on request.draft_ids, which follow the session's tokens and request.new_ids."""
        ...

    def generate(self, session: int) -> Iterator[Verdict]:
        """Yield the target's own tokens without drafts (cloud-only decoding), one verdict for each token."""
        ...

    def close(self, session: int) -> None:
        """Close the session and release its resources."""
        ...


@runtime_checkable
class Connectable(Protocol):
    """A verifier behind a network connection, which may be unreachable."""

    def probe(self) -> None:
        """Check the connection, and that the server still has the model that it had at first.

        Raises:
            CloudError: the server is unreachable, cannot verify, or serves another model.
        """
        ...

    def disconnect(self) -> None:
        """Close all sessions and the connection."""
        ...


S = TypeVar("S")


class SessionTable(Generic[S]):
    """The sessions of a verifier by number."""

    def __init__(self) -> None:
        self._sessions: dict[int, S] = {}
        self._session_ids = count(1)

    def _add(self, session: S) -> int:
        number = next(self._session_ids)
        self._sessions[number] = session
        return number

    def _get(self, session: int) -> S:
        if session not in self._sessions:
            raise StateError(f"session {session} is not open")
        return self._sessions[session]


class RemoteSessions(SessionTable[S], ABC):
    """The methods that verifiers behind a network connection have in common."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    @abstractmethod
    def disconnect(self) -> None:
        """Close all sessions and the connection."""

    @abstractmethod
    def forget_model(self) -> None:
        """Forget a model that does not fit the drafter. The server may have another one at the next handshake."""

    @abstractmethod
    def submit(self, session: int, request: Verify) -> Future[Verdict]:
        """Send a request and return the future of its verdict."""

    def verify(self, session: int, request: Verify) -> Verdict:
        """Send a request and wait for its verdict."""
        return self.submit(session, request).result()


def disconnect(verifier: Verifier | None) -> None:
    """Close the verifier's connection, if it has one."""
    if isinstance(verifier, Connectable):
        verifier.disconnect()


def match_vocabularies(edge: ModelInfo, cloud: ModelInfo) -> tuple[int, int]:
    """Return how many ids the drafter may draft and how many the target may emit.

    The target may emit every token that its tokenizer names, otherwise its output would change. The drafter needs an
    embedding row for each of them, possibly a padding row.

    Raises:
        VocabularyMismatch: an id stands for different tokens (the message names the first), the sizes differ by more
            than 128, or the drafter has no row for a token that the target may emit.
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


def share_vocabulary(edge: ModelInfo, cloud: ModelInfo) -> bool:
    """Return whether the ids of drafter and target have the same meaning, as `match_vocabularies` checks it."""
    try:
        match_vocabularies(edge, cloud)
    except VocabularyMismatch:
        return False
    return True


def _check_names(edge: ModelInfo, cloud: ModelInfo) -> list[str]:
    """Return the target's token strings after comparing the shared ids. The list is empty without tokenizers."""
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
                f"{format_pair(edge.name, cloud.name)} do not share a vocabulary: token {token} is {first!r} in the "
                f"first and {second!r} in the second"
            )
    return theirs


def format_pair(edge: str, cloud: str) -> str:
    """Return both names with their roles. Models of one class have the same name."""
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
