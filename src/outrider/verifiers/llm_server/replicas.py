"""Servers of one model, and which of them a session is with.

Prefix caches are per server, so a session stays where its tokens are: rendezvous hashing (Thaler and Ravishankar, 1998)
gives every session an order of the replicas, known to all edges alike without their speaking to each other. The first
that answers has it; where one fails, only its own sessions move, each to the next of its order.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from outrider.errors import CloudRefused
from outrider.transport.http_client import HttpClient, HttpResponse
from outrider.transport.status import Disconnected, UntrustedServer
from outrider.verifiers.llm_server.backend import (
    Backend,
    CachedLogprobsMissing,
    Capabilities,
    fetch_logprobs,
    probe_request,
)
from outrider.verifiers.llm_server.logit_noise import is_normalised, require_same_model
from outrider.verifiers.retry import Retryable

T = TypeVar("T")
log = logging.getLogger(__name__)

AVOID_SECONDS = 5.0  # s for which a replica that failed is asked last


class Replica:
    """One server. `capabilities` is what its probe found."""

    def __init__(self, backend: Backend, client: HttpClient, deadline: float) -> None:
        self.client, self.deadline = client, deadline
        self.name = f"{backend.scheme}://{client.name}"
        self.capabilities: Capabilities | None = None
        self._backend = backend
        self._failed = -AVOID_SECONDS
        self._needs_recheck = False  # it was away: who came back may be another
        self._connections_seen = 0  # connections that were made when it was last looked at
        self._lock = asyncio.Lock()
        self._failed_over = False  # its sessions have moved, and that was said
        self._warned: set[str] = set()

    @property
    def is_avoided(self) -> bool:
        return time.monotonic() - self._failed < AVOID_SECONDS

    async def ensure_ready(self, first: Capabilities | None = None) -> Capabilities:
        """What it can do; asked once, and again after it was away. first: of the model that all replicas must serve.

        Raises:
            Retryable: it cannot be reached, or is not ready.
            CloudRefused: it cannot verify, or serves another model than `first`.
        """
        async with self._lock:
            if self.capabilities is None or self._needs_recheck:
                found = await self.map_errors(self._backend.probe(self.client))
                self._check(found, first or self.capabilities)
                self.capabilities, self._needs_recheck = found, False
                self._connections_seen = self.client.endpoint.connections
            return self.capabilities

    async def post(self, path: str, body: bytes, session: str, seconds: float) -> HttpResponse:
        """One request; raises as `ensure_ready` does.

        Where a connection had to be made for it, the server may have been restarted since it was last asked: whether it
        is still the same is found out before its answer counts.
        """
        reply = await self.map_errors(self.client.post(path, body, seconds, {"X-Session-ID": session}))
        async with self._lock:
            if self.capabilities is not None and self.client.endpoint.connections != self._connections_seen:
                await self._recheck(self.capabilities)
        return reply

    async def _recheck(self, capabilities: Capabilities) -> None:
        try:
            found = await self.map_errors(
                fetch_logprobs(self._backend, self.client, probe_request(skip_cache=True), capabilities, self.deadline)
            )
            require_same_model(self.name, capabilities.sample, found, capabilities.noise)
            if is_normalised(found) != capabilities.normalised:
                raise CloudRefused("it sends other values")
        except (CloudRefused, CachedLogprobsMissing) as error:
            self._needs_recheck = True
            raise Retryable(f"{self.name} is not as it was: {error}") from error
        self._connections_seen = self.client.endpoint.connections

    async def map_errors(self, work: Awaitable[T]) -> T:
        """What `work` comes to, with the transport's errors as ours; a replica that fails is avoided for a while."""
        try:
            return await work
        except UntrustedServer as error:
            raise CloudRefused(f"{self.name} is not trusted: {error}") from error
        except (Disconnected, TimeoutError) as error:
            self.mark_failed()
            raise Retryable(f"{self.name}: {str(error) or 'no answer in time'}") from error

    def mark_failed(self) -> None:
        self._failed, self._needs_recheck = time.monotonic(), True

    def log_failover(self, reason: Retryable, replicas: Sequence[Replica]) -> None:
        """A session could not use it, and asks the next one."""
        if self._failed_over or len(replicas) < 2:
            return
        self._failed_over = True
        left = ", ".join(other.name for other in replicas if not other._failed_over)
        then = f"its sessions move to {left}" if left else "none is left"
        log.warning("replica %s does not answer (%s); %s", self.name, strip_name(reason, self.name), then)

    def log_recovery(self) -> None:
        """A session used it."""
        if self._failed_over:
            self._failed_over = False
            log.warning("replica %s is back in use", self.name)

    def warn_once(self, warning: str) -> None:
        """Say it, once for all sessions; nothing if it is empty."""
        if warning and warning not in self._warned:
            self._warned.add(warning)
            log.warning("%s", warning)

    def _check(self, found: Capabilities, expected: Capabilities | None) -> None:
        if expected is None:
            return
        if (found.model, found.max_length) != (expected.model, expected.max_length):
            raise CloudRefused(f"{self.name} serves {found.model}, not {expected.model} as before")
        require_same_model(self.name, expected.sample, found.sample, max(expected.noise, found.noise))


def strip_name(reason: Retryable, name: str) -> str:
    """The reason, without the name of who it is about in front."""
    return str(reason).removeprefix(f"{name}: ").removeprefix(f"{name.partition('://')[2]}: ")


def rendezvous_order(key: str, replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas in this session's order, those that failed a moment ago last."""

    def weight(replica: Replica) -> bytes:
        return hashlib.sha256(f"{key} {replica.name}".encode()).digest()

    return sorted(sorted(replicas, key=weight, reverse=True), key=lambda replica: replica.is_avoided)


async def use_first_ready(replicas: Sequence[Replica], key: str, use: Callable[[Replica], Awaitable[None]]) -> None:
    """Use the first replica of the session's order that can be used.

    Raises:
        Retryable: none can, for now; the last one's reason. A busy one (429) is waited for, where the session's tokens
        are.
    """
    reason: Retryable | None = None
    for replica in rendezvous_order(key, replicas):
        try:
            await use(replica)
            return replica.log_recovery()
        except Retryable as error:
            if error.is_busy:
                raise
            replica.log_failover(error, replicas)
            reason = error
    assert reason is not None
    raise reason
