"""The sampling policy: logits processors, then sampling. Drafter, verifier and baselines use the same object."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from outrider.config import GenerationSettings
from outrider.errors import SettingsError
from outrider.sampling.grammar import CompiledGrammar, DeadEnd, GrammarMask
from outrider.sampling.logits import argmax, ban_others, clone_logits
from outrider.sampling.logits_processors import LogitsProcessors
from outrider.sampling.logprobs import Logprobs, compute_logprobs
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
        bans = processors.banned_ids or (processors.eos_ids and processors.min_new_tokens)
        return bool(self.needs_history or processors.logit_bias or bans)

    @property
    def needs_history(self) -> bool:
        """Return whether a logits processor reads the ids of the prefix."""
        return self.processors.needs_history


class Policy:
    """Logits processors and sampling over the vocabulary that both models share.

    vocab_size: the length to which rows are cut. Entries beyond it are padding, without a token. logprobs: how many
    top log-probabilities to report in addition to the token's own, or None for no report. grammar: constrains the
    output.
    """

    def __init__(
        self,
        processors: LogitsProcessors,
        sampling: SamplingParams,
        vocab_size: int,
        logprobs: int | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        self.processors = processors
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.logprobs = logprobs
        self._index = processors.index()
        self._mask = None if grammar is None else GrammarMask(grammar)

    @classmethod
    def build(
        cls,
        settings: GenerationSettings,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        prompt_length: int,
        grammar: CompiledGrammar | None = None,
    ) -> Policy:
        """Return the policy of `settings`. eos_ids: the target's. grammar: that of the settings.

        Raises:
            SettingsError: the settings have a grammar that was not compiled.
        """
        if settings.grammar is not None and grammar is None:
            raise SettingsError("grammar needs a tokenizer, and there is none on this side")
        processors = LogitsProcessors(
            settings.repetition_penalty,
            settings.no_repeat_ngram_size,
            settings.min_new_tokens,
            () if settings.ignore_eos else eos_ids,
            settings.suppress_tokens,
            prompt_length,
            settings.repetition_window,
            settings.frequency_penalty,
            settings.presence_penalty,
            settings.logit_bias,
        )
        sampling = SamplingParams(settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.seed)
        return cls(processors, sampling, vocab_size, settings.logprobs, grammar)

    @cached_property
    def batch_key(self) -> BatchKey:
        """The key of rows that can be sampled together with this policy's."""
        processors, sampling = replace(self.processors, prompt_length=0), replace(self.sampling, seed=0)
        return BatchKey(processors, sampling, self.vocab_size)

    def distribution(self, logits: Tensor, ids: list[int], length: int) -> Distribution:
        """Return the distribution after ids[:length]. logits: the model's raw row, float32 [≥ vocab_size].

        Raises:
            DeadEnd: the other settings ban every token that the grammar allows, or the grammar allows none.
        """
        processed = self._process(logits, ids, length)
        if self.has_grammar and float(processed[argmax(processed)]) == -math.inf:
            raise DeadEnd(
                f"no token can be chosen at position {length}: min_new_tokens, suppress_tokens or "
                "no_repeat_ngram_size ban every token that the grammar allows"
            )
        return Distribution(processed, self.sampling, length)

    def _process(self, logits: Tensor, ids: list[int], length: int) -> Tensor:
        raw = logits[: self.vocab_size]
        processed = self.processors.apply(raw, ids, length, self._index)
        allowed = self.allowed(ids, length)
        if allowed is not None:
            processed = clone_logits(raw) if processed is raw else processed
            ban_others(processed, allowed)
        return processed

    @property
    def needs_logits(self) -> bool:
        """True if the host samples: a grammar's mask depends on the preceding token, and a report on the whole row."""
        return self.has_grammar or self.logprobs is not None

    @property
    def has_grammar(self) -> bool:
        """True if a grammar masks the tokens of each position."""
        return self._mask is not None

    def allows(self, ids: list[int], token: int) -> bool:
        """Return whether a token is in the vocabulary, and the grammar allows it after `ids`."""
        if token >= self.vocab_size:
            return False
        return self._mask is None or self._mask.allows(ids[self.processors.prompt_length :], token)

    def allowed(self, ids: list[int], length: int) -> np.ndarray | None:
        """Return the tokens that the grammar allows after ids[:length], bool [≤ vocab_size], or None without one."""
        if self._mask is None:
            return None
        return self._mask.allowed(ids[self.processors.prompt_length : length])[: self.vocab_size]

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
        allowed = self.allowed(ids, length)
        if allowed is not None:
            row = row.within(allowed)
        return row.to_distribution(lambda logits: self.distribution(logits, ids, length), self.vocab_size)

    def report_logprobs(self, output: ForwardOutput, tokens: Seq[int], position: int) -> tuple[Logprobs, ...]:
        """Return the log-probabilities of `tokens`, the first at `position`, or () if none are requested.

        output: the raw rows before the tokens.

        Raises:
            NeedMoreLogprobs: the known entries of a row do not contain the best tokens.
        """
        if self.logprobs is None:
            return ()
        return compute_logprobs(output, tokens, self.logprobs, self.vocab_size, position)

    @property
    def noise_gain(self) -> float:
        """The factor by which the logits processors can enlarge a difference of two logits.

        Biases and the penalties that are subtracted do not change the noise of a logit.
        """
        penalty = self.processors.repetition_penalty
        return max(penalty, 1.0 / penalty)

    def banned_ids(self, ids: list[int]) -> list[int]:
        """Return the tokens that the logits processors ban after `ids`, possibly with repetitions."""
        return self.processors.banned_at(ids, len(ids), self._index)

    def leave_loop(self, logits: Tensor, ids: list[int], length: int) -> int:
        """Draw from the five best at temperature 0.8 (`--on-loop sample`). logits: float32 [≥ vocab_size]."""
        constrained = self.distribution(logits, ids, length).logits
        candidates = filter_logits(constrained, SamplingParams(LOOP_TEMPERATURE, top_k=LOOP_TOP_K))
        return candidates.draw(self.sampling.seed, length, NoiseStream.LOOP)
