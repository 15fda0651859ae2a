"""One HTTP/2 connection of a client: h2's state machine between a socket and the calls.

The connection saves bytes. Frames of one iteration of the event loop leave in one write. A window is increased only
when half of it is used, whereas grpcio sends two WINDOW_UPDATE frames with every message.
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

WINDOW = 2**20  # bytes, per stream and per connection; large enough for a vocabulary
SETTINGS_TIMEOUT = 20.0  # s from the connection to the server's first frame

_DEFAULT_WINDOW = 2**16 - 1  # RFC 9113, 6.5.2
_LAST_STREAM = 2**31 - 1
_SETTINGS = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: WINDOW}


class StreamListener(Protocol):
    """The receiver of a stream's events."""

    def on_headers(self, headers: Headers) -> None:
        """Handle headers or trailers."""

    def on_data(self, data: bytes, size: int) -> None:
        """Handle data that used `size` bytes of the window."""

    def on_end(self) -> None:
        """Handle the end of the server's side."""

    def on_reset(self, reason: str) -> None:
        """Handle a reset of the stream or the loss of its connection."""


class Http2(asyncio.Protocol):
    """A connection. Use it in one event loop.

    It does not raise h2's errors: a server that breaks the protocol loses the connection with all its calls.
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
        self._unacknowledged = 0  # bytes received since the last increase of the connection's window
        self._settings_received = self._draining = self._writing_paused = False
        self._reason: str | None = None
        self._is_foreign = False  # the server does not speak HTTP/2
        self._goaway_reason = ""
        self._outbound = self._preface()

    def _preface(self) -> bytes:
        """Return the preface with only the settings that differ from the defaults. h2 would send all of them."""
        self._h2.local_settings = Settings(client=True, initial_values=_SETTINGS)
        self._h2.initiate_connection()
        self._h2.clear_outbound_data_buffer()
        self._h2.increment_flow_control_window(WINDOW - _DEFAULT_WINDOW)
        return preface({code.value: value for code, value in _SETTINGS.items()})

    # For channels -------------------------------------------------------------------------------------------

    @property
    def reason(self) -> str | None:
        """Return why the connection is lost, or None if it is not."""
        return self._reason

    def make_error(self, reason: str) -> Disconnected:
        """Return the exception for a call that was lost for this reason."""
        return NotGrpc(reason) if self._is_foreign else Disconnected(reason)

    @property
    def usable(self) -> bool:
        """Return whether new streams can be opened: not lost, not draining, and with stream numbers left."""
        return self._reason is None and not self._draining and self._h2.highest_outbound_stream_id < _LAST_STREAM

    @property
    def at_stream_limit(self) -> bool:
        """Return whether the server's limit of concurrent streams is reached."""
        return self._h2.open_outbound_streams >= self._h2.remote_settings.max_concurrent_streams

    def open(self, headers: Sequence[tuple[bytes, bytes]], listener: StreamListener) -> int:
        """Open a stream and return its number. The connection must be usable and below its stream limit."""
        stream_id = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream_id, list(headers))
        self._listeners[stream_id] = listener
        self._schedule_flush()
        return stream_id

    async def wait_for_change(self) -> None:
        """Wait until the windows, the number of streams, or the state of the connection may have changed."""
        self.flush()
        await self._changed.wait()

    def drain(self) -> None:
        """Accept no further call, and close after the last one."""
        self._draining, self._goaway_reason = True, "the connection was given up for another"
        self._close_if_drained()

    def goaway(self) -> None:
        """Send GOAWAY and close after the pending writes."""
        if self._reason is None:
            self._h2.close_connection()
        self._close("the channel was closed")
        if self.scheme == "https" and self._transport is not None:
            self._transport.abort()  # TLS would wait for close_notify, which grpcio's server does not send

    def abort(self, reason: str) -> None:
        """Close at once and discard pending writes."""
        self._fail(reason)
        if self._transport is not None:
            self._transport.abort()

    # For streams: `stream_id` is open on this side -------------------------------------------------------------

    def send_capacity(self, stream_id: int) -> int:
        """Return how many bytes one DATA frame may carry now. After 0, wait for a change."""
        if self._writing_paused:
            return 0
        return max(0, min(self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size))

    def send(self, stream_id: int, data: memoryview, *, last: bool = False) -> None:
        """Send one DATA frame. `last` ends this side of the stream."""
        self._h2.send_data(stream_id, data, end_stream=last)
        if len(data) == self._h2.max_outbound_frame_size:
            self.flush()  # lets the transport's buffer grow instead of h2's, since it has backpressure
        else:
            self._schedule_flush()

    def increase_window(self, size: int, stream_id: int | None = None) -> None:
        """Let the server send `size` more bytes, on a stream or on the connection."""
        with suppress(StreamClosedError):  # the current frame may have closed the stream
            self._h2.increment_flow_control_window(size, stream_id)
        self._schedule_flush()

    def reset(self, stream_id: int) -> None:
        """Cancel the stream. Its listener gets no further events."""
        self.remove_stream(stream_id)
        if self._reason is not None:
            return
        with suppress(StreamClosedError):  # as above
            self._h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        self._schedule_flush()

    def remove_stream(self, stream_id: int) -> None:
        """Remove a stream that has ended on both sides or has been reset."""
        self._listeners.pop(stream_id, None)
        self._notify_waiters()
        self._close_if_drained()

    # From the socket ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Check TLS, and start the timer for the server's first frame."""
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
        """Process the frames that are complete."""
        try:
            for kind, frame in self._frame_reader.feed(data):
                if kind == GOAWAY:
                    self._on_goaway(frame)
                elif self._reason is None:
                    for event in self._h2.receive_data(frame):
                        self._dispatch(event)
        except NotHttp2 as error:
            self._is_foreign = True
            self._close(f"the server speaks {error}")
        except ProtocolError as error:
            self._close(f"protocol error: {str(error) or type(error).__name__}")
        self.flush()
        self._notify_waiters()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all open calls."""
        self._fail(
            self._goaway_reason
            or describe_loss(error, had_settings=self._settings_received, is_tls=self.scheme == "https")
        )
        self.closed.set_result(None)

    def pause_writing(self) -> None:
        """Stop sending while the transport's buffer is full."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Continue sending."""
        self._writing_paused = False
        self._notify_waiters()

    # Within -------------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event) -> None:
        match event:
            case RemoteSettingsChanged():
                self._settings_received = True
                if self._settings_timer is not None:
                    self._settings_timer.cancel()
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

    def _on_data(self, event: DataReceived) -> None:
        """Increase the connection's window on receipt, so that a call that does not read cannot block the others."""
        self._unacknowledged += event.flow_controlled_length
        if self._unacknowledged >= WINDOW // 2:
            self.increase_window(self._unacknowledged)
            self._unacknowledged = 0
        if listener := self._listeners.get(event.stream_id):
            listener.on_data(event.data, event.flow_controlled_length)

    def _on_goaway(self, frame: bytes) -> None:
        """Fail the streams that the server will not process. The others continue.

        The frame is not passed to h2, which closes the connection on any GOAWAY. A server that shuts down gracefully
        sends GOAWAY first and then finishes its calls.
        """
        last, why = parse_goaway(frame)
        self._draining, self._goaway_reason = True, f"the server is going away: {why}"
        for stream_id in [stream_id for stream_id in self._listeners if stream_id > last]:
            self._listeners.pop(stream_id).on_reset(f"{self._goaway_reason}; it has not processed this call")
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        """Close a draining connection after its last call."""
        if self._draining and not self._listeners:
            self._close(self._goaway_reason)

    def _schedule_flush(self) -> None:
        """Flush after this iteration of the event loop, which combines its frames in one write."""
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write all pending frames to the transport."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        data, self._outbound = self._outbound + self._h2.data_to_send(), b""
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _notify_waiters(self) -> None:
        self._changed.set()  # wakes the present waiters only
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
