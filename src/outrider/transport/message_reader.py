"""gRPC's message framing in the bytes of a stream: a flag, four bytes of length, and the message."""

from __future__ import annotations

import struct
from collections import deque

from outrider.transport.status import CallFailed, Status

MAX_MESSAGE_SIZE = 64 * 2**20  # bytes

_PREFIX = struct.Struct(">BI")


def frame_message(message: bytes) -> bytes:
    """Add the prefix to a message. Messages are small or compressed already, so the flag is always 0."""
    return _PREFIX.pack(0, len(message)) + message


class MessageReader:
    """Splits a stream's bytes into messages."""

    def __init__(self) -> None:
        self.buffered_bytes = 0  # of complete messages, prefixes included
        self._messages: deque[bytes] = deque()
        self._buffer = bytearray()

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_truncated(self) -> bool:
        """Return whether the last message is incomplete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        """Append received bytes.

        Raises:
            CallFailed: a message is compressed, too large, or has an invalid flag.
        """
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size:
            flag, size = _PREFIX.unpack_from(self._buffer)
            if flag == 1:
                message = "the server sent a compressed message, which this client does not accept"
                raise CallFailed(Status.UNIMPLEMENTED, message)
            if flag:
                raise CallFailed(Status.INTERNAL, f"a message that begins with {flag:#04x} is not a gRPC message")
            if size > MAX_MESSAGE_SIZE:
                message = f"a message of {size} bytes; {MAX_MESSAGE_SIZE} are accepted"
                raise CallFailed(Status.RESOURCE_EXHAUSTED, message)
            end = _PREFIX.size + size
            if len(self._buffer) < end:
                return
            self._messages.append(bytes(self._buffer[_PREFIX.size : end]))
            self.buffered_bytes += end
            del self._buffer[:end]

    def pop(self) -> bytes:
        """Remove and return the oldest message. There must be one."""
        message = self._messages.popleft()
        self.buffered_bytes -= _PREFIX.size + len(message)
        return message
