"""Check of the schemas in a request for keywords that JSON Schema does not define, such as typos."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outrider.engines.schemas import find_unknown_keywords
from outrider.gateway.errors import JsonObject, RequestError
from outrider.gateway.request_schema import ChatRequest, JsonSchemaFormat
from outrider.gateway.tools import RequestedTools

MAX_NAMED: Final = 5  # keywords that a warning names


def check_keywords(request: ChatRequest, tools: RequestedTools | None) -> list[str]:
    """Return warnings about unknown keywords, one for each schema with any.

    Raises:
        RequestError: a schema with `strict` has one. OpenAI refuses it, too.
    """
    notes = []
    for field, schema, is_strict in _schemas(request, tools):
        unknown = find_unknown_keywords(schema)
        if unknown and is_strict:
            path = f"{field}.{unknown[0]}"
            raise RequestError(f"{path}: no such keyword in JSON Schema", param=path, code="invalid_value")
        if unknown:
            more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
            notes.append(
                f"{field}: ignored keywords that JSON Schema does not define: {', '.join(unknown[:MAX_NAMED])}{more}"
            )
    return notes


def _schemas(request: ChatRequest, tools: RequestedTools | None) -> Iterator[tuple[str, JsonObject, bool]]:
    """Yield the enforced and the strict schemas, each with its field, and whether it is strict."""
    given = request.response_format
    if isinstance(given, JsonSchemaFormat) and isinstance(given.json_schema.schema_, dict):
        yield "response_format.json_schema.schema", given.json_schema.schema_, bool(given.json_schema.strict)
    for number, tool in enumerate(request.tools or ()):
        function = tool.function
        is_enforced = tools is not None and number in tools.enforced
        if function.parameters and (function.strict or is_enforced):
            yield f"tools.{number}.function.parameters", function.parameters, bool(function.strict)
