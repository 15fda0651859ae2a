"""The grammar of an answer that must call tools."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Final

from outrider.config import Grammar
from outrider.gateway.errors import JsonObject
from outrider.gateway.tool_parsers import ToolSyntax

_ROOT: Final = "#/$defs/tool{}"
_LITERAL: Final = ("const", "enum", "default", "examples")  # keys whose values are not schemas
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # values: schemas
# The layout of JSON in chat templates. With unlimited white space, weak models generate nothing else.
_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BASE: Final = ("$id", "$schema")  # keys that would change the base of references


def call_grammar(syntax: ToolSyntax, tools: Seq[JsonObject], before: str, *, parallel: bool) -> Grammar:
    """Return the grammar of an answer that is one or more calls of these tools.

    before: the text before a call, or before a list of them. parallel: allow more than one.

    Raises:
        SettingsError: the grammar is too long.
    """
    roots = [_ROOT.format(number) for number, _ in enumerate(tools)]
    parameters = [_rebase(tool["function"]["parameters"], root) for tool, root in zip(tools, roots, strict=True)]
    definitions = {root.rpartition("/")[2]: each for root, each in zip(roots, parameters, strict=True)}
    about: JsonObject = {"$defs": definitions, "x-guidance": _LAYOUT}
    calls = [_call_schema(syntax, tool, root) for tool, root in zip(tools, roots, strict=True)]
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if syntax.start:
        most = {} if parallel else {"maxItems": 1}
        return Grammar.json_in({"type": "array", "items": call, "minItems": 1, **most, **about}, before)
    after = f"\n{syntax.closer}" if syntax.closer else ""
    separator = ("\n" if after else f"{syntax.separator} ") if parallel else None
    return Grammar.json_in({**call, **about}, before, after, separator=separator)


def _call_schema(syntax: ToolSyntax, tool: JsonObject, root: str) -> JsonObject:
    properties = {"name": {"const": tool["function"]["name"]}, syntax.arguments: {"$ref": root}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _rebase(schema: Any, root: str) -> Any:
    """Return a schema whose references to its own root point to `root`."""
    if isinstance(schema, list):
        return [_rebase(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    rebased: JsonObject = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            rebased[key] = root + value[1:]
        elif key in _NAMED and isinstance(value, dict):
            rebased[key] = {name: _rebase(each, root) for name, each in value.items()}
        elif key not in _BASE:
            rebased[key] = value if key in _LITERAL else _rebase(value, root)
    return rebased
