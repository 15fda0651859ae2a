"""The tool whose schema prevents an enforced call: the error of the grammar of all tools together does not tell."""

from __future__ import annotations

from collections.abc import Callable

from outrider.config import Grammar
from outrider.errors import GrammarError, SettingsError
from outrider.gateway.tools import RequestedTools


def locate_schema(
    error: GrammarError, tools: RequestedTools, compile_grammar: Callable[[Grammar], None]
) -> tuple[str | None, GrammarError]:
    """Return the field and the error of the first tool whose schema cannot be compiled by itself. May take seconds.

    If all can, return the field of all schemas together, and `error`.
    """
    for number in tools.enforced:
        try:
            compile_grammar(Grammar.json_schema(tools.definitions[number]["function"]["parameters"]))
        except GrammarError as found:
            return f"tools.{number}.function.parameters", found
        except SettingsError:  # no schema causes it
            break
    return tools.grammar_field, error
