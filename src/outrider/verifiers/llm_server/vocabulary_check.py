"""The vocabulary check for a server that does not list its tokens.

Drafter and server decode the same ranges of ids. A range with different texts is bisected down to the first token that
differs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from outrider.errors import VocabularyMismatch
from outrider.verifiers.base import MAX_EXTRA_TOKENS, ModelInfo, format_pair

MAX_IDS_PER_REQUEST = 16_384

Decode = Callable[[Sequence[int]], Awaitable[str]]


async def count_shared_tokens(edge: ModelInfo, name: str, decode: Decode) -> int:
    """Return the size of the server's vocabulary after comparing every token of the drafter.

    Raises:
        VocabularyMismatch: a token differs (the message names the first), the server has too many tokens beyond the
            drafter's, or the drafter has no tokenizer.
    """
    if edge.decode is None:
        raise VocabularyMismatch(f"the drafter {edge.name} came without a tokenizer: it cannot be compared with {name}")
    for start in range(0, edge.vocab_size, MAX_IDS_PER_REQUEST):
        await _compare_range(edge, name, decode, start, min(start + MAX_IDS_PER_REQUEST, edge.vocab_size))
    return edge.vocab_size + await _count_extra(edge, name, decode)


async def _compare_range(edge: ModelInfo, name: str, decode: Decode, start: int, end: int) -> None:
    assert edge.decode is not None
    ours, theirs = edge.decode(range(start, end)), await decode(range(start, end))
    if ours == theirs:
        return
    if end - start == 1:
        raise VocabularyMismatch(
            f"{format_pair(edge.name, name)} do not share a vocabulary: token {start} is {ours!r} in the first and "
            f"{theirs!r} in the second"
        )
    middle = (start + end) // 2
    await _compare_range(edge, name, decode, start, middle)
    await _compare_range(edge, name, decode, middle, end)
    raise VocabularyMismatch(
        f"{format_pair(edge.name, name)} do not share a vocabulary: tokens {start} to {end - 1} together are {ours!r} "
        f"in the first and {theirs!r} in the second"
    )


async def _count_extra(edge: ModelInfo, name: str, decode: Decode) -> int:
    """Return how many tokens the server has beyond the drafter's.

    Raises:
        VocabularyMismatch: there are more than MAX_EXTRA_TOKENS.
    """
    first = edge.vocab_size
    for found in range(MAX_EXTRA_TOKENS + 1):
        if not await decode([first + found]):
            return found
    raise VocabularyMismatch(
        f"the target {name} has over {MAX_EXTRA_TOKENS} tokens more than the drafter {edge.name}, the first {first}"
    )
