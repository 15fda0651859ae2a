"""The log-probability of a generated token, with the texts of the tokens at its position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.sampling.logprobs import Logprobs


@dataclass(frozen=True)
class TokenLogprob:
    """A token and its log-probability, and the best tokens at its position in descending order.

    The log-probability is that of the model's raw distribution, before biases, penalties, temperature and filters.
    data: the bytes of the token, None without a tokenizer. They may be a part of a character.
    """

    token_id: int
    logprob: float
    data: bytes | None = None
    top: tuple[TokenLogprob, ...] = ()

    @classmethod
    def build(cls, logprobs: Logprobs, to_bytes: Callable[[int], bytes] | None) -> TokenLogprob:
        """Build the report on one position. to_bytes: the tokenizer's conversion, if there is a tokenizer."""
        (own, *best) = (
            cls(token, value, None if to_bytes is None else to_bytes(token))
            for token, value in zip(logprobs.ids, logprobs.values, strict=True)
        )
        return cls(own.token_id, own.logprob, own.data, tuple(best))

    @property
    def text(self) -> str:
        """The token's text, with U+FFFD for bytes that are not a whole character. Empty without a tokenizer."""
        return "" if self.data is None else self.data.decode(errors="replace")

    def to_json(self) -> dict[str, object]:
        """Return a JSON-ready dictionary, without texts."""
        return {"logprob": self.logprob, "top": [[each.token_id, each.logprob] for each in self.top]}
