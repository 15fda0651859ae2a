"""Text that grows token by token, and never shows half a character."""

from __future__ import annotations

from collections.abc import Callable


class IncrementalDetokenizer:
    """The text of a growing (and sometimes rewound) list of tokens, one piece per token.

    decode: ids as text that only grows at its end, as `Detokenizer` does. The pieces together are the decoding of all
    ids. The letters that a token completes are its piece, so that one which ends inside a character may have none.

    A piece is the difference of two decodings. Both begin with the token of the last piece but one, since decoders
    treat the first token of a text differently; with it, they hold the character that is not complete yet.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._offsets: list[tuple[int, int]] = [(0, 0)]  # per length: start of the context, end of what is shown

    @property
    def text(self) -> str:
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
        """Forget all but the first `length` tokens."""
        del self.ids[length:], self.pieces[length:], self._offsets[length + 1 :]
