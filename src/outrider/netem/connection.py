"""One client's connection to the target: two sockets and the two lines between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from outrider.netem.line import Line, Mark, abort
from outrider.netem.medium import Medium


class End(asyncio.Protocol):
    """One of the two sockets: what it reads goes into one line, what it writes comes from the other.

    asyncio sets TCP_NODELAY on every TCP socket it makes a transport of.
    """

    def __init__(self, reads: Line, writes: Line, on_made: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self.gone = True  # no socket is open
        self._reads, self._writes, self._on_made, self._on_lost = reads, writes, on_made, on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.gone = transport, False
        self._reads.read_from(transport)
        self._on_made()

    def data_received(self, data: bytes) -> None:
        self._reads.take(data)

    def eof_received(self) -> bool:
        self._reads.close(Mark.END)
        return True  # stay open for the other way

    def pause_writing(self) -> None:
        self._writes.hold(True)

    def resume_writing(self) -> None:
        self._writes.hold(False)

    def connection_lost(self, _: Exception | None) -> None:
        self.gone = True
        self._writes.drop()
        self._reads.close(Mark.RESET)
        self._on_lost()

    def abort(self) -> None:
        if self.transport is not None:
            abort(self.transport)


class Connection:
    """From the client's connect to the end of both sockets.

    The handshake takes a round trip: the target is dialled one RTT after the client came, the client's first byte
    reaches it half an RTT later, and what the target says first reaches the client two RTTs after it came.
    """

    def __init__(
        self,
        medium: Medium,
        address: tuple[str, int],
        on_accept: Callable[[Connection], bool],
        on_close: Callable[[Connection], None],
    ) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        self._medium, self._address, self._on_accept, self._on_close = medium, address, on_accept, on_close
        self._up, self._down = Line(medium, medium.up, self._finish), Line(medium, medium.down, self._finish)
        self.client = End(self._up, self._down, self._accept, self._leave)
        self._target = End(self._down, self._up, self._open, self._settle)
        self._made = monotonic()
        self._dialling: asyncio.Task[None] | None = None
        self._refusal: OSError | None = None
        self._fuse: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Bytes in both delay lines."""
        return self._up.held + self._down.held

    async def connected(self) -> None:
        """Wait until the target has accepted.

        Raises:
            OSError: it has not, or this connection was cut.
        """
        if self._dialling is not None:
            await asyncio.wait([self._dialling])
        if self._target.transport is None:
            raise self._refusal or ConnectionAbortedError("the connection was cut")

    def cut(self) -> None:
        """Abort both sockets."""
        if self._dialling is not None:
            self._dialling.cancel()
        self.client.abort()
        self._target.abort()

    def reschedule(self) -> None:
        """The medium's conditions have changed."""
        self._up.reschedule()
        self._down.reschedule()
        self._light()

    def _accept(self) -> None:
        if not self._on_accept(self):
            self.client.abort()
            return
        self._light()
        self._dialling = asyncio.create_task(self._dial())
        self._dialling.add_done_callback(lambda _: self._settle())

    def _light(self) -> None:
        """Set the time of the cut."""
        if self._fuse is not None:
            self._fuse.cancel()
        after = self._medium.conditions.cut_after
        loop = asyncio.get_running_loop()
        self._fuse = None if after is None else loop.call_at(self._made + after, self.cut)

    async def _dial(self) -> None:
        await self._shake_hands()
        try:
            await asyncio.get_running_loop().create_connection(lambda: self._target, *self._address)
        except OSError as error:  # refused, unreachable, unknown: a client of the relay sees a reset
            self._refusal = error
            self.client.abort()

    async def _shake_hands(self) -> None:
        """One round trip, and the rest of a stall."""
        due = monotonic() + self._medium.conditions.rtt
        while (wait := self._medium.moves_at(due) - monotonic()) > 0:
            await asyncio.sleep(wait)

    def _open(self) -> None:
        """The target is there."""
        assert self.client.transport is not None
        assert self._target.transport is not None
        self._down.write_to(self.client.transport, monotonic() + self._medium.conditions.rtt)
        self._up.write_to(self._target.transport)

    def _finish(self) -> None:
        """Both sides have said all: close both, once their buffers are written."""
        if self._up.ended and self._down.ended:
            for end in (self.client, self._target):
                assert end.transport is not None
                end.transport.close()

    def _leave(self) -> None:
        """The client is gone; a target that is not there yet is not needed any more."""
        if self._dialling is not None and self._target.transport is None:
            self._dialling.cancel()
        self._settle()

    def _settle(self) -> None:
        dialled = self._dialling is None or self._dialling.done()
        if not (dialled and self.client.gone and self._target.gone) or self.closed.done():
            return
        if self._fuse is not None:
            self._fuse.cancel()
        self.closed.set_result(None)
        self._on_close(self)
