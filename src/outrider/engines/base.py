"""What the rest of outrider knows of a model: an engine with KV slots, and a reader of one sequence in it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor

from outrider.decoding.actions import Proposal
from outrider.decoding.sequence import check_cache
from outrider.errors import ModelError, PromptError, StateError
from outrider.sampling.policy import ForwardOutput, Policy
from outrider.sampling.sampler import SampledToken


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
    def has_audio(self) -> bool:
        """True where a recording comes with it, as a waveform or as features."""
        return self.audio is not None or self.features is not None


@dataclass(frozen=True)
class SequenceInput:
    """One slot's part of a batched forward: `ids` to append, and for how many of the last ones rows are wanted."""

    slot: int
    ids: Seq[int]
    logits_to_keep: int


def grow_to_fit(size: int, wanted: int, limit: int | None = None) -> int:
    """`size`, doubled until it holds what is wanted, but never past the limit."""
    while size < wanted:
        size *= 2
    return size if limit is None else min(size, limit)


def check_truncation(slot: int, length: int, cached_len: int) -> None:
    """Raise StateError unless a slot that holds `cached_len` positions can keep the first `length`."""
    if not 0 <= length <= cached_len:
        raise StateError(f"cannot truncate slot {slot} to {length}: it holds {cached_len} positions")


def check_inputs(inputs: Seq[SequenceInput]) -> None:
    """Raise StateError unless each slot stands once in a batch, and is fed what rows are wanted of."""
    slots = [seq_input.slot for seq_input in inputs]
    if len(set(slots)) < len(slots):
        raise StateError(f"one slot stands twice in a batch: {slots}")
    for seq_input in inputs:
        if not 0 < seq_input.logits_to_keep <= len(seq_input.ids):
            raise StateError(
                f"slot {seq_input.slot}: {seq_input.logits_to_keep} rows wanted of {len(seq_input.ids)} fed tokens"
            )


def plan_kv_budget(
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

    def forward(self, slot: int, ids: Seq[int], logits_to_keep: int | None = None) -> Tensor:
        """Append `ids` to the slot; the logits that follow each of the last `logits_to_keep` (default: all) of them.

        Returns float32 [rows, V ≥ vocab_size].
        """
        ...

    def forward_many(self, inputs: Seq[SequenceInput]) -> list[Tensor]:
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


class ServableEngine(Engine, Protocol):
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


class DeviceSampler(Engine, Protocol):
    """An engine that can choose tokens where it computed the logits, on a device that is slow to be read back from."""

    samples_on_device: bool  # whether this one can

    def sample_many(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> list[list[SampledToken]]:
        """`forward_many`, and what each feed's policy chooses from each of its rows."""
        ...

    def draft(self, slot: int, ids: Seq[int], count: int, policy: Policy, *, with_signals: bool) -> list[Proposal]:
        """Append `ids`, then choose a token and append it, `count` times (the last one is not appended).

        Returns the tokens up to an EOS; the cache may hold what came behind it.
        with_signals: with each one's signals.
        """
        ...


def as_device_sampler(engine: Engine) -> DeviceSampler | None:
    """The engine, if it can choose."""
    return cast(DeviceSampler, engine) if getattr(engine, "samples_on_device", False) else None


def forward_or_sample(engine: Engine, inputs: Seq[SequenceInput], policies: Seq[Policy | None]) -> list[ForwardOutput]:
    """`forward_many`; where a policy is given and the engine can choose, the feed's picks in place of its rows."""
    sampler = as_device_sampler(engine)
    sampled = [n for n, policy in enumerate(policies) if sampler is not None and policy is not None]
    others = [n for n in range(len(inputs)) if n not in sampled]
    found: dict[int, ForwardOutput] = {}
    if others:
        found |= zip(others, engine.forward_many([inputs[n] for n in others]), strict=True)
    if sampled and sampler is not None:
        chosen = [policy for policy in policies if policy is not None]
        found |= zip(sampled, sampler.sample_many([inputs[n] for n in sampled], chosen), strict=True)
    return [found[n] for n in range(len(inputs))]


class CachedSequence:
    """One sequence's place in an engine: it feeds what the cache lacks, and nothing twice."""

    def __init__(self, engine: Engine, prompt: Prompt, owner: str) -> None:
        self.engine, self.owner = engine, owner
        self.slot = engine.open(prompt)

    @property
    def cached_len(self) -> int:
        """How many tokens the cache holds."""
        return self.engine.kv_len(self.slot)

    def extend(self, ids: Seq[int], logits_to_keep: int) -> Tensor:
        """Bring the cache up to `ids`. Return the logits of the last `logits_to_keep`: float32 [rows, V]."""
        seq_input = self.next_input(ids, logits_to_keep)
        return self.engine.forward(seq_input.slot, seq_input.ids, logits_to_keep)

    def next_input(self, ids: Seq[int], logits_to_keep: int) -> SequenceInput:
        """What the cache lacks of `ids`, with the last `logits_to_keep` wanted."""
        cached_len = self.cached_len
        if logits_to_keep > len(ids) - cached_len:
            raise StateError(
                f"{self.owner}: {logits_to_keep} logits requested, but {len(ids) - cached_len} tokens are new"
            )
        return SequenceInput(self.slot, ids[cached_len:], logits_to_keep)

    def rollback_to(self, length: int) -> None:
        """Roll back to a proper prefix of the first `length` tokens: those after them were void."""
        if self.cached_len >= length:
            self.engine.truncate(self.slot, length - 1)
        check_cache(length, self.cached_len, self.owner)

    def close(self) -> None:
        self.engine.close(self.slot)
