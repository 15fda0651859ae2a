"""One call on a channel, as its caller sees it: messages go out and come back, and at the end there is a status."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outrider.transport.http2 import WINDOW, Http2
from outrider.transport.message_reader import MessageReader, frame_message
from outrider.transport.status import CallFailed, Disconnected, Headers, Status, call_error, check_response_headers


class Stream:
    """To be ended by receiving all, or cancelled. One task may send while another receives.

    Raises (send and receive):
        Disconnected: the call or its connection broke.
    """

    def __init__(self, http: Http2, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._http = http
        self._messages = MessageReader()
        self._headers: dict[bytes, bytes] = {}
        self._failure: CallFailed | Disconnected | None = None
        self._local_open = self._remote_open = True  # whether either side may still send
        self._received = self._window_granted = 0  # bytes of the window
        self._changed = asyncio.Event()
        self._stream_id = http.open(headers, self)

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """One message, as fast as the server's window allows; `last` ends our side with it.

        Where the server has ended the call already, nothing is sent: `receive` tells how it ended. A cancelled send
        cancels the call, unless nothing of the message had left.
        """
        rest = whole = memoryview(frame_message(data))
        try:
            while rest and self._local_open:
                rest = await self._send_frame(rest, last)
        except asyncio.CancelledError:
            if len(rest) < len(whole):
                self.cancel()
            raise
        if isinstance(self._failure, Disconnected):
            raise self._failure

    async def _send_frame(self, rest: memoryview, last: bool) -> memoryview:
        """What is left behind the next frame, which may have to wait."""
        room = self._http.send_capacity(self._stream_id)
        if not room:
            await self._http.wait_for_change()
            return rest
        part, rest = rest[:room], rest[room:]
        is_last = last and not rest
        self._http.send(self._stream_id, part, last=is_last)
        if is_last:
            self._close_local()
        return rest

    async def receive(self) -> bytes | None:
        """The next message; None once the server has ended the call with status OK.

        Raises:
            CallFailed: it ended with another status, or sent what is not gRPC.
        """
        while not self._messages and self._remote_open:
            self._changed.clear()
            await self._changed.wait()
        if self._messages:
            message = self._messages.pop()
            self._increase_window()
            return message
        if self._failure is not None:
            raise self._failure
        return None

    async def end(self) -> None:
        """Nothing more will be sent; the server may go on."""
        if self._local_open:
            self._http.send(self._stream_id, memoryview(b""), last=True)
            self._close_local()

    def cancel(self) -> None:
        """Give the call up, if it is still open. Messages that came can still be received."""
        self._fail(CallFailed(Status.CANCELLED, "the call was cancelled here"))

    # What the connection tells ------------------------------------------------------------------------------

    def on_headers(self, headers: Headers) -> None:
        first = not self._headers
        self._headers.update(headers)
        header_error = check_response_headers(headers) if first else None
        if header_error is not None:
            self._fail(header_error)

    def on_data(self, data: bytes, size: int) -> None:
        self._received += size
        try:
            self._messages.feed(data)
        except CallFailed as failure:
            self._fail(failure)
        self._increase_window()
        self._changed.set()

    def on_end(self) -> None:
        self._failure = call_error(self._headers)
        if self._failure is None and self._messages.is_truncated:
            self._failure = CallFailed(Status.INTERNAL, "the server ended the call within a message")
        self._remote_open = False
        self._changed.set()
        self._remove_if_closed()

    def on_reset(self, reason: str) -> None:
        if self._remote_open:  # else it has a status, which stands
            self._failure = self._http.make_error(reason)
        self._local_open = self._remote_open = False
        self._changed.set()

    # Within -------------------------------------------------------------------------------------------------

    def _increase_window(self) -> None:
        """More of the window, once half of it is used up by what was taken, or belongs to a message still to come."""
        due = self._received - self._window_granted - self._messages.buffered_bytes
        if self._remote_open and due >= WINDOW // 2:
            self._window_granted += due
            self._http.increase_window(due, self._stream_id)

    def _close_local(self) -> None:
        self._local_open = False
        self._remove_if_closed()

    def _remove_if_closed(self) -> None:
        if not (self._local_open or self._remote_open):
            self._http.remove_stream(self._stream_id)

    def _fail(self, failure: CallFailed) -> None:
        if not (self._local_open or self._remote_open):
            return
        if self._remote_open:
            self._failure = failure
        self._local_open = self._remote_open = False
        self._changed.set()
        self._http.reset(self._stream_id)
