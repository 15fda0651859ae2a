"""The closed sessions that a cloud still has, so that the next prompt sends only what it lacks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider.engines.base import Prompt
from outrider.engines.prefix_cache import KeptList, common_prefix
from outrider.protocol import schema
from outrider.protocol.messages import digest

MAX_KEPT_SESSIONS = 16  # per verifier


@dataclass(frozen=True)
class KeptSession:
    """A closed session. tokens: those that the cloud confirmed, prompt first. media: its kind and bytes on the wire."""

    id: bytes
    tokens: list[int]
    media: tuple[int, bytes]
    cache_salt: str
    closed_at: float = field(default_factory=time.monotonic)

    def reference(self, length: int) -> schema.Base:
        """Return the reference to the session's first `length` tokens."""
        return schema.Base(session=self.id, length=length, digest=digest(self.tokens[:length]))


class KeptSessions:
    """Closed sessions, least recently closed first. The cloud refuses the reference to one that it has forgotten."""

    def __init__(self) -> None:
        self._sessions: KeptList[KeptSession] = KeptList(MAX_KEPT_SESSIONS)

    def add(self, session: KeptSession) -> None:
        """Keep a session. Beyond `MAX_KEPT_SESSIONS` the oldest is dropped."""
        self._sessions.add(session)

    def drop_until(self, forgotten: KeptSession) -> None:
        """Drop the sessions that were closed before one that the cloud has forgotten, as it evicts in this order."""
        self._sessions.retain(lambda each: each.closed_at > forgotten.closed_at)

    def take(self, prompt: Prompt) -> tuple[KeptSession | None, int]:
        """Remove and return the session with the longest common prefix with `prompt`, and its length.

        The prompt's last token never belongs to it, so that the next opening is not empty.
        """

        def length(session: KeptSession) -> int:
            is_own = session.cache_salt == prompt.cache_salt
            return min(common_prefix(session.tokens, prompt.ids), len(prompt.ids) - 1) if is_own else 0

        return self._sessions.take(length)
