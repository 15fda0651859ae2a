"""Translation of all kinds of grammars into llguidance's variant of Lark, which is then compiled.

The variant has one extension: `%token "text"` matches the tokenizer's added token of that name, or the text if there is
no such token. A model that was trained with an added token such as `<tool_call>` does not spell it with other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from outrider.config import Grammar
from outrider.decoding.detokenizer import Tokenizer
from outrider.engines.schema_parts import Schema
from outrider.engines.schemas import check_schema, normalize, read_schema, write_schema
from outrider.errors import GrammarError

# Forced tokens would make masks depend on how the tokenizer splits forced texts.
OPTIONS: Final = '%llguidance {"no_forcing": true}'
_STRING: Final = r'"(?:\\.|[^"\\\n])*"'
_LEXEMES: Final = re.compile(  # strings, regular expressions and comments too, as they may contain a directive's text
    rf"{_STRING}|/(?!/)(?:\\.|[^/\\\n])+/|//[^\n]*|(?P<rule>^\w+)|%json\b\s*(?=\{{)|%token\s+(?P<token>{_STRING})", re.M
)


def to_lark(grammar: Grammar, tokenizer: Tokenizer) -> str:
    """Return a grammar of any kind in llguidance's variant of Lark.

    Raises:
        GrammarError: a schema is not valid JSON, is not a schema, or cannot be enforced exactly.
    """
    if grammar.kind == "lark":
        added = _added_tokens(tokenizer)
        parts = (
            _check_and_write(value, rule) if isinstance(value, dict) else value
            for rule, value in _split(grammar, added)
        )
        return "".join(parts) + f"\n{OPTIONS}"
    if grammar.kind == "regex":
        from llguidance import regex_to_lark

        return f"start: /{regex_to_lark(grammar.text, '')}/\n{OPTIONS}"
    ((_, schema),) = schemas_in(grammar)
    check_schema(schema)
    return json_to_lark(schema)


def json_to_lark(schema: Schema) -> str:
    """Return the grammar of a schema's values."""
    return f"start: %json {write_schema(schema)}\n{OPTIONS}"


def schemas_in(grammar: Grammar) -> list[tuple[str, Schema]]:
    """Return the JSON schemas of a grammar, each with the name of its Lark rule ("" for the other kinds).

    Raises:
        GrammarError: the text of a JSON grammar is not JSON, or is not a schema.
    """
    if grammar.kind == "json_object":
        return [("", {"type": "object"})]
    if grammar.kind == "json_schema":
        return [("", read_schema(grammar.text))]
    if grammar.kind == "regex":
        return []
    return [(rule, value) for rule, value in _split(grammar, {}) if isinstance(value, dict)]


def _split(grammar: Grammar, added: dict[str, int]) -> Iterator[tuple[str, str | Schema]]:
    """Yield the texts and the JSON schemas of a Lark grammar in order, each with the name of its rule.

    added: the tokenizer's added tokens, with which `%token` is replaced.
    """
    text, at, rule = grammar.text, 0, ""
    while (found := _LEXEMES.search(text, at)) is not None:
        rule = found["rule"] or rule
        if found["token"] is not None:
            yield rule, text[at : found.start()] + _token(found["token"], added)
        else:
            yield rule, text[at : found.end()]
        at = found.end()
        if found[0].startswith("%json"):
            try:
                schema, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                continue  # llguidance refuses it
            yield rule, normalize(schema)
    yield rule, text[at:]


def _check_and_write(schema: Schema, rule: str) -> str:
    """Return a schema as JSON for llguidance. An error's path begins with the name of the rule."""
    try:
        check_schema(schema)
    except GrammarError as error:
        raise GrammarError(error.reason, ".".join(filter(None, (rule, error.place)))) from error
    return write_schema(schema)


def _token(literal: str, added: dict[str, int]) -> str:
    """Return the Lark terminal of `%token`. literal: the token's name, as a Lark string."""
    token = added.get(_unquote(literal))
    return literal if token is None else f"<[{token}]>"


def _unquote(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""


def _added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {each.content: token for token, each in added.items()}
