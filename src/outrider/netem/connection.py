"""One client's connection to the target: two sockets and the two delay lines between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from outrider.netem.delay_line import DelayLine, StreamEnd, abort
from outrider.netem.link_state import LinkState


class RelayProtocol(asyncio.Protocol):
    """One of the two sockets. It feeds the incoming delay line with its reads, and the outgoing line writes to it.

    asyncio sets TCP_NODELAY on the TCP sockets of its transports.
    """

    def __init__(
        self, incoming: DelayLine, outgoing: DelayLine, on_made: Callable[[], None], on_lost: Callable[[], None]
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_closed = True  # no socket is open
        self._incoming, self._outgoing, self._on_made, self._on_lost = incoming, outgoing, on_made, on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start reading from the socket into the incoming line."""
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.is_closed = transport, False
        self._incoming.read_from(transport)
        self._on_made()

    def data_received(self, data: bytes) -> None:
        """Feed bytes to the incoming line."""
        self._incoming.feed(data)

    def eof_received(self) -> bool:
        """Close the incoming line, and keep the socket open for writing."""
        self._incoming.close(StreamEnd.EOF)
        return True

    def pause_writing(self) -> None:
        """Hold the outgoing line, as the socket's buffer is full."""
        self._outgoing.set_sink_full(True)

    def resume_writing(self) -> None:
        """Resume the outgoing line, as the socket's buffer has room."""
        self._outgoing.set_sink_full(False)

    def connection_lost(self, _: Exception | None) -> None:
        """Drop the outgoing line, and reset the incoming one."""
        self.is_closed = True
        self._outgoing.drop()
        self._incoming.close(StreamEnd.RESET)
        self._on_lost()

    def abort(self) -> None:
        """Reset the socket, if it is open."""
        if self.transport is not None:
            abort(self.transport)


class RelayConnection:
    """A relayed connection, from the client's connect to the end of both sockets.

    The handshake takes a round trip. The target is connected one RTT after the client, the client's first byte reaches
    it half an RTT later, and the target's first byte reaches the client two RTTs after its connect.
    """

    def __init__(
        self,
        state: LinkState,
        address: tuple[str, int],
        on_accept: Callable[[RelayConnection], bool],
        on_close: Callable[[RelayConnection], None],
    ) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        self._state, self._address, self._on_accept, self._on_close = state, address, on_accept, on_close
        self._up, self._down = (
            DelayLine(state, state.up, self._close_if_ended),
            DelayLine(state, state.down, self._close_if_ended),
        )
        self.client = RelayProtocol(self._up, self._down, self._on_client_connected, self._on_client_closed)
        self._target = RelayProtocol(self._down, self._up, self._on_target_connected, self._close_if_done)
        self._created = monotonic()
        self._connecting: asyncio.Task[None] | None = None
        self._refusal: OSError | None = None
        self._cut_timer: asyncio.TimerHandle | None = None

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes in both delay lines."""
        return self._up.buffered_bytes + self._down.buffered_bytes

    async def connected(self) -> None:
        """Wait until the target has accepted the connection.

        Raises:
            OSError: the target refused it, or the connection was cut.
        """
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        if self._target.transport is None:
            raise self._refusal or ConnectionAbortedError("the connection was cut")

    def cut(self) -> None:
        """Abort both sockets."""
        if self._connecting is not None:
            self._connecting.cancel()
        self.client.abort()
        self._target.abort()

    def reschedule(self) -> None:
        """Apply changed conditions of the link to bytes that wait, and to the time of the cut."""
        self._up.reschedule()
        self._down.reschedule()
        self._arm_cut_timer()

    def _on_client_connected(self) -> None:
        if not self._on_accept(self):
            self.client.abort()
            return
        self._arm_cut_timer()
        self._connecting = asyncio.create_task(self._connect_target())
        self._connecting.add_done_callback(lambda _: self._close_if_done())

    def _arm_cut_timer(self) -> None:
        """Schedule the cut that the conditions demand, if any."""
        if self._cut_timer is not None:
            self._cut_timer.cancel()
        after = self._state.conditions.cut_after
        loop = asyncio.get_running_loop()
        self._cut_timer = None if after is None else loop.call_at(self._created + after, self.cut)

    async def _connect_target(self) -> None:
        await self._wait_handshake()
        try:
            await asyncio.get_running_loop().create_connection(lambda: self._target, *self._address)
        except OSError as error:  # refused, unreachable or unknown, which the relay's client sees as a reset
            self._refusal = error
            self.client.abort()

    async def _wait_handshake(self) -> None:
        """Wait for one round trip, and for the end of a stall."""
        due = monotonic() + self._state.conditions.rtt
        while (wait := self._state.next_active_time(due) - monotonic()) > 0:
            await asyncio.sleep(wait)

    def _on_target_connected(self) -> None:
        """Connect both delay lines to the sockets that they write to."""
        assert self.client.transport is not None
        assert self._target.transport is not None
        self._down.write_to(self.client.transport, monotonic() + self._state.conditions.rtt)
        self._up.write_to(self._target.transport)

    def _close_if_ended(self) -> None:
        """Close both sockets once both streams have ended. asyncio writes their buffers first."""
        if self._up.ended and self._down.ended:
            for side in (self.client, self._target):
                assert side.transport is not None
                side.transport.close()

    def _on_client_closed(self) -> None:
        """Cancel the connect to the target if it is still pending, as the client is gone."""
        if self._connecting is not None and self._target.transport is None:
            self._connecting.cancel()
        self._close_if_done()

    def _close_if_done(self) -> None:
        connected = self._connecting is None or self._connecting.done()
        if not (connected and self.client.is_closed and self._target.is_closed) or self.closed.done():
            return
        if self._cut_timer is not None:
            self._cut_timer.cancel()
        self.closed.set_result(None)
        self._on_close(self)
