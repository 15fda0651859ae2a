"""The kinds of requests that generate: from a body to a request, and from a generation to an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.decoding.events import StreamEvent
from outrider.decoding.result import Result
from outrider.gateway.access import JSON
from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import ErrorResponse
from outrider.gateway.request_parsing import ParsedRequest, parse_request, validate_body
from outrider.gateway.request_schema import ChatRequest, Request
from outrider.gateway.response_building import Answer


class ChoiceOutput(Protocol):
    """The conversion of one generation to a part of an answer."""

    def note(self, events: Sequence[StreamEvent]) -> None:
        """Process events of an answer that is sent as a whole."""
        ...

    def chunk(self, events: Sequence[StreamEvent]) -> bytes:
        """Return the stream's chunks for these events, which may be empty."""
        ...

    def last(self, result: Result) -> bytes:
        """Return the last chunks of this generation."""
        ...


class Output(Protocol):
    """The conversion of a request's generations to an answer.

    id: of the request. media_type: of an answer as a whole. choices: one for each generation.
    """

    id: str
    media_type: str

    @property
    def choices(self) -> Sequence[ChoiceOutput]:
        """Return the parts of the answer."""
        ...

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer."""
        ...

    def end(self, results: Sequence[Result]) -> bytes:
        """Return the end of a stream."""
        ...

    def error(self, response: ErrorResponse) -> bytes:
        """Return an error as the stream's last event."""
        ...


@dataclass(frozen=True)
class RequestKind:
    """A kind of requests that generate. prepare: returns the request in a body, and the conversion of its answer.

    media_type: of the body. The whole content type is the second argument of `prepare`.
    """

    prepare: Callable[[bytes, str, Defaults], tuple[ParsedRequest, Output]]
    media_type: str = JSON


def completion_kind(kind: type[Request]) -> RequestKind:
    """Return the kind of OpenAI's requests for completions."""

    def prepare(body: bytes, _: str, defaults: Defaults) -> tuple[ParsedRequest, Output]:
        request = parse_request(validate_body(kind, body), defaults)
        return request, Answer(request, chat=issubclass(kind, ChatRequest))

    return RequestKind(prepare)
