"""Token ids as text and back, for two tokenizers that share special tokens only by name."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import groupby
from typing import Any, Protocol

from outrider.decoding.detokenizer import get_detokenizer
from outrider.engines.vocabulary import tokenize

FIRST_SYMBOL = 0x100000  # in a private-use plane: a text with such a character only lowers acceptance


class TokenizedModel(Protocol):
    """A model's tokenizer and end tokens: an engine, or a prompt lookup with a tokenizer."""

    tokenizer: Any
    eos_ids: tuple[int, ...]


class TextCodec:
    """Converts the ids of one tokenizer to text and back. In the text, each special token is one private character.

    symbols: the character of each special token that the other tokenizer has as well. untranslatable: the other special
    tokens, which have no text.
    """

    def __init__(self, tokenizer: Any, symbols: dict[int, str], untranslatable: frozenset[int]) -> None:
        self.untranslatable = untranslatable
        self._tokenizer, self._symbols = tokenizer, symbols
        self._ids = {symbol: token for token, symbol in symbols.items()}
        self._detokenize: Callable[[Seq[int]], str] = get_detokenizer(tokenizer)

    def decode(self, ids: Seq[int]) -> str:
        """Return the text of `ids`, without an incomplete character at the end."""
        parts = []
        for is_special, run in groupby(ids, self._is_special):
            tokens = list(run)
            text = "".join(self._symbols.get(token, "") for token in tokens) if is_special else self._detokenize(tokens)
            parts.append(text)
        return "".join(parts)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens that are not in it."""
        ids: list[int] = []
        for is_symbol, run in groupby(text, self._ids.__contains__):
            if is_symbol:
                ids += [self._ids[symbol] for symbol in run]
            else:
                ids += tokenize(self._tokenizer, "".join(run), add_special_tokens=False)
        return ids

    def leading_ids(self) -> list[int]:
        """Return the special tokens with which the tokenizer begins every text."""
        return [token for token in tokenize(self._tokenizer, "") if token == self._tokenizer.bos_token_id]

    def _is_special(self, token: int) -> bool:
        return token in self._symbols or token in self.untranslatable


def build_codecs(edge: TokenizedModel, target: TokenizedModel) -> tuple[TextCodec, TextCodec]:
    """Return the codecs of two models. Their special tokens have the same symbol if they have the same name.

    If neither model's end token exists in the other vocabulary, the two share a symbol.
    """
    ours, theirs = _special_names(edge), _special_names(target)
    shared = sorted(set(ours.values()) & set(theirs.values()))
    symbols = {name: chr(FIRST_SYMBOL + n) for n, name in enumerate(shared)}
    edge_symbols = {token: symbols[name] for token, name in ours.items() if name in symbols}
    target_symbols = {token: symbols[name] for token, name in theirs.items() if name in symbols}
    edge_end = next((token for token in edge.eos_ids if token not in edge_symbols), None)
    target_end = next((token for token in target.eos_ids if token not in target_symbols), None)
    if edge_end is not None and target_end is not None:
        edge_symbols[edge_end] = target_symbols[target_end] = chr(FIRST_SYMBOL + len(shared))
    return (
        TextCodec(edge.tokenizer, edge_symbols, frozenset(ours) - edge_symbols.keys()),
        TextCodec(target.tokenizer, target_symbols, frozenset(theirs) - target_symbols.keys()),
    )


def _special_names(model: TokenizedModel) -> dict[int, str]:
    """Return the names of the special tokens and end tokens by id."""
    added = getattr(model.tokenizer, "added_tokens_decoder", {})
    special = {token for token, each in added.items() if each.special}
    special |= {*getattr(model.tokenizer, "all_special_ids", ()), *model.eos_ids}
    return {token: str(model.tokenizer.convert_ids_to_tokens(token)) for token in sorted(special)}
