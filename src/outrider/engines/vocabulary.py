"""Vocabulary of an engine: its token strings, and the hash by which edge and cloud compare them."""

from __future__ import annotations

import hashlib
import logging
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor

from outrider.engines.locking import get_lock
from outrider.errors import ModelError, quote
from outrider.numeric import is_integer

log = logging.getLogger(__name__)


def tokenize(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the ids of a text. options: of the tokenizer's call.

    The tokenizer stores some options during the call, so one thread calls it at a time.
    """
    with get_lock(tokenizer):
        return list(tokenizer(text, **options)["input_ids"])


class Vocabulary:
    """The part of an engine that depends on its tokenizer. row_count: number of ids that the model can read."""

    tokenizer: Any
    row_count: int

    @cached_property
    def vocab_size(self) -> int:
        """Return how many ids the tokenizer can name. Ids beyond are padding."""
        if self.tokenizer is None:
            return self.row_count
        return min(self.row_count, max(self.tokenizer.get_vocab().values()) + 1)

    @cached_property
    def fingerprint(self) -> str:
        """Return the hash of the vocabulary, 16 hexadecimal digits."""
        tokens = self.vocabulary or [str(self.vocab_size)]
        return hashlib.sha256("\0".join(tokens).encode()).hexdigest()[:16]

    @cached_property
    def vocabulary(self) -> list[str]:
        """Return the token strings by id, or an empty list without a tokenizer."""
        if self.tokenizer is None:
            return []
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(range(self.vocab_size)))]


def check_eos_ids(name: str, ids: tuple[Any, ...], row_count: int, source: str) -> tuple[int, ...]:
    """Return the end tokens that the model can emit. Ids beyond its vocabulary are dropped.

    source: origin of the end tokens, for error messages.

    Raises:
        ModelError: an end token is not a token id.
    """
    for token in ids:
        if not is_integer(token) or token < 0:
            raise ModelError(
                f"{name}: eos_token_id {quote(token)} of its {source} is not a token id: expected an integer, 0 or more"
            )
    return tuple(token for token in ids if token < row_count)


def warn_if_eos_differs(name: str, used: tuple[int, ...], tokenizer: Any, source: str) -> None:
    """Log a warning if the tokenizer's end token is not among the end tokens in use. source: the origin of those."""
    end = getattr(tokenizer, "eos_token_id", None)
    if end is not None and end not in used:
        _warn_once(
            name, tuple(_describe_token(tokenizer, token) for token in used), _describe_token(tokenizer, end), source
        )


@lru_cache(256)
def _warn_once(name: str, used: tuple[str, ...], end: str, source: str) -> None:
    """Log the warning, once for equal arguments."""
    ends = f"ends outputs with {', '.join(used)}" if used else "names no end token, so that only lengths end an output"
    log.warning("%s: its tokenizer's end token is %s, but its %s %s. The latter is used", name, end, source, ends)


def _describe_token(tokenizer: Any, token: int) -> str:
    return f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})"


def read_eos_ids(model: Any) -> tuple[int, ...]:
    """Return the end tokens of a transformers model's generation config."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if isinstance(eos, Tensor):
        eos = eos.tolist()
    return () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
