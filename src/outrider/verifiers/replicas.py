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
from outrider.verifiers.measure import is_normalised, require_same
from outrider.verifiers.refusals import Again
from outrider.verifiers.server import Abilities, Dialect, Reread, asked, known
from outrider.wire.status import Disconnected, Untrusted
from outrider.wire.web import Reply, Web

T = TypeVar("T")
log = logging.getLogger(__name__)

AVOIDED = 5.0  # s for which a replica that failed is asked last


class Replica:
    """One server. `able` is what its probe found."""

    def __init__(self, dialect: Dialect, web: Web, deadline: float) -> None:
        self.web, self.deadline = web, deadline
        self.name = f"{dialect.scheme}://{web.name}"
        self.able: Abilities | None = None
        self._dialect = dialect
        self._failed = -AVOIDED
        self._doubtful = False  # it was away: who came back may be another
        self._seen = 0  # connections that were made when it was last looked at
        self._lock = asyncio.Lock()
        self._lost = False  # its sessions have moved, and that was said
        self._warned: set[str] = set()

    @property
    def avoided(self) -> bool:
        return time.monotonic() - self._failed < AVOIDED

    async def ready(self, first: Abilities | None = None) -> Abilities:
        """What it can do; asked once, and again after it was away. first: of the model that all replicas must serve.

        Raises:
            Again: it cannot be reached, or is not ready.
            CloudRefused: it cannot verify, or serves another model than `first`.
        """
        async with self._lock:
            if self.able is None or self._doubtful:
                found = await self.guarded(self._dialect.probe(self.web))
                self._check(found, first or self.able)
                self.able, self._doubtful = found, False
                self._seen = self.web.endpoint.connections
            return self.able

    async def post(self, path: str, body: bytes, session: str, seconds: float) -> Reply:
        """One request; raises as `ready` does.

        Where a connection had to be made for it, the server may have been restarted since it was last asked: whether it
        is still the same is found out before its answer counts.
        """
        reply = await self.guarded(self.web.post(path, body, seconds, {"X-Session-ID": session}))
        async with self._lock:
            if self.able is not None and self.web.endpoint.connections != self._seen:
                await self._look_again(self.able)
        return reply

    async def _look_again(self, able: Abilities) -> None:
        try:
            found = await self.guarded(asked(self._dialect, self.web, known(fresh=True), able, self.deadline))
            require_same(self.name, able.sample, found, able.noise)
            if is_normalised(found) != able.normalised:
                raise CloudRefused("it sends other values")
        except (CloudRefused, Reread) as error:
            self._doubtful = True
            raise Again(f"{self.name} is not as it was: {error}") from error
        self._seen = self.web.endpoint.connections

    async def guarded(self, work: Awaitable[T]) -> T:
        """What `work` comes to, with the transport's errors as ours; a replica that fails is avoided for a while."""
        try:
            return await work
        except Untrusted as error:
            raise CloudRefused(f"{self.name} is not trusted: {error}") from error
        except (Disconnected, TimeoutError) as error:
            self.fail()
            raise Again(f"{self.name}: {str(error) or 'no answer in time'}") from error

    def fail(self) -> None:
        self._failed, self._doubtful = time.monotonic(), True

    def lost(self, reason: Again, everyone: Sequence[Replica]) -> None:
        """A session could not use it, and asks the next one."""
        if self._lost or len(everyone) < 2:
            return
        self._lost = True
        left = ", ".join(other.name for other in everyone if not other._lost)
        then = f"its sessions move to {left}" if left else "none is left"
        log.warning("replica %s does not answer (%s); %s", self.name, bare(reason, self.name), then)

    def found(self) -> None:
        """A session used it."""
        if self._lost:
            self._lost = False
            log.warning("replica %s is back in use", self.name)

    def warn(self, caution: str) -> None:
        """Say it, once for all sessions; nothing if it is empty."""
        if caution and caution not in self._warned:
            self._warned.add(caution)
            log.warning("%s", caution)

    def _check(self, found: Abilities, known: Abilities | None) -> None:
        if known is None:
            return
        if (found.model, found.max_length) != (known.model, known.max_length):
            raise CloudRefused(f"{self.name} serves {found.model}, not {known.model} as before")
        require_same(self.name, known.sample, found.sample, max(known.noise, found.noise))


def bare(reason: Again, name: str) -> str:
    """The reason, without the name of who it is about in front."""
    return str(reason).removeprefix(f"{name}: ").removeprefix(f"{name.partition('://')[2]}: ")


def rendezvous(key: str, replicas: Sequence[Replica]) -> list[Replica]:
    """The replicas in this session's order, those that failed a moment ago last."""

    def weight(replica: Replica) -> bytes:
        return hashlib.sha256(f"{key} {replica.name}".encode()).digest()

    return sorted(sorted(replicas, key=weight, reverse=True), key=lambda replica: replica.avoided)


async def first_ready(replicas: Sequence[Replica], key: str, use: Callable[[Replica], Awaitable[None]]) -> None:
    """Use the first replica of the session's order that can be used.

    Raises:
        Again: none can, for now; the last one's reason. A busy one (429) is waited for, where the session's tokens are.
    """
    reason: Again | None = None
    for replica in rendezvous(key, replicas):
        try:
            await use(replica)
            return replica.found()
        except Again as again:
            if again.busy:
                raise
            replica.lost(again, replicas)
            reason = again
    assert reason is not None
    raise reason
