"""Errors of requests and of the scheduler, and their HTTP responses in OpenAI's format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import (
    CloudLost,
    CloudRefused,
    ContextError,
    DecodingError,
    InputError,
    OutriderError,
    VocabularyMismatch,
)

JsonObject = dict[str, Any]
INVALID = "invalid_request_error"
SERVER = "server_error"
CLOUD = "cloud_error"
# OpenAI's wording: LiteLLM and other clients match it and ignore the error's code.
CONTEXT_EXCEEDED = "this model's maximum context length is exceeded"


class RequestError(InputError):
    """A request that is refused before anything is computed.

    status: of HTTP. param: the field at fault, as in "messages.0.content". code: OpenAI's code of the reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class QueueFull(OutriderError):
    """The queue is full. retry_after_s: seconds until a place is likely to be free."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ShuttingDown(OutriderError):
    """The scheduler is being closed."""

    def __init__(self) -> None:
        super().__init__("the gateway is shutting down")


class GenerationTimeout(OutriderError):
    """A generation took longer than the gateway allows."""


@dataclass(frozen=True)
class ErrorResponse:
    """An error as an HTTP response, with the fields of OpenAI's error object."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> JsonObject:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        """Return the body as JSON."""
        return encode_json(self.body())


def encode_json(value: JsonObject) -> bytes:
    """Return JSON in UTF-8. Half a surrogate pair, which UTF-8 cannot encode, is escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def with_param(error: InputError, param: str | None) -> RequestError:
    """Return an error as a RequestError that names the field at fault."""
    if isinstance(error, ContextError):
        return RequestError(f"{CONTEXT_EXCEEDED}: {error}", param=param, code="context_length_exceeded")
    return RequestError(str(error), param=param, code="unusable")


def to_error_response(error: OutriderError) -> ErrorResponse:
    """Return the response for an error."""
    text = str(error)
    if isinstance(error, RequestError):
        kind = INVALID if error.status < 500 else SERVER
        headers = _response_headers(error.status)
        return ErrorResponse(error.status, text, kind, param=error.param, code=error.code, headers=headers)
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return ErrorResponse(429, text, type="rate_limit_error", code="rate_limit_exceeded", headers=wait)
    if isinstance(error, ShuttingDown):
        return ErrorResponse(503, text, type=SERVER, code="going_down")
    if isinstance(error, GenerationTimeout):
        return ErrorResponse(504, text, type=SERVER, code="time_limit")
    if isinstance(error, VocabularyMismatch):  # the cloud serves another model than at the gateway's start
        return ErrorResponse(503, text, type=CLOUD, code="cloud_refused")
    if isinstance(error, InputError):
        return ErrorResponse(400, text, code="unusable")
    if isinstance(error, DecodingError):  # the request's own settings ban every token
        return ErrorResponse(400, text, code="nothing_to_choose")
    if isinstance(error, CloudLost):
        return ErrorResponse(503, text, type=CLOUD, code="cloud_lost", headers={"Retry-After": "1"})
    if isinstance(error, CloudRefused):
        return ErrorResponse(503, text, type=CLOUD, code="cloud_refused")
    return ErrorResponse(500, f"{type(error).__name__}: {text}", type=SERVER, code="internal")


def http_error(status: int, message: str) -> ErrorResponse:
    """Return the response for an error of HTTP itself, such as an unknown path or method."""
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ErrorResponse(status, message, type=INVALID if status < 500 else SERVER, code=codes.get(status))


def _response_headers(status: int) -> dict[str, str]:
    """Return the headers of a refusal. A connection closes if the body was not read to its end."""
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Connection": "close"} if status in (408, 413, 415) else {}
