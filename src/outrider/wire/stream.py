"""One call on a channel, as its caller sees it: messages go out and come back, and at the end there is a status."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outrider.wire.http2 import WINDOW, Http2
from outrider.wire.inbox import Inbox, framed
from outrider.wire.status import CallFailed, Disconnected, Headers, Status, outcome, refusal


class Stream:
    """To be ended by receiving all, or cancelled. One task may send while another receives.

    Raises (send and receive):
        Disconnected: the call or its connection broke.
    """

    def __init__(self, http: Http2, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._http = http
        self._inbox = Inbox()
        self._headers: dict[bytes, bytes] = {}
        self._failure: CallFailed | Disconnected | None = None
        self._ours = self._theirs = True  # whether either side may still send
        self._came = self._granted = 0  # bytes of the window
        self._news = asyncio.Event()
        self._number = http.open(headers, self)

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """One message, as fast as the server's window allows; `last` ends our side with it.

        Where the server has ended the call already, nothing is sent: `receive` tells how it ended. A cancelled send
        cancels the call, unless nothing of the message had left.
        """
        rest = whole = memoryview(framed(data))
        try:
            while rest and self._ours:
                rest = await self._send_some(rest, last)
        except asyncio.CancelledError:
            if len(rest) < len(whole):
                self.cancel()
            raise
        if isinstance(self._failure, Disconnected):
            raise self._failure

    async def _send_some(self, rest: memoryview, last: bool) -> memoryview:
        """What is left behind the next frame, which may have to wait."""
        room = self._http.room(self._number)
        if not room:
            await self._http.change()
            return rest
        part, rest = rest[:room], rest[room:]
        over = last and not rest
        self._http.send(self._number, part, last=over)
        if over:
            self._close_ours()
        return rest

    async def receive(self) -> bytes | None:
        """The next message; None once the server has ended the call with status OK.

        Raises:
            CallFailed: it ended with another status, or sent what is not gRPC.
        """
        while not self._inbox and self._theirs:
            self._news.clear()
            await self._news.wait()
        if self._inbox:
            message = self._inbox.take()
            self._grant()
            return message
        if self._failure is not None:
            raise self._failure
        return None

    async def end(self) -> None:
        """Nothing more will be sent; the server may go on."""
        if self._ours:
            self._http.send(self._number, memoryview(b""), last=True)
            self._close_ours()

    def cancel(self) -> None:
        """Give the call up, if it is still open. Messages that came can still be received."""
        self._fail(CallFailed(Status.CANCELLED, "the call was cancelled here"))

    # What the connection tells ------------------------------------------------------------------------------

    def headed(self, headers: Headers) -> None:
        first = not self._headers
        self._headers.update(headers)
        refused = refusal(headers) if first else None
        if refused is not None:
            self._fail(refused)

    def fed(self, data: bytes, size: int) -> None:
        self._came += size
        try:
            self._inbox.feed(data)
        except CallFailed as failure:
            self._fail(failure)
        self._grant()
        self._news.set()

    def ended(self) -> None:
        self._failure = outcome(self._headers)
        if self._failure is None and self._inbox.cut_short:
            self._failure = CallFailed(Status.INTERNAL, "the server ended the call within a message")
        self._theirs = False
        self._news.set()
        self._settle()

    def lost(self, reason: str) -> None:
        if self._theirs:  # else it has a status, which stands
            self._failure = self._http.failure(reason)
        self._ours = self._theirs = False
        self._news.set()

    # Within -------------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """More of the window, once half of it is used up by what was taken, or belongs to a message still to come."""
        due = self._came - self._granted - self._inbox.held
        if self._theirs and due >= WINDOW // 2:
            self._granted += due
            self._http.grant(due, self._number)

    def _close_ours(self) -> None:
        self._ours = False
        self._settle()

    def _settle(self) -> None:
        if not (self._ours or self._theirs):
            self._http.forget(self._number)

    def _fail(self, failure: CallFailed) -> None:
        if not (self._ours or self._theirs):
            return
        if self._theirs:
            self._failure = failure
        self._ours = self._theirs = False
        self._news.set()
        self._http.reset(self._number)
