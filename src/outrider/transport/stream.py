"""One gRPC call: messages in both directions, and a status at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outrider.transport.http2 import WINDOW, Http2
from outrider.transport.message_reader import MessageReader, frame_message
from outrider.transport.status import CallFailed, Disconnected, Headers, Status, call_error, check_response_headers


class Stream:
    """One call. The caller receives until its end, or cancels it. One task may send while another receives.

    Raises (send and receive):
        Disconnected: the call or its connection broke.
    """

    def __init__(self, http: Http2, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._http = http
        self._messages = MessageReader()
        self._headers: dict[bytes, bytes] = {}
        self._failure: CallFailed | Disconnected | None = None
        self._local_open = self._remote_open = True  # whether that side may still send
        self._received = self._window_granted = 0  # bytes of the window
        self._changed = asyncio.Event()
        self._stream_id = http.open(headers, self)

    async def send(self, data: bytes, *, last: bool = False) -> None:
        """Send one message, subject to flow control. `last` ends this side of the call.

        If the server has ended the call, nothing is sent and `receive` raises the error. A cancelled send cancels the
        call if part of the message was sent.
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
        """Send the next frame or wait for window space. Return the remaining bytes."""
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
        """Return the next message, or None after the server has ended the call with status OK.

        Raises:
            CallFailed: the call ended with another status, or the answer is not valid gRPC.
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
        """End this side of the call. The server may continue to send."""
        if self._local_open:
            self._http.send(self._stream_id, memoryview(b""), last=True)
            self._close_local()

    def cancel(self) -> None:
        """Cancel the call if it is open. Received messages remain available."""
        self._fail(CallFailed(Status.CANCELLED, "the call was cancelled here"))

    # Events of the connection -------------------------------------------------------------------------------

    def on_headers(self, headers: Headers) -> None:
        """Check the response headers and keep the trailers."""
        first = not self._headers
        self._headers.update(headers)
        header_error = check_response_headers(headers) if first else None
        if header_error is not None:
            self._fail(header_error)

    def on_data(self, data: bytes, size: int) -> None:
        """Split the data into messages."""
        self._received += size
        try:
            self._messages.feed(data)
        except CallFailed as failure:
            self._fail(failure)
        self._increase_window()
        self._changed.set()

    def on_end(self) -> None:
        """Take the status of the call from the trailers."""
        self._failure = call_error(self._headers)
        if self._failure is None and self._messages.is_truncated:
            self._failure = CallFailed(Status.INTERNAL, "the server ended the call within a message")
        self._remote_open = False
        self._changed.set()
        self._remove_if_closed()

    def on_reset(self, reason: str) -> None:
        """Fail the call unless the server has ended it with a status."""
        if self._remote_open:
            self._failure = self._http.make_error(reason)
        self._local_open = self._remote_open = False
        self._changed.set()

    # Within -------------------------------------------------------------------------------------------------

    def _increase_window(self) -> None:
        """Increase the window when half of it is used. Messages count once the caller has received them."""
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
