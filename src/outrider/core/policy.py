"""The decode policy: how a row of logits becomes a token. One object for drafter, verifier and baselines alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from outrider.config import GenerationSettings
from outrider.core.constraints import Constraints
from outrider.core.partial import PartialRow
from outrider.core.sampling import Distribution, Pick, Sampling, Stream, Support, support

Rows = Tensor | Seq[Pick] | Seq[PartialRow]  # logits float32 [R, V]; what was chosen from each; or parts of each

LOOP_SHORTLIST = 5
LOOP_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Kind:
    """What rows must share to be chosen from together: all of a policy but seed and prompt length."""

    constraints: Constraints
    sampling: Sampling
    vocab_size: int

    @property
    def constrains(self) -> bool:
        """Whether any constraint can apply to a row."""
        chain = self.constraints
        return self.reads_history or bool(chain.banned_ids or (chain.eos_ids and chain.min_new_tokens))

    @property
    def reads_history(self) -> bool:
        return self.constraints.repetition_penalty != 1.0 or self.constraints.no_repeat_ngram > 0


class Policy:
    """Constraints, then sampling, over the vocabulary that both models share.

    vocab_size: rows are cut to this many entries; what lies beyond is padding that no tokenizer can name.
    """

    def __init__(self, constraints: Constraints, sampling: Sampling, vocab_size: int) -> None:
        self.constraints, self.sampling, self.vocab_size = constraints, sampling, vocab_size
        self._index = constraints.index()

    @classmethod
    def build(
        cls, settings: GenerationSettings, eos_ids: tuple[int, ...], vocab_size: int, prompt_length: int
    ) -> Policy:
        """The policy that `settings` ask for, with the target's EOS ids."""
        constraints = Constraints(
            settings.repetition_penalty,
            settings.no_repeat_ngram_size,
            settings.min_new_tokens,
            () if settings.ignore_eos else eos_ids,
            settings.suppress_tokens,
            prompt_length,
            settings.repetition_window,
        )
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.seed)
        return cls(constraints, sampling, vocab_size)

    @cached_property
    def kind(self) -> Kind:
        constraints, sampling = replace(self.constraints, prompt_length=0), replace(self.sampling, seed=0)
        return Kind(constraints, sampling, self.vocab_size)

    def distribution(self, row: Tensor, ids: list[int], length: int) -> Distribution:
        """What follows ids[:length], given the model's raw row (float32 [≥ vocab_size])."""
        row = self.constraints.apply(row[: self.vocab_size], ids, length, self._index)
        return Distribution(row, self.sampling, length)

    def at(self, rows: Rows, i: int, ids: list[int], length: int) -> Distribution | Pick:
        """What follows ids[:length], given row i, a part of it, or what was chosen from it.

        Raises:
            DecodingError: nothing could be chosen.
            Uncovered: the part does not say.
        """
        row = rows[i]
        if isinstance(row, Tensor):
            return self.distribution(row, ids, length)
        return row.checked(length) if isinstance(row, Pick) else row.under(self, ids, length)

    @property
    def noise_gain(self) -> float:
        """By how much the constraints can enlarge a difference between two logits."""
        penalty = self.constraints.repetition_penalty
        return max(penalty, 1.0 / penalty)

    def leave_loop(self, row: Tensor, ids: list[int], length: int) -> int:
        """A seeded draw from the five best at temperature 0.8 (`--on-loop sample`). row: float32 [≥ vocab_size]."""
        constrained = self.distribution(row, ids, length).row
        options: Support = support(constrained, Sampling(LOOP_TEMPERATURE, top_k=LOOP_SHORTLIST))
        return options.draw(self.sampling.seed, length, Stream.LOOP)
