"""From a request's body to what is generated and how: prompt, settings, choice; or a refusal that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from outrider.config import GenerationSettings
from outrider.core.acceptance import rule
from outrider.core.gate import gate
from outrider.errors import AudioError, InputError, PromptError, SettingsError
from outrider.gateway.pool import Choice
from outrider.gateway.recordings import decoded
from outrider.gateway.refusing import Refused, blaming
from outrider.gateway.schemas import (
    MODEL,
    PARTS,
    ROLES,
    UNDONE,
    UNUSED,
    AudioPart,
    ChatRequest,
    CompletionRequest,
    Message,
    OutriderOptions,
    Request,
    TextPart,
)
from outrider.netem.conditions import conditions
from outrider.prompts.audio import Audio
from outrider.prompts.chat import PromptLike, check_text

R = TypeVar("R", bound=Request)

MOST_BESIDE: Final = 2**21  # bytes of a body beside its recording: texts, ids and options
RECORDING: Final = re.compile(rb'"data"\s*:\s*"[A-Za-z0-9+/=\\]{1000,}')
SIZES: Final = ("too_long", "too_short", "string_too_long", "string_too_short")
FILTERS: Final = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # each at the value that keeps everything
CHOICE: Final = tuple(each.name for each in fields(Choice) if each.name in OutriderOptions.model_fields)
SETTINGS: Final = tuple(each.name for each in fields(GenerationSettings) if each.name in OutriderOptions.model_fields)


@dataclass(frozen=True)
class Defaults:
    """What the command line said. settings: fields of GenerationSettings. audio_seconds: 0 without recordings."""

    choice: Choice = field(default_factory=Choice)
    settings: Mapping[str, Any] = field(default_factory=dict)
    audio_seconds: float = 0.0
    edge: str = "the edge model"


@dataclass(frozen=True)
class Asked:
    """A request that can be answered. notes: what of it asked for nothing, for the answer's warnings. field: where its
    prompt stood."""

    prompt: PromptLike
    settings: dict[str, Any]
    choice: Choice
    stream: bool = False
    include_usage: bool = False
    provisional: bool = False
    tokens: bool = False
    stop: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    field: str = "prompt"


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
        raise Refused(f"the body is no JSON that can be read: {error}", code="invalid_json") from None
    if not isinstance(sent, dict):
        raise Refused("the body: an object is due here", code="invalid_value")
    return sent


def asked(request: Request, defaults: Defaults) -> Asked:
    """What to generate for a request; decodes its recording, which takes a while.

    Raises:
        Refused: fields that contradict each other or the model, or a recording that cannot be used; the field is named.
    """
    options = request.outrider or OutriderOptions()
    if request.stream_options is not None and not request.stream:
        raise Refused("stream_options is for streams: set stream to true", param="stream_options")
    if options.provisional and not (request.stream and options.tokens):
        raise Refused(
            "provisional tokens are reported in the chunks of a stream: set stream and outrider.tokens to true",
            param="outrider.provisional",
        )
    settings = _settings(request, options, defaults)
    return Asked(
        prompt=_prompt(request, options, defaults),
        settings=settings,
        choice=_choice(options, defaults.choice),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        provisional=bool(options.provisional),
        tokens=bool(options.tokens),
        stop=settings["stop"],
        notes=tuple(f"{name} was not used" for name in UNUSED if getattr(request, name, None) is not None),
        field="messages" if isinstance(request, ChatRequest) else "prompt",
    )


# Settings ---------------------------------------------------------------------------------------------------


def _settings(request: Request, options: OutriderOptions, defaults: Defaults) -> dict[str, Any]:
    given = {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}
    names = {"temperature": "temperature", "top_p": "top_p", "seed": "seed"}
    given |= {ours: value for theirs, ours in names.items() if (value := getattr(request, theirs)) is not None}
    length = _length(request)
    if length is not None:
        given["max_new_tokens"] = length
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.logit_bias:
        given["suppress_tokens"] = tuple(int(key) for key in request.logit_bias)
    return _checked({**_giving_way(defaults.settings, given), **given})


def _length(request: Request) -> int | None:
    newer = getattr(request, "max_completion_tokens", None)
    if newer is not None and request.max_tokens is not None and newer != request.max_tokens:
        raise Refused(
            f"max_completion_tokens {newer} and max_tokens {request.max_tokens} are two words for one limit: give one",
            param="max_tokens",
        )
    return newer if newer is not None else request.max_tokens


def _giving_way(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The command line's settings, without those that make no sense beside what the request asks for."""
    kept = {"stop": (), **values}
    if given.get("temperature") == 0:
        kept |= FILTERS
    if "max_new_tokens" in given:
        kept["min_new_tokens"] = min(kept.get("min_new_tokens", 0), given["max_new_tokens"])
    return kept


def blamed(error: InputError, work: Asked) -> Refused:
    """What was found out only where the prompt was read: the refusal, with the field that is to blame."""
    about_prompt = isinstance(error, (PromptError, AudioError))
    return blaming(error, work.field if about_prompt else _blamed(str(error)))


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    try:
        built = GenerationSettings.build(settings)
    except SettingsError as error:
        raise Refused(str(error), param=_blamed(str(error)), code="invalid_value") from error
    return {each.name: getattr(built, each.name) for each in fields(built)}


def _blamed(message: str) -> str | None:
    """The first field of a request that a message of ours speaks of."""
    theirs = {"max_new_tokens": "max_tokens", "suppress_tokens": "logit_bias"}
    for word in re.findall(r"\w+", message):
        if word in theirs:
            return theirs[word]
        if word in OutriderOptions.model_fields:
            return f"outrider.{word}"
        if word in Request.model_fields:
            return word
    return None


def _choice(options: OutriderOptions, default: Choice) -> Choice:
    given = {name: value for name in CHOICE if (value := getattr(options, name)) is not None}
    if "calibrated:" in given.get("gate", "") and given["gate"] != default.gate:
        raise Refused(
            "a gate file is named on the gateway's command line (--gate calibrated:FILE), not in a request",
            param="outrider.gate",
        )
    readers = {"gate": gate, "accept": rule, "net": lambda text: None if text == "cut" else conditions(text)}
    for name, reader in readers.items():
        if name in given and given[name] != getattr(default, name):
            _checked_by(reader, given[name], f"outrider.{name}")
    if "net" in given and given["net"] != "cut":
        given["net"] = str(conditions(given["net"]))  # one verifier for one network, however it is written
    choice = replace(default, **given, watch=bool(options.tokens))
    _check_used(choice, given)
    return choice


def _check_used(choice: Choice, given: Mapping[str, Any]) -> None:
    """Refuse what the request itself asks for and its way does not do. Values that ask for nothing are taken."""
    used, nothing = choice.settled(), Choice()
    for name, value in given.items():
        if value != getattr(used, name) and value != getattr(nothing, name):
            way = f"decoding {choice.way}" + ("" if "way" in given else ", as this gateway does unless told otherwise,")
            raise Refused(f"outrider.{name}: {way} does not use it: leave it out", param=f"outrider.{name}")


def _checked_by(reader: Any, value: str, param: str) -> None:
    try:
        reader(value)
    except SettingsError as error:
        raise Refused(str(error), param=param, code="invalid_value") from error


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
    text = _texts(message)
    _check_text(text, f"messages.{at}.content")
    return {"role": "system" if message.role == "developer" else message.role, "content": text}


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
        raise Refused("one recording to a request", param="messages.0.content")
    question = _texts(message).strip() or None
    if question is not None:
        _check_text(question, "messages.0.content")
        if options.task is not None or options.lang is not None:
            raise Refused(
                "the text beside a recording says what to write, and so do outrider.task and lang: give one",
                param="outrider.task" if options.task is not None else "outrider.lang",
            )
    try:
        recording = decoded(found[0].input_audio.data, found[0].input_audio.format, defaults.audio_seconds)
    except AudioError as error:
        raise blaming(error, "messages.0.content.input_audio.data") from error
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
    if len(place) == 1:
        return f"; there are {', '.join(sorted(kind.model_fields))}"
    names = OutriderOptions.model_fields if place[0] == "outrider" and len(place) == 2 else ()
    return f"; there are {', '.join(sorted(names))}" if names else ""
