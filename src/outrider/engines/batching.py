"""Rules for batching sequences in one forward, shared by the gateway's and the cloud's schedulers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

T = TypeVar("T")

FREE_PADDING_TOKENS = 16  # padding up to this width costs less than a second forward
PREFILL_CHUNK = 256  # tokens of a long prompt per forward, where others wait or it may be cancelled


def may_pad_together(narrowest: int, widest: int) -> bool:
    """Return whether inputs between these widths may share a forward, in which all are padded to the widest.

    No input is padded to more than twice its width, or `FREE_PADDING_TOKENS` if that is more.
    """
    return widest <= max(FREE_PADDING_TOKENS, 2 * narrowest)


def group_by_width(items: Seq[T], width: Callable[[T], int], limit: int) -> list[list[T]]:
    """Return the items in batches of at most `limit`, each of widths that may be padded together."""
    groups: list[list[T]] = []
    for item in sorted(items, key=width):
        if groups and len(groups[-1]) < limit and may_pad_together(width(groups[-1][0]), width(item)):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def batch_with_first(items: Seq[T], width: Callable[[T], int], *, limit: int, max_tokens: int) -> list[T]:
    """Return the first item and, in order, each later one that fits in the same forward.

    limit: items in the batch. max_tokens: sum of their widths, which the first alone may exceed.
    """
    batch = [items[0]]
    total = narrowest = widest = width(items[0])
    for item in items[1:]:
        low, high = min(narrowest, width(item)), max(widest, width(item))
        if len(batch) < limit and total + width(item) <= max_tokens and may_pad_together(low, high):
            batch.append(item)
            total += width(item)
            narrowest, widest = low, high
    return batch


def next_chunk_size(remaining: int, chunk: int, logits_to_keep: int) -> int:
    """Return how many of the remaining tokens to prefill next.

    The last chunk holds every position with logits to keep, even if they are more than `chunk`.
    """
    if remaining <= max(chunk, logits_to_keep):
        return remaining
    return min(chunk, remaining - logits_to_keep)
