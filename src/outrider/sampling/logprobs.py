"""Log-probabilities of committed tokens, for reports. They do not influence the output.

The definition is that of vLLM's default mode, `raw_logprobs`, and of OpenAI's API: log-softmax of the model's raw
logits, before biases, penalties, temperature and filters, over all rows of the model, padding included.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.errors import StateError
from outrider.sampling.top_logprobs import TopLogprobs


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at one position: the token's own first, then the best ones in descending order."""

    ids: tuple[int, ...]
    values: tuple[float, ...]


def compute_logprobs(
    rows: Tensor | Seq[object], tokens: Seq[int], count: int, vocab_size: int, position: int
) -> tuple[Logprobs, ...]:
    """Return the log-probabilities of `tokens` and of the `count` best ones at each position.

    rows: the raw logits before each token, float32 [≥ tokens, V], or the largest entries of each row. position: the
    absolute index of the first token.

    Raises:
        NeedMoreLogprobs: the known entries of a row do not contain the best ones.
    """
    count = min(count, vocab_size)
    if isinstance(rows, Tensor):
        return _of_logits(rows[: len(tokens)], tokens, count, vocab_size)
    found = []
    for n, (row, token) in enumerate(zip(rows, tokens, strict=False)):
        if not isinstance(row, TopLogprobs):
            raise StateError("log-probabilities need the rows of logits, not the tokens that were sampled from them")
        ids, values = row.top_logprobs(token, count, vocab_size, position + n)
        found.append(Logprobs(ids, values))
    return tuple(found)


def _of_logits(logits: Tensor, tokens: Seq[int], count: int, vocab_size: int) -> tuple[Logprobs, ...]:
    logp = torch.log_softmax(logits.float(), -1)[:, :vocab_size]
    own = torch.tensor(tokens, device=logp.device)[:, None]
    best = torch.topk(logp, count)
    ids = torch.cat([own, best.indices], -1).tolist()
    values = torch.cat([logp.gather(-1, own), best.values], -1).tolist()
    return tuple(Logprobs(tuple(row), tuple(logprobs)) for row, logprobs in zip(ids, values, strict=True))
