"""The engine contract: a model with KV slots, and one cached sequence in such a slot."""

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
    """The input that a model is conditioned on.

    ids: tokens, audio placeholders expanded. audio: float32 [samples], 16 kHz mono. features: float32 [mels, frames]
    from `AudioInput.features`, in place of the recording. With neither, placeholders are ordinary tokens.
    warnings: remarks about the recording, for the result. cache_salt: only prompts with equal ones share KV caches.

    Raises:
        PromptError: both a recording and features.
    """

    ids: tuple[int, ...]
    audio: np.ndarray | None = None
    features: np.ndarray | None = None
    warnings: tuple[str, ...] = ()
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if self.audio is not None and self.features is not None:
            raise PromptError("a prompt has a recording or its features, not both")

    @property
    def has_audio(self) -> bool:
        """Return whether the prompt has a recording, as a waveform or as features."""
        return self.audio is not None or self.features is not None


LAST_SAMPLED = -1  # as an id: the token that the slot's latest launch sampled last, which the host may not know yet


@dataclass(frozen=True)
class SequenceInput:
    """One slot's part of a batched forward: the `ids` to append, and how many of the last ones need logits."""

    slot: int
    ids: Seq[int]
    logits_to_keep: int

    @property
    def kept(self) -> range:
        """Indices of the ids that need logits."""
        return range(len(self.ids) - self.logits_to_keep, len(self.ids))


def grow_to_fit(size: int, required: int, limit: int | None = None) -> int:
    """Return `size`, doubled until it is at least `required`, but at most `limit`."""
    while size < required:
        size *= 2
    return size if limit is None else min(size, limit)


def check_truncation(slot: int, length: int, cached_len: int) -> None:
    """Raise StateError unless a slot that holds `cached_len` positions can keep the first `length`."""
    if not 0 <= length <= cached_len:
        raise StateError(f"cannot truncate slot {slot} to {length}: it holds {cached_len} positions")


def check_inputs(inputs: Seq[SequenceInput]) -> None:
    """Raise StateError if a slot occurs twice in a batch, or has fewer tokens than logits to keep."""
    slots = [seq_input.slot for seq_input in inputs]
    if len(set(slots)) < len(slots):
        raise StateError(f"a slot occurs twice in a batch: {slots}")
    for seq_input in inputs:
        if not 0 < seq_input.logits_to_keep <= len(seq_input.ids):
            raise StateError(
                f"slot {seq_input.slot}: requested logits for {seq_input.logits_to_keep} positions, "
                f"but only {len(seq_input.ids)} tokens were given"
            )


def plan_kv_budget(
    name: str, in_use: int, budget: int, max_length: int, limit: int | None, size: Callable[[int], int]
) -> tuple[int, int]:
    """Return how many sequences a budget in bytes holds, and the length of each.

    size: bytes of one sequence, by its length.

    Raises:
        ModelError: not one sequence fits.
        StateError: slots are open.
    """
    if in_use:
        raise StateError(f"{name}: reserve memory before slots are opened: {in_use} are open")
    if max_length < 1:
        raise ModelError(f"{name}: a sequence must hold at least 1 position, not {max_length}")
    length = max_length if limit is None else min(max_length, limit)
    if budget < size(length):
        raise ModelError(
            f"{name}: a sequence of {length} positions needs {size(length)} bytes of cache; the budget is {budget}"
        )
    return budget // size(length), length


class Engine(Protocol):
    """A model on this machine and its KV slots. The engine owns every cache and alone moves their lengths."""

    name: str
    tokenizer: Any  # a transformers tokenizer, or None
    row_count: int  # ids that the model can read: those of the tokenizer, and padding
    eos_ids: tuple[int, ...]
    max_length: int | None  # positions that the model was made for
    noise: float  # logits; a margin below it may flip between a 1-token and a k-token forward (0 in float32)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer can name."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of the vocabulary. Engines with equal fingerprints give each id the same meaning."""
        ...

    def open(self, prompt: Prompt) -> int:
        """Return a free slot for a sequence that will begin with `prompt`. Nothing is computed yet."""
        ...

    def forward(self, slot: int, ids: Seq[int], logits_to_keep: int | None = None) -> Tensor:
        """Append `ids` to the slot.

        Returns the logits after each of the last `logits_to_keep` ids (default: all), float32 [rows, V ≥ vocab_size].
        """
        ...

    def forward_many(self, inputs: Seq[SequenceInput]) -> list[Tensor]:
        """Run `forward` for several slots at once."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Roll the slot back to its first `length` positions, in O(1)."""
        ...

    def kv_len(self, slot: int) -> int:
        """Return how many positions the slot's cache holds."""
        ...

    def close(self, slot: int) -> None:
        """Release the slot."""
        ...


class ServableEngine(Engine, Protocol):
    """An engine that a service can host: its memory is bounded, and its checkpoint has an identity."""

    @property
    def audio(self) -> Any:
        """Audio encoder of the model (`AudioInput`), or None for a text model."""
        ...

    @property
    def identity(self) -> str:
        """Hash that distinguishes checkpoints."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV caches hold now."""
        ...

    def reserve(self, budget: int, max_length: int) -> int:
        """Limit the KV caches to `budget` bytes, for sequences of `max_length` positions. Return the slots."""
        ...


class SlotReuse(Engine, Protocol):
    """An engine whose slots can be continued by another sequence (engines/prefix_cache.py)."""

    prefix_cache: Any  # a `PrefixCache`, or None for an engine that keeps nothing

    def reopen(self, slot: int, prompt: Prompt) -> None:
        """Let an open slot continue as a sequence that begins with `prompt`. Its cached positions stay.

        They must be those of the prompt's first tokens, with the prompt's media.

        Raises: as `open`.
        """
        ...


def as_slot_reuse(engine: Engine) -> SlotReuse | None:
    """Return the engine if it keeps the KV caches of finished sequences, or None."""
    return cast(SlotReuse, engine) if getattr(engine, "prefix_cache", None) is not None else None


class PendingOutputs(Protocol):
    """The outputs of a launched forward, in the order of its inputs."""

    def ready(self) -> bool:
        """Return whether `result` would return at once."""
        ...

    def result(self) -> Seq[ForwardOutput]:
        """Wait for the device, and return the output of each input."""
        ...


@dataclass(frozen=True)
class KnownOutputs:
    """Outputs that were computed when the forward was launched."""

    outputs: Seq[ForwardOutput]

    def ready(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Seq[ForwardOutput]:
        """Return the outputs."""
        return self.outputs


class DeviceSampler(Engine, Protocol):
    """An engine that can sample tokens on the device, without reading the logits back to the host."""

    samples_on_device: bool  # False for an engine that lacks the kernels

    def sample_many(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> Seq[Seq[SampledToken]]:
        """Run `forward_many`, and sample a token from each kept position by its input's policy."""
        ...

    def draft(self, slot: int, ids: Seq[int], count: int, policy: Policy, *, with_signals: bool) -> list[Proposal]:
        """Append `ids`, then sample and append a token, `count` times. The last token is not appended.

        Returns the tokens up to an EOS. The cache may hold tokens behind it.
        with_signals: compute the gate signals of each token as well.
        """
        ...


class AsyncSampler(DeviceSampler, Protocol):
    """A `DeviceSampler` whose forwards can be launched before the host has read the results of earlier ones."""

    def launch(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> PendingOutputs:
        """Start `sample_many`, and return while the device computes. The KV lengths move at once.

        Forwards run in the order of their launch. An input may be the single id `LAST_SAMPLED`.
        """
        ...


def as_device_sampler(engine: Engine) -> DeviceSampler | None:
    """Return the engine if it samples on its device, or None."""
    return cast(DeviceSampler, engine) if getattr(engine, "samples_on_device", False) else None


def forward_or_sample(engine: Engine, inputs: Seq[SequenceInput], policies: Seq[Policy | None]) -> Seq[ForwardOutput]:
    """Return the logits of each input, or its sampled tokens if it has a policy and the engine can sample."""
    sampled = {n: policy for n, policy in enumerate(policies) if policy is not None}
    if not sampled or (sampler := as_device_sampler(engine)) is None:
        return engine.forward_many(inputs)
    others = [n for n in range(len(inputs)) if n not in sampled]
    found: dict[int, ForwardOutput] = {}
    if others:
        found |= zip(others, engine.forward_many([inputs[n] for n in others]), strict=True)
    found |= zip(sampled, sampler.sample_many([inputs[n] for n in sampled], [*sampled.values()]), strict=True)
    return [found[n] for n in range(len(inputs))]


def launch(engine: Engine, inputs: Seq[SequenceInput], policies: Seq[Policy | None]) -> PendingOutputs:
    """Start `forward_or_sample`. It is over at once, unless an `AsyncSampler` samples for all inputs."""
    given = [policy for policy in policies if policy is not None]
    if len(given) < len(inputs) or as_device_sampler(engine) is None or not hasattr(engine, "launch"):
        return KnownOutputs(forward_or_sample(engine, inputs, policies))
    return cast(AsyncSampler, engine).launch(inputs, given)


class CachedSequence:
    """One sequence in an engine's slot. It feeds only the tokens that the cache lacks.

    owner: name of the sequence in error messages. slot, tokens: an open slot to continue, and its cached tokens.
    """

    def __init__(
        self, engine: Engine, prompt: Prompt, owner: str, *, slot: int | None = None, tokens: Seq[int] = ()
    ) -> None:
        self.engine, self.prompt, self.owner = engine, prompt, owner
        self.slot = engine.open(prompt) if slot is None else slot
        self._tokens = list(tokens)

    @property
    def cached_len(self) -> int:
        """Number of tokens that the cache holds."""
        return self.engine.kv_len(self.slot)

    def extend(self, ids: Seq[int], logits_to_keep: int) -> Tensor:
        """Bring the cache up to `ids`. Return the logits of the last `logits_to_keep`: float32 [rows, V]."""
        seq_input = self.next_input(ids, logits_to_keep)
        return self.engine.forward(seq_input.slot, seq_input.ids, logits_to_keep)

    def next_input(self, ids: Seq[int], logits_to_keep: int) -> SequenceInput:
        """Return the forward input that brings the cache up to `ids`.

        Raises:
            StateError: fewer than `logits_to_keep` of the tokens are new.
        """
        cached_len = self.cached_len
        if logits_to_keep > len(ids) - cached_len:
            raise StateError(
                f"{self.owner}: {logits_to_keep} logits requested, but {len(ids) - cached_len} tokens are new"
            )
        kept = min(cached_len, len(self._tokens))
        self._tokens[kept:] = ids[kept:]
        return SequenceInput(self.slot, ids[cached_len:], logits_to_keep)

    def cached_tokens(self) -> list[int]:
        """Return the tokens that the cache holds, without those that the engine drafted last."""
        return self._tokens[: self.cached_len]

    def rollback_to(self, length: int) -> None:
        """Roll the cache back to a proper prefix of the first `length` tokens."""
        if self.cached_len >= length:
            self.engine.truncate(self.slot, length - 1)
        check_cache(length, self.cached_len, self.owner)

    def close(self) -> None:
        """Release the slot."""
        self.engine.close(self.slot)
