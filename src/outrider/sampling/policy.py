"""The decode policy: how a row of logits becomes a token. One object for drafter, verifier and baselines alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from outrider.config import GenerationSettings
from outrider.sampling.logits_processors import LogitsProcessors
from outrider.sampling.sampler import Distribution, NoiseStream, SampledToken, SamplingParams, Support, filter_logits
from outrider.sampling.top_logprobs import TopLogprobs

ForwardOutput = (
    Tensor | Seq[SampledToken] | Seq[TopLogprobs]
)  # logits float32 [R, V]; what was chosen from each; or parts of each

LOOP_TOP_K = 5
LOOP_TEMPERATURE = 0.8


@dataclass(frozen=True)
class BatchKey:
    """What rows must share to be chosen from together: all of a policy but seed and prompt length."""

    processors: LogitsProcessors
    sampling: SamplingParams
    vocab_size: int

    @property
    def has_processors(self) -> bool:
        """Whether any constraint can apply to a row."""
        processors = self.processors
        return self.needs_history or bool(processors.banned_ids or (processors.eos_ids and processors.min_new_tokens))

    @property
    def needs_history(self) -> bool:
        return self.processors.repetition_penalty != 1.0 or self.processors.no_repeat_ngram > 0


class Policy:
    """Constraints, then sampling, over the vocabulary that both models share.

    vocab_size: rows are cut to this many entries; what lies beyond is padding that no tokenizer can name.
    """

    def __init__(self, processors: LogitsProcessors, sampling: SamplingParams, vocab_size: int) -> None:
        self.processors, self.sampling, self.vocab_size = processors, sampling, vocab_size
        self._index = processors.index()

    @classmethod
    def build(
        cls, settings: GenerationSettings, eos_ids: tuple[int, ...], vocab_size: int, prompt_length: int
    ) -> Policy:
        """The policy that `settings` ask for, with the target's EOS ids."""
        processors = LogitsProcessors(
            settings.repetition_penalty,
            settings.no_repeat_ngram_size,
            settings.min_new_tokens,
            () if settings.ignore_eos else eos_ids,
            settings.suppress_tokens,
            prompt_length,
            settings.repetition_window,
        )
        sampling = SamplingParams(settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.seed)
        return cls(processors, sampling, vocab_size)

    @cached_property
    def batch_key(self) -> BatchKey:
        processors, sampling = replace(self.processors, prompt_length=0), replace(self.sampling, seed=0)
        return BatchKey(processors, sampling, self.vocab_size)

    def distribution(self, logits: Tensor, ids: list[int], length: int) -> Distribution:
        """What follows ids[:length], given the model's raw row (float32 [≥ vocab_size])."""
        logits = self.processors.apply(logits[: self.vocab_size], ids, length, self._index)
        return Distribution(logits, self.sampling, length)

    def distribution_at(
        self, output: ForwardOutput, i: int, ids: list[int], length: int
    ) -> Distribution | SampledToken:
        """What follows ids[:length], given row i, a part of it, or what was chosen from it.

        Raises:
            DecodingError: nothing could be chosen.
            NeedMoreLogprobs: the part does not say.
        """
        logits = output[i]
        if isinstance(logits, Tensor):
            return self.distribution(logits, ids, length)
        return (
            logits.validated(length) if isinstance(logits, SampledToken) else logits.to_distribution(self, ids, length)
        )

    @property
    def noise_gain(self) -> float:
        """By how much the constraints can enlarge a difference between two logits."""
        penalty = self.processors.repetition_penalty
        return max(penalty, 1.0 / penalty)

    def leave_loop(self, logits: Tensor, ids: list[int], length: int) -> int:
        """A seeded draw from the five best at temperature 0.8 (`--on-loop sample`). logits: float32 [≥ vocab_size]."""
        constrained = self.distribution(logits, ids, length).logits
        candidates: Support = filter_logits(constrained, SamplingParams(LOOP_TEMPERATURE, top_k=LOOP_TOP_K))
        return candidates.draw(self.sampling.seed, length, NoiseStream.LOOP)
