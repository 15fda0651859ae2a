"""Repetition penalty, no-repeat n-gram, minimum length and bans: one chain, the same code on both sides.

Each constraint is a pure function of a row and of *that position's own prefix* (prompt, output and the earlier
drafts of the block), equal to transformers' processors of the same name and applied in transformers' order. What
makes it fast is `PrefixIndex`, a memo over the last prefix seen: it pops and pushes to reach the prefix that is
asked for, so it cannot disagree with the tokens, whatever was rolled back in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outrider.sampling.logits import clone_logits, gather_logits, scatter_logits


class PrefixIndex:
    """The distinct tokens and the n-grams of a prefix, maintained incrementally."""

    def __init__(self, ngram: int = 0) -> None:
        self._ngram = ngram
        self._ids: list[int] = []
        self._counts: dict[int, int] = {}
        self._distinct = np.empty(256, dtype=np.int64)  # a stack: tokens in order of first appearance
        self._ngram_followers: dict[tuple[int, ...], list[int]] = {}

    def move_to(self, ids: list[int], length: int) -> None:
        """Index the prefix ids[:length]: amortised O(what changed), plus one comparison of the common part."""
        common = _common_prefix_length(self._ids, ids, length)
        while len(self._ids) > common:
            self._pop()
        for token in ids[common:length]:
            self._push(token)

    @property
    def distinct_ids(self) -> np.ndarray:
        """int64 [distinct]: the distinct tokens of the prefix."""
        return self._distinct[: len(self._counts)]

    def ngram_completions(self) -> list[int]:
        """Tokens that would repeat an n-gram of the prefix (transformers' NoRepeatNGram)."""
        if len(self._ids) + 1 < self._ngram:
            return []
        return self._ngram_followers.get(self._tail(), [])

    def _tail(self) -> tuple[int, ...]:
        return tuple(self._ids[len(self._ids) - self._ngram + 1 :])

    def _push(self, token: int) -> None:
        if self._ngram and len(self._ids) >= self._ngram - 1:
            self._ngram_followers.setdefault(self._tail(), []).append(token)
        self._ids.append(token)
        count = self._counts.get(token, 0)
        self._counts[token] = count + 1
        if not count:
            if len(self._counts) > self._distinct.size:
                self._distinct = np.concatenate([self._distinct, np.empty_like(self._distinct)])
            self._distinct[len(self._counts) - 1] = token

    def _pop(self) -> None:
        token = self._ids.pop()
        self._counts[token] -= 1
        if not self._counts[token]:
            del self._counts[token]  # first seen here, so it is the top of the stack
        if self._ngram and len(self._ids) >= self._ngram - 1:
            self._ngram_followers[self._tail()].pop()


def _common_prefix_length(old: list[int], new: list[int], length: int) -> int:
    shared = min(len(old), length)
    if old[:shared] == new[:shared]:
        return shared
    return next(i for i in range(shared) if old[i] != new[i])


@dataclass(frozen=True)
class LogitsProcessors:
    """The settings of the chain. `prompt_length` separates generated tokens from the prompt.

    repetition_window: the number of the prefix's last tokens that the penalty covers; 0: all, as in transformers.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    prompt_length: int = 0
    repetition_window: int = 0

    def is_active(self, length: int) -> bool:
        """Whether anything applies to the row that follows a prefix of `length` tokens."""
        return bool(self.repetition_penalty != 1.0 or self.no_repeat_ngram or self.banned_ids or self.bans_eos(length))

    def bans_eos(self, length: int) -> bool:
        return bool(self.eos_ids) and length - self.prompt_length < self.min_new_tokens

    def apply(self, logits: Tensor, ids: list[int], length: int, index: PrefixIndex) -> Tensor:
        """The row (float32 [V]) that follows ids[:length], constrained; the given row is left as it was."""
        if not self.is_active(length):
            return logits
        logits = clone_logits(logits)
        if self.repetition_penalty != 1.0 or self.no_repeat_ngram:
            index.move_to(ids, length)
        if self.repetition_penalty != 1.0:
            _apply_repetition_penalty(logits, self._penalised_ids(ids, length, index), self.repetition_penalty)
        if self.no_repeat_ngram:
            _ban(logits, index.ngram_completions())
        if self.bans_eos(length):
            _ban(logits, self.eos_ids)
        _ban(logits, self.banned_ids)
        return logits

    def _penalised_ids(self, ids: list[int], length: int, index: PrefixIndex) -> np.ndarray:
        """int64 [distinct]: the distinct tokens that the penalty covers."""
        if not self.repetition_window:
            return index.distinct_ids
        return np.unique(np.array(ids[max(0, length - self.repetition_window) : length], dtype=np.int64))

    def index(self) -> PrefixIndex:
        """A memo to pass to `apply`; one per reader, never shared between threads."""
        return PrefixIndex(self.no_repeat_ngram)


def _apply_repetition_penalty(logits: Tensor, seen: np.ndarray, penalty: float) -> None:
    """Negative scores × penalty, others ÷ penalty, once per distinct token.

    Dividing a negative logit would *raise* its probability: the prototype's bug.
    """
    indices = seen[seen < logits.shape[-1]]  # audio placeholders may lie beyond the shared vocabulary
    scores = gather_logits(logits, indices)
    scatter_logits(logits, indices, np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty)))


def _ban(logits: Tensor, ids: list[int] | tuple[int, ...]) -> None:
    indices = np.array([token for token in ids if token < logits.shape[-1]], dtype=np.int64)
    if indices.size:
        scatter_logits(logits, indices, -np.inf)
