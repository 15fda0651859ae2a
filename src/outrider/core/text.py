"""Text that grows token by token, and never shows half a character."""

from __future__ import annotations

from collections.abc import Callable

BROKEN = "\ufffd"  # what decoders put where bytes do not make a character yet


class Transcript:
    """The text of a growing (and sometimes rewound) list of tokens, one piece per token.

    A token that ends in the middle of a character has an empty piece; the character belongs to the piece of the
    token that completes it. Pieces are cut from decodings with the previous piece's tokens as context, since
    decoders treat the first token of a text differently.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._marks: list[tuple[int, int]] = [(0, 0)]  # per length: start of the context, end of what is shown

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def push(self, token: int) -> str:
        """Append a token and return its piece."""
        context, shown = self._marks[-1]
        self.ids.append(token)
        before, after = self._decode(self.ids[context:shown]), self._decode(self.ids[context:])
        complete = not after.endswith(BROKEN) and len(after) > len(before)
        self.pieces.append(after[len(before) :] if complete else "")
        self._marks.append((shown, len(self.ids)) if complete else (context, shown))
        return self.pieces[-1]

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.ids[length:], self.pieces[length:], self._marks[length + 1 :]

    def flush(self) -> str:
        """What is still held back at the end of the output: an incomplete character, as the decoder shows it."""
        context, shown = self._marks[-1]
        return self._decode(self.ids[context:])[len(self._decode(self.ids[context:shown])) :]
