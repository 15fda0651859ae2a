"""Translation of pydantic's validation errors into one error of the request, with the path of the field at fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import ValidationError

from outrider.errors import MAX_QUOTED
from outrider.gateway.errors import JsonObject, RequestError
from outrider.gateway.request_schema import OutriderOptions, StrictModel

PART_TYPES: Final = ("text", "input_audio")  # tags of union branches, which pydantic inserts into an error's path
SIZE_ERRORS: Final = ("too_long", "too_short", "string_too_long", "string_too_short")
TYPE_ERRORS: Final = ("string_type", "int_type", "int_from_float", "list_type")
FORMATS_MESSAGE: Final = "expected the type text, json_object or json_schema"
FUNCTION_MESSAGE: Final = "expected function, the only supported type"
PROMPT_MESSAGE: Final = "a prompt is a text, token ids, a list of texts, or a list of lists of token ids"


def to_request_error(error: ValidationError, kind: type[StrictModel], data: JsonObject) -> RequestError:
    """Return the most helpful of the validation errors, without quoting values.

    A wrong `type` comes first, then an unknown field, a wrong size, and the error at the longest path.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    paths = [_error_path(each["loc"], data, missing=each["type"] == "missing") for each in errors]
    order = range(len(errors))

    def weight(n: int) -> tuple[bool, bool, bool, int, int]:
        """Return the sort key of an error. In a union, the branch that matches best has the longest path."""
        kind = errors[n]["type"]
        is_wrong_type = kind == "literal_error" and paths[n][-1:] == ["type"]  # which decides the other fields
        return is_wrong_type, kind == "extra_forbidden", kind in SIZE_ERRORS, len(paths[n]), -n

    at = max(order, key=weight)
    return _describe_error(errors[at]["type"], errors[at]["msg"], paths[at], kind)


def _describe_error(type_: str, message: str, path_steps: list[str], kind: type[StrictModel]) -> RequestError:
    path = ".".join(path_steps)
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
    message = _find_message(type_, path_steps, kind) or message
    if path_steps[:1] == ["prompt"] and type_ in TYPE_ERRORS:
        message = f"{message}: {PROMPT_MESSAGE}"
    return RequestError(f"{path or 'the body'}: {message}", param=path or None, code="invalid_value")


def _find_message(type_: str, path_steps: list[str], kind: type[StrictModel]) -> str | None:
    """Return a message in place of an unclear one of pydantic, or None."""
    name = path_steps[-1] if path_steps else ""
    if name == "role":
        return kind.roles_message
    if path_steps == ["tool_choice"]:
        return kind.tool_choice_message
    if path_steps == ["outrider", "k"]:
        return "expected 1 to 64, or auto"
    if type_ == "literal_error" and name == "type":
        return FUNCTION_MESSAGE
    if type_.startswith("union_tag"):
        formats = FORMATS_MESSAGE if name in ("response_format", "format") else None
        return formats or (kind.items_message if len(path_steps) == len(("input", "0")) else kind.parts_message)
    return "expected an object" if type_ in ("model_type", "model_attributes_type", "dict_type") else None


def _find_unsupported(path_steps: list[str], kind: type[StrictModel]) -> str | None:
    """Return the first step of a path that is an unsupported field of the request or of a message, or None."""
    steps = path_steps if path_steps[:1] == ["messages"] else path_steps[:1]
    return next((step for step in steps if step in kind.reasons), None)


def _error_path(loc: Sequence[int | str], data: object, *, missing: bool) -> list[str]:
    """Return the path of an error in the request, without the steps that pydantic adds for branches of unions."""
    path_steps: list[str] = []
    for number, step in enumerate(loc, start=1):
        child = _step_into(data, step)
        is_tag = number > 1 and isinstance(loc[number - 2], int) and step in PART_TYPES
        if is_tag and isinstance(data, dict) and data.get("type") == step and number < len(loc):
            continue  # the tag of a part's type, even if the part has a field of this name
        if child is not None:
            data = child[0]
        elif number < len(loc) or not missing:
            continue
        path_steps.append(str(step)[:MAX_QUOTED])
    return path_steps


def _step_into(data: object, step: int | str) -> tuple[object] | None:
    """Return the value under a key or index, in a tuple, or None if there is none."""
    if isinstance(data, dict):
        return (data[step],) if step in data else None
    return (data[step],) if isinstance(data, list) and isinstance(step, int) and step < len(data) else None


def _list_known_fields(path_steps: list[str], kind: type[StrictModel]) -> str:
    """Return the end of the message about an unknown field: the fields that exist there."""
    if len(path_steps) == 1 and path_steps[0] in OutriderOptions.model_fields:
        return f"; use outrider.{path_steps[0]}"
    if len(path_steps) == 1:
        return f"; expected one of {', '.join(sorted(kind.model_fields))}"
    names = OutriderOptions.model_fields if path_steps[0] == "outrider" and len(path_steps) == 2 else ()
    return f"; expected one of {', '.join(sorted(names))}" if names else ""
