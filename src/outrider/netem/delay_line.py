"""A delay line: one way of one connection, from the socket that is read to the one that is written.

    source ─ feed ─▶ │ waits for the bottleneck │ under way, rtt/2 ± jitter │ ─ forward ─▶ sink
                       departure > now             departure <= now < arrival

What departs in order arrives in order: an arrival is never before the one ahead of it.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from time import monotonic
from typing import NamedTuple

from outrider.netem.link_state import Direction, LinkState


class StreamEnd(Enum):
    """What travels like a byte without being one."""

    EOF = "eof"  # the source has no more to say
    RESET = "reset"  # the source is gone


class Entry(NamedTuple):
    """One thing in the line; times in seconds of the monotonic clock."""

    departure: float
    arrival: float
    item: memoryview | StreamEnd


class DelayLine:
    """Bytes of one way; without conditions they go from socket to socket at once, uncopied.

    Bounded: the source is not read while more than `Direction.max_buffered` bytes are held, so that at most this and
    one read (256 KiB) are in memory, nor while the sink's own buffer is full.
    """

    def __init__(self, state: LinkState, direction: Direction, on_end: Callable[[], None]) -> None:
        self.ended = False  # END was handed to the sink
        self.buffered_bytes = 0  # bytes
        self._state, self._direction, self._on_end = state, direction, on_end
        self._loop = asyncio.get_running_loop()
        self._source: asyncio.Transport | None = None
        self._sink: asyncio.Transport | None = None
        self._pending: list[memoryview | StreamEnd] = []  # taken before the sink was there
        self._queue: deque[Entry] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last = -math.inf  # nothing arrives before this
        self._sink_is_full = False  # the sink takes no more for now
        self._closing: StreamEnd | None = None  # what the source ended with
        self._dropped = False

    def read_from(self, source: asyncio.Transport) -> None:
        self._source = source

    def write_to(self, sink: asyncio.Transport, not_before: float = -math.inf) -> None:
        """The far side is there; nothing reaches it before `not_before` (s, monotonic clock)."""
        if self._dropped:
            return
        self._sink, self._last = sink, not_before
        pending, self._pending = self._pending, []
        self._schedule(pending)

    def feed(self, data: bytes) -> None:
        """What the source said."""
        if self._sink is not None and not self._queue and self._state.is_passthrough():
            self._direction.byte_count += len(data)
            self._sink.write(data)
        elif not self._dropped:
            self.buffered_bytes += len(data)
            self._enqueue(memoryview(data))

    def close(self, end: StreamEnd) -> None:
        """The source says no more; RESET after END counts, anything else after either does not."""
        if self._dropped or self._closing in (end, StreamEnd.RESET):
            return
        self._closing = end
        self._enqueue(end)

    def drop(self) -> None:
        """The sink is gone: what is under way is lost, and so is what still comes."""
        self._dropped, self._sink, self.buffered_bytes = True, None, 0
        self._pending.clear()
        self._queue.clear()
        self._set_timer(None)

    def set_sink_full(self, full: bool) -> None:
        """The sink's buffer is full, or has room again."""
        self._sink_is_full = full
        self._deliver()

    def reschedule(self) -> None:
        """Conditions have changed: what has not passed the bottleneck comes under the new ones."""
        now = monotonic()
        waiting = [entry for entry in self._queue if entry.departure > now]
        for _ in waiting:
            self._queue.pop()
        if waiting:
            self._last = self._queue[-1].arrival if self._queue else now
        self._schedule([entry.item for entry in waiting])

    def _enqueue(self, item: memoryview | StreamEnd) -> None:
        if self._sink is None:
            self._pending.append(item)
            self._apply_backpressure()
        else:
            self._schedule([item])

    def _schedule(self, items: list[memoryview | StreamEnd]) -> None:
        now = monotonic()
        for item in items:
            delay = self._direction.delay()
            for chunk in [item] if isinstance(item, StreamEnd) else _split(item, self._direction.chunk_size):
                departure = self._direction.departure(0 if isinstance(chunk, StreamEnd) else len(chunk), now)
                self._last = max(self._last, departure + delay)
                self._queue.append(Entry(departure, self._last, chunk))
        self._deliver()

    def _deliver(self) -> None:
        """Hand over what has arrived, and come back for the rest."""
        now = monotonic()
        due = self._due(now)
        while due is not None and due <= now:
            self._forward(self._queue.popleft().item)
            due = self._due(now)
        self._set_timer(due)
        self._apply_backpressure()

    def _due(self, now: float) -> float | None:
        """When the head of the line may be handed over; None while nobody takes it."""
        if not self._queue or self._sink is None or self._sink.is_closing():
            return None
        if (
            self._sink_is_full and self._closing is not StreamEnd.RESET
        ):  # a reset does not wait for a sink that reads nothing
            return None
        return self._state.next_active_time(max(self._queue[0].arrival, now))

    def _forward(self, item: memoryview | StreamEnd) -> None:
        assert self._sink is not None
        if item is StreamEnd.RESET:
            abort(self._sink)
        elif item is StreamEnd.EOF:
            self._forward_eof(self._sink)
        elif isinstance(item, memoryview):
            self.buffered_bytes -= len(item)
            self._direction.byte_count += len(item)
            self._sink.write(item)

    def _forward_eof(self, sink: asyncio.Transport) -> None:
        try:
            sink.write_eof()
        except OSError:  # reset by its peer a moment ago, and asyncio does not know yet
            abort(sink)
        self.ended = True
        self._on_end()

    def _set_timer(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._deliver)

    def _apply_backpressure(self) -> None:
        if self._source is None or self._closing is not None:  # resuming after its end, asyncio would read that again
            return
        if not self._dropped and (self._sink_is_full or self.buffered_bytes > self._direction.max_buffered):
            self._source.pause_reading()
        else:
            self._source.resume_reading()


def abort(transport: asyncio.Transport) -> None:
    """End a connection at once, unsent bytes dropped: by RST over TCP; a Unix socket only has an end."""
    with suppress(OSError):  # the socket is closed, or its peer is: there is nothing left to reset
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _split(data: memoryview, size: int) -> list[memoryview]:
    return [data[at : at + size] for at in range(0, len(data), size)]
