"""gRPC status codes and the exceptions of failed calls."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from urllib.parse import unquote_to_bytes


class Status(IntEnum):
    """gRPC's status codes (grpc/doc/statuscodes.md)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CallFailed(Exception):
    """A call that ended with a status other than OK, sent by the server or assigned here to an invalid answer."""

    def __init__(self, status: Status, details: str) -> None:
        super().__init__(f"{status.name.lower()}: {details}")
        self.status, self.details = status, details


class Disconnected(Exception):
    """A call without a status because its stream or connection broke. The message has the reason."""


class NotGrpc(Disconnected):
    """A connection to a server of another protocol, which the message names. A retry does not help."""


class UntrustedServer(Disconnected):
    """A connection to a server with an invalid certificate. A retry does not help."""


Headers = Mapping[bytes, bytes]

_CONTENT_TYPE = b"application/grpc"

_FROM_HTTP_STATUS = {  # sent by proxies; grpc/doc/http-grpc-status-mapping.md
    400: Status.INTERNAL,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.UNIMPLEMENTED,
    429: Status.UNAVAILABLE,
    502: Status.UNAVAILABLE,
    503: Status.UNAVAILABLE,
    504: Status.UNAVAILABLE,
}


def check_response_headers(headers: Headers) -> CallFailed | None:
    """Return the error if these response headers are not those of a gRPC answer, else None."""
    if b"grpc-status" in headers:
        return None
    code, kind = headers.get(b":status", b""), headers.get(b"content-type", b"")
    if code != b"200":
        return CallFailed(
            _FROM_HTTP_STATUS.get(_number(code), Status.UNKNOWN), f"HTTP status {_text(code)} instead of gRPC's"
        )
    if not kind.startswith(_CONTENT_TYPE):
        return CallFailed(Status.UNKNOWN, f"an answer of content type {_text(kind) or 'none'} instead of gRPC's")
    return None


def call_error(trailers: Headers) -> CallFailed | None:
    """Return the error in the trailers of a call, or None if its status is OK."""
    if b"grpc-status" not in trailers:
        return CallFailed(Status.UNKNOWN, "the server ended the call without a status")
    number = _number(trailers[b"grpc-status"])
    status = Status(number) if number in _CODES else Status.UNKNOWN
    if status is Status.OK:
        return None
    return CallFailed(status, _text(unquote_to_bytes(trailers.get(b"grpc-message", b""))))


_CODES = frozenset(Status)


def _number(text: bytes) -> int:
    """Parse a status of up to three digits. Return -1 for any other text."""
    return int(text) if text.isdigit() and len(text) <= 3 else -1


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
