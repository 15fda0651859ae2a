"""The grammar of an answer that calls tools, or that may follow a response format instead."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from typing import Any, Final

from outrider.config import Grammar
from outrider.gateway.errors import JsonObject
from outrider.gateway.tool_parsers import ToolSyntax

_ROOT: Final = "#/$defs/tool{}"
_LITERAL: Final = ("const", "enum", "default", "examples")  # keywords whose values are not schemas
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # map names to schemas
# The layout of JSON in chat templates. With free white space, weak models generate nothing else.
_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_BASE: Final = ("$id", "$schema")  # keywords that change what a $ref means


def call_grammar(
    syntax: ToolSyntax, tools: Seq[JsonObject], before: str, *, parallel: bool, answer: JsonObject | None = None
) -> Grammar:
    """Return the grammar of an answer that is one or more calls of these tools.

    before: the text before a call, or before a list of calls. parallel: allow more than one call. answer: the schema of
    an answer without calls, if one is allowed. The path in a GrammarError begins with the rule `calls` or `answer`.

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
        call = {"type": "array", "items": call, "minItems": 1, **most}
    rules = [
        "start: all" if answer is None else f"start: all | answer\nanswer: %json {_json(answer)}",
        f"all: one {_repeated(syntax) if parallel and not syntax.start else ''}",
        f"one: {_terminals(syntax, before)} calls {_terminals(syntax, _after(syntax))}",
        f"calls: %json {_json({**about, **call})}",
    ]
    return Grammar("lark", "\n".join(rules))


def _after(syntax: ToolSyntax) -> str:
    """Return the text after a call, or after a list of calls."""
    return f"\n{syntax.closer}" if syntax.closer and not syntax.start else ""


def _repeated(syntax: ToolSyntax) -> str:
    """Return further calls in Lark, each after a separator."""
    separator = "\n" if syntax.closer else f"{syntax.separator} "
    return f"({_json(separator)} one)*"


def _terminals(syntax: ToolSyntax, text: str) -> str:
    """Return a text before or after calls in Lark. Opener and closer are added tokens if the tokenizer has them."""
    marks = [mark for mark in (syntax.opener, syntax.closer) if mark]
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text)
    return " ".join(f"{'%token ' * (part in marks)}{_json(part)}" for part in parts if part)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _call_schema(syntax: ToolSyntax, tool: JsonObject, root: str) -> JsonObject:
    """Return the schema of a call. root: the reference of the schema of its arguments."""
    properties = {"name": {"const": tool["function"]["name"]}, syntax.arguments: {"$ref": root}}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _rebase(schema: Any, root: str) -> Any:
    """Return a copy of a schema in which references from its root are relative to `root`."""
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
