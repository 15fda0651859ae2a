"""The request's field that an error of the decoder is about."""

from __future__ import annotations

import re
from typing import Final

from outrider.config import GenerationSettings
from outrider.errors import (
    AudioError,
    ContextError,
    DecodingError,
    GrammarError,
    InputError,
    PromptError,
)
from outrider.gateway.errors import RequestError, with_param
from outrider.gateway.generation_options import find_field, use_request_names
from outrider.gateway.request_parsing import ParsedRequest

BANNING: Final = ("min_new_tokens", "no_repeat_ngram_size")  # settings that may ban every token of a grammar
# Templates get arguments as objects and contents in other forms, but a request's own fields are texts or lists.
_WITHIN_FIELD: Final = re.compile(r"^(messages\.\d+\.(?:tool_calls\.\d+\.function\.arguments|content))\..*", re.DOTALL)


def attach_param(error: InputError | DecodingError, request: ParsedRequest, prompt: int = 0) -> RequestError:
    """Return an error of the decoder as a RequestError that names the field at fault, in the request's own words.

    prompt: the index of the prompt in the request.
    """
    if isinstance(error, DecodingError):
        return _nothing_to_choose(error, request)
    if isinstance(error, GrammarError) and request.grammar_fields:
        place = request.rename(_grammar_place(error.place or "", request))
        return RequestError(f"{place}: {error.reason}", param=place, code="invalid_value")
    found = with_param(error, _find_param(error, request, prompt))
    found.args = (request.rename(use_request_names(str(found), request.length_field, request.grammar_field)),)
    return found


def _grammar_place(place: str, request: ParsedRequest) -> str:
    """Return the field at a place in the request's grammar."""
    beginnings = (each for each in request.grammar_fields if not each or f"{place}.".startswith(f"{each}."))
    beginning = max(beginnings, key=len)
    if not beginning and request.settings["grammar"].kind == "lark":
        return request.grammar_fields[""]  # a text without fields of its own, or the gateway's own schema of calls
    return ".".join(filter(None, (request.grammar_fields[beginning], place.removeprefix(beginning).lstrip("."))))


def place_of(error: InputError) -> str | None:
    """Return the field of a chat that an error of its template is about, or None."""
    place = error.place if isinstance(error, PromptError) else None
    return None if place is None else _WITHIN_FIELD.sub(r"\1", place)


def _find_param(error: InputError, request: ParsedRequest, prompt: int) -> str | None:
    if isinstance(error, ContextError) and request.length_field is not None and "max_new_tokens" in str(error):
        return request.rename(request.length_field)  # the prompt alone fits, but not with the output
    if (place := place_of(error)) is not None:
        return request.rename(place)
    if isinstance(error, AudioError) and request.recording_field is not None:
        return request.rename(request.recording_field)
    if isinstance(error, PromptError | AudioError):
        return request.rename(request.fields[prompt])
    param = find_field(str(error), request.length_field, request.grammar_field)
    return None if param is None else request.rename(param)


def _nothing_to_choose(error: DecodingError, request: ParsedRequest) -> RequestError:
    """Return the error of a grammar all of whose tokens other settings ban."""
    if request.settings.get("grammar") is None:
        return RequestError(str(error), code="nothing_to_choose")
    values = {name: request.settings.get(name, 0) for name in BANNING}
    used = [f"outrider.{name}" for name in BANNING if values[name] != getattr(GenerationSettings, name)]
    message = str(error)
    if used:
        bans = "bans" if len(used) == 1 else "ban"
        message = f"{' and '.join(used)} {bans} every token that the grammar allows after the answer so far"
    param = used[0] if used else request.grammar_field
    return RequestError(
        request.rename(message), param=None if param is None else request.rename(param), code="nothing_to_choose"
    )
