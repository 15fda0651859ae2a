"""Who is being served: the sessions of a service, each with its tokens, its owner, and what it was conditioned on.

A session outlives the stream that opened it and the KV slot that it sits in. Slots are the engine's and belong to the
batcher's thread (seats.py); everything here belongs to the service's event loop.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from outrider.cloud.limits import Limits
from outrider.config import GenerationSettings
from outrider.core.acceptance import Verdict
from outrider.engines.base import Prompt
from outrider.verifiers.session import Session
from outrider.wire.messages import Code, Refusal

SESSION_BYTES = 16
RETRY_FULL = 1.0  # s; when a full service may be asked again


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
    stream: object | None = None  # the one that may use it: the last to open or resume it; None once it has ended
    pending: Future[Verdict] | None = None  # the verdict being computed, which nothing may overtake

    @property
    def name(self) -> str:
        """For logs: enough to tell sessions apart, too little to resume one."""
        return self.id[:4].hex()

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
        self._check_room(record)
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
        record.stream = None
        if self._records.pop(record.id, None) is not None:
            self._on_gone(record)

    def expire(self) -> int:
        """End sessions that were idle for too long; how many."""
        oldest = self._clock() - self._limits.idle_seconds
        gone = [record for record in self if record.touched < oldest and not record.busy]
        for record in gone:
            self.drop(record)
        return len(gone)

    def _check_room(self, record: Record) -> None:
        limits = self._limits
        if len(self) >= limits.max_sessions and not self._drop_orphan(list(self)):
            raise Refusal(Code.LIMIT, f"all {limits.max_sessions} sessions of this service are taken", RETRY_FULL)
        own = [other for other in self if other.identity == record.identity]
        if len(own) >= limits.max_sessions_per_identity and not self._drop_orphan(own):
            raise Refusal(Code.LIMIT, f"{record.identity} has {len(own)} sessions open, as many as it may", RETRY_FULL)
        self._make_room_for_media(record.media_bytes)

    def _drop_orphan(self, records: list[Record]) -> bool:
        """End the longest idle of these that no stream uses; its edge, if there still is one, opens it again."""
        orphan = next((record for record in records if record.stream is None and not record.busy), None)
        if orphan is not None:
            self.drop(orphan)
        return orphan is not None

    def _make_room_for_media(self, wanted: int) -> None:
        """Media is kept for sessions that lose their slot; the longest idle give way, and their edges send it again."""
        excess = sum(record.media_bytes for record in self) + wanted - self._limits.max_media_total
        idle = [record for record in self if record.media_bytes and not record.busy]
        if not wanted or excess <= 0:
            return
        if sum(record.media_bytes for record in idle) < excess:  # else some would go for nothing
            raise Refusal(Code.LIMIT, "no room for more media: too many recordings are in use", RETRY_FULL)
        for record in idle:
            if excess <= 0:
                return
            excess -= record.media_bytes
            self.drop(record)
