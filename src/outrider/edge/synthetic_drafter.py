"""A drafter that is right as often as it is told: to measure the speed of engines at a chosen acceptance rate."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from outrider.decoding.actions import Draft, Proposal
from outrider.edge.drafter import Drafter
from outrider.errors import SettingsError
from outrider.sampling.sampler import uniforms


class SyntheticDrafter:
    """Replays what the target says, with errors at rate 1 − alpha, in the time that a real drafter takes.

    The drafter does its work, and its tokens are thrown away: its cache holds as many as it should, but not those of
    the output. output: the target's own continuation of the prompt; where it ends, the drafter's tokens stand. Whether
    the token at a position is wrong depends on (seed, position) alone: the chance that a block's first i tokens are
    accepted is alphaⁱ, however blocks are cut. Signals stay the drafter's own, and say nothing about acceptance.

    Raises:
        SettingsError: alpha is no probability.
    """

    def __init__(self, drafter: Drafter, prompt_length: int, output: Seq[int], alpha: float, seed: int = 0) -> None:
        self._drafter, self._prompt_length = drafter, prompt_length
        self._tokens = corrupt_tokens(output, alpha, seed)

    @property
    def seconds(self) -> float:
        return self._drafter.seconds

    @property
    def prefill_seconds(self) -> float:
        return self._drafter.prefill_seconds

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        """As many proposals as the drafter makes."""
        offset = len(ids) - self._prompt_length
        drafted = self._drafter.draft(ids, action)
        target_tokens = self._tokens[offset : offset + len(drafted)]
        replaced = [replace(proposal, token=token) for proposal, token in zip(drafted, target_tokens, strict=False)]
        return replaced + drafted[len(replaced) :]

    def rollback_to(self, length: int) -> None:
        self._drafter.rollback_to(length)

    def close(self) -> None:
        self._drafter.close()


def corrupt_tokens(output: Seq[int], alpha: float, seed: int) -> list[int]:
    """`output`, each token wrong with probability 1 − alpha, drawn from (seed, position) alone.

    Raises:
        SettingsError: alpha is no probability.
    """
    if not 0.0 <= alpha <= 1.0:
        raise SettingsError(f"alpha is a probability, not {alpha}")
    positions = np.zeros(1, dtype=np.int64)
    wrong = [uniforms(seed, n, positions)[0] >= alpha for n in range(len(output))]
    return [(token - 1 if token else 1) if is_wrong else token for token, is_wrong in zip(output, wrong, strict=True)]
