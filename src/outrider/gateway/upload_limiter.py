"""Limits on uploads and on the memory of waiting requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.gateway.errors import QueueFull


class UploadLimiter:
    """Limits on requests whose generation has not begun: the number of uploads, and the bytes in memory.

    One client may have as many uploads at once as there are slots and places in the queue, and `budget` bytes of bodies
    and waiting prompts. All clients together may have twice that.
    """

    def __init__(self) -> None:
        self._by_client: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def upload(self, client: str, room: int) -> Iterator[None]:
        """Count an upload of this client, until the end of the block.

        Raises:
            QueueFull: there are too many uploads.
        """
        if self._by_client[client] >= room or self._by_client.total() >= 2 * room:
            raise QueueFull(f"{self._by_client.total()} requests are being uploaded: try again later", 1.0)
        self._by_client[client] += 1
        try:
            yield
        finally:
            _subtract(self._by_client, client, 1)

    @contextmanager
    def reserving(self, client: str, budget: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that adds bytes to this client's count, until the end of the block.

        Raises (the function):
            QueueFull: the client, or all clients together, would hold too many bytes.
        """
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            if self._bytes[client] + size > budget or self._bytes.total() + size > 2 * budget:
                message = f"the waiting requests take {self._bytes.total()} bytes already: try again later"
                raise QueueFull(message, 1.0)
            self._bytes[client] += size
            reserved += size

        try:
            yield reserve
        finally:
            _subtract(self._bytes, client, reserved)


def _subtract(counts: Counter[str], client: str, count: int) -> None:
    counts[client] -= count
    if not counts[client]:
        del counts[client]
