"""Kinds of generating requests: parsing of the body, and conversion of the generations to an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from outrider.decoding.events import StreamEvent
from outrider.decoding.result import Result
from outrider.gateway.access import JSON
from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import ErrorResponse
from outrider.gateway.request_parsing import ParsedRequest, parse_request, validate_body
from outrider.gateway.request_schema import ChatRequest, Request
from outrider.gateway.response_building import Answer


class ChoiceOutput(Protocol):
    """Converts one generation to a part of an answer."""

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
    """Converts the generations of a request to an answer.

    id: the request's. media_type: that of an answer without streaming. choices: one for each generation.
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


class SingleOutput:
    """The parts that the answers of a single generation have in common. Such an answer is its own choice."""

    @property
    def choices(self) -> Sequence[Self]:
        """Return the only part of the answer."""
        return (self,)

    def end(self, results: Sequence[Result]) -> bytes:
        """Return nothing: `last` has returned the end of the stream."""
        return b""


@dataclass(frozen=True)
class RequestKind:
    """A kind of generating requests. prepare: parses a body, and returns the request and the conversion of its answer.

    media_type: that of the body. The second argument of `prepare` is the complete content type.
    """

    prepare: Callable[[bytes, str, Defaults], tuple[ParsedRequest, Output]]
    media_type: str = JSON


def completion_kind(kind: type[Request]) -> RequestKind:
    """Return the kind of OpenAI's requests for completions."""

    def prepare(body: bytes, _: str, defaults: Defaults) -> tuple[ParsedRequest, Output]:
        request = parse_request(validate_body(kind, body), defaults)
        return request, Answer(request, chat=issubclass(kind, ChatRequest))

    return RequestKind(prepare)
