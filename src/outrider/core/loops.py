"""Degeneration: the tail of the committed output repeats itself.

A loop of period p is declared when the tail shows two whole periods and four tokens more, and at least eight
tokens: ABAB needs 8, a 4-token phrase 12, a 32-token one 68. It never ends generation; it makes the next block go
to the verifier once (or, without one, makes one token be drawn), and only what follows that is looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

MAX_PERIOD = 32
MIN_TAIL = 8
EXTRA = 4
WINDOW = 2 * MAX_PERIOD + EXTRA  # no more of the tail is ever needed


def tail_needed(period: int) -> int:
    """Tokens of periodic tail that make a loop of this period."""
    return max(MIN_TAIL, 2 * period + EXTRA)


def loop_period(tokens: Seq[int]) -> int | None:
    """The smallest period (1 to 32) with which the tail of `tokens` loops, or None."""
    tail = list(tokens[-WINDOW:])
    if tail and tail[-1] not in tail[-1 - MAX_PERIOD : -1]:
        return None  # nearly always: no period repeats a token that was not there before
    for period in range(1, MAX_PERIOD + 1):
        need = tail_needed(period)
        if len(tail) < need:
            return None
        if tail[-1] == tail[-1 - period] and tail[-need + period :] == tail[-need:-period]:
            return period
    return None
