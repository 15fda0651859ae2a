"""Tools: the syntax of a model's calls, the tools of a request, and the calls of an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Final

from outrider.config import Grammar
from outrider.decoding.events import StreamEvent
from outrider.decoding.result import Result
from outrider.decoding.stopping import FinishReason
from outrider.errors import PromptError, SettingsError, quote
from outrider.gateway.errors import JsonObject, RequestError
from outrider.gateway.request_schema import ChatRequest, JsonObjectFormat, JsonSchemaFormat, NamedToolChoice
from outrider.gateway.tool_grammar import call_grammar
from outrider.gateway.tool_parsers import (
    HERMES,
    LLAMA,
    MISTRAL,
    CallStart,
    Part,
    Text,
    ToolParser,
    ToolSyntax,
)
from outrider.prompts import chat_template

_PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "ProbeTool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"ProbeKey": {"type": "string", "description": "A key."}}},
    },
}
_PROBE_ID: Final = "Probe0001"
_PROBE_CALL: Final = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": _PROBE_ID,
            "type": "function",
            "function": {"name": "ProbeTool", "arguments": {"ProbeKey": "ProbeValue"}},
        }
    ],
}
_PROBE: Final[list[JsonObject]] = [
    {"role": "user", "content": "A question."},
    _PROBE_CALL,
    {"role": "tool", "tool_call_id": _PROBE_ID, "content": "A result."},
]
_WRITTEN: Final = re.compile(
    r'\{\s*"name":\s*"ProbeTool",\s*"(arguments|parameters)":\s*\{\s*"ProbeKey":\s*"ProbeValue"\s*\}'
)


@dataclass(frozen=True)
class ToolSupport:
    """A model's support of tools.

    opening: the text with which the template begins the calls of a turn. special: the texts of special tokens that
    belong to the syntax, which the detokenizer drops.
    """

    syntax: ToolSyntax
    opening: str = ""
    special: Mapping[int, str] = field(default_factory=dict)

    @property
    def writes_opener(self) -> bool:
        """Whether the template writes the opener before calls, which distinguishes them from other answers."""
        return self.syntax.opener in self.opening


def find_tool_support(name: str, tokenizer: Any) -> ToolSupport:
    """Return the syntax in which a chat template writes the tool calls.

    Raises:
        PromptError: the template does not support tools, or writes calls in a syntax without a parser.
    """
    question = chat_template.render(name, tokenizer, _PROBE[:1], tools=[_PROBE_TOOL])
    prompt = chat_template.render(name, tokenizer, _PROBE, tools=[_PROBE_TOOL])
    written = _WRITTEN.search(prompt, len(question) if prompt.startswith(question) else 0)
    before = prompt[: written.start()] if written is not None else ""
    opening = before.removeprefix(question)
    for syntax in (HERMES, MISTRAL, LLAMA):
        if written is not None and _matches(syntax, opening, is_bare=before == question):
            found = replace(syntax, arguments=written[1])  # type: ignore[arg-type]
            return ToolSupport(found, opening, _special_tokens(tokenizer, found))
    raise PromptError(
        f"tools: the chat template of {name} writes the tool calls in a syntax that the gateway cannot parse: it "
        "parses <tool_call>{…}</tool_call>, [TOOL_CALLS] [{…}] and JSON with name and parameters"
    )


def _matches(syntax: ToolSyntax, opening: str, *, is_bare: bool) -> bool:
    """Return whether the text before the first call of an answer matches the syntax."""
    if is_bare:
        return syntax is LLAMA
    return "".join(opening.split()).endswith(syntax.opener + syntax.start)


def _special_tokens(tokenizer: Any, syntax: ToolSyntax) -> dict[int, str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {syntax.opener, syntax.closer, syntax.start, syntax.separator} - {""}
    return {token: each.content for token, each in added.items() if each.special and each.content in texts}


# Requests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestedTools:
    """The tools of one request. parallel: whether an answer may hold more than one call.

    enforced: the indices of the tools whose calls a grammar enforces, or empty without a grammar. answer: the schema of
    an answer without a call, if the grammar allows one. answer_field: its field in the request.
    """

    support: ToolSupport
    definitions: tuple[JsonObject, ...]
    parallel: bool = True
    enforced: tuple[int, ...] = ()
    answer: JsonObject | None = None
    answer_field: str = ""

    @property
    def names(self) -> Set[str]:
        """Return the names of the tools."""
        return {tool["function"]["name"] for tool in self.definitions}

    @property
    def grammar(self) -> Grammar | None:
        """Return the grammar of an enforced answer.

        Raises:
            RequestError: the schemas are too long.
        """
        if not self.enforced:
            return None
        syntax, tools = self.support.syntax, [self.definitions[number] for number in self.enforced]
        begun = self.support.opening.rpartition(syntax.opener)[2].removesuffix(syntax.start)
        before = syntax.opener + begun if self.support.writes_opener else begun
        try:
            return call_grammar(syntax, tools, before, parallel=self.parallel, answer=self.answer)
        except SettingsError as error:
            raise RequestError(f"tools: {error}", param="tools", code="invalid_value") from error

    @property
    def grammar_fields(self) -> dict[str, str]:
        """Return the request's fields of the schemas in the grammar, by prefixes of the path in a GrammarError."""
        fields = [f"tools.{number}.function.parameters" for number in self.enforced]
        places = {f"calls.$defs.tool{number}": each for number, each in enumerate(fields)}
        answer = {} if self.answer is None else {"answer": self.answer_field}
        return {"": fields[0] if len(fields) == 1 else "tools", **places, **answer} if fields else {}


def read_tools(request: ChatRequest, support: ToolSupport | str) -> RequestedTools | None:
    """Return the tools that the model may call, or None. support: the model's, or the reason why it has none.

    Raises:
        RequestError: there is no support, or the tools and the choice among them contradict each other.
    """
    tools, choice = request.tools or [], request.tool_choice or "auto"
    if not tools and choice not in ("none", "auto"):
        raise RequestError("tool_choice: the request has no tools to call", param="tool_choice")
    if not tools or choice == "none":
        return None
    if isinstance(support, str):
        raise RequestError(support, param="tools", code="unsupported")
    definitions = tuple(each.definition() for each in tools)
    names = [tool["function"]["name"] for tool in definitions]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise RequestError(f"tools.{number}: duplicate tool name {name}", param=f"tools.{number}")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise RequestError(f"tool_choice: there is no tool {quote(choice.function.name)}", param="tool_choice")
    answer, answer_field = _read_answer(request, support) if choice == "auto" else (None, "")
    enforced: tuple[int, ...] = ()
    if isinstance(choice, NamedToolChoice):
        enforced = (names.index(choice.function.name),)
    elif choice == "required" or answer is not None:
        enforced = tuple(range(len(names)))
    parallel = request.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    return RequestedTools(support, definitions, parallel, enforced, answer, answer_field)


def _read_answer(request: ChatRequest, support: ToolSupport) -> tuple[JsonObject | None, str]:
    """Return the schema of an answer without a call and the schema's field, or None and ""."""
    given = request.response_format
    if not isinstance(given, JsonSchemaFormat | JsonObjectFormat):
        return None, ""
    if not support.writes_opener:
        raise RequestError(
            "response_format cannot be combined with tools: this model writes calls as JSON alone, which cannot be "
            "distinguished from an answer in the format: leave out one of them",
            param="response_format",
            code="unsupported",
        )
    if isinstance(given, JsonObjectFormat):
        return {"type": "object"}, "response_format"
    field, schema = "response_format.json_schema.schema", given.json_schema.schema_
    if schema is False:
        raise RequestError(f"{field}: the schema false allows no output", param=field, code="invalid_value")
    return {} if schema is True else schema, field


def build_notes(request: ChatRequest, tools: RequestedTools | None) -> list[str]:
    """Return warnings about fields of tools without effect."""
    if request.parallel_tool_calls is not None and not request.tools:
        return ["parallel_tool_calls was not used: there are no tools"]
    strict = [n for n, tool in enumerate(request.tools or []) if tool.function.strict]
    if not strict or tools is None or tools.enforced:
        return []
    return [f"tools.{strict[0]}.function.strict was not used: with tool_choice auto, arguments are not enforced"]


# Answers ------------------------------------------------------------------------------------------------------


class ToolOutput:
    """Splits one answer into text and calls. whole: the answer is not streamed."""

    def __init__(self, tools: RequestedTools, *, whole: bool) -> None:
        self._tools = tools
        self._parser = ToolParser(
            tools.support.syntax, tools.names, whole=whole, calls_or_text=tools.answer is not None
        )
        self._calls = 0  # number of reported calls
        self._left_out = 0

    def add_special(self, events: Seq[StreamEvent]) -> list[StreamEvent]:
        """Return the events, with the texts of the syntax's special tokens added."""
        special = self._tools.support.special
        return [
            replace(event, text=event.text + special[event.token_id]) if event.token_id in special else event
            for event in events
        ]

    def with_special(self, result: Result) -> Result:
        """Return the result, with the texts of the syntax's special tokens added."""
        special = self._tools.support.special
        if not special.keys() & set(result.token_ids):
            return result
        pairs = zip(result.pieces, result.token_ids, strict=True)
        return replace(result, text="".join(piece + special.get(token, "") for piece, token in pairs))

    def feed(self, text: str) -> list[JsonObject]:
        """Process a piece of the text, and return its deltas."""
        return self._deltas(self._parser.feed(text))

    def end(self) -> list[JsonObject]:
        """Return the deltas at the end of the output."""
        return self._deltas(self._parser.end())

    def message(self, text: str) -> JsonObject:
        """Return the content and the calls of an answer that is not streamed."""
        content, calls = "", list[JsonObject]()
        for delta in [*self.feed(text), *self.end()]:
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish reason. reason: that of an answer without calls."""
        return "tool_calls" if self._calls and reason != "length" else reason

    def warnings(self, finish_reason: FinishReason) -> list[str]:
        """Return warnings about calls that are not reported as the model wrote them."""
        end = "by the token limit" if finish_reason == "length" else "at the end of the output"
        counts = {
            "tool calls in the output are malformed, or name no tool of the request: they are text of the answer": (
                self._parser.malformed
            ),
            f"tool calls were cut off {end}: they are text of the answer": self._parser.cut_off,
            "tool calls ended within their arguments, which are not valid JSON": self._parser.broken,
            "tool calls were left out: parallel_tool_calls is false": self._left_out,
        }
        return [f"{count} {reason}" for reason, count in counts.items() if count]

    def _deltas(self, parts: Seq[Part]) -> list[JsonObject]:
        deltas: list[JsonObject] = []
        for part in parts:
            if isinstance(part, Text):
                deltas.append({"content": part.text})
                continue
            is_start = isinstance(part, CallStart)
            if part.index and not self._tools.parallel:
                self._left_out += is_start
                continue
            self._calls += is_start
            deltas.append({"tool_calls": [_call_delta(part)]})
        return deltas


def _call_delta(part: Part) -> JsonObject:
    if isinstance(part, CallStart):
        function = {"name": part.name, "arguments": ""}
        return {"index": part.index, "id": part.id, "type": "function", "function": function}
    assert not isinstance(part, Text)
    return {"index": part.index, "function": {"arguments": part.text}}
