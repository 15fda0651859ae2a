"""Attribution of decoder errors to fields of the request."""

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

BANNING_SETTINGS: Final = ("min_new_tokens", "no_repeat_ngram_size")  # may ban every token that a grammar allows
# Paths below fields that a template gets in another form than the request has, such as arguments as an object.
_WITHIN_FIELD: Final = re.compile(r"^(messages\.\d+\.(?:tool_calls\.\d+\.function\.arguments|content))\..*", re.DOTALL)


def attach_param(error: InputError | DecodingError, request: ParsedRequest, prompt: int = 0) -> RequestError:
    """Return an error of the decoder as a RequestError with the path of the field at fault, in the request's own names.

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
    """Return the request's field for a path in the grammar, by the longest known prefix of the path."""
    prefixes = (each for each in request.grammar_fields if not each or f"{place}.".startswith(f"{each}."))
    prefix = max(prefixes, key=len)
    if not prefix and request.settings["grammar"].kind == "lark":
        return request.grammar_fields[""]  # a text has no fields, and rules of tool calls are the gateway's own
    return ".".join(filter(None, (request.grammar_fields[prefix], place.removeprefix(prefix).lstrip("."))))


def place_of(error: InputError) -> str | None:
    """Return the path of a chat's field at which its template failed, or None."""
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
    """Return the error of a generation in which no token can be chosen, usually because settings ban them all."""
    if request.settings.get("grammar") is None:
        return RequestError(str(error), code="nothing_to_choose")
    values = {name: request.settings.get(name, 0) for name in BANNING_SETTINGS}
    used = [f"outrider.{name}" for name in BANNING_SETTINGS if values[name] != getattr(GenerationSettings, name)]
    message = str(error)
    if used:
        bans = "bans" if len(used) == 1 else "ban"
        message = f"{' and '.join(used)} {bans} every token that the grammar allows after the answer so far"
    param = used[0] if used else request.grammar_field
    return RequestError(
        request.rename(message), param=None if param is None else request.rename(param), code="nothing_to_choose"
    )
