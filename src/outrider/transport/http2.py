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

from outrider.transport.frames import GOAWAY, FrameReader, NotHttp2, describe_loss, error_name, parse_goaway, preface
from outrider.transport.status import Disconnected, Headers, NotGrpc

WINDOW = 2**20  # bytes that the server may send ahead, per stream and in all: a vocabulary without waiting
SETTINGS_TIMEOUT = 20.0  # s that a server may take for its first frame, once connected

_DEFAULT_WINDOW = 2**16 - 1  # RFC 9113, 6.5.2
_LAST_STREAM = 2**31 - 1
_SETTINGS = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: WINDOW}


class StreamListener(Protocol):
    """Who hears of what happens on a stream."""

    def on_headers(self, headers: Headers) -> None:
        """Headers came, or trailers."""

    def on_data(self, data: bytes, size: int) -> None:
        """Data came, which took `size` bytes of the window."""

    def on_end(self) -> None:
        """The server has said all."""

    def on_reset(self, reason: str) -> None:
        """The stream is no more."""


class Http2(asyncio.Protocol):
    """A connection, from its socket to its end; to be used in one event loop.

    It never raises h2's errors: a server that breaks the rules has its connection closed, and every call lost.
    """

    def __init__(self) -> None:
        self.scheme = "http"
        self.closed = asyncio.get_running_loop().create_future()
        self._h2 = H2Connection(H2Configuration(client_side=True, normalize_outbound_headers=False))
        self._listeners: dict[int, StreamListener] = {}
        self._frame_reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._settings_timer: asyncio.TimerHandle | None = None
        self._flush_handle: asyncio.Handle | None = None
        self._changed = asyncio.Event()
        self._unacknowledged = 0  # bytes since the last grant on the connection
        self._settings_received = self._draining = self._writing_paused = False
        self._reason: str | None = None  # why it is lost
        self._is_foreign = False  # the server does not speak HTTP/2
        self._goaway_reason = ""  # why the server goes
        self._outbound = self._preface()

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

    def make_error(self, reason: str) -> Disconnected:
        """Return the exception of a call that was lost for this reason."""
        return NotGrpc(reason) if self._is_foreign else Disconnected(reason)

    @property
    def usable(self) -> bool:
        """Whether new streams may be opened: it is not lost, the server is not going, stream numbers are left."""
        return self._reason is None and not self._draining and self._h2.highest_outbound_stream_id < _LAST_STREAM

    @property
    def at_stream_limit(self) -> bool:
        """Whether the server allows no further stream for now."""
        return self._h2.open_outbound_streams >= self._h2.remote_settings.max_concurrent_streams

    def open(self, headers: Sequence[tuple[bytes, bytes]], listener: StreamListener) -> int:
        """A new stream's number; the connection must be usable and not full."""
        stream_id = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream_id, list(headers))
        self._listeners[stream_id] = listener
        self._schedule_flush()
        return stream_id

    async def wait_for_change(self) -> None:
        """Wait until windows, places, or the connection itself may have changed."""
        self.flush()
        await self._changed.wait()

    def drain(self) -> None:
        """No further call; close after the last one."""
        self._draining, self._goaway_reason = True, "the connection was given up for another"
        self._close_if_drained()

    def goaway(self) -> None:
        """Say goodbye and close, once what was written has left."""
        if self._reason is None:
            self._h2.close_connection()
        self._close("the channel was closed")
        if self.scheme == "https" and self._transport is not None:
            self._transport.abort()  # TLS would wait for the server's goodbye, and gRPC's says none

    def abort(self, reason: str) -> None:
        """End at once. What is not written yet is lost."""
        self._fail(reason)
        if self._transport is not None:
            self._transport.abort()

    # For streams: `stream_id` is open on our side --------------------------------------------------------------

    def send_capacity(self, stream_id: int) -> int:
        """Bytes that one DATA frame may carry now. 0: wait for a change."""
        if self._writing_paused:
            return 0
        return max(0, min(self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size))

    def send(self, stream_id: int, data: memoryview, *, last: bool = False) -> None:
        """One DATA frame; `last` ends our side of the stream."""
        self._h2.send_data(stream_id, data, end_stream=last)
        if len(data) == self._h2.max_outbound_frame_size:
            self.flush()  # so that the socket's buffer, not h2's, grows, and says when it is too much
        else:
            self._schedule_flush()

    def increase_window(self, size: int, stream_id: int | None = None) -> None:
        """Let the server send that many bytes more, on a stream or in all."""
        with suppress(StreamClosedError):  # by the very frame whose events are being dispatched
            self._h2.increment_flow_control_window(size, stream_id)
        self._schedule_flush()

    def reset(self, stream_id: int) -> None:
        """Cancel the stream; its call hears no more."""
        self.remove_stream(stream_id)
        if self._reason is not None:
            return
        with suppress(StreamClosedError):  # as above
            self._h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        self._schedule_flush()

    def remove_stream(self, stream_id: int) -> None:
        """The stream has ended both ways, or nobody listens any more."""
        self._listeners.pop(stream_id, None)
        self._notify_waiters()
        self._close_if_drained()

    # From the socket ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        timeout = f"the server sent no HTTP/2 within {SETTINGS_TIMEOUT:g} s"
        self._settings_timer = asyncio.get_running_loop().call_later(SETTINGS_TIMEOUT, self.abort, timeout)
        secured = transport.get_extra_info("ssl_object")
        if secured is not None:
            self.scheme = "https"
            if secured.selected_alpn_protocol() != "h2":
                self.abort("TLS failure: the server does not agree to HTTP/2")

    def data_received(self, data: bytes) -> None:
        try:
            for kind, frame in self._frame_reader.feed(data):
                if kind == GOAWAY:
                    self._on_goaway(frame)
                else:
                    self._feed_h2(frame)
        except NotHttp2 as error:
            self._is_foreign = True
            self._close(f"the server speaks {error}")
        except ProtocolError as error:
            self._close(f"protocol error: {str(error) or type(error).__name__}")
        self.flush()
        self._notify_waiters()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(
            self._goaway_reason
            or describe_loss(error, had_settings=self._settings_received, is_tls=self.scheme == "https")
        )
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._notify_waiters()

    # Within -------------------------------------------------------------------------------------------------

    def _feed_h2(self, frame: bytes) -> None:
        if self._reason is None:
            for event in self._h2.receive_data(frame):
                self._dispatch(event)

    def _dispatch(self, event: Event) -> None:
        match event:
            case RemoteSettingsChanged():
                self._on_settings()
            case ResponseReceived() | TrailersReceived():
                if listener := self._listeners.get(event.stream_id):
                    listener.on_headers(dict(event.headers))
            case DataReceived():
                self._on_data(event)
            case StreamEnded():
                if listener := self._listeners.get(event.stream_id):
                    listener.on_end()
            case StreamReset():
                if listener := self._listeners.pop(event.stream_id, None):
                    listener.on_reset(f"the stream was reset: {error_name(event.error_code)}")
                self.remove_stream(event.stream_id)

    def _on_settings(self) -> None:
        self._settings_received = True
        if self._settings_timer is not None:
            self._settings_timer.cancel()

    def _on_data(self, event: DataReceived) -> None:
        """The connection's window is opened as bytes come: one call that does not read shall not stop the others."""
        self._unacknowledged += event.flow_controlled_length
        if self._unacknowledged >= WINDOW // 2:
            self.increase_window(self._unacknowledged)
            self._unacknowledged = 0
        if listener := self._listeners.get(event.stream_id):
            listener.on_data(event.data, event.flow_controlled_length)

    def _on_goaway(self, frame: bytes) -> None:
        """Streams that the server will not process are lost; the others go on to their ends.

        h2 takes any GOAWAY for the end of the connection, but a server that shuts down in order sends it first and
        finishes its calls afterwards. So h2 is not told.
        """
        last, why = parse_goaway(frame)
        self._draining, self._goaway_reason = True, f"the server is going away: {why}"
        for stream_id in [stream_id for stream_id in self._listeners if stream_id > last]:
            self._listeners.pop(stream_id).on_reset(f"{self._goaway_reason}; it has not processed this call")
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        """Close what the server will end, once no call needs it."""
        if self._draining and not self._listeners:
            self._close(self._goaway_reason)

    def _schedule_flush(self) -> None:
        """Whatever else is sent in this turn of the loop comes along."""
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Hand over to the socket what waits to be sent."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        data, self._outbound = self._outbound + self._h2.data_to_send(), b""
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _notify_waiters(self) -> None:
        self._changed.set()  # who waits now goes on; who comes later waits
        self._changed.clear()

    def _close(self, reason: str) -> None:
        self.flush()
        self._fail(reason)
        if self._transport is not None:
            self._transport.close()

    def _fail(self, reason: str) -> None:
        if self._reason is not None:
            return
        self._reason = reason
        if self._settings_timer is not None:
            self._settings_timer.cancel()
        listeners = list(self._listeners.values())
        self._listeners.clear()
        for listener in listeners:
            listener.on_reset(reason)
        self._notify_waiters()
