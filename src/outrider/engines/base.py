"""What the rest of outrider knows of a model: an engine with KV slots, and a reader of one sequence in it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor

from outrider.core.actions import Proposal
from outrider.core.policy import Policy, Rows
from outrider.core.sampling import Pick
from outrider.core.sequence import check_cache
from outrider.errors import ModelError, PromptError, StateError

CHUNK = 256  # tokens of a long prompt that are read at once, where others wait for the engine or it may be cancelled


@dataclass(frozen=True)
class Prompt:
    """What a model is conditioned on.

    ids: tokens, audio placeholders expanded. audio: float32 [samples], 16 kHz mono. features: float32 [mels, frames]
    instead, from `AudioInput.features`, if the recording itself is not sent. With neither, placeholders are read as
    ordinary tokens. warnings: about the recording, for the result.

    Raises:
        PromptError: both a recording and features.
    """

    ids: tuple[int, ...]
    audio: np.ndarray | None = None
    features: np.ndarray | None = None
    warnings: tuple[str, ...] = ()

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


def doubled(size: int, wanted: int, limit: int | None = None) -> int:
    """`size`, doubled until it holds what is wanted, but never past the limit."""
    while size < wanted:
        size *= 2
    return size if limit is None else min(size, limit)


def check_truncation(slot: int, length: int, held: int) -> None:
    """Raise StateError unless a slot that holds `held` positions can keep the first `length`."""
    if not 0 <= length <= held:
        raise StateError(f"cannot truncate slot {slot} to {length}: it holds {held} positions")


def check_feeds(feeds: Seq[Feed]) -> None:
    """Raise StateError unless each slot stands once in a batch, and is fed what rows are wanted of."""
    slots = [feed.slot for feed in feeds]
    if len(set(slots)) < len(slots):
        raise StateError(f"one slot stands twice in a batch: {slots}")
    for feed in feeds:
        if not 0 < feed.rows <= len(feed.ids):
            raise StateError(f"slot {feed.slot}: {feed.rows} rows wanted of {len(feed.ids)} fed tokens")


def afford(
    name: str, in_use: int, budget: int, max_length: int, limit: int | None, size: Callable[[int], int]
) -> tuple[int, int]:
    """How many sequences a budget in bytes holds, and the length of each. size: bytes of one, by its length.

    Raises:
        ModelError: not one sequence fits.
        StateError: slots are open.
    """
    if in_use:
        raise StateError(f"{name}: memory is reserved before slots are opened; {in_use} are open")
    if max_length < 1:
        raise ModelError(f"{name}: a sequence of at most {max_length} positions holds nothing")
    length = max_length if limit is None else min(max_length, limit)
    if budget < size(length):
        raise ModelError(
            f"{name}: a sequence of {length} positions needs {size(length)} bytes of cache; the budget is {budget}"
        )
    return budget // size(length), length


class Engine(Protocol):
    """A model on this machine and its KV slots. It owns every cache and is the only one to move their lengths."""

    name: str
    tokenizer: Any  # a transformers tokenizer, or None
    row_count: int  # ids that the model can read: the named ones and padding
    eos_ids: tuple[int, ...]
    max_length: int | None  # positions that the model was made for
    noise: float  # logits; a lead below it may flip between a 1-token and a k-token forward (0 in float32)

    @property
    def vocab_size(self) -> int:
        """Ids that a tokenizer can name."""
        ...

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


class Hosted(Engine, Protocol):
    """An engine as a service needs it: with its memory bounded, and told apart from others."""

    @property
    def audio(self) -> Any:
        """How recordings enter (`AudioInput`); None where they cannot."""
        ...

    @property
    def identity(self) -> str:
        """A hash that tells checkpoints apart."""
        ...

    @property
    def cache_bytes(self) -> int:
        """What the caches of keys and values hold now."""
        ...

    def reserve(self, budget: int, max_length: int) -> int:
        """Never hold more than `budget` bytes of them, for sequences of `max_length` positions; returns the slots."""
        ...


class Chooser(Engine, Protocol):
    """An engine that can choose tokens where it computed the logits, on a device that is slow to be read back from."""

    chooses: bool  # whether this one can

    def choose_many(self, feeds: Seq[Feed], policies: Seq[Policy]) -> list[list[Pick]]:
        """`forward_many`, and what each feed's policy chooses from each of its rows."""
        ...

    def draft(self, slot: int, ids: Seq[int], count: int, policy: Policy, *, sure: bool) -> list[Proposal]:
        """Append `ids`, then choose a token and append it, `count` times (the last one is not appended).

        Returns the tokens up to an EOS; the cache may hold what came behind it.
        sure: with each one's signals.
        """
        ...


def chooser(engine: Engine) -> Chooser | None:
    """The engine, if it can choose."""
    return cast(Chooser, engine) if getattr(engine, "chooses", False) else None


def read_many(engine: Engine, feeds: Seq[Feed], policies: Seq[Policy | None]) -> list[Rows]:
    """`forward_many`; where a policy is given and the engine can choose, the feed's picks in place of its rows."""
    able = chooser(engine)
    picked = [n for n, policy in enumerate(policies) if able is not None and policy is not None]
    others = [n for n in range(len(feeds)) if n not in picked]
    found: dict[int, Rows] = {}
    if others:
        found |= zip(others, engine.forward_many([feeds[n] for n in others]), strict=True)
    if picked and able is not None:
        chosen = [policy for policy in policies if policy is not None]
        found |= zip(picked, able.choose_many([feeds[n] for n in picked], chosen), strict=True)
    return [found[n] for n in range(len(feeds))]


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
        feed = self.feed(ids, rows)
        return self.engine.forward(feed.slot, feed.ids, rows)

    def feed(self, ids: Seq[int], rows: int) -> Feed:
        """What the cache lacks of `ids`, with the last `rows` wanted."""
        known = self.known
        if rows > len(ids) - known:
            raise StateError(
                f"{self.owner}: {rows} rows wanted but only {len(ids) - known} tokens are new to the cache"
            )
        return Feed(self.slot, ids[known:], rows)

    def settle(self, length: int) -> None:
        """Roll back to a proper prefix of the first `length` tokens: those after them were void."""
        if self.known >= length:
            self.engine.truncate(self.slot, length - 1)
        check_cache(length, self.known, self.owner)

    def close(self) -> None:
        self.engine.close(self.slot)
