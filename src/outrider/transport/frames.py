"""HTTP/2 frames outside h2's state machine, and the descriptions of a lost connection."""

from __future__ import annotations

import ssl
import struct
from collections.abc import Iterator, Mapping

from h2.errors import ErrorCodes
from h2.exceptions import FrameTooLargeError, ProtocolError

FRAME_HEADER_SIZE = 9  # bytes
MAX_FRAME_SIZE = 2**14  # bytes; the default, which our SETTINGS do not change (RFC 9113, 6.5.2)
SETTINGS, GOAWAY = 4, 7

_TLS_RECORDS, _TLS_MAJOR = (0x15, 0x16), 3  # an alert or a handshake message, and the version's first byte
_ALERT_SIZE = 7  # bytes of a TLS alert
_GOAWAY_FIXED_SIZE = 8  # bytes of a GOAWAY frame before its text
_CODES = frozenset(ErrorCodes)


def preface(settings: Mapping[int, int]) -> bytes:
    """Return a client's connection preface and its SETTINGS frame."""
    body = b"".join(struct.pack(">HI", *setting) for setting in settings.items())
    header = struct.pack(">I", len(body))[1:] + bytes((SETTINGS, 0)) + bytes(4)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + header + body


class NotHttp2(ProtocolError):
    """The error for a peer that does not begin with HTTP/2. The message names its protocol."""


class FrameReader:
    """Splits received bytes into whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._first_frame_checked = False

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield each frame's type, and the frame.

        Raises:
            h2.exceptions.FrameTooLargeError: a frame is larger than allowed.
            NotHttp2: the peer does not speak HTTP/2.
        """
        self._buffer += data
        if not self._first_frame_checked and len(self._buffer) >= (
            _ALERT_SIZE if self._buffer[0] in _TLS_RECORDS else FRAME_HEADER_SIZE
        ):
            self._first_frame_checked = True
            _check_first_frame(bytes(self._buffer[:FRAME_HEADER_SIZE]))
        while len(self._buffer) >= FRAME_HEADER_SIZE:
            size = int.from_bytes(self._buffer[:3], "big")
            if size > MAX_FRAME_SIZE:
                raise FrameTooLargeError(f"a frame of {size} bytes")
            if len(self._buffer) < FRAME_HEADER_SIZE + size:
                return
            yield self._buffer[3], bytes(self._buffer[: FRAME_HEADER_SIZE + size])
            del self._buffer[: FRAME_HEADER_SIZE + size]


def _check_first_frame(start: bytes) -> None:
    """Raise NotHttp2 if a server's first bytes belong neither to a SETTINGS frame nor to a GOAWAY."""
    if start.startswith(b"HTTP/"):
        raise NotHttp2(f"{start[:8].decode('ascii', 'replace').strip()}, not gRPC")
    if start[0] in _TLS_RECORDS and start[1] == _TLS_MAJOR:
        raise NotHttp2("TLS")
    if start[3] not in (SETTINGS, GOAWAY):
        raise NotHttp2(f"another protocol than gRPC, and began with {start.decode('latin-1')!a}")


def parse_goaway(frame: bytes) -> tuple[int, str]:
    """Return the last stream that the sender of a GOAWAY frame will process, and its reason.

    Raises:
        h2.exceptions.ProtocolError: the frame is too short.
    """
    body = frame[FRAME_HEADER_SIZE:]
    if len(body) < _GOAWAY_FIXED_SIZE:
        raise ProtocolError("a GOAWAY frame that is too short")
    last, code = (int.from_bytes(body[at : at + 4], "big") for at in (0, 4))
    text = body[_GOAWAY_FIXED_SIZE:].decode("utf-8", errors="replace")
    return last & 0x7FFFFFFF, error_name(code) + (f", {text}" if text else "")


def error_name(code: int) -> str:
    """Return the name of an HTTP/2 error code."""
    return ErrorCodes(code).name if code in _CODES else f"error {code}"


def describe_loss(error: Exception | None, *, had_settings: bool, is_tls: bool) -> str:
    """Return why an established connection broke."""
    if isinstance(error, ssl.SSLError):
        return describe_tls_error(error)
    detail = "" if error is None else f": {getattr(error, 'strerror', None) or error}"
    if had_settings:
        return f"the connection was lost{detail}"
    if is_tls:  # in TLS 1.3 the handshake succeeds on the client before the server checks the client's certificate
        return (
            f"the server closed the connection after the TLS handshake: our certificate is missing or refused{detail}"
        )
    return f"the connection was lost at once{detail}"


def describe_tls_error(error: ssl.SSLError) -> str:
    """Return OpenSSL's description of an error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return f"TLS failure: {(error.reason or str(error)).replace('_', ' ').lower()}"
