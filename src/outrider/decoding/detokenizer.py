"""Detokenisation, shared by results, streams and stop strings.

The text of some ids is their tokenizer's decoding, except that

- the bytes of an incomplete character at the end are not shown,
- a byte that belongs to no character becomes U+FFFD on its own, and takes no other character with it (the byte fallback
  of `tokenizers` replaces a whole run of byte tokens by U+FFFD as soon as one byte of it fits nowhere).

So while tokens are appended the text only grows at its end, wherever decoding begins.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Final, Protocol

REPLACEMENT_CHARACTER: Final = "\ufffd"  # for bytes that are not valid UTF-8
METASPACE: Final = "\u2581"  # SentencePiece's character for a space
SPECIAL_MARK: Final = b"\xff"  # a byte that never occurs in UTF-8
MAX_UTF8_BYTES: Final = 4  # largest length of a character in UTF-8


class Tokenizer(Protocol):
    """A tokenizer of transformers, as far as decoding needs it. One without a byte fallback needs only `decode`."""

    def __hash__(self) -> int: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> object:
        """Return the text of ids, a `str`."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        ...

    def convert_ids_to_tokens(self, ids: int) -> object:
        """Return the token of an id, a `str`."""
        ...


class Detokenizer:
    """Converts ids to text. tokenizer: one of transformers, or an object with its `decode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_tokens(tokenizer)
        self._ids = {byte: token for token, byte in self._bytes.items()}
        self._byte_level = _token_to_string(tokenizer, "ç¤¾") == "社"

    def __call__(self, ids: Seq[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`. skip_special: without special tokens."""
        text = self._decode(ids, skip_special)
        if REPLACEMENT_CHARACTER not in text:
            return text
        if self._bytes:
            return self._decode(self._merge_byte_runs(self._without_special(ids, skip_special)), skip_special)
        if not text.endswith(REPLACEMENT_CHARACTER):
            return text
        if self._byte_level:
            return text[:-1] if _ends_incomplete(self._last_bytes(self._without_special(ids, skip_special))) else text
        return text if hasattr(self._tokenizer, "backend_tokenizer") else text.rstrip(REPLACEMENT_CHARACTER)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token in the middle of a text. Those of a special token are its name."""
        names = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        name = "" if names is None else str(names(token))
        if token in self._special_ids and token not in self._bytes:
            return name.encode()
        if token in self._bytes or self._byte_level or METASPACE in name:
            return self._bytes_of(token, name)
        return self._decode([token], skip_special=False).encode()

    def _decode(self, ids: Seq[int], skip_special: bool) -> str:
        decode = self._tokenizer.decode
        return str(decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def _without_special(self, ids: Seq[int], skip_special: bool) -> list[int]:
        return [token for token in ids if token not in self._special_ids] if skip_special else list(ids)

    @cached_property
    def _special_ids(self) -> set[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {token for token, each in added.items() if each.special}

    def _merge_byte_runs(self, ids: list[int]) -> list[int]:
        """Return the ids with runs of byte tokens merged to characters, without an incomplete one at the end."""
        repaired: list[int] = []
        for is_byte, run in groupby(ids, self._bytes.__contains__):
            if not is_byte:
                repaired += run
                continue
            raw = bytes(self._bytes[token] for token in run)
            repaired += (self._ids[byte] for byte in raw.decode(errors="replace").encode())
        if ids and ids[-1] in self._bytes and _ends_incomplete(raw):
            del repaired[-len(REPLACEMENT_CHARACTER.encode()) :]
        return repaired

    def vocabulary_bytes(self, count: int) -> list[bytes] | None:
        """Return the bytes that each of the ids below `count` adds to a text, or None if a token has none of its own.

        A special token is its name after the byte 0xFF, which no text contains. Ids without a token are empty.
        """
        if not (self._byte_level or self._bytes):
            return None
        tokens = [b""] * count
        for name, token in self._tokenizer.get_vocab().items():
            if token < count:
                is_special = token in self._special_ids
                tokens[token] = SPECIAL_MARK + name.encode() if is_special else self._bytes_of(token, name)
        return tokens

    def _bytes_of(self, token: int, name: str) -> bytes:
        """Return the bytes of an ordinary token of a byte-level or SentencePiece tokenizer."""
        if self._byte_level:
            return _token_bytes(name)
        return bytes([self._bytes[token]]) if token in self._bytes else name.replace(METASPACE, " ").encode()

    def _last_bytes(self, ids: list[int]) -> bytes:
        """Return the last bytes of a byte-level tokenizer's ids, as many as one character may have or more."""
        tail = b""
        for token in reversed(ids):
            tail = _token_bytes(str(self._tokenizer.convert_ids_to_tokens(token))) + tail
            if len(tail) >= MAX_UTF8_BYTES:
                break
        return tail


@lru_cache(16)
def get_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """Return the tokenizer's detokenizer, which is cached."""
    return Detokenizer(tokenizer)


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Return the byte of each byte token, `<0x00>` to `<0xFF>`, or {} if the tokenizer has no byte fallback."""
    if _token_to_string(tokenizer, "<0x41>") != "A":
        return {}
    vocabulary = tokenizer.get_vocab()
    found = {vocabulary[name]: byte for byte in range(256) if (name := f"<0x{byte:02X}>") in vocabulary}
    return found if len(found) == 256 else {}


def _token_to_string(tokenizer: Tokenizer, token: str) -> str | None:
    """Return a token as the tokenizer's decoder writes it, or None if it has no such method."""
    to_string = getattr(tokenizer, "convert_tokens_to_string", None)
    return None if to_string is None else str(to_string([token]))


def _ends_incomplete(raw: bytes) -> bool:
    """Return whether the bytes end inside a character."""
    for length in range(1, min(MAX_UTF8_BYTES, len(raw) + 1)):
        try:
            raw[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return True
    return False


def _token_bytes(token: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, or those of its name if it is an added token."""
    try:
        return bytes(_byte_alphabet()[letter] for letter in token)
    except KeyError:
        return token.encode()


@lru_cache(1)
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each letter by which byte-level vocabularies write bytes (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
