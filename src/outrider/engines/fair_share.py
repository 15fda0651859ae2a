"""Shares of the engine per identity: one client at its limits must not stall the others.

Slots go round-robin over identities. Heavy work is opening a slot (a recording is encoded in one go) and chunks of long
prefills. It is timed: while other identities have requests, an identity may spend as much engine time on heavy work as
the others use meanwhile, so at most half of the total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TypeVar

T = TypeVar("T")
By = Callable[[T], str]


def round_robin(items: Iterable[T], by: By[T], taken: Mapping[str, int]) -> list[T]:
    """Order items so that the identity with the fewest places comes next. Within an identity, the order stays.

    by: an item's identity. taken: places that identities have already.
    """
    places = Counter(taken)
    ranked = []
    for item in items:
        ranked.append((places[by(item)], item))
        places[by(item)] += 1
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


def limit_to_share(items: Seq[T], by: By[T], width: Callable[[T], int], minimum: int) -> list[T]:
    """Drop items beyond an identity's share of one step.

    The share is `minimum` tokens, or as many as the most demanding other identity has. A lone identity has no limit,
    and every identity keeps its first item.
    """
    demand: Counter[str] = Counter()
    for item in items:
        demand[by(item)] += width(item)
    if len(demand) < 2:
        return list(items)
    (first, most), (_, second) = demand.most_common(2)
    limits = {name: max(minimum, second if name == first else most) for name in demand}
    used: Counter[str] = Counter()
    kept = []
    for item in items:
        name = by(item)
        if not used[name] or used[name] + width(item) <= limits[name]:
            used[name] += width(item)
            kept.append(item)
    return kept


class FairShare:
    """Seconds of heavy work that each identity is ahead of the others."""

    def __init__(self) -> None:
        self._debts: dict[str, float] = {}

    def charge(self, identity: str, seconds: float) -> None:
        """Add heavy work of an identity."""
        self._debts[identity] = self._debts.get(identity, 0.0) + seconds

    def repay(self, used: Mapping[str, float]) -> None:
        """Account for a step: the others' seconds reduce an identity's debt. used: engine seconds per identity."""
        total = sum(used.values())
        for identity, debt in list(self._debts.items()):
            left = debt - (total - used.get(identity, 0.0))
            if left > 0:
                self._debts[identity] = left
            else:
                del self._debts[identity]

    def permitted(self, wanting: Collection[str], running: Collection[str]) -> set[str]:
        """Return the identities that may do heavy work now.

        wanting: those with heavy work. running: those with other work. An identity in debt waits while another one has
        runnable work of any kind.
        """
        free = {name for name in wanting if name not in self._debts}
        indebted = set(wanting) - free
        if not indebted:
            return free
        minimum = min(indebted, key=self._debts.__getitem__)
        if free - {minimum} or set(running) - {minimum}:
            return free
        return {minimum}
