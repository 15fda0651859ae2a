"""A synthetic drafter with a chosen acceptance rate, for benchmarks of the engines."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.decoding.actions import Draft, Proposal
from outrider.edge.drafter import Drafter, Proposer
from outrider.errors import SettingsError
from outrider.sampling.sampler import uniforms


class SyntheticDrafter(Proposer):
    """Replays the target's output with errors at rate 1 − alpha, in the time of a real drafter.

    The real drafter runs, and its tokens are replaced. Its cache has the right length, but holds its own tokens.
    output: the target's continuation of the prompt. Behind its end the drafter's tokens stay. An error depends on
    (seed, position) alone, so the first i tokens of any block are accepted with probability alphaⁱ. Signals are the
    real drafter's and do not predict acceptance.

    Raises:
        SettingsError: alpha is not a probability.
    """

    def __init__(self, drafter: Drafter, prompt_length: int, output: Seq[int], alpha: float, seed: int = 0) -> None:
        self._drafter, self._prompt_length = drafter, prompt_length
        self._tokens = corrupt_tokens(output, alpha, seed)

    @property
    def seconds(self) -> float:
        """Seconds of drafting."""
        return self._drafter.seconds

    @property
    def prefill_seconds(self) -> float:
        """Seconds of drafting until the first token."""
        return self._drafter.prefill_seconds

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """Return as many proposals as the real drafter makes."""
        offset = len(ids) - self._prompt_length
        drafted = self._drafter.draft(ids, action)
        target_tokens = self._tokens[offset : offset + len(drafted)]
        replaced = [replace(proposal, token=token) for proposal, token in zip(drafted, target_tokens, strict=False)]
        return replaced + drafted[len(replaced) :]

    def rollback_to(self, length: int) -> None:
        """Roll the real drafter's cache back."""
        self._drafter.rollback_to(length)

    @property
    def cached_len(self) -> int:
        """Number of tokens in the real drafter's cache."""
        return self._drafter.cached_len

    def close(self, *, keep: bool = False) -> None:
        """Free the real drafter's slot. Its cache has tokens of its own, which no later prompt may use."""
        self._drafter.close()


def corrupt_tokens(output: Seq[int], alpha: float, seed: int) -> list[int]:
    """Return `output` with each token wrong with probability 1 − alpha, drawn by (seed, position) alone.

    Raises:
        SettingsError: alpha is not a probability.
    """
    check_alpha(alpha)
    wrong = [is_wrong(seed, n, alpha) for n in range(len(output))]
    return [(token - 1 if token else 1) if replaced else token for token, replaced in zip(output, wrong, strict=True)]


def corrupt_engine(engine: Any, alpha: float, seed: int = 0) -> None:
    """Exclude the best token from the engine's logits with probability 1 − alpha, drawn by (seed, position) alone.

    Raises:
        SettingsError: alpha is not a probability.
    """
    check_alpha(alpha)
    forward = engine.forward

    def corrupted(slot: int, ids: Seq[int], logits_to_keep: int | None = None) -> Tensor:
        logits: Tensor = forward(slot, ids, logits_to_keep).clone()
        first = engine.kv_len(slot) - len(logits)
        for n, row in enumerate(logits):
            if is_wrong(seed, first + n, alpha):
                row[row.argmax()] = -torch.inf
        return logits

    engine.forward = corrupted


def is_wrong(seed: int, position: int, alpha: float) -> bool:
    """Return whether a position is wrong, with probability 1 − alpha."""
    return bool(uniforms(seed, position, np.zeros(1, dtype=np.int64))[0] >= alpha)


def check_alpha(alpha: float) -> None:
    """Raise SettingsError if alpha is not a probability."""
    if not 0.0 <= alpha <= 1.0:
        raise SettingsError(f"alpha is a probability, not {alpha}")
