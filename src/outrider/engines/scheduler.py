"""The batching scheduler: which requests share the next forward, and how many tokens of each.

It calls no engine and takes no lock. Two drivers run its batches:

    engines/shared_engine.py   `next_batch`: one forward at a time, always with the oldest request
    cloud/batcher.py           `admit`, `plan_step`: slots and steps that are shared between clients

Chunked prefill: a long prompt is computed over several forwards. Only inputs of similar width share a forward.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from outrider.engines.base import Engine, SequenceInput
from outrider.engines.fair_share import FairShare, limit_to_share, round_robin

T = TypeVar("T")
R = TypeVar("R", bound="Request")

FREE_PADDING_TOKENS = 16  # padding up to this width costs less than a second forward
PREFILL_CHUNK = 256  # see `prefill_chunk`
SHORT_BLOCK_TOKENS = 96  # up to here a step computes a request at once, beyond it in chunks
MAX_BATCH = 256  # sequences in one forward


def prefill_chunk(engine: Engine) -> int:
    """Return the tokens of a long prompt per forward, where others wait or it may be cancelled."""
    return int(getattr(engine, "prefill_chunk", PREFILL_CHUNK))


def overlap_tokens(engine: Engine) -> float:
    """Return the tokens of a batch whose halves take little longer, if the engine computes while the host works."""
    return float(getattr(engine, "overlap_tokens", math.inf))


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


def halve(items: list[T], width: Callable[[T], int], max_tokens: float) -> list[list[T]]:
    """Return the items in two batches if they have more than `max_tokens` together, else in one."""
    if sum(map(width, items)) <= max_tokens or len(items) < 2:
        return [items]
    middle = -(-len(items) // 2)
    return [items[:middle], items[middle:]]


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


class Request:
    """Tokens to append to the KV cache of one slot. Each driver derives its own requests from this class."""

    identity: str = ""  # client between whose requests and those of others the engine is shared
    slot: int
    ids: Seq[int] = ()
    logits_to_keep: int = 0  # how many of the last ids need logits
    admitted: float | None = None  # time when the request got its slot
    alone: bool = False  # whether it is never batched with others
    in_flight: int = 0  # forwards that were launched and not read back

    @property
    def remaining(self) -> int:
        """Return how many of the ids can be appended now: those that the KV cache lacks."""
        return len(self.ids)

    def next_input(self, count: int) -> SequenceInput:
        """Return the next `count` tokens as a part of a forward. Parts before the last keep one row of logits."""
        remaining = self.remaining
        start = len(self.ids) - remaining
        rows = self.logits_to_keep if count == remaining else 1
        return SequenceInput(self.slot, self.ids[start : start + count], rows)


@dataclass
class Batch(Generic[R]):
    """The requests of one forward, and how many tokens each appends. is_prefill: chunks of long prefills."""

    requests: list[R]
    counts: list[int]
    is_prefill: bool = False

    @property
    def inputs(self) -> list[SequenceInput]:
        """Return the inputs of the forward."""
        return [request.next_input(count) for request, count in zip(self.requests, self.counts, strict=True)]


class Scheduler(Generic[R]):
    """The choice of the next batches from `requests`, to which the driver appends in order of arrival.

    chunk: tokens of long prefills per forward, over all requests. max_batch: requests in one forward. overlap_tokens: a
    step's batch of more tokens is halved, so that the host works on one half while the engine computes the other.
    """

    def __init__(
        self, *, chunk: int = PREFILL_CHUNK, max_batch: int = MAX_BATCH, overlap_tokens: float = math.inf
    ) -> None:
        self.requests: list[R] = []
        self._chunk, self._max_batch, self._overlap_tokens = chunk, max_batch, overlap_tokens
        self._fair_share = FairShare()
        self._engine_seconds: defaultdict[str, float] = defaultdict(float)  # of the present step, by identity

    # In order of arrival ------------------------------------------------------------------------------------

    def next_batch(self) -> Batch[R]:
        """Remove the oldest request, with the later ones that fit in its forward. Each brings one chunk at most."""
        oldest = self.requests[0]
        candidates = [oldest] if oldest.alone else [request for request in self.requests if not request.alone]
        taken = batch_with_first(candidates, self._next_chunk, limit=self._max_batch, max_tokens=self._chunk)
        removed = set(taken)
        self.requests = [request for request in self.requests if request not in removed]
        return self.batch(taken)

    def batch(self, requests: list[R]) -> Batch[R]:
        """Return a batch of the next chunk of each request."""
        return Batch(requests, [self._next_chunk(request) for request in requests])

    def isolate(self, failed: Batch[R]) -> None:
        """Put the requests of a failed batch first in line, each in a forward of its own."""
        for request in failed.requests:
            request.alone = True
        self.requests = [*failed.requests, *self.requests]

    def _next_chunk(self, request: R) -> int:
        return next_chunk_size(request.remaining, self._chunk, request.logits_to_keep)

    # In steps that identities share -------------------------------------------------------------------------

    @property
    def running(self) -> list[R]:
        """Return the requests with a slot."""
        return [request for request in self.requests if request.admitted is not None]

    @property
    def waiting(self) -> list[R]:
        """Return the requests without a slot."""
        return [request for request in self.requests if request.admitted is None]

    def admit(self, slots: int, cached: Collection[R]) -> tuple[list[R], R | None]:
        """Select as many waiting requests as there are slots, round-robin over identities.

        Returns the requests, and the running one that returns to the queue and gives its slot to them, if any.
        slots: total. cached: requests of sequences that have a slot, and keep it if they are selected.
        """
        running, waiting = self.running, self.waiting
        if not waiting:
            return [], None
        permitted = self._fair_share.permitted(
            _identities(request for request in waiting if request not in cached), _identities([*running, *cached])
        )
        waiting = [request for request in waiting if request in cached or request.identity in permitted]
        waiting = round_robin(waiting, _identity, Counter(map(_identity, running)))
        room = max(0, slots - len(running))
        if room or not waiting:
            return waiting[:room], None
        victim = self._preempt(waiting[0], running)
        return [] if victim is None else waiting[:1], victim

    def _preempt(self, newcomer: R, running: Seq[R]) -> R | None:
        """Return a request to the queue if its identity has the most slots, at least two more than the newcomer's.

        It is the latest of the identity's long prefills, and is recomputed later. Short requests are not preempted,
        because they release their slots within a step.
        """
        using = Counter(map(_identity, running))
        name, most = using.most_common(1)[0]
        victims = [
            request for request in running if request.identity == name and request.remaining > SHORT_BLOCK_TOKENS
        ]
        if most < using[newcomer.identity] + 2 or not victims:
            return None
        victim = max(victims, key=lambda request: request.admitted or 0.0)
        victim.admitted = None
        return victim

    def plan_step(self) -> list[Batch[R]]:
        """Return the forwards of one step: all short requests of the running ones, then a chunk of the long prefills.

        So a long prefill delays the others by one chunk at most. While requests wait for a slot, none that is in flight
        is launched again: it gives its slot up between two forwards.
        """
        is_crowded = bool(self.waiting)
        pending = [(request, request.remaining) for request in self.running if not (is_crowded and request.in_flight)]
        short = [entry for entry in pending if 0 < entry[1] <= SHORT_BLOCK_TOKENS]
        long = [request for request, remaining in pending if remaining > SHORT_BLOCK_TOKENS]
        shared = limit_to_share(short, _entry_identity, _entry_width, SHORT_BLOCK_TOKENS)
        batches = [
            Batch([request for request, _ in half], [remaining for _, remaining in half])
            for group in group_by_width(shared, _entry_width, self._max_batch)
            for half in halve(group, _entry_width, self._overlap_tokens)
        ]
        if not long:
            return batches
        permitted = self._fair_share.permitted(_identities(long), {request.identity for request, _ in short})
        long = round_robin([request for request in long if request.identity in permitted], _identity, {})
        if long := long[: max(1, self._chunk // SHORT_BLOCK_TOKENS)]:
            share = max(1, self._chunk // len(long))
            counts = [next_chunk_size(request.remaining, share, request.logits_to_keep) for request in long]
            batches.append(Batch(long, counts, is_prefill=True))
        return batches

    def record_batch(self, batch: Batch[R], seconds: float) -> None:
        """Account for a forward that took `seconds`."""
        for request, count in zip(batch.requests, batch.counts, strict=True):
            self.record(request.identity, seconds * count / sum(batch.counts), heavy=batch.is_prefill)

    def record(self, identity: str, seconds: float, *, heavy: bool) -> None:
        """Account for engine time of an identity. heavy: it opened a slot, or prefilled a long prompt."""
        self._engine_seconds[identity] += seconds
        if heavy:
            self._fair_share.charge(identity, seconds)

    def end_step(self) -> None:
        """Account for the end of a step."""
        self._fair_share.repay(self._engine_seconds)
        self._engine_seconds.clear()


_identity: Callable[[Request], str] = attrgetter("identity")


def _entry_identity(entry: tuple[Request, int]) -> str:
    return entry[0].identity


def _entry_width(entry: tuple[Request, int]) -> int:
    return entry[1]


def _identities(requests: Iterable[Request]) -> set[str]:
    return set(map(_identity, requests))
