"""Logits processors: logit bias, penalties, no-repeat n-gram, minimum length and bans. Both sides run the same code.

Each processor is a pure function of a row and of the prefix of that row's own position: prompt, output and the earlier
drafts of the block. Definitions and order are those of transformers and vLLM (v1/sample/sampler.py,
`apply_logits_processors`, and model_executor/layers/utils.py, `apply_penalties`), which agree where both have a
processor. For a token v with count c_v in the output:

    logit bias           l_v + b_v
    repetition penalty   l_v / p if l_v ≥ 0 else l_v · p, for the tokens of prompt and output
    frequency penalty    l_v − f · c_v
    presence penalty     l_v − r if c_v > 0
    bans                 −∞

Each is a non-decreasing function of l_v, on which `sampling/top_logprobs.py` relies. `PrefixIndex` makes the n-grams
and the penalties fast. Its state belongs to the last prefix, which is compared with the next one, so a roll-back needs
no call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from outrider.sampling.logits import clone_logits, gather_logits, scatter_logits


class TokenCounts:
    """The distinct tokens of a sequence and their counts. Tokens are added and removed at the sequence's end."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # in order of first appearance
        self._table = np.zeros((256, 2), dtype=np.int64)

    @property
    def ids(self) -> np.ndarray:
        """The distinct tokens in order of first appearance, int64 [distinct]."""
        return self._table[: len(self._rows), 0]

    @property
    def counts(self) -> np.ndarray:
        """The count of each distinct token, int64 [distinct]."""
        return self._table[: len(self._rows), 1]

    def push(self, token: int) -> None:
        """Append a token."""
        row = self._rows.setdefault(token, len(self._rows))
        if row == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._table[row] = token, self._table[row, 1] + 1

    def pop(self, token: int) -> None:
        """Remove the last token, which is `token`."""
        row = self._rows[token]
        self._table[row, 1] -= 1
        if not self._table[row, 1]:
            del self._rows[token]  # it first appeared here, so it is the last row


class PrefixIndex:
    """The counts of tokens and the n-grams of a prefix, maintained incrementally.

    tokens: the counts in the whole prefix. output: the counts after its first `prompt_length` tokens.
    """

    def __init__(self, ngram: int = 0, prompt_length: int = 0) -> None:
        self._ngram, self._prompt_length = ngram, prompt_length
        self._ids: list[int] = []
        self._ngram_followers: dict[tuple[int, ...], list[int]] = {}
        self.tokens, self.output = TokenCounts(), TokenCounts()

    def move_to(self, ids: list[int], length: int) -> None:
        """Index the prefix ids[:length], in amortised O(changed tokens) plus one comparison of the common part."""
        common = common_prefix_length(self._ids, ids, length)
        while len(self._ids) > common:
            self._pop()
        for token in ids[common:length]:
            self._push(token)

    def ngram_completions(self) -> list[int]:
        """Return the tokens that would repeat an n-gram of the prefix (transformers' NoRepeatNGram)."""
        if len(self._ids) + 1 < self._ngram:
            return []
        return self._ngram_followers.get(self._tail(), [])

    def _tail(self) -> tuple[int, ...]:
        return tuple(self._ids[len(self._ids) - self._ngram + 1 :])

    def _push(self, token: int) -> None:
        if self._ngram and len(self._ids) >= self._ngram - 1:
            self._ngram_followers.setdefault(self._tail(), []).append(token)
        self.tokens.push(token)
        if len(self._ids) >= self._prompt_length:
            self.output.push(token)
        self._ids.append(token)

    def _pop(self) -> None:
        token = self._ids.pop()
        self.tokens.pop(token)
        if len(self._ids) >= self._prompt_length:
            self.output.pop(token)
        if self._ngram and len(self._ids) >= self._ngram - 1:
            self._ngram_followers[self._tail()].pop()


def common_prefix_length(old: list[int], new: list[int], length: int) -> int:
    """Return the length of the common prefix of `old` and the first `length` ids of `new`."""
    shared = min(len(old), length)
    if old[:shared] == new[:shared]:
        return shared
    return next(i for i in range(shared) if old[i] != new[i])


@dataclass(frozen=True)
class LogitsProcessors:
    """The settings of the logits processors. `prompt_length` separates generated tokens from the prompt.

    repetition_window: the number of last tokens that the penalty covers, or 0 for all, as in transformers.
    logit_bias: pairs of token id and bias.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    prompt_length: int = 0
    repetition_window: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def counts_output(self) -> bool:
        """Return whether a penalty depends on the token counts of the output."""
        return bool(self.frequency_penalty or self.presence_penalty)

    @property
    def needs_history(self) -> bool:
        """Return whether a processor reads the ids of the prefix."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram > 0 or self.counts_output

    def is_active(self, length: int) -> bool:
        """Return whether a processor applies to the row that follows a prefix of `length` tokens."""
        return bool(self.needs_history or self.logit_bias or self.banned_ids or self.bans_eos(length))

    def bans_eos(self, length: int) -> bool:
        """Return whether the output of a prefix of `length` tokens is too short to end."""
        return bool(self.eos_ids) and length - self.prompt_length < self.min_new_tokens

    def apply(self, logits: Tensor, ids: list[int], length: int, index: PrefixIndex) -> Tensor:
        """Apply the processors to the row (float32 [V]) that follows ids[:length]. The given row stays unchanged."""
        if not self.is_active(length):
            return logits
        logits = clone_logits(logits)
        if self.logit_bias:
            _add_bias(logits, self.logit_bias)
        if self.repetition_penalty != 1.0:
            index.move_to(ids, length)
            _apply_repetition_penalty(logits, self._penalised_ids(ids, length, index), self.repetition_penalty)
        if self.counts_output:
            index.move_to(ids, length)
            self._subtract_penalties(logits, index.output)
        _ban(logits, self.banned_at(ids, length, index))
        return logits

    def banned_at(self, ids: list[int], length: int, index: PrefixIndex) -> list[int]:
        """Return the tokens that cannot follow ids[:length], a token possibly more than once."""
        banned = [*self.banned_ids, *(self.eos_ids if self.bans_eos(length) else ())]
        if self.no_repeat_ngram:
            index.move_to(ids, length)
            banned += index.ngram_completions()
        return banned

    def _penalised_ids(self, ids: list[int], length: int, index: PrefixIndex) -> np.ndarray:
        """Return the distinct tokens that the penalty covers, int64 [distinct]."""
        if not self.repetition_window:
            return index.tokens.ids
        return np.unique(np.array(ids[max(0, length - self.repetition_window) : length], dtype=np.int64))

    def _subtract_penalties(self, logits: Tensor, output: TokenCounts) -> None:
        """Apply the frequency and the presence penalty, in float32 and in vLLM's order."""
        known = output.ids < logits.shape[-1]
        tokens, counts = output.ids[known], output.counts[known]
        scores = gather_logits(logits, tokens)
        scores = scores - np.float32(self.frequency_penalty) * counts.astype(np.float32)
        scatter_logits(logits, tokens, scores - np.float32(self.presence_penalty))

    def index(self) -> PrefixIndex:
        """Return a new index to pass to `apply`. Threads must not share one."""
        return PrefixIndex(self.no_repeat_ngram, self.prompt_length)


def _apply_repetition_penalty(logits: Tensor, seen: np.ndarray, penalty: float) -> None:
    """Multiply negative scores by the penalty and divide others by it, once per distinct token.

    Dividing a negative logit would raise its probability.
    """
    indices = seen[seen < logits.shape[-1]]  # audio placeholders may lie beyond the shared vocabulary
    scores = gather_logits(logits, indices)
    scatter_logits(logits, indices, np.where(scores < 0, scores * np.float32(penalty), scores / np.float32(penalty)))


def _add_bias(logits: Tensor, logit_bias: tuple[tuple[int, float], ...]) -> None:
    pairs = [(token, bias) for token, bias in logit_bias if token < logits.shape[-1]]
    indices = np.array([token for token, _ in pairs], dtype=np.int64)
    biases = np.array([bias for _, bias in pairs], dtype=np.float32)
    scatter_logits(logits, indices, gather_logits(logits, indices) + biases)


def _ban(logits: Tensor, ids: list[int]) -> None:
    indices = np.array([token for token in ids if token < logits.shape[-1]], dtype=np.int64)
    if indices.size:
        scatter_logits(logits, indices, -np.inf)
