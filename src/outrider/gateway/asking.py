"""From a request's body to what is generated and how: prompt, settings, choice; or a refusal that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from outrider.errors import AudioError, ContextError, InputError, PromptError
from outrider.gateway.base64_data import base64_of
from outrider.gateway.generation_options import (
    choice_of,
    field_named_in,
    in_request_words,
    length_field_of,
    notes_of,
    settings_of,
)
from outrider.gateway.pool import RequestOptions
from outrider.gateway.recordings import decoded
from outrider.gateway.refusing import Refused, blaming
from outrider.gateway.schemas import (
    MODEL,
    PARTS,
    ROLES,
    UNDONE,
    AudioPart,
    ChatRequest,
    CompletionRequest,
    Message,
    OutriderOptions,
    Request,
    TextPart,
)
from outrider.prompts.audio import Audio
from outrider.prompts.chat import PromptLike, check_text

R = TypeVar("R", bound=Request)

MOST_BESIDE: Final = 2**21  # bytes of a body beside its recording: texts, ids and options
RECORDING: Final = re.compile(rb'"data"\s*:\s*"[ !#-~]{1000,}')  # whatever it is, it stays one string of ASCII
SIZES: Final = ("too_long", "too_short", "string_too_long", "string_too_short")


@dataclass(frozen=True)
class Defaults:
    """The command line's defaults.

    settings: fields of GenerationSettings. audio_seconds: 0 without recordings. text: False for a model that only takes
    recordings.
    """

    choice: RequestOptions = field(default_factory=RequestOptions)
    settings: Mapping[str, Any] = field(default_factory=dict)
    audio_seconds: float = 0.0
    text: bool = True
    edge: str = "the edge model"


@dataclass(frozen=True)
class Asked:
    """A valid request.

    notes: its fields without effect, for the answer's warnings. field: the prompt's field. length_field: the field that
    limits the output, if it was given.
    """

    prompt: PromptLike
    settings: dict[str, Any]
    choice: RequestOptions
    stream: bool = False
    include_usage: bool = False
    provisional: bool = False
    tokens: bool = False
    stop: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    field: str = "prompt"
    length_field: str | None = None


def read(kind: type[R], body: bytes) -> R:
    """The request that a body holds.

    Raises:
        Refused: it is no JSON, or a field is unknown, missing, out of range, or asks for what is not done.
    """
    sent = _sent(body)
    try:
        request = kind.model_validate(sent)
    except ValidationError as error:
        raise _refused(error, kind, sent) from None
    if request.model != MODEL:
        raise Refused(
            f"the model {request.model!r} is not here: the pair is {MODEL!r}",
            param="model",
            code="model_not_found",
            status=404,
        )
    return request


def _sent(body: bytes) -> Any:
    """The body's values. What is small in JSON can be large in memory: only a recording may be long."""
    recording = RECORDING.search(body)
    if len(body) - (len(recording[0]) if recording is not None else 0) > MOST_BESIDE:
        raise Refused(f"the body holds more than {MOST_BESIDE} bytes beside a recording", code="too_large", status=413)
    try:
        sent = from_json(body)
    except ValueError as error:
        raise Refused(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(sent, dict):
        raise Refused("the body is not a JSON object", code="invalid_value")
    return sent


def asked(request: Request, defaults: Defaults) -> Asked:
    """What to generate for a request; decodes its recording, which takes a while.

    Raises:
        Refused: fields that contradict each other or the model, or a recording that cannot be used; the field is named.
    """
    options = request.outrider or OutriderOptions()
    if options.provisional and not (request.stream and options.tokens):
        raise Refused(
            "provisional tokens are reported in the chunks of a stream: set stream and outrider.tokens to true",
            param="outrider.provisional",
        )
    settings = settings_of(request, options, defaults.settings)
    length = length_field_of(request)
    return Asked(
        prompt=_prompt(request, options, defaults),
        settings=settings,
        choice=choice_of(options, defaults.choice),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        provisional=bool(options.provisional),
        tokens=bool(options.tokens),
        stop=settings["stop"],
        notes=notes_of(request, settings),
        field="messages" if isinstance(request, ChatRequest) else "prompt",
        length_field=length,
    )


# Checks that need the model -----------------------------------------------------------------------


def blamed(error: InputError, work: Asked) -> Refused:
    """What was found out only where the prompt was read: the refusal, with the field that is to blame."""
    about_prompt = isinstance(error, (PromptError, AudioError))
    param = work.field if about_prompt else field_named_in(str(error), work.length_field)
    if isinstance(error, ContextError) and work.length_field and "max_new_tokens" in str(error):
        param = work.length_field  # the prompt alone fits, but not with the output
    refused = blaming(error, param)
    refused.args = (in_request_words(str(error), work.length_field),)
    return refused


# Prompts ----------------------------------------------------------------------------------------------------


def _prompt(request: Request, options: OutriderOptions, defaults: Defaults) -> PromptLike:
    if isinstance(request, ChatRequest):
        if any(_audio_parts(message) for message in request.messages):
            return _recording(request, options, defaults)
        _no_task(options)
        return [_turn(at, message) for at, message in enumerate(request.messages)]
    _no_task(options)
    assert isinstance(request, CompletionRequest)  # there are two kinds of requests
    prompt = request.prompt
    if isinstance(prompt, list) and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        _check_text(prompt, "prompt")
        if not prompt:
            raise Refused("the prompt is empty: it has no tokens", param="prompt")
    return prompt


def _no_task(options: OutriderOptions) -> None:
    for name in ("task", "lang"):
        if getattr(options, name) is not None:
            raise Refused(f"outrider.{name} is for a recording, and there is none", param=f"outrider.{name}")


def _audio_parts(message: Message) -> list[AudioPart]:
    return [part for part in message.content if isinstance(part, AudioPart)]


def _texts(message: Message) -> str:
    """A message's text; parts become lines."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content if isinstance(part, TextPart))


def _turn(at: int, message: Message) -> dict[str, str]:
    _check_texts(at, message)
    text = _texts(message)
    return {"role": "system" if message.role == "developer" else message.role, "content": text}


def _check_texts(at: int, message: Message) -> None:
    """Refuse a message whose text holds half a surrogate pair."""
    if isinstance(message.content, str):
        _check_text(message.content, f"messages.{at}.content")
        return
    for n, part in enumerate(message.content):
        if isinstance(part, TextPart):
            _check_text(part.text, f"messages.{at}.content.{n}.text")


def _check_text(text: str, param: str) -> None:
    """Refuse half a surrogate pair."""
    try:
        check_text(text)
    except PromptError as error:
        raise Refused(str(error), param=param) from error


def _recording(request: ChatRequest, options: OutriderOptions, defaults: Defaults) -> Audio:
    if not defaults.audio_seconds:
        raise Refused(f"{defaults.edge} takes no audio: give an audio-language model as --edge", param="messages")
    if len(request.messages) > 1 or request.messages[0].role != "user":
        raise Refused(
            "a recording comes in a conversation of one message, the user's: its prompt has no room for others",
            param="messages",
        )
    message = request.messages[0]
    found = _audio_parts(message)
    if len(found) > 1:
        at = next(n for n, part in enumerate(message.content) if part is found[1])
        raise Refused("one recording per request", param=f"messages.0.content.{at}")
    question = _texts(message).strip() or None
    if question is not None:
        _check_texts(0, message)
        if options.task is not None or options.lang is not None:
            raise Refused(
                "the text beside a recording says what to write, and so do outrider.task and lang: give one",
                param="outrider.task" if options.task is not None else "outrider.lang",
            )
    at = next(n for n, part in enumerate(message.content) if part is found[0])
    where = f"messages.0.content.{at}.input_audio"
    try:
        data = base64_of(found[0].input_audio.data, f"{where}.data")
        recording = decoded(data, found[0].input_audio.format, defaults.audio_seconds, where)
    except AudioError as error:
        raise blaming(error, f"{where}.data") from error
    task, lang = options.task or "default", options.lang or "en"
    return Audio(recording.waveform, task, lang, instruction=question, warnings=recording.warnings)


# Refusals ---------------------------------------------------------------------------------------------------


def _refused(error: ValidationError, kind: type[Request], sent: Any) -> Refused:
    """What is wrong, in our words: an unknown field first, else whatever lies deepest. No value is repeated."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    places = [_place(each["loc"], sent, missing=each["type"] == "missing") for each in errors]
    order = range(len(errors))

    def weight(n: int) -> tuple[bool, bool, int, int]:
        """Of the branches of a union, the one whose type is right says what is wrong."""
        kind = errors[n]["type"]
        return kind == "extra_forbidden", kind in SIZES, len(places[n]), -n

    at = max(order, key=weight)
    return _explained(errors[at]["type"], errors[at]["msg"], places[at], kind)


def _explained(type_: str, message: str, place: list[str], kind: type[Request]) -> Refused:
    name, path = (place[-1] if place else ""), ".".join(place)
    if type_ == "too_many":
        return Refused(f"{path or 'the body'}: {message}", param=path or None, code="invalid_value")
    if type_ == "missing":
        return Refused(f"{path} is missing", param=path, code="missing")
    if undone := next((step for step in place if step in UNDONE), None):
        return Refused(f"{path}: not done: {UNDONE[undone]}", param=path, code="unsupported")
    if type_ == "extra_forbidden":
        return Refused(f"{path}: no such field{_known(place, kind)}", param=path, code="unknown_parameter")
    if name == "role":
        message = ROLES
    elif path == "outrider.k":
        message = "1 to 64, or auto"
    elif type_.startswith("union_tag"):
        message = PARTS
    elif type_ in ("model_type", "model_attributes_type", "dict_type"):
        message = "an object is due here"
    return Refused(f"{path or 'the body'}: {message}", param=path or None, code="invalid_value")


def _place(loc: Sequence[int | str], sent: Any, *, missing: bool) -> list[str]:
    """Where in the request an error is; the steps that are branches of our own types are left out."""
    place: list[str] = []
    for number, step in enumerate(loc, start=1):
        inside = _inside(sent, step)
        tag = number > 1 and isinstance(loc[number - 2], int) and isinstance(sent, dict) and sent.get("type") == step
        if tag and number < len(loc):
            continue  # a part's kind, which may be the name of a field as well
        if inside is not None:
            sent = inside[0]
        elif number < len(loc) or not missing:
            continue
        place.append(str(step))
    return place


def _inside(sent: Any, step: int | str) -> tuple[Any] | None:
    if isinstance(sent, dict):
        return (sent[step],) if step in sent else None
    return (sent[step],) if isinstance(sent, list) and isinstance(step, int) and step < len(sent) else None


def _known(place: list[str], kind: type[Request]) -> str:
    if len(place) == 1 and place[0] in OutriderOptions.model_fields:
        return f"; it is outrider.{place[0]} here"
    if len(place) == 1:
        return f"; there are {', '.join(sorted(kind.model_fields))}"
    names = OutriderOptions.model_fields if place[0] == "outrider" and len(place) == 2 else ()
    return f"; there are {', '.join(sorted(names))}" if names else ""
