"""HTTP/2 frames, as far as h2 does not see to them, and the words for how they stop coming."""

from __future__ import annotations

import ssl
import struct
from collections.abc import Iterator, Mapping

from h2.errors import ErrorCodes
from h2.exceptions import FrameTooLargeError, ProtocolError

HEADER = 9  # bytes before each frame's own
LARGEST = 2**14  # bytes of a frame, as long as we announce nothing else (RFC 9113, 6.5.2)
SETTINGS, GOAWAY = 4, 7

_TLS_RECORDS, _TLS_MAJOR = (0x15, 0x16), 3  # an alert or a handshake message, and the version's first byte
_ALERT = 7  # bytes of a TLS alert
_FIXED = 8  # bytes of a GOAWAY frame before its text
_CODES = frozenset(ErrorCodes)


def preface(settings: Mapping[int, int]) -> bytes:
    """A client's first bytes, up to its SETTINGS."""
    body = b"".join(struct.pack(">HI", *setting) for setting in settings.items())
    header = struct.pack(">I", len(body))[1:] + bytes((SETTINGS, 0)) + bytes(4)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + header + body


class OtherProtocol(ProtocolError):
    """The first bytes are not HTTP/2's. The message names their protocol."""


class Frames:
    """Cuts what arrives into whole frames."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._greeted = False

    def cut(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield each frame's type, and the frame.

        Raises:
            h2.exceptions.FrameTooLargeError: a frame is larger than allowed.
            OtherProtocol: the peer does not speak HTTP/2.
        """
        self._rest += data
        if not self._greeted and len(self._rest) >= (_ALERT if self._rest[0] in _TLS_RECORDS else HEADER):
            self._greeted = True
            _check_greeting(bytes(self._rest[:HEADER]))
        while len(self._rest) >= HEADER:
            size = int.from_bytes(self._rest[:3], "big")
            if size > LARGEST:
                raise FrameTooLargeError(f"a frame of {size} bytes")
            if len(self._rest) < HEADER + size:
                return
            yield self._rest[3], bytes(self._rest[: HEADER + size])
            del self._rest[: HEADER + size]


def _check_greeting(start: bytes) -> None:
    """Raise OtherProtocol if a server's first bytes belong neither to a SETTINGS frame nor to a GOAWAY."""
    if start.startswith(b"HTTP/"):
        raise OtherProtocol(f"{start[:8].decode('ascii', 'replace').strip()}, not gRPC")
    if start[0] in _TLS_RECORDS and start[1] == _TLS_MAJOR:
        raise OtherProtocol("TLS")
    if start[3] not in (SETTINGS, GOAWAY):
        raise OtherProtocol(f"another protocol than gRPC, and began with {start.decode('latin-1')!a}")


def goodbye(frame: bytes) -> tuple[int, str]:
    """The last stream that the sender of a GOAWAY frame will process, and why it goes.

    Raises:
        h2.exceptions.ProtocolError: a frame that is too short.
    """
    body = frame[HEADER:]
    if len(body) < _FIXED:
        raise ProtocolError("a GOAWAY frame that is too short")
    last, code = (int.from_bytes(body[at : at + 4], "big") for at in (0, 4))
    text = body[_FIXED:].decode("utf-8", errors="replace")
    return last & 0x7FFFFFFF, named(code) + (f", {text}" if text else "")


def named(code: int) -> str:
    """An HTTP/2 error code in words."""
    return ErrorCodes(code).name if code in _CODES else f"error {code}"


def broken(error: Exception | None, *, greeted: bool, secured: bool) -> str:
    """Return why a connection broke that had been made."""
    if isinstance(error, ssl.SSLError):
        return broken_tls(error)
    how = f": {error}" if error is not None else ""
    if greeted:
        return f"the connection was lost{how}"
    if secured:  # TLS 1.3: the client is done before the server has looked at the client's certificate
        return f"the server hung up after the TLS handshake: our certificate is missing, or not to its liking{how}"
    return f"the connection was lost at once{how}"


def broken_tls(error: ssl.SSLError) -> str:
    """What went wrong, in OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return f"TLS failure: {(error.reason or str(error)).replace('_', ' ').lower()}"
