"""A delay line: one direction of one connection, from the source socket to the sink socket.

    source ─ feed ─▶ │ waits for the bottleneck │ in flight, rtt/2 ± jitter │ ─ forward ─▶ sink
                       departure > now             departure <= now < arrival

Order is kept: no entry arrives before the one ahead of it.
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
    """Marker of a stream's end, which travels in order with the bytes."""

    EOF = "eof"  # the source sends no more
    RESET = "reset"  # the source is gone


class Entry(NamedTuple):
    """A chunk or an end in the line. Times are in seconds of the monotonic clock."""

    departure: float
    arrival: float
    item: memoryview | StreamEnd


class DelayLine:
    """Delay line of one direction. Without conditions, bytes pass from socket to socket at once, uncopied.

    Memory is bounded: the source is not read while more than `Direction.max_buffered` bytes are held, or while the
    sink's own buffer is full. At most that and one read (256 KiB) are in memory.
    """

    def __init__(self, state: LinkState, direction: Direction, on_end: Callable[[], None]) -> None:
        self.ended = False  # EOF was forwarded to the sink
        self.buffered_bytes = 0
        self._state, self._direction, self._on_end = state, direction, on_end
        self._loop = asyncio.get_running_loop()
        self._source: asyncio.Transport | None = None
        self._sink: asyncio.Transport | None = None
        self._pending: list[memoryview | StreamEnd] = []  # received before the sink was connected
        self._queue: deque[Entry] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last = -math.inf  # earliest time of the next arrival
        self._sink_is_full = False
        self._closing: StreamEnd | None = None  # how the source ended
        self._dropped = False

    def read_from(self, source: asyncio.Transport) -> None:
        """Set the source, which backpressure pauses."""
        self._source = source

    def write_to(self, sink: asyncio.Transport, not_before: float = -math.inf) -> None:
        """Set the sink. Nothing reaches it before `not_before` (s, monotonic clock)."""
        if self._dropped:
            return
        self._sink, self._last = sink, not_before
        pending, self._pending = self._pending, []
        self._schedule(pending)

    def feed(self, data: bytes) -> None:
        """Take bytes that the source received."""
        if self._sink is not None and not self._queue and self._state.is_passthrough():
            self._direction.byte_count += len(data)
            self._sink.write(data)
        elif not self._dropped:
            self.buffered_bytes += len(data)
            self._enqueue(memoryview(data))

    def close(self, end: StreamEnd) -> None:
        """End the stream. A RESET after EOF is forwarded. Any other repeat is ignored."""
        if self._dropped or self._closing in (end, StreamEnd.RESET):
            return
        self._closing = end
        self._enqueue(end)

    def drop(self) -> None:
        """Discard all bytes, also those that still come, as the sink is gone."""
        self._dropped, self._sink, self.buffered_bytes = True, None, 0
        self._pending.clear()
        self._queue.clear()
        self._set_timer(None)

    def set_sink_full(self, full: bool) -> None:
        """Set whether the sink's buffer is full, and deliver if it is not."""
        self._sink_is_full = full
        self._deliver()

    def reschedule(self) -> None:
        """Apply changed conditions to the entries that have not passed the bottleneck."""
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
        """Forward the entries that have arrived, and set a timer for the next."""
        now = monotonic()
        due = self._due(now)
        while due is not None and due <= now:
            self._forward(self._queue.popleft().item)
            due = self._due(now)
        self._set_timer(due)
        self._apply_backpressure()

    def _due(self, now: float) -> float | None:
        """Return when the first entry may be forwarded, or None while the sink accepts nothing."""
        if not self._queue or self._sink is None or self._sink.is_closing():
            return None
        if self._sink_is_full and self._closing is not StreamEnd.RESET:  # a reset does not wait for a full sink
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
        except OSError:  # reset by its peer, and asyncio has not noticed yet
            abort(sink)
        self.ended = True
        self._on_end()

    def _set_timer(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._deliver)

    def _apply_backpressure(self) -> None:
        if self._source is None or self._closing is not None:  # after EOF, resuming would make asyncio read it again
            return
        if not self._dropped and (self._sink_is_full or self.buffered_bytes > self._direction.max_buffered):
            self._source.pause_reading()
        else:
            self._source.resume_reading()


def abort(transport: asyncio.Transport) -> None:
    """End a connection at once and drop unsent bytes. TCP sends RST. A Unix socket is just closed."""
    with suppress(OSError):  # the socket or its peer is closed already
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _split(data: memoryview, size: int) -> list[memoryview]:
    return [data[at : at + size] for at in range(0, len(data), size)]
