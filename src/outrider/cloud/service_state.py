"""State that the streams of a service share, and the checks of their requests against it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from outrider.cloud.authentication import ANONYMOUS
from outrider.cloud.batcher import Batcher
from outrider.cloud.identity_semaphore import IdentitySemaphore
from outrider.cloud.limits import Limits, RateLimiter
from outrider.cloud.metrics import Metrics
from outrider.cloud.sessions import RETRY_WHEN_FULL_S, SessionEntry, Sessions
from outrider.decoding.actions import Verify
from outrider.engines.base import Prompt, ServableEngine
from outrider.protocol import schema
from outrider.protocol.messages import ErrorCode, FrameError
from outrider.verifiers.local import describe

RETRY_WHEN_DRAINING_S = 0.5  # s
MAX_OPENINGS = 2  # recordings of one identity unpacked at a time: worker threads are few
MAX_CACHED_PROMPTS = 16  # prompts that are kept unpacked until they get their first slot
MAX_SESSION_TOKENS = 2**20  # tokens of a session if neither the model nor the operator sets a limit


class ServiceState:
    """Engine and batcher, sessions and limits of one service.

    max_length: positions that a session may have. None is the model's own limit.
    """

    def __init__(
        self,
        engine: ServableEngine,
        batcher: Batcher,
        *,
        limits: Limits,
        metrics: Metrics,
        max_length: int | None = None,
    ) -> None:
        self.engine, self.batcher, self.limits, self.metrics = engine, batcher, limits, metrics
        self.sessions = Sessions(limits, batcher.release)
        self.opening_semaphore = IdentitySemaphore(MAX_OPENINGS)
        self.max_length = max_length if max_length is not None else engine.max_length
        self.draining = False
        self._rate = RateLimiter(limits.max_rate, limits.burst)
        self._model_info = describe(engine)
        self._model = engine.identity.encode()
        self._pending_media = 0  # bytes of media of sessions that are being opened
        self._pending_media_of: Counter[str] = Counter()  # the same by identity
        self._cached_prompts: deque[list[Prompt]] = deque()

    def check_serving(self) -> None:
        """Raise FrameError if the service is draining."""
        if self.draining:
            raise FrameError(ErrorCode.DRAINING, "this service is going down: connect again", RETRY_WHEN_DRAINING_S)

    def check_opening(self, frame: schema.Open) -> None:
        """Raise FrameError unless protocol, vocabulary and model are those that `Describe` returned."""
        if frame.protocol != schema.VERSION:
            raise FrameError(ErrorCode.PROTOCOL, f"protocol {frame.protocol}: this service speaks {schema.VERSION}")
        if frame.fingerprint != self._model_info.fingerprint.encode():
            message = f"{self.engine.name} has another vocabulary than the edge compared with"
            raise FrameError(ErrorCode.VOCABULARY, message)
        if frame.model != self._model:
            message = f"{self._model_info.label} is another model than the one that was described"
            raise FrameError(ErrorCode.MODEL, message)
        limit = self._model_info.vocab_size
        if not 0 < frame.vocab_size <= limit:
            raise FrameError(ErrorCode.INVALID, f"vocab_size {frame.vocab_size}: expected 1 to {limit}")

    def check_audio_support(self) -> None:
        """Raise FrameError if the model takes no audio, before the edge uploads any."""
        if not self._model_info.audio_seconds:
            message = f"{self.engine.name} takes no audio: it cannot verify a recording's transcript"
            raise FrameError(ErrorCode.PROMPT, message)

    def reserve_media(self, identity: str, size: int) -> None:
        """Reserve bytes for media of sessions that are being opened. A negative size releases them.

        If there may be other identities, one identity gets at most half of the total.

        Raises:
            FrameError: a limit would be exceeded.
        """
        share = self.limits.media_share(named=identity != ANONYMOUS)
        over_total = self._pending_media + size > self.limits.max_media_total
        if size > 0 and (over_total or self._pending_media_of[identity] + size > share):
            message = "no room for more media: too many recordings are being uploaded"
            raise FrameError(ErrorCode.LIMIT, message, RETRY_WHEN_FULL_S)
        self._pending_media += size
        self._pending_media_of[identity] += size
        if not self._pending_media_of[identity]:
            del self._pending_media_of[identity]

    def cache_prompt(self, prompt: list[Prompt]) -> None:
        """Keep an unpacked prompt until its first slot. May be called from worker threads.

        Beyond the limit the oldest is dropped, and unpacked again on use: a minute of silence is a few kilobytes of
        FLAC, but megabytes of samples.
        """
        self._cached_prompts.append(prompt)
        if len(self._cached_prompts) > MAX_CACHED_PROMPTS:
            self._cached_prompts.popleft().clear()

    def check_rate(self, identity: str) -> None:
        """Count a request of this identity. Raise FrameError if it exceeds the rate limit."""
        wait = self._rate.acquire(identity)
        if wait > 0:
            message = f"{identity} exceeds {self.limits.max_rate:g} requests per second"
            raise FrameError(ErrorCode.LIMIT, message, wait)

    async def wait_for_rate(self, identity: str) -> None:
        """Wait until the rate limit allows one more. Streamed tokens are delayed, not refused."""
        while (wait := self._rate.acquire(identity)) > 0:
            await asyncio.sleep(wait)

    def check_id_count(self, ids: int) -> None:
        """Raise FrameError for more ids than a session may have, before they are parsed one by one."""
        if ids > self.length_limit:
            message = f"{ids} ids in one request: a session holds at most {self.length_limit} tokens"
            raise FrameError(ErrorCode.PROMPT, message)

    def check_length(self, request: Verify) -> None:
        """Raise FrameError if the sequence would be longer than a session may be."""
        total = request.base_length + len(request.draft_ids)
        if self.max_length is not None and total > self.max_length:
            message = f"a sequence of {total} tokens: a session holds at most {self.max_length}"
            raise FrameError(ErrorCode.PROMPT, message)

    @property
    def length_limit(self) -> int:
        """Return the most tokens of a session, prompt and output."""
        return self.max_length if self.max_length is not None else MAX_SESSION_TOKENS

    @property
    def prompt_limit(self) -> int:
        """Return the most tokens of a prompt."""
        return min(self.length_limit, self.limits.max_prompt_tokens or MAX_SESSION_TOKENS)

    def remaining_tokens(self, entry: SessionEntry, base_length: int) -> int:
        """Return the number of tokens that may follow the first `base_length`."""
        end = entry.session.prompt_length + entry.settings.max_new_tokens
        return min(end, self.length_limit) - base_length

    def end_ids(self, entry: SessionEntry) -> tuple[int, ...]:
        """Return the token ids that end a session's output."""
        return () if entry.settings.ignore_eos else self.engine.eos_ids
