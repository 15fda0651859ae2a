"""An engine that samples tokens at once: what is left is the time of the host around a GPU."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from outrider.engines.base import KnownOutputs, Prompt, SequenceInput
from outrider.sampling.policy import Policy
from outrider.sampling.sampler import SampledRows


@dataclass(frozen=True)
class LateOutputs(KnownOutputs):
    """Outputs that are not ready before they are waited for, as those of a GPU."""

    def ready(self) -> bool:
        """Return False."""
        return False


@dataclass
class InstantSampler:
    """An `AsyncSampler` without a model. The token at position n of a slot is 100 + n % 500."""

    name: str = "instant"
    noise: float = 0.4
    vocab_size: int = 152_064
    row_count: int = 152_064
    eos_ids: tuple[int, ...] = ()
    samples_on_device: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _lengths: dict[int, int] = field(default_factory=dict)
    _opened: int = 0

    def open(self, prompt: Prompt) -> int:
        """Return a new slot."""
        self._opened += 1
        self._lengths[self._opened] = 0
        return self._opened

    def close(self, slot: int) -> None:
        """Release a slot."""
        del self._lengths[slot]

    def kv_len(self, slot: int) -> int:
        """Return the length of a slot."""
        return self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Roll a slot back."""
        self._lengths[slot] = length

    def sample_many(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> Seq[SampledRows]:
        """Return the tokens of each input."""
        found = []
        for each in inputs:
            self._lengths[each.slot] += len(each.ids)
            end = self._lengths[each.slot] + 1
            tokens = [100 + n % 500 for n in range(end - each.logits_to_keep, end)]
            found.append(SampledRows(tokens, [1.0] * len(tokens), [0.0] * len(tokens)))
        return found

    def launch(self, inputs: Seq[SequenceInput], policies: Seq[Policy]) -> LateOutputs:
        """Compute the tokens, which are ready when they are waited for."""
        return LateOutputs(self.sample_many(inputs, policies))
