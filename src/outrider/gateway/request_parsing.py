"""Validation and parsing of a request's body: prompt, settings and options, or an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclasses_field
from typing import Final, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from outrider.config import SEED_LIMIT
from outrider.errors import quote
from outrider.gateway.decoder_pool import RequestOptions
from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import JsonObject, RequestError
from outrider.gateway.generation_options import (
    build_notes,
    build_options,
    build_settings,
    count_choices,
    find_grammar_fields,
    find_length_field,
)
from outrider.gateway.prompt_size import measure_prompt
from outrider.gateway.request_prompts import build_echo, build_prompts
from outrider.gateway.request_schema import (
    MAX_PROMPTS,
    MODEL,
    ChatRequest,
    OutriderOptions,
    Request,
    StrictModel,
)
from outrider.gateway.responses_schema import ResponsesRequest
from outrider.gateway.schema_keywords import check_keywords
from outrider.gateway.tools import RequestedTools, read_tools
from outrider.gateway.tools import build_notes as build_tool_notes
from outrider.gateway.validation_errors import to_request_error
from outrider.prompts.chat import PromptLike

R = TypeVar("R", bound=Request)
M = TypeVar("M", bound=StrictModel)

MAX_BYTES_BESIDE_RECORDING: Final = 2**21  # bytes of a body beside its recording: texts, ids and options
RECORDING: Final = re.compile(rb'"data"\s*:\s*"[ !#-~]{1000,}')  # parses into a single string of ASCII


@dataclass(frozen=True)
class ParsedRequest:
    """A valid request.

    notes: warnings about fields without effect. fields: the field of each prompt. recording_field: the field of the
    recording, if there is one. length_field: the field that limits the output, if the request has one. tools: those
    that the answer may call. echo: the prompts' texts, if the answers begin with them. grammar_fields: the fields of
    the grammar, by prefixes of the path in a GrammarError, "" for the whole grammar. n: choices of each prompt.
    candidates: generations of each prompt, of which the likeliest are the choices. logprobs: report log-probabilities.
    more_prompts: further prompts, each with choices of its own. prompt_bytes: the approximate memory of each prompt.
    rename: replaces a chat's field names in a text by those of the original request.
    """

    prompt: PromptLike
    settings: JsonObject
    options: RequestOptions
    stream: bool = False
    include_usage: bool = False
    provisional: bool = False
    tokens: bool = False
    cache_salt: str = ""
    stop: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fields: tuple[str, ...] = ("prompt",)
    recording_field: str | None = None
    length_field: str | None = None
    tools: RequestedTools | None = None
    echo: tuple[str, ...] = ()
    grammar_fields: Mapping[str, str] = dataclasses_field(default_factory=dict)
    n: int = 1
    candidates: int = 1
    logprobs: bool = False
    more_prompts: tuple[PromptLike, ...] = ()
    prompt_bytes: tuple[int, ...] = (0,)
    rename: Callable[[str], str] = str

    @property
    def prompts(self) -> tuple[PromptLike, ...]:
        """All prompts, each with `candidates` generations, in this order."""
        return (self.prompt, *self.more_prompts)

    @property
    def grammar_field(self) -> str | None:
        """The field that holds the whole grammar, or None without one."""
        return self.grammar_fields.get("")

    def choice_settings(self, index: int) -> JsonObject:
        """Return the settings of one generation. Its seed is the request's plus its index among those of its prompt."""
        return {**self.settings, "seed": (self.settings.get("seed", 0) + index % self.candidates) % SEED_LIMIT}


def validate_body(kind: type[R], body: bytes) -> R:
    """Return the request in a body.

    Raises:
        RequestError: the body is not valid JSON, or a field is unknown, missing, out of range or unsupported.
    """
    return validate(kind, parse_json(body))


def validate(kind: type[M], data: JsonObject) -> M:
    """Return the request in an object.

    Raises:
        RequestError: a field is unknown, missing, out of range or unsupported, or there is no such model.
    """
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise to_request_error(error, kind, data) from None
    model = getattr(request, "model", MODEL)
    if model not in (MODEL, None):
        raise RequestError(
            f"no such model: {quote(model)}: use {MODEL!r}", param="model", code="model_not_found", status=404
        )
    return request


def parse_json(body: bytes, field: str | None = None) -> JsonObject:
    """Parse a body, or a form's field. Only a recording may be long: other values take more memory than their JSON.

    Raises:
        RequestError: it is not a JSON object, or too long.
    """
    name = field or "the body"
    recording = RECORDING.search(body)
    if len(body) - (len(recording[0]) if recording is not None else 0) > MAX_BYTES_BESIDE_RECORDING:
        raise RequestError(
            f"{name} holds more than {MAX_BYTES_BESIDE_RECORDING} bytes beside a recording",
            param=field,
            code="too_large",
            status=413,
        )
    try:
        data = from_json(body)
    except ValueError as error:
        raise RequestError(f"{name} is not valid JSON: {error}", param=field, code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError(f"{name} is not a JSON object", param=field, code="invalid_value")
    return data


def parse_request(request: Request, defaults: Defaults) -> ParsedRequest:
    """Return the prompt, settings and options of a request. Decoding its recording takes a while.

    Raises:
        RequestError: fields contradict each other or the model, or the recording is invalid. The error names the field.
    """
    check_stream_options(request)
    options = request.outrider or OutriderOptions()
    if options.provisional and not (request.stream and options.tokens):
        raise RequestError(
            "provisional tokens are reported in the chunks of a stream: set stream and outrider.tokens to true",
            param="outrider.provisional",
        )
    tools = read_tools(request, defaults.tools) if isinstance(request, ChatRequest) else None
    calls = tools.grammar if tools is not None else None
    grammar_fields = find_grammar_fields(request) if tools is None else tools.grammar_fields
    settings = build_settings(request, options, defaults.settings, calls, grammar_fields.get(""))
    tool_notes: list[str] = []
    if isinstance(request, ChatRequest):
        tool_notes = [*build_tool_notes(request, tools), *check_keywords(request, tools)]
    found = build_prompts(request, options, defaults, tools)
    prompts = found.prompts
    n, candidates = count_choices(request)
    if len(prompts) * candidates > MAX_PROMPTS:
        message = f"{len(prompts)} prompts with {candidates} generations each: at most {MAX_PROMPTS} in one request"
        raise RequestError(message, param="prompt")
    logprobs = settings["logprobs"] is not None
    if candidates > n and not logprobs:
        settings["logprobs"] = 0  # needed to choose the likeliest
    return ParsedRequest(
        prompt=prompts[0],
        settings=settings,
        options=build_options(options, defaults.options),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        provisional=bool(options.provisional),
        tokens=bool(options.tokens),
        cache_salt=options.cache_salt or "",
        stop=settings["stop"],
        notes=(*build_notes(request, settings), *tool_notes),
        fields=found.fields,
        recording_field=found.recording_field,
        length_field=find_length_field(request),
        tools=tools,
        echo=build_echo(prompts, defaults, logprobs=logprobs) if getattr(request, "echo", None) else (),
        more_prompts=tuple(prompts[1:]),
        prompt_bytes=tuple(map(measure_prompt, prompts)),
        grammar_fields=grammar_fields,
        n=n,
        candidates=candidates,
        logprobs=logprobs,
    )


def check_stream_options(request: Request | ResponsesRequest) -> None:
    """Refuse `stream_options` without `stream`, as OpenAI does.

    Raises:
        RequestError: stream is not true.
    """
    if request.stream_options is not None and not request.stream:
        message = "stream_options needs stream: set stream to true, or leave out stream_options"
        raise RequestError(message, param="stream_options", code="invalid_value")
