"""Turns and pace per identity, for one event loop: a bounded number of tasks at a time, first come, first served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider.cloud.limits import RateLimiter


@dataclass
class _IdentitySlots:
    free: asyncio.Semaphore
    users: int = field(default=0)  # including those that wait


class IdentitySemaphore:
    """A semaphore per identity. limit: turns that an identity may have at a time.

    With a limit of one, the event loop serves identities in rotation: one with hundreds of streams gets no more passes
    than one with a single stream.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_identity: dict[str, _IdentitySlots] = {}

    def __len__(self) -> int:
        """Return the number of identities that have a turn or wait for one."""
        return len(self._by_identity)

    @asynccontextmanager
    async def hold(self, identity: str) -> AsyncIterator[None]:
        """Wait for a turn. It ends with the next pass of the event loop, so that other identities run in between."""
        slots = self._by_identity.setdefault(identity, _IdentitySlots(asyncio.Semaphore(self._limit)))
        slots.users += 1
        try:
            await slots.free.acquire()
        except BaseException:
            self._forget(identity, slots)
            raise
        try:
            yield
        finally:
            asyncio.get_running_loop().call_soon(self._release, identity, slots)

    def _release(self, identity: str, slots: _IdentitySlots) -> None:
        slots.free.release()
        self._forget(identity, slots)

    def _forget(self, identity: str, slots: _IdentitySlots) -> None:
        slots.users -= 1
        if not slots.users:
            self._by_identity.pop(identity, None)


class Pace:
    """A rate limit per identity that delays: `burst` at once, then `rate` per second, in order of arrival."""

    def __init__(
        self,
        rate: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._limiter, self._turns, self._sleep = RateLimiter(rate, burst, clock), IdentitySemaphore(1), sleep

    async def wait(self, identity: str) -> None:
        """Wait until the rate allows one more."""
        async with self._turns.hold(identity):
            while (seconds := self._limiter.acquire(identity)) > 0:
                await self._sleep(seconds)
