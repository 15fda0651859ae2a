"""One HTTP/2 connection of a client: the h2 library's state machine between a socket and the calls.

Thrifty on purpose. What is to be sent within one turn of the event loop leaves in one write, and the server is granted
more only when half of a window is used up; gRPC's own client spends two WINDOW_UPDATEs on every message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings

from outrider.wire.frames import GOAWAY, Frames, OtherProtocol, broken, goodbye, named, preface
from outrider.wire.status import Disconnected, Headers, NotGrpc

WINDOW = 2**20  # bytes that the server may send ahead, per stream and in all: a vocabulary without waiting
GREETING = 20.0  # s that a server may take for its first frame, once connected

_DEFAULT_WINDOW = 2**16 - 1  # RFC 9113, 6.5.2
_LAST_STREAM = 2**31 - 1
_SETTINGS = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: WINDOW}


class Call(Protocol):
    """Who hears of what happens on a stream."""

    def headed(self, headers: Headers) -> None:
        """Headers came, or trailers."""

    def fed(self, data: bytes, size: int) -> None:
        """Data came, which took `size` bytes of the window."""

    def ended(self) -> None:
        """The server has said all."""

    def lost(self, reason: str) -> None:
        """The stream is no more."""


class Http2(asyncio.Protocol):
    """A connection, from its socket to its end; to be used in one event loop.

    It never raises h2's errors: a server that breaks the rules has its connection closed, and every call lost.
    """

    def __init__(self) -> None:
        self.scheme = "http"
        self.closed = asyncio.get_running_loop().create_future()
        self._h2 = H2Connection(H2Configuration(client_side=True, normalize_outbound_headers=False))
        self._calls: dict[int, Call] = {}
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._greeting: asyncio.TimerHandle | None = None
        self._sending: asyncio.Handle | None = None
        self._changed = asyncio.Event()
        self._arrived = 0  # bytes since the last grant on the connection
        self._greeted = self._leaving = self._paused = False
        self._reason: str | None = None  # why it is lost
        self._foreign = False  # the server does not speak HTTP/2
        self._farewell = ""  # why the server goes
        self._out = self._preface()

    def _preface(self) -> bytes:
        """h2 would announce defaults as well: only what differs is sent."""
        self._h2.local_settings = Settings(client=True, initial_values=_SETTINGS)
        self._h2.initiate_connection()
        self._h2.clear_outbound_data_buffer()
        self._h2.increment_flow_control_window(WINDOW - _DEFAULT_WINDOW)
        return preface({code.value: value for code, value in _SETTINGS.items()})

    # For channels -------------------------------------------------------------------------------------------

    @property
    def reason(self) -> str | None:
        """Why the connection is lost; None while it is not."""
        return self._reason

    def failure(self, reason: str) -> Disconnected:
        """Return the exception of a call that was lost for this reason."""
        return NotGrpc(reason) if self._foreign else Disconnected(reason)

    @property
    def usable(self) -> bool:
        """Whether new streams may be opened: it is not lost, the server is not going, stream numbers are left."""
        return self._reason is None and not self._leaving and self._h2.highest_outbound_stream_id < _LAST_STREAM

    @property
    def full(self) -> bool:
        """Whether the server allows no further stream for now."""
        return self._h2.open_outbound_streams >= self._h2.remote_settings.max_concurrent_streams

    def open(self, headers: Sequence[tuple[bytes, bytes]], call: Call) -> int:
        """A new stream's number; the connection must be usable and not full."""
        number = self._h2.get_next_available_stream_id()
        self._h2.send_headers(number, list(headers))
        self._calls[number] = call
        self._send_soon()
        return number

    async def change(self) -> None:
        """Wait until windows, places, or the connection itself may have changed."""
        self.flush()
        await self._changed.wait()

    def retire(self) -> None:
        """No further call; close after the last one."""
        self._leaving, self._farewell = True, "the connection was given up for another"
        self._settle()

    def leave(self) -> None:
        """Say goodbye and close, once what was written has left."""
        if self._reason is None:
            self._h2.close_connection()
        self._end("the channel was closed")
        if self.scheme == "https" and self._transport is not None:
            self._transport.abort()  # TLS would wait for the server's goodbye, and gRPC's says none

    def abandon(self, reason: str) -> None:
        """End at once. What is not written yet is lost."""
        self._lose(reason)
        if self._transport is not None:
            self._transport.abort()

    # For streams: `number` is open on our side --------------------------------------------------------------

    def room(self, number: int) -> int:
        """Bytes that one DATA frame may carry now. 0: wait for a change."""
        if self._paused:
            return 0
        return max(0, min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size))

    def send(self, number: int, data: memoryview, *, last: bool = False) -> None:
        """One DATA frame; `last` ends our side of the stream."""
        self._h2.send_data(number, data, end_stream=last)
        if len(data) == self._h2.max_outbound_frame_size:
            self.flush()  # so that the socket's buffer, not h2's, grows, and says when it is too much
        else:
            self._send_soon()

    def grant(self, size: int, number: int | None = None) -> None:
        """Let the server send that many bytes more, on a stream or in all."""
        with suppress(StreamClosedError):  # by the very frame whose events are being dispatched
            self._h2.increment_flow_control_window(size, number)
        self._send_soon()

    def reset(self, number: int) -> None:
        """Cancel the stream; its call hears no more."""
        self.forget(number)
        if self._reason is not None:
            return
        with suppress(StreamClosedError):  # as above
            self._h2.reset_stream(number, ErrorCodes.CANCEL)
        self._send_soon()

    def forget(self, number: int) -> None:
        """The stream has ended both ways, or nobody listens any more."""
        self._calls.pop(number, None)
        self._wake()
        self._settle()

    # From the socket ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        timeout = f"the server sent no HTTP/2 within {GREETING:g} s"
        self._greeting = asyncio.get_running_loop().call_later(GREETING, self.abandon, timeout)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None:
            self.scheme = "https"
            if secured.selected_alpn_protocol() != "h2":
                self.abandon("TLS failure: the server does not agree to HTTP/2")

    def data_received(self, data: bytes) -> None:
        try:
            for kind, frame in self._frames.cut(data):
                if kind == GOAWAY:
                    self._go_away(frame)
                else:
                    self._receive(frame)
        except OtherProtocol as error:
            self._foreign = True
            self._end(f"the server speaks {error}")
        except ProtocolError as error:
            self._end(f"protocol error: {str(error) or type(error).__name__}")
        self.flush()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(self._farewell or broken(error, greeted=self._greeted, secured=self.scheme == "https"))
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake()

    # Within -------------------------------------------------------------------------------------------------

    def _receive(self, frame: bytes) -> None:
        if self._reason is None:
            for event in self._h2.receive_data(frame):
                self._dispatch(event)

    def _dispatch(self, event: Event) -> None:
        match event:
            case RemoteSettingsChanged():
                self._greet()
            case ResponseReceived() | TrailersReceived():
                if call := self._calls.get(event.stream_id):
                    call.headed(dict(event.headers))
            case DataReceived():
                self._take(event)
            case StreamEnded():
                if call := self._calls.get(event.stream_id):
                    call.ended()
            case StreamReset():
                if call := self._calls.pop(event.stream_id, None):
                    call.lost(f"the stream was reset: {named(event.error_code)}")
                self.forget(event.stream_id)

    def _greet(self) -> None:
        self._greeted = True
        if self._greeting is not None:
            self._greeting.cancel()

    def _take(self, event: DataReceived) -> None:
        """The connection's window is opened as bytes come: one call that does not read shall not stop the others."""
        self._arrived += event.flow_controlled_length
        if self._arrived >= WINDOW // 2:
            self.grant(self._arrived)
            self._arrived = 0
        if call := self._calls.get(event.stream_id):
            call.fed(event.data, event.flow_controlled_length)

    def _go_away(self, frame: bytes) -> None:
        """Streams that the server will not process are lost; the others go on to their ends.

        h2 takes any GOAWAY for the end of the connection, but a server that shuts down in order sends it first and
        finishes its calls afterwards. So h2 is not told.
        """
        last, why = goodbye(frame)
        self._leaving, self._farewell = True, f"the server is going away: {why}"
        for number in [number for number in self._calls if number > last]:
            self._calls.pop(number).lost(f"{self._farewell}; it has not processed this call")
        self._settle()

    def _settle(self) -> None:
        """Close what the server will end, once no call needs it."""
        if self._leaving and not self._calls:
            self._end(self._farewell)

    def _send_soon(self) -> None:
        """Whatever else is sent in this turn of the loop comes along."""
        if self._sending is None:
            self._sending = asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Hand over to the socket what waits to be sent."""
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        data, self._out = self._out + self._h2.data_to_send(), b""
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _wake(self) -> None:
        self._changed.set()  # who waits now goes on; who comes later waits
        self._changed.clear()

    def _end(self, reason: str) -> None:
        self.flush()
        self._lose(reason)
        if self._transport is not None:
            self._transport.close()

    def _lose(self, reason: str) -> None:
        if self._reason is not None:
            return
        self._reason = reason
        if self._greeting is not None:
            self._greeting.cancel()
        calls = list(self._calls.values())
        self._calls.clear()
        for call in calls:
            call.lost(reason)
        self._wake()
