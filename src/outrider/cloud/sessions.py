"""The sessions of a service, with their tokens, identities and prompts.

A session outlives the stream that opened it, and its KV slot. Slots belong to the batcher's thread (slot_pool.py).
Everything here belongs to the service's event loop.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.cloud.limits import Limits
from outrider.config import GenerationSettings
from outrider.engines.base import Prompt
from outrider.protocol import schema
from outrider.protocol.messages import ErrorCode, FrameError, digest
from outrider.verifiers.session import Session

SESSION_ID_BYTES = 16
RETRY_WHEN_FULL_S = 1.0  # s until a client may retry on a full service


class Stream(Protocol):
    """A stream, as its session sees it."""

    def on_detached(self) -> None:
        """Handle the loss of the session: it has ended, or another stream uses it."""
        ...


@dataclass(frozen=True)
class SessionMedia:
    """The media of a session as they crossed the wire. kind: a MediaKind."""

    kind: int
    data: bytes


NO_MEDIA = SessionMedia(schema.NONE, b"")


@dataclass(frozen=True)
class Base:
    """The session that a new one continues. length: tokens that both begin with, of which the KV cache can be used."""

    entry: SessionEntry
    length: int


@dataclass(eq=False)
class SessionEntry:
    """One session. load_prompt: returns its prompt, with the media unpacked, for each slot that it gets."""

    identity: str
    session: Session
    settings: GenerationSettings
    load_prompt: Callable[[], Prompt]
    media: SessionMedia = NO_MEDIA
    id: bytes = field(default_factory=lambda: secrets.token_bytes(SESSION_ID_BYTES))
    base: Base | None = None  # until the session has taken the base's slot over
    last_used: float = 0.0
    stream: Stream | None = None  # the last one to open or resume the session, None once that has ended
    pending: Future[Any] | None = None  # the verdict or the generation being computed
    awaits_client: bool = False  # the generation goes on when its client has read more of it

    def attach(self, stream: Stream | None) -> None:
        """Attach the session to a stream, or to none. Its previous stream is detached."""
        if self.stream is not None and self.stream is not stream:
            self.stream.on_detached()
        self.stream = stream

    @property
    def media_bytes(self) -> int:
        """Number of bytes of media that the session holds."""
        return len(self.media.data)

    @property
    def name(self) -> str:
        """Return a short name for logs: enough to distinguish sessions, too little to resume one."""
        return self.id[:4].hex()

    @property
    def unused(self) -> bool:
        """Return whether no stream uses the session and no verdict is being computed."""
        return self.stream is None and not self.busy

    @property
    def busy(self) -> bool:
        """Return whether a verdict is being computed."""
        return self.pending is not None and not self.pending.done() and not self.awaits_client


class Sessions:
    """All sessions of one service. on_ended: called with each session that ends, for any reason."""

    def __init__(
        self, limits: Limits, on_ended: Callable[[SessionEntry], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits, self._on_ended, self._clock = limits, on_ended, clock
        self._entries: dict[bytes, SessionEntry] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: SessionEntry) -> bool:
        return entry.id in self._entries

    def __iter__(self) -> Iterator[SessionEntry]:
        return iter(list(self._entries.values()))

    def add(self, entry: SessionEntry) -> None:
        """Add a new session, in place of its base if it has one, and evict others for it if necessary.

        Raises:
            FrameError: a session limit is reached, or the media limit, and nothing can be evicted. The base has ended.
        """
        if entry.base is not None:
            entry.base.entry.attach(None)
            self._entries.pop(entry.base.entry.id, None)
        try:
            self._make_room(entry)
        except FrameError:
            if entry.base is not None:
                self._on_ended(entry)  # frees the base's slot
            raise
        self._entries[entry.id] = entry
        entry.last_used = self._clock()

    def _make_room(self, entry: SessionEntry) -> None:
        evicted = self._evictions_for_session(entry.identity)
        for other in (*evicted, *self._evictions_for_media(entry.identity, entry.media_bytes)):
            self.drop(other)

    def find(self, id_: bytes, identity: str) -> SessionEntry:
        """Return the session with this id. Sessions of other identities count as unknown.

        Raises:
            FrameError: there is none.
        """
        entry = self._entries.get(id_)
        if entry is None or entry.identity != identity:
            raise FrameError(ErrorCode.UNKNOWN_SESSION, "unknown session: it expired, or was never opened")
        return entry

    def find_base(self, frame: schema.Base, identity: str) -> SessionEntry:
        """Return the session that a new one continues.

        Raises:
            FrameError: it is unknown, or its tokens are not those that the edge announced.
        """
        entry = self.find(frame.session, identity)
        ids = entry.session.ids
        if not 0 < frame.length <= len(ids) or digest(ids[: frame.length]) != frame.digest:
            raise FrameError(ErrorCode.UNKNOWN_SESSION, "the session to continue has other tokens")
        return entry

    def touch(self, entry: SessionEntry) -> None:
        """Mark a session as used now. Does nothing for one that has ended."""
        if self._entries.pop(entry.id, None) is not None:
            entry.last_used = self._clock()
            self._entries[entry.id] = entry

    def drop(self, entry: SessionEntry) -> None:
        """End a session, and detach its stream. Does nothing for one that has ended."""
        entry.attach(None)
        if self._entries.pop(entry.id, None) is not None:
            self._on_ended(entry)

    def active(self, seconds: float) -> int:
        """Return the number of sessions with a stream that are busy, or were within so many seconds."""
        since = self._clock() - seconds
        return sum(entry.stream is not None and (entry.busy or entry.last_used >= since) for entry in self)

    def expire(self) -> int:
        """End the sessions that were idle for too long, and return their number."""
        oldest = self._clock() - self._limits.idle_seconds
        expired = [entry for entry in self if entry.last_used < oldest and not entry.busy]
        for entry in expired:
            self.drop(entry)
        return len(expired)

    def check_capacity(self, identity: str) -> None:
        """Raise FrameError if this identity could not add a session now. Nothing is changed."""
        self._evictions_for_session(identity)

    def _evictions_for_session(self, identity: str) -> list[SessionEntry]:
        """Return the sessions to evict for another one: the longest idle that no stream uses.

        Their edges can open them again.
        """
        limits = self._limits
        own = [other for other in self if other.identity == identity]
        if len(own) >= limits.max_sessions_per_identity:
            unused = [entry for entry in own if entry.unused]
            if not unused:
                message = f"{identity} has {len(own)} sessions in use, the most allowed"
                raise FrameError(ErrorCode.LIMIT, message, RETRY_WHEN_FULL_S)
            return unused[:1]
        if len(self) >= limits.max_sessions:
            return [self._excess_session(identity, len(own))]
        return []

    def _excess_session(self, identity: str, own: int) -> SessionEntry:
        """Return the session to evict from a full service, of an identity that has as many as the newcomer or more.

        First choice: one that no stream uses, of the identity that has the most. Else one in use, if the newcomer would
        still have fewer than that identity.
        """
        count = Counter(entry.identity for entry in self)
        by_count = sorted(self, key=lambda entry: -count[entry.identity])
        unused = [entry for entry in by_count if entry.unused and count[entry.identity] >= own]
        if unused:
            return unused[0]
        first = min(by_count, key=lambda entry: (-count[entry.identity], entry.busy))
        if count[first.identity] >= own + 2:
            return first
        message = f"all {self._limits.max_sessions} sessions of this service are in use"
        raise FrameError(ErrorCode.LIMIT, message, RETRY_WHEN_FULL_S)

    def _evictions_for_media(self, identity: str, media_bytes: int) -> list[SessionEntry]:
        """Return the sessions to evict for this much media, of the identity that holds the most, longest idle first.

        Their edges can send it again. A session of an identity that holds less than the newcomer would is never ended.
        """
        excess = sum(entry.media_bytes for entry in self) + media_bytes - self._limits.max_media_total
        held_bytes = Counter({identity: media_bytes})
        for entry in self:
            held_bytes[entry.identity] += entry.media_bytes
        left = [entry for entry in self if entry.media_bytes]
        evicted: list[SessionEntry] = []
        while media_bytes and excess > 0:
            own = held_bytes[identity]
            larger = [entry for entry in left if held_bytes[entry.identity] > own]
            candidates = larger or [entry for entry in left if entry.identity == identity and not entry.busy]
            if not candidates:
                message = "no room for more media: too many recordings are in use"
                raise FrameError(ErrorCode.LIMIT, message, RETRY_WHEN_FULL_S)
            chosen = min(candidates, key=lambda entry: (-held_bytes[entry.identity], entry.busy))
            evicted.append(chosen)
            left.remove(chosen)
            held_bytes[chosen.identity] -= chosen.media_bytes
            excess -= chosen.media_bytes
        return evicted
