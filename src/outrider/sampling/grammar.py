"""Structured output: the tokens that a grammar allows after each prefix of the output.

The mask of a position is a pure function of the output's tokens before it. Drafter and verifier therefore compute the
same masks, and decoding stays exact. llguidance computes a mask from the bytes of all tokens. The mask holds each token
whose bytes continue the output within the grammar, regardless of how a tokenizer would split the text, and EOS where
the output is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import DecodingError
from outrider.sampling.logits_processors import common_prefix_length

if TYPE_CHECKING:  # imported with the first grammar
    from llguidance import LLMatcher

WORD_BITS = 32


class DeadEnd(DecodingError):
    """No token can follow: the grammar allows none, or the other settings ban all that it allows."""


class CompiledGrammar:
    """A grammar over the tokens of one vocabulary. Threads may share it.

    compile_matcher: returns a matcher at the beginning of an output. vocab_size: tokens of the mask. eos_ids: the
    end tokens. eos, end: packed masks of all end tokens, and of the first one.
    """

    def __init__(self, compile_matcher: Callable[[], LLMatcher], vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.compile_matcher, self.vocab_size, self.eos_ids = compile_matcher, vocab_size, eos_ids
        self.eos, self.end = self._pack(eos_ids), self._pack(eos_ids[:1])
        self._prototype = compile_matcher()

    def _pack(self, tokens: tuple[int, ...]) -> np.ndarray:
        words = np.zeros(-(-self.vocab_size // WORD_BITS), dtype=np.int32)
        for token in tokens:
            words.view(np.uint8)[token // 8] |= 1 << token % 8
        return words

    def is_text(self, token: int) -> bool:
        """Return whether a token is in the vocabulary and does not end the output."""
        return token < self.vocab_size and token not in self.eos_ids

    @property
    def error(self) -> str:
        """The reason why the grammar could not be compiled, or an empty text."""
        return self._prototype.get_error()

    def copy_matcher(self) -> LLMatcher:
        """Return a matcher that shares the lexer's states with its other copies."""
        return self._prototype.deep_copy()


class GrammarMask:
    """The masks of one output's positions. Threads must not share it.

    The state belongs to the last prefix, which is compared with the next one, so a roll-back needs no call.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar, self._matcher = grammar, grammar.copy_matcher()
        self._ids: list[int] = []  # the tokens that the matcher has consumed, without EOS
        self._words = np.zeros_like(grammar.eos)
        self._has_mask = False  # whether `_words` is the mask after `_ids`
        self._unpacked: np.ndarray | None = None  # `_words` as bools

    def packed(self, output: list[int]) -> np.ndarray:
        """Return the mask after an output's tokens: int32 [⌈vocab_size ÷ 32⌉], bit n % 32 of word n ÷ 32 for token n.

        It is empty after tokens that the grammar does not allow. Where only EOS can follow, and after an EOS, it holds
        only the first EOS, so that no row of logits is needed. The next call overwrites it.

        Raises:
            DeadEnd: no token of the vocabulary continues the output, or the grammar is too complex here.
        """
        if not self._move_to(output):
            self._matcher = self._grammar.compile_matcher()  # with unused limits
            self._ids, self._has_mask = [], False
            if not self._move_to(output):
                reason = self._matcher.get_error().partition("\n")[0] or "no token has the required bytes"
                raise DeadEnd(f"grammar: no token can follow {len(output)} tokens: {reason}")
        return self._words

    def allowed(self, output: list[int]) -> np.ndarray:
        """Return the mask after an output's tokens: bool [vocab_size], cached: do not change it. Raise as `packed`."""
        words = self.packed(output)
        if self._unpacked is None:
            bits = np.unpackbits(words.view(np.uint8), count=self._grammar.vocab_size, bitorder="little")
            self._unpacked = bits.view(np.bool_)
        return self._unpacked

    def allows(self, output: list[int], token: int) -> bool:
        """Return whether a token may follow an output. In a dead end, no token may."""
        try:
            words = self.packed(output)
        except DeadEnd:
            return False
        return token < self._grammar.vocab_size and bool(words.view(np.uint8)[token // 8] >> token % 8 & 1)

    def _move_to(self, output: list[int]) -> bool:
        """Compute the mask after an output. Return whether the matcher succeeded."""
        common = common_prefix_length(self._ids, output, len(output))
        surplus = len(self._ids) - common
        if surplus and not self._matcher.rollback(surplus):
            return False
        del self._ids[common:]
        text = list(takewhile(self._grammar.is_text, output[common:]))
        consumed = self._matcher.try_consume_tokens(text) if text else 0
        self._ids += text[:consumed]
        self._has_mask = self._has_mask and not surplus and not consumed
        if len(self._ids) < len(output):
            self._words[:], self._has_mask, self._unpacked = 0, False, None
            if output[len(self._ids)] in self._grammar.eos_ids:
                self._words[:] = self._grammar.end
        elif not self._has_mask:
            self._unpacked = None
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            self._has_mask = self._matcher.stop_reason() != "NoExtensionBias"  # no token is allowed, not even EOS
            if not (self._words & ~self._grammar.eos).any():
                self._words &= self._grammar.end
        return not self._matcher.is_error() and (self._has_mask or len(self._ids) < len(output))
