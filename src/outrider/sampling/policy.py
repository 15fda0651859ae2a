"""The sampling policy: logits processors, then sampling. Drafter, verifier and baselines use the same object."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from outrider.config import GenerationSettings
from outrider.sampling.logits_processors import LogitsProcessors
from outrider.sampling.sampler import Distribution, NoiseStream, SampledToken, SamplingParams, filter_logits
from outrider.sampling.top_logprobs import TopLogprobs

# The rows of a forward pass: logits float32 [R, V], the token sampled from each row, or the largest entries of each.
ForwardOutput = Tensor | Seq[SampledToken] | Seq[TopLogprobs]

LOOP_TOP_K = 5
LOOP_TEMPERATURE = 0.8


@dataclass(frozen=True)
class BatchKey:
    """The part of a policy that rows sampled in one batch have in common: all but seed and prompt length."""

    processors: LogitsProcessors
    sampling: SamplingParams
    vocab_size: int

    @property
    def has_processors(self) -> bool:
        """Return whether a logits processor can apply to a row."""
        processors = self.processors
        return self.needs_history or bool(processors.banned_ids or (processors.eos_ids and processors.min_new_tokens))

    @property
    def needs_history(self) -> bool:
        """Return whether a logits processor reads the ids of the prefix."""
        return self.processors.repetition_penalty != 1.0 or self.processors.no_repeat_ngram > 0


class Policy:
    """Logits processors and sampling over the vocabulary that both models share.

    vocab_size: the length to which rows are cut. Entries beyond it are padding, without a token.
    """

    def __init__(self, processors: LogitsProcessors, sampling: SamplingParams, vocab_size: int) -> None:
        self.processors = processors
        self.sampling = sampling
        self.vocab_size = vocab_size
        self._index = processors.index()

    @classmethod
    def build(
        cls, settings: GenerationSettings, eos_ids: tuple[int, ...], vocab_size: int, prompt_length: int
    ) -> Policy:
        """Return the policy of `settings`. eos_ids: the target's."""
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
        """The key of rows that can be sampled together with this policy's."""
        processors, sampling = replace(self.processors, prompt_length=0), replace(self.sampling, seed=0)
        return BatchKey(processors, sampling, self.vocab_size)

    def distribution(self, logits: Tensor, ids: list[int], length: int) -> Distribution:
        """Return the distribution after ids[:length]. logits: the model's raw row, float32 [≥ vocab_size]."""
        logits = self.processors.apply(logits[: self.vocab_size], ids, length, self._index)
        return Distribution(logits, self.sampling, length)

    def distribution_at(
        self, output: ForwardOutput, i: int, ids: list[int], length: int
    ) -> Distribution | SampledToken:
        """Return the distribution after ids[:length] from row i, or the token that was sampled from the row.

        Raises:
            DecodingError: no token can be chosen.
            NeedMoreLogprobs: the known entries of the row do not determine the token.
        """
        row = output[i]
        if isinstance(row, Tensor):
            return self.distribution(row, ids, length)
        if isinstance(row, SampledToken):
            return row.validated(length)
        known = self.distribution(row.to_logits(self.vocab_size), ids, length)
        return row.to_distribution(known, self.processors.repetition_penalty)

    @property
    def noise_gain(self) -> float:
        """The factor by which the logits processors can enlarge a difference of two logits."""
        penalty = self.processors.repetition_penalty
        return max(penalty, 1.0 / penalty)

    def banned_ids(self, ids: list[int]) -> list[int]:
        """Return the tokens that the logits processors ban behind `ids`, a token possibly more than once."""
        return self.processors.banned_at(ids, len(ids), self._index)

    def leave_loop(self, logits: Tensor, ids: list[int], length: int) -> int:
        """Draw from the five best at temperature 0.8 (`--on-loop sample`). logits: float32 [≥ vocab_size]."""
        constrained = self.distribution(logits, ids, length).logits
        candidates = filter_logits(constrained, SamplingParams(LOOP_TEMPERATURE, top_k=LOOP_TOP_K))
        return candidates.draw(self.sampling.seed, length, NoiseStream.LOOP)
