"""Replicas of one model, and the assignment of sessions to them.

Prefix caches are per server, so a session stays with one replica. Rendezvous hashing (Thaler and Ravishankar, 1998)
gives each session an order of the replicas without coordination between edges. The session uses the first replica of
its order that answers. When a replica fails, only its own sessions move, each to the next replica of its order.
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

AVOID_SECONDS = 5.0  # s for which a failed replica is tried last


class Replica:
    """One server. capabilities: found by its probe, None before it."""

    def __init__(self, backend: Backend, client: HttpClient, deadline: float) -> None:
        self.client, self.deadline = client, deadline
        self.name = f"{backend.scheme}://{client.name}"
        self.capabilities: Capabilities | None = None
        self._backend = backend
        self._failed = -AVOID_SECONDS
        self._needs_recheck = False  # after a failure, since the server may have been replaced
        self._connections_seen = 0  # number of connections at the last check
        self._lock = asyncio.Lock()
        self._failed_over = False  # its sessions have moved, and the log has the warning
        self._warned: set[str] = set()

    @property
    def is_avoided(self) -> bool:
        """Return whether the replica failed within the last AVOID_SECONDS."""
        return time.monotonic() - self._failed < AVOID_SECONDS

    async def ensure_ready(self, first: Capabilities | None = None) -> Capabilities:
        """Return the capabilities. They are probed at first use and after a failure.

        first: the capabilities of another replica, which must serve the same model.

        Raises:
            Retryable: the server is unreachable or not ready.
            CloudRefused: the server cannot verify, or serves another model than `first`.
        """
        async with self._lock:
            if self.capabilities is None or self._needs_recheck:
                found = await self.map_errors(self._backend.probe(self.client))
                if (expected := first or self.capabilities) is not None:
                    self._require_named(expected, found.model, found.max_length)
                    noise = max(expected.noise, found.noise)
                    require_same_model(self.name, expected.sample, found.sample, noise)
                self.capabilities, self._needs_recheck = found, False
                self._connections_seen = self.client.endpoint.connections
            return self.capabilities

    async def check(self, first: Capabilities) -> None:
        """Check that the server still has its model, without computation unless it was restarted.

        The arguments and errors are those of `ensure_ready`.
        """
        capabilities = await self.ensure_ready(first)
        self._require_named(capabilities, *await self.map_errors(self._backend.read_model(self.client)))
        await self._recheck_new_connection()

    def _require_named(self, expected: Capabilities, model: str, max_length: int | None) -> None:
        if (model, max_length) != (expected.model, expected.max_length):
            raise CloudRefused(f"{self.name} serves {model}, not {expected.model} as before")

    async def post(self, path: str, body: bytes, session: str, seconds: float) -> HttpResponse:
        """Send one request. The errors are those of `ensure_ready`.

        A new connection can mean that the server was restarted. The answer then counts only after a check that the
        server still has the same model.
        """
        reply = await self.map_errors(self.client.post(path, body, seconds, {"X-Session-ID": session}))
        await self._recheck_new_connection()
        return reply

    async def _recheck_new_connection(self) -> None:
        async with self._lock:
            if self.capabilities is not None and self.client.endpoint.connections != self._connections_seen:
                await self._recheck(self.capabilities)

    async def _recheck(self, capabilities: Capabilities) -> None:
        try:
            found = await self.map_errors(
                fetch_logprobs(self._backend, self.client, probe_request(skip_cache=True), capabilities, self.deadline)
            )
            require_same_model(self.name, capabilities.sample, found, capabilities.noise)
            if is_normalised(found) != capabilities.normalised:
                raise CloudRefused("it has switched between logits and log-probabilities")
        except (CloudRefused, CachedLogprobsMissing) as error:
            self._needs_recheck = True
            raise Retryable(f"{self.name} is not as it was: {error}") from error
        self._connections_seen = self.client.endpoint.connections

    async def map_errors(self, work: Awaitable[T]) -> T:
        """Await `work` and map the transport's errors. A replica that cannot be reached is avoided for a while."""
        try:
            return await work
        except UntrustedServer as error:
            raise CloudRefused(f"{self.name} is not trusted: {error}") from error
        except (Disconnected, TimeoutError) as error:
            self.mark_failed()
            raise Retryable(f"{self.name}: {str(error) or 'no answer in time'}") from error

    def mark_failed(self) -> None:
        """Avoid the replica for a while, and probe it before its next use."""
        self._failed, self._needs_recheck = time.monotonic(), True

    def log_failover(self, reason: Retryable, replicas: Sequence[Replica]) -> None:
        """Log that sessions move to the other replicas, once until this one recovers."""
        if self._failed_over or len(replicas) < 2:
            return
        self._failed_over = True
        left = ", ".join(other.name for other in replicas if not other._failed_over)
        then = f"its sessions move to {left}" if left else "none is left"
        log.warning("replica %s does not answer (%s); %s", self.name, strip_name(reason, self.name), then)

    def log_recovery(self) -> None:
        """Log that the replica is used again after a fail-over."""
        if self._failed_over:
            self._failed_over = False
            log.warning("replica %s is back in use", self.name)

    def warn_once(self, warning: str) -> None:
        """Log a warning once for all sessions. An empty one is ignored."""
        if warning and warning not in self._warned:
            self._warned.add(warning)
            log.warning("%s", warning)


def strip_name(reason: Retryable, name: str) -> str:
    """Return the reason without the replica's name in front."""
    return str(reason).removeprefix(f"{name}: ").removeprefix(f"{name.partition('://')[2]}: ")


def rendezvous_order(key: str, replicas: Sequence[Replica]) -> list[Replica]:
    """Return the replicas in the session's order, recently failed ones last."""

    def weight(replica: Replica) -> bytes:
        return hashlib.sha256(f"{key} {replica.name}".encode()).digest()

    return sorted(sorted(replicas, key=weight, reverse=True), key=lambda replica: replica.is_avoided)


async def use_first_ready(replicas: Sequence[Replica], key: str, use: Callable[[Replica], Awaitable[None]]) -> None:
    """Use the first replica of the session's order that answers.

    Raises:
        Retryable: no replica answered (the error is that of the last one), or one is busy (429). A busy replica is
            retried rather than skipped because its prefix cache holds the session's tokens.
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
