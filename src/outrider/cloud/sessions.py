"""Who is being served: the sessions of a service, each with its tokens, its owner, and what it was conditioned on.

A session outlives the stream that opened it and the KV slot that it sits in. Slots are the engine's and belong to the
batcher's thread (seats.py); everything here belongs to the service's event loop.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from outrider.cloud.limits import Limits
from outrider.config import GenerationSettings
from outrider.core.acceptance import Verdict
from outrider.engines.base import Prompt
from outrider.verifiers.session import Session
from outrider.wire.messages import Code, Refusal

SESSION_BYTES = 16
RETRY_FULL = 1.0  # s; when a full service may be asked again


class Stream(Protocol):
    """What uses a session."""

    def lose(self) -> None:
        """The session has ended, or another stream has it: nothing more is to be expected here."""
        ...


@dataclass(eq=False)
class Record:
    """One session. load_prompt: unpacks its media anew, for a slot that has to be filled again."""

    identity: str
    session: Session
    settings: GenerationSettings
    load_prompt: Callable[[], Prompt]
    media_bytes: int = 0
    id: bytes = field(default_factory=lambda: secrets.token_bytes(SESSION_BYTES))
    touched: float = 0.0
    stream: Stream | None = None  # the one that may use it: the last to open or resume it; None once it has ended
    pending: Future[Verdict] | None = None  # the verdict being computed, which nothing may overtake

    def give_to(self, stream: Stream | None) -> None:
        """From here on another stream has the session, or none; the one that had it is out."""
        if self.stream is not None and self.stream is not stream:
            self.stream.lose()
        self.stream = stream

    @property
    def name(self) -> str:
        """For logs: enough to tell sessions apart, too little to resume one."""
        return self.id[:4].hex()

    @property
    def unused(self) -> bool:
        """Return whether no stream uses the session and no verdict is being computed."""
        return self.stream is None and not self.busy

    @property
    def busy(self) -> bool:
        """True while a verdict is being computed: until then, nobody takes the session away."""
        return self.pending is not None and not self.pending.done()


class Sessions:
    """All sessions of one service. on_gone is told of each that ends, however it ends."""

    def __init__(
        self, limits: Limits, on_gone: Callable[[Record], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits, self._on_gone, self._clock = limits, on_gone, clock
        self._records: dict[bytes, Record] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, record: Record) -> bool:
        return record.id in self._records

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def add(self, record: Record) -> None:
        """Take a new session in.

        Raises:
            Refusal: as many as the service, or this identity, may have; or no room for its media.
        """
        going = [*self._in_the_way(record.identity), *self._to_free(record.identity, record.media_bytes)]
        for other in going:
            self.drop(other)
        self._records[record.id] = record
        record.touched = self._clock()

    def find(self, id_: bytes, identity: str) -> Record:
        """The session, if it is this identity's. Another's is as unknown as one that never was."""
        record = self._records.get(id_)
        if record is None or record.identity != identity:
            raise Refusal(Code.UNKNOWN_SESSION, "this session is not known here: it expired, or was never opened")
        return record

    def touch(self, record: Record) -> None:
        """It was used now. One that has ended stays so."""
        if self._records.pop(record.id, None) is not None:
            record.touched = self._clock()
            self._records[record.id] = record

    def drop(self, record: Record) -> None:
        """End a session: its stream loses it, too. Again does nothing."""
        record.give_to(None)
        if self._records.pop(record.id, None) is not None:
            self._on_gone(record)

    def active(self, seconds: float) -> int:
        """How many have a stream and are at work, or were within so many seconds."""
        since = self._clock() - seconds
        return sum(record.stream is not None and (record.busy or record.touched >= since) for record in self)

    def expire(self) -> int:
        """End sessions that were idle for too long; how many."""
        oldest = self._clock() - self._limits.idle_seconds
        gone = [record for record in self if record.touched < oldest and not record.busy]
        for record in gone:
            self.drop(record)
        return len(gone)

    def check_room(self, identity: str) -> None:
        """Raise Refusal where this identity could not add a session now. Nothing is changed."""
        self._in_the_way(identity)

    def _in_the_way(self, identity: str) -> list[Record]:
        """Who must go for a session more: the longest idle that no stream uses; its edge can open it again."""
        limits = self._limits
        own = [other for other in self if other.identity == identity]
        if len(own) >= limits.max_sessions_per_identity:
            return [_orphan(own, f"{identity} has {len(own)} sessions in use, as many as it may")]
        if len(self) >= limits.max_sessions:
            return [self._in_excess(identity, len(own))]
        return []

    def _in_excess(self, identity: str, own: int) -> Record:
        """Return the session to evict from a full service, of an identity that has as many as the newcomer or more.

        First choice: one that no stream uses, of the identity that has the most. Else one in use, if the newcomer would
        still have fewer than that identity.
        """
        count = Counter(record.identity for record in self)
        by_count = sorted(self, key=lambda record: -count[record.identity])
        unused = [record for record in by_count if record.unused and count[record.identity] >= own]
        if unused:
            return unused[0]
        first = min(by_count, key=lambda record: (-count[record.identity], record.busy))
        if count[first.identity] >= own + 2:
            return first
        raise Refusal(Code.LIMIT, f"all {self._limits.max_sessions} sessions of this service are in use", RETRY_FULL)

    def _to_free(self, identity: str, wanted: int) -> list[Record]:
        """Return the sessions to evict for this much media, of the identity that holds the most, longest idle first.

        Their edges can send it again. A session of an identity that holds less than the newcomer would is never ended.
        """
        excess = sum(record.media_bytes for record in self) + wanted - self._limits.max_media_total
        held = Counter({identity: wanted})
        for record in self:
            held[record.identity] += record.media_bytes
        left = [record for record in self if record.media_bytes]
        going: list[Record] = []
        while wanted and excess > 0:
            own = held[identity]
            candidates = [
                record
                for record in left
                if (record.identity == identity and not record.busy) or held[record.identity] > own
            ]
            if not candidates:
                raise Refusal(Code.LIMIT, "no room for more media: too many recordings are in use", RETRY_FULL)
            going.append(min(candidates, key=lambda record: (-held[record.identity], record.busy)))
            left.remove(going[-1])
            held[going[-1].identity] -= going[-1].media_bytes
            excess -= going[-1].media_bytes
        return going


def _orphan(records: list[Record], otherwise: str) -> Record:
    for record in records:
        if record.unused:
            return record
    raise Refusal(Code.LIMIT, otherwise, RETRY_FULL)
