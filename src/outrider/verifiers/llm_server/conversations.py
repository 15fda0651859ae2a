"""Ended sessions whose tokens the servers' prefix caches may still hold, for the next turn of a conversation.

Prefix caches are separate for each key (vLLM's `cache_salt`). The next turn uses the key of the turn before it.
It must be longer than everything that was sent under that key: a server does not return the rows of cached tokens.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from outrider.engines.base import Prompt
from outrider.engines.prefix_cache import KeptList, common_prefix
from outrider.verifiers.llm_server.backend import Media
from outrider.verifiers.llm_server.replicas import Replica

MAX_CONVERSATIONS = 16  # per verifier


@dataclass
class Conversation:
    """The sequences that share a key. tokens: the last one's. sent: length of the longest request.

    has_recording: replicas that have the recording.
    """

    cache_salt: str
    media: Media | None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: list[int] = field(default_factory=list)
    sent: int = 0
    has_recording: set[Replica] = field(default_factory=set)


class Conversations:
    """Conversations without a session, least recently used first."""

    def __init__(self) -> None:
        self._conversations: KeptList[Conversation] = KeptList(MAX_CONVERSATIONS)

    def add(self, conversation: Conversation) -> None:
        """Keep a conversation whose session has ended. Beyond `MAX_CONVERSATIONS` the oldest is dropped."""
        self._conversations.add(conversation)

    def take(self, prompt: Prompt, media: Media | None) -> Conversation:
        """Remove and return the conversation with the longest common prefix with `prompt`, or return a new one."""
        best, _ = self._conversations.take(
            lambda each: common_prefix(each.tokens, prompt.ids) if _fits(each, prompt, media) else 0
        )
        return best or Conversation(prompt.cache_salt, media)


def _fits(conversation: Conversation, prompt: Prompt, media: Media | None) -> bool:
    urls = [None if each is None else each.url for each in (conversation.media, media)]
    same = conversation.cache_salt == prompt.cache_salt and urls[0] == urls[1]
    return same and conversation.sent < len(prompt.ids)
