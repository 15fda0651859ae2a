"""What ids mean: an engine's tokens, and the hash by which two sides compare them."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

from outrider.engines.locking import lock_of


def tokenize(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the ids of a text. options: of the tokenizer's call.

    Some options are written into the tokenizer for the time of the call: one thread at a time.
    """
    with lock_of(tokenizer):
        return list(tokenizer(text, **options)["input_ids"])


class Vocabulary:
    """The part of an engine that its tokenizer makes. row_count: ids that the model can read."""

    tokenizer: Any
    row_count: int

    @cached_property
    def vocab_size(self) -> int:
        """How many ids the tokenizer can name; what lies beyond is padding."""
        if self.tokenizer is None:
            return self.row_count
        return min(self.row_count, max(self.tokenizer.get_vocab().values()) + 1)

    @cached_property
    def fingerprint(self) -> str:
        tokens = self.vocabulary or [str(self.vocab_size)]
        return hashlib.sha256("\0".join(tokens).encode()).hexdigest()[:16]

    @cached_property
    def vocabulary(self) -> list[str]:
        """The token strings by id; empty without a tokenizer."""
        if self.tokenizer is None:
            return []
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(range(self.vocab_size)))]
