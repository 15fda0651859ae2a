"""Incremental detokenisation, without incomplete characters."""

from __future__ import annotations

from collections.abc import Callable


class IncrementalDetokenizer:
    """The text of a list of tokens that grows and may be truncated, one piece per token.

    decode: converts ids to text that only grows at its end, as `Detokenizer` does. The pieces concatenated are the
    decoding of all ids. A token that ends inside a character may have an empty piece.

    A piece is the difference of two decodings of the last tokens. Both begin one piece early, because decoders treat
    the first token of a text differently, and so that they contain the incomplete character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._offsets: list[tuple[int, int]] = [(0, 0)]  # per length: start of the context, end of the emitted text

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(self.pieces)

    def append(self, token: int) -> str:
        """Append a token and return its piece."""
        start, end = self._offsets[-1]
        self.ids.append(token)
        before, after = self._decode(self.ids[start:end]), self._decode(self.ids[start:])
        piece = after[len(before) :]
        self.pieces.append(piece)
        self._offsets.append((end, len(self.ids)) if piece else (start, end))
        return piece

    def truncate(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        del self.ids[length:], self.pieces[length:], self._offsets[length + 1 :]
