"""Scripted models with real tokenizers, for pairs whose tokenizers differ."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.detokenizer import _token_bytes
from outrider.engines.vocabulary import tokenize
from tests.support.fakes import Rows, ScriptedEngine, replay
from tests.support.tokenizers import trained


class TokenizedEngine(ScriptedEngine):
    """A scripted engine whose vocabulary is that of a tokenizer."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, rows: Rows, tokenizer: Any, *, name: str = "model", **options: Any) -> None:
        eos = (tokenizer.eos_token_id,)
        super().__init__(rows, len(tokenizer), eos_ids=eos, tokenizer=tokenizer, name=name, **options)

    @property
    def fingerprint(self) -> str:
        return str(hash(tuple(self.vocabulary)))

    @property
    def vocabulary(self) -> list[str]:
        return [str(token) for token in self.tokenizer.convert_ids_to_tokens(list(range(self.vocab_size)))]


def ids_in(kind: str, text: str) -> list[int]:
    """The ids of a text in a trained tokenizer's vocabulary."""
    return tokenize(trained(kind), text, add_special_tokens=False)


def ids_of_bytes(kind: str, raw: bytes) -> list[int]:
    """The ids of any bytes, one for each, in a tokenizer that has them: "byte level" or "llama"."""
    tokenizer = trained(kind)
    names = {_token_bytes(str(token)): str(token) for token in tokenizer.get_vocab()}
    spelt = (names[bytes([byte])] if kind == "byte level" else f"<0x{byte:02X}>" for byte in raw)
    return [tokenizer.convert_tokens_to_ids(token) for token in spelt]


def model_that_emits(
    kind: str, length: int, ids: Seq[int], *, name: str = "model", lead: float = 30.0
) -> TokenizedEngine:
    """A model that answers a prompt of `length` ids with `ids` and its end token, whatever is in between."""
    tokenizer = trained(kind)
    said = [*ids, tokenizer.eos_token_id]
    rows = replay(length, said, len(tokenizer), tail=(tokenizer.eos_token_id,), lead=lead)
    return TokenizedEngine(rows, tokenizer, name=name)


def model_of(kind: str, prompt: str, output: str, *, name: str = "model", lead: float = 30.0) -> TokenizedEngine:
    """A model that answers `prompt` with `output` and its end token, whatever is in between."""
    length, ids = len(ids_in(kind, prompt)), ids_in(kind, prompt + output)
    return model_that_emits(kind, length, ids[length:], name=name, lead=lead)


def model_that_knows(text: str, *, name: str = "edge") -> TokenizedEngine:
    """A byte-level model that continues every beginning of `text`, in whatever tokens, and then ends."""
    tokenizer, raw = trained("byte level"), text.encode()
    spelt = [_token_bytes(str(token)) for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids), key=lambda token: -len(spelt[token]))

    def rows(prefix: tuple[int, ...]) -> Tensor:
        rest = raw[sum(len(spelt[token]) for token in prefix) :]
        fitting = (token for token in ordinary if rest.startswith(spelt[token]))
        row = torch.zeros(len(tokenizer))
        row[next(fitting) if rest else tokenizer.eos_token_id] = 30.0
        return row

    return TokenizedEngine(rows, tokenizer, name=name)
