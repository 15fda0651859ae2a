"""What the rest of outrider knows of a model: an engine with KV slots, and a reader of one sequence in it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from outrider.core.sequence import check_cache
from outrider.errors import PromptError, StateError


@dataclass(frozen=True)
class Prompt:
    """What a model is conditioned on.

    ids: tokens, audio placeholders expanded. audio: float32 [samples], 16 kHz mono. features: float32 [mels, frames]
    instead, from `AudioInput.features`, where the recording itself stays behind. With neither, placeholders are read as
    ordinary tokens: the recording is withheld.

    Raises:
        PromptError: both a recording and features.
    """

    ids: tuple[int, ...]
    audio: np.ndarray | None = None
    features: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.audio is not None and self.features is not None:
            raise PromptError("a prompt has a recording or its features, not both")

    @property
    def heard(self) -> bool:
        """True where a recording comes with it, as a waveform or as features."""
        return self.audio is not None or self.features is not None


@dataclass(frozen=True)
class Feed:
    """One slot's part of a batched forward: `ids` to append, and for how many of the last ones rows are wanted."""

    slot: int
    ids: Seq[int]
    rows: int


class Engine(Protocol):
    """A model on this machine and its KV slots. It owns every cache and is the only one to move their lengths."""

    name: str
    tokenizer: Any  # a transformers tokenizer, or None
    vocab_size: int  # ids that a tokenizer can name
    row_count: int  # ids that the model can read: the named ones and padding
    eos_ids: tuple[int, ...]
    max_length: int | None  # positions that the model was made for
    noise: float  # logits; a lead below it may flip between a 1-token and a k-token forward (0 in float32)

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary: equal fingerprints mean that ids mean the same."""
        ...

    def open(self, prompt: Prompt) -> int:
        """A free slot for a sequence that will begin with `prompt`. Nothing is computed yet."""
        ...

    def forward(self, slot: int, ids: Seq[int], rows: int | None = None) -> Tensor:
        """Append `ids` to the slot; the logits that follow each of the last `rows` (default: all) of them.

        Returns float32 [rows, V ≥ vocab_size].
        """
        ...

    def forward_many(self, feeds: Seq[Feed]) -> list[Tensor]:
        """`forward` for several slots at once."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions. O(1)."""
        ...

    def kv_len(self, slot: int) -> int:
        """Positions that the slot's cache holds."""
        ...

    def close(self, slot: int) -> None:
        """Give the slot back."""
        ...


class Reader:
    """One sequence's place in an engine: it feeds what the cache lacks, and nothing twice."""

    def __init__(self, engine: Engine, prompt: Prompt, owner: str) -> None:
        self.engine, self.owner = engine, owner
        self.slot = engine.open(prompt)

    @property
    def known(self) -> int:
        """How many tokens the cache holds."""
        return self.engine.kv_len(self.slot)

    def read(self, ids: Seq[int], rows: int) -> Tensor:
        """Bring the cache up to `ids` and return the logits after each of the last `rows`: float32 [rows, V]."""
        known = self.known
        if rows > len(ids) - known:
            raise StateError(
                f"{self.owner}: {rows} rows wanted but only {len(ids) - known} tokens are new to the cache"
            )
        return self.engine.forward(self.slot, ids[known:], rows)

    def settle(self, length: int) -> None:
        """Roll back to a proper prefix of the first `length` tokens: those after them were void."""
        if self.known >= length:
            self.engine.truncate(self.slot, length - 1)
        check_cache(length, self.known, self.owner)

    def close(self) -> None:
        self.engine.close(self.slot)
