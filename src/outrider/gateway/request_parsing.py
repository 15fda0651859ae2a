"""Validation and parsing of a request's body: prompt, settings and options, or an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclasses_field
from typing import Final, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from outrider.config import SEED_LIMIT
from outrider.errors import AudioError, ContextError, GrammarError, InputError, PromptError
from outrider.gateway.decoder_pool import RequestOptions
from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import JsonObject, RequestError, with_param
from outrider.gateway.generation_options import (
    build_notes,
    build_options,
    build_settings,
    count_choices,
    find_field,
    find_grammar_fields,
    find_length_field,
    use_request_names,
)
from outrider.gateway.prompt_size import measure_prompt
from outrider.gateway.request_prompts import build_echo, build_prompts
from outrider.gateway.request_schema import (
    MAX_PROMPTS,
    MODEL,
    ROLES_MESSAGE,
    TOOL_CHOICE_MESSAGE,
    ChatRequest,
    OutriderOptions,
    Request,
    StrictModel,
)
from outrider.gateway.schema_keywords import check_keywords
from outrider.gateway.tools import RequestedTools, read_tools
from outrider.gateway.tools import build_notes as build_tool_notes
from outrider.prompts.chat import PromptLike

R = TypeVar("R", bound=Request)
M = TypeVar("M", bound=StrictModel)

MAX_BYTES_BESIDE_RECORDING: Final = 2**21  # bytes of a body beside its recording: texts, ids and options
RECORDING: Final = re.compile(rb'"data"\s*:\s*"[ !#-~]{1000,}')  # parses into a single string of ASCII
PART_TYPES: Final = ("text", "input_audio")  # tags that pydantic inserts in an error's path
SIZE_ERRORS: Final = ("too_long", "too_short", "string_too_long", "string_too_short")


@dataclass(frozen=True)
class ParsedRequest:
    """A valid request.

    notes: warnings about fields without effect. field: the prompt's field. length_field: the field that limits the
    output, if the request has one. tools: those that the answer may call. echo: the prompts' texts, if the answers
    begin with them. grammar_fields: the fields of the grammar, by the beginning of an error's place. n: choices of each
    prompt.
    candidates: generations of each prompt, of which the likeliest are the choices. logprobs: report log-probabilities.
    more_prompts: further prompts, each with choices of its own. prompt_bytes: the approximate memory of each prompt.
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
    field: str = "prompt"
    length_field: str | None = None
    tools: RequestedTools | None = None
    echo: tuple[str, ...] = ()
    grammar_fields: Mapping[str, str] = dataclasses_field(default_factory=dict)
    n: int = 1
    candidates: int = 1
    logprobs: bool = False
    more_prompts: tuple[PromptLike, ...] = ()
    prompt_bytes: tuple[int, ...] = (0,)

    @property
    def prompts(self) -> tuple[PromptLike, ...]:
        """All prompts, each with `candidates` generations, in this order."""
        return (self.prompt, *self.more_prompts)

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
        raise _to_request_error(error, kind, data) from None
    model = getattr(request, "model", MODEL)
    if model not in (MODEL, None):
        raise RequestError(
            f"no such model: {model!r}: use {MODEL!r}", param="model", code="model_not_found", status=404
        )
    return request


def parse_json(body: bytes) -> JsonObject:
    """Parse a body. Only a recording may be long, because other values take more memory than their JSON text."""
    recording = RECORDING.search(body)
    if len(body) - (len(recording[0]) if recording is not None else 0) > MAX_BYTES_BESIDE_RECORDING:
        raise RequestError(
            f"the body holds more than {MAX_BYTES_BESIDE_RECORDING} bytes beside a recording",
            code="too_large",
            status=413,
        )
    try:
        data = from_json(body)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError("the body is not a JSON object", code="invalid_value")
    return data


def parse_request(request: Request, defaults: Defaults) -> ParsedRequest:
    """Return the prompt, settings and options of a request. Decoding its recording takes a while.

    Raises:
        RequestError: fields contradict each other or the model, or the recording is invalid. The error names the field.
    """
    options = request.outrider or OutriderOptions()
    if options.provisional and not (request.stream and options.tokens):
        raise RequestError(
            "provisional tokens are reported in the chunks of a stream: set stream and outrider.tokens to true",
            param="outrider.provisional",
        )
    tools = read_tools(request, defaults.tools) if isinstance(request, ChatRequest) else None
    calls = tools.grammar if tools is not None else None
    settings = build_settings(request, options, defaults.settings, calls)
    tool_notes = [] if not isinstance(request, ChatRequest) else build_tool_notes(request, tools)
    tool_notes += check_keywords(request, tools) if isinstance(request, ChatRequest) else []
    prompts = build_prompts(request, options, defaults, tools)
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
        field="messages" if isinstance(request, ChatRequest) else "prompt",
        length_field=find_length_field(request),
        tools=tools,
        echo=build_echo(prompts, defaults, logprobs=logprobs) if getattr(request, "echo", None) else (),
        more_prompts=tuple(prompts[1:]),
        prompt_bytes=tuple(map(measure_prompt, prompts)),
        grammar_fields=find_grammar_fields(request) if tools is None else tools.grammar_fields,
        n=n,
        candidates=candidates,
        logprobs=logprobs,
    )


def attach_param(error: InputError, request: ParsedRequest) -> RequestError:
    """Return an error of the decoder as a RequestError that names the field at fault."""
    if isinstance(error, GrammarError) and request.grammar_fields:
        place = _grammar_place(error.place or "", request)
        return RequestError(f"{place}: {error.reason}", param=place, code="invalid_value")
    about_prompt = isinstance(error, (PromptError, AudioError))
    param = request.field if about_prompt else find_field(str(error), request.length_field)
    if isinstance(error, ContextError) and request.length_field and "max_new_tokens" in str(error):
        param = request.length_field  # the prompt alone fits, but not with the output
    request_error = with_param(error, param)
    request_error.args = (use_request_names(str(request_error), request.length_field),)
    return request_error


def _grammar_place(place: str, request: ParsedRequest) -> str:
    """Return the field at a place in the request's grammar."""
    beginnings = (each for each in request.grammar_fields if not each or f"{place}.".startswith(f"{each}."))
    beginning = max(beginnings, key=len)
    if not beginning and request.settings["grammar"].kind == "lark":
        return request.grammar_fields[""]  # a text without fields of its own, or the gateway's own schema of calls
    return ".".join(filter(None, (request.grammar_fields[beginning], place.removeprefix(beginning).lstrip("."))))


# Errors -----------------------------------------------------------------------------------------------------


def _to_request_error(error: ValidationError, kind: type[StrictModel], data: JsonObject) -> RequestError:
    """Return the most helpful of the validation errors: an unknown field, else the deepest one. It quotes no value."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    paths = [_error_path(each["loc"], data, missing=each["type"] == "missing") for each in errors]
    order = range(len(errors))

    def weight(n: int) -> tuple[bool, bool, int, int]:
        """Return the sort key of an error. In a union, the branch of the right type has the deepest error."""
        kind = errors[n]["type"]
        return kind == "extra_forbidden", kind in SIZE_ERRORS, len(paths[n]), -n

    at = max(order, key=weight)
    return _describe_error(errors[at]["type"], errors[at]["msg"], paths[at], kind)


def _describe_error(type_: str, message: str, path_steps: list[str], kind: type[StrictModel]) -> RequestError:
    name, path = (path_steps[-1] if path_steps else ""), ".".join(path_steps)
    if type_ == "refused":
        return RequestError(f"{path or 'the body'}: {message}", param=path or None, code="invalid_value")
    if type_ == "missing":
        return RequestError(f"{path} is missing", param=path, code="missing")
    if unsupported := _find_unsupported(path_steps, kind):
        return RequestError(f"{path}: not supported: {kind.reasons[unsupported]}", param=path, code="unsupported")
    if type_ == "extra_forbidden":
        return RequestError(
            f"{path}: no such field{_list_known_fields(path_steps, kind)}", param=path, code="unknown_parameter"
        )
    if name == "role":
        message = ROLES_MESSAGE
    elif path == "tool_choice":
        message = TOOL_CHOICE_MESSAGE
    elif path == "outrider.k":
        message = "expected 1 to 64, or auto"
    elif type_.startswith("union_tag"):
        message = kind.formats_message if name in ("response_format", "format") else kind.tags_message
    elif type_ in ("model_type", "model_attributes_type", "dict_type"):
        message = "expected an object"
    return RequestError(f"{path or 'the body'}: {message}", param=path or None, code="invalid_value")


def _find_unsupported(path_steps: list[str], kind: type[StrictModel]) -> str | None:
    """Return the unsupported field of a path: a field of the request, or of a message."""
    steps = path_steps if path_steps[:1] == ["messages"] else path_steps[:1]
    return next((step for step in steps if step in kind.reasons), None)


def _error_path(loc: Sequence[int | str], data: object, *, missing: bool) -> list[str]:
    """Return the path of an error in the request, without the steps that pydantic adds for branches of unions."""
    path_steps: list[str] = []
    for number, step in enumerate(loc, start=1):
        child = _step_into(data, step)
        is_tag = number > 1 and isinstance(loc[number - 2], int) and step in PART_TYPES
        if is_tag and isinstance(data, dict) and data.get("type") == step and number < len(loc):
            continue  # a part's kind, although there may be a field of the same name
        if child is not None:
            data = child[0]
        elif number < len(loc) or not missing:
            continue
        path_steps.append(str(step))
    return path_steps


def _step_into(data: object, step: int | str) -> tuple[object] | None:
    if isinstance(data, dict):
        return (data[step],) if step in data else None
    return (data[step],) if isinstance(data, list) and isinstance(step, int) and step < len(data) else None


def _list_known_fields(path_steps: list[str], kind: type[StrictModel]) -> str:
    if len(path_steps) == 1 and path_steps[0] in OutriderOptions.model_fields:
        return f"; it is outrider.{path_steps[0]} here"
    if len(path_steps) == 1:
        return f"; there are {', '.join(sorted(kind.model_fields))}"
    names = OutriderOptions.model_fields if path_steps[0] == "outrider" and len(path_steps) == 2 else ()
    return f"; there are {', '.join(sorted(names))}" if names else ""
