"""Incremental parsing of a model's output into text and tool calls.

A `ToolSyntax` describes the texts around the calls, in which model families differ. One parser handles all of them. A
call that cannot be parsed is text of the answer, in full.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Final, Literal

from outrider.gateway.tool_call_scanner import CallScanner, load_json

WHITE: Final = " \t\r\n"
ID_LETTERS: Final = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolSyntax:
    """The texts around the tool calls in a model's output.

    opener: begins a group of calls. bare: a call may also be the whole answer, without an opener. start, separator,
    closer: before, between and after the calls of a group, each possibly missing. others: openers that models write
    instead, each with its closer. arguments: the key of the arguments beside "name". id_length: the length of a call's
    id if the template requires one, else 0.
    """

    name: Literal["hermes", "llama", "mistral"]
    opener: str
    bare: bool = False
    start: str = ""
    separator: str = ""
    closer: str = ""
    others: tuple[tuple[str, str], ...] = ()
    arguments: Literal["arguments", "parameters"] = "arguments"
    id_length: int = 0

    def new_id(self) -> str:
        """Return the id of a new call."""
        if self.id_length:
            return "".join(secrets.choice(ID_LETTERS) for _ in range(self.id_length))
        return f"call_{secrets.token_hex(12)}"


# Small models write a call as a block of code, or without any opener.
FENCES: Final = (("```json", "```"), ("```", "```"))
HERMES: Final = ToolSyntax("hermes", "<tool_call>", bare=True, closer="</tool_call>", others=FENCES)
LLAMA: Final = ToolSyntax("llama", "<|python_tag|>", bare=True, separator=";", arguments="parameters")
MISTRAL: Final = ToolSyntax("mistral", "[TOOL_CALLS]", start="[", separator=",", closer="]", id_length=9)


@dataclass(frozen=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next part of a call's arguments, which are JSON."""

    index: int
    text: str


Part = Text | CallStart | Arguments


class ToolParser:
    """Splits an output that arrives in pieces into text and calls.

    names: the tools. Calls of other names are text. whole: report a call at its end, and only if it is valid. Otherwise
    it is reported once its arguments begin, and `broken` counts the calls that turn out to be invalid after that.
    calls_or_text: the output is calls only if it begins with the opener, and otherwise text throughout.

    malformed, cut_off: number of calls that are text, because they are invalid or because the output ended within them.
    """

    def __init__(
        self, syntax: ToolSyntax, names: Set[str], *, whole: bool = False, calls_or_text: bool = False
    ) -> None:
        self._syntax, self._names, self._whole = syntax, names, whole
        self._pending = ""  # not processed yet
        self._lead = ""  # processed, but text unless a call follows
        first = self._group if syntax.bare else self._text
        self._state: Callable[[], list[Part] | None] = self._begin if calls_or_text else first
        self._in_group = 0  # calls in the current group
        self._openers = dict([(syntax.opener, syntax.closer), *syntax.others])
        self._closer = ""  # of the current group
        self._scanner = CallScanner(syntax.arguments)
        self._started = False  # whether the current call is reported
        self.calls = 0
        self.broken = 0
        self.malformed = 0
        self.cut_off = 0

    def feed(self, text: str) -> list[Part]:
        """Process a piece of the output, and return the completed parts."""
        self._pending += text
        parts: list[Part] = []
        while (found := self._state()) is not None:
            parts += found
        return parts

    def end(self) -> list[Part]:
        """Return the remaining parts at the end of the output."""
        parts = list[Part]()
        if self._state == self._object:
            before = self.malformed
            parts = self._end_call()
            self.cut_off, self.malformed = self.malformed - before, before
        elif self._state == self._group:
            if self._in_group and self._closer.startswith(self._pending):
                self._pending = ""
            self.cut_off = int(self._syntax.opener in self._lead or (self._in_group > 0 and bool(self._lead.strip())))
        rest = self._lead + self._pending
        self._lead = self._pending = ""
        return [*parts, Text(rest)] if rest and not (self.calls and not rest.strip()) else parts

    # States: each returns the parts that it found, or None if it needs more of the output --------------------

    def _begin(self) -> list[Part] | None:
        """Decide by the output's beginning whether it is calls or text."""
        opener = self._syntax.opener
        if opener.startswith(self._pending) and self._pending != opener:
            return None
        self._state = self._text if self._pending.startswith(opener) else self._plain
        return []

    def _plain(self) -> list[Part] | None:
        """Pass all output on as text."""
        text, self._pending = self._pending, ""
        return [Text(text)] if text else None

    def _text(self) -> list[Part] | None:
        """Search for an opener. White space before a call is not part of the text."""
        at, opener = self._find_opener()
        kept = at if at >= 0 else len(self._pending) - max(_overlap(self._pending, each) for each in self._openers)
        text = self._pending[:kept].rstrip(WHITE)
        found: list[Part] = [Text(text)] if text else []
        if at < 0:
            self._pending = self._pending[len(text) :]
            return found or None
        self._lead = self._pending[len(text) : at] + opener
        self._pending, self._closer = self._pending[at + len(opener) :], self._openers[opener]
        self._state, self._in_group = self._group, 0
        return found

    def _find_opener(self) -> tuple[int, str]:
        """Return the position of the first opener and its text. Position -1: none, or a longer one may still follow."""
        found = [(at, -len(opener), opener) for opener in self._openers if (at := self._pending.find(opener)) >= 0]
        at, _, opener = min(found, default=(-1, 0, ""))
        rest = self._pending[at:]
        is_open = any(other != rest and other.startswith(rest) for other in self._openers)
        return (-1, "") if at < 0 or is_open else (at, opener)

    def _group(self) -> list[Part] | None:
        """Expect a call, or the end of the group."""
        syntax = self._syntax
        rest = self._pending.lstrip(WHITE)
        self._lead += self._pending[: len(self._pending) - len(rest)]
        self._pending = rest
        if not rest:
            return None
        if rest[0] == "{":
            self._scanner, self._started, self._state = CallScanner(syntax.arguments), False, self._object
            return []
        expected = (syntax.separator, self._closer) if self._in_group else (syntax.start,)
        for token in filter(None, expected):
            if rest.startswith(token) and not self._lead.endswith(token):
                return self._skip(token, is_end=bool(self._in_group) and token == self._closer)
            if token.startswith(rest):
                return None
        return self._leave_group()

    def _skip(self, token: str, *, is_end: bool) -> list[Part]:
        self._lead += token
        self._pending = self._pending[len(token) :]
        if is_end:
            self._lead, self._state = "", self._text
        return []

    def _leave_group(self) -> list[Part]:
        """Continue as text. An opener without a call becomes text."""
        lead, self._lead, self._state = self._lead, "", self._text
        self.malformed += self._syntax.opener in lead
        if not lead.strip():
            self._pending = lead + self._pending
            return []
        return [Text(lead)]

    def _object(self) -> list[Part] | None:
        """Read a call."""
        scanner = self._scanner
        self._pending = self._pending[scanner.feed(self._pending) :]
        is_unknown = scanner.name is not None and scanner.name not in self._names
        if scanner.is_complete or scanner.has_failed or is_unknown:
            return self._end_call()
        return (None if self._whole else self._progress()) or None

    def _progress(self) -> list[Part]:
        """Report the call once its name and the beginning of its arguments are known, and then its arguments."""
        scanner, parts = self._scanner, list[Part]()
        if not self._started and scanner.name in self._names and scanner.arguments_begin_object:
            parts += self._start(str(scanner.name))
        if self._started and (text := scanner.take_arguments()):
            parts.append(Arguments(self.calls - 1, text))
        return parts

    def _start(self, name: str) -> list[Part]:
        self._started, self._lead = True, ""
        self.calls += 1
        return [CallStart(self.calls - 1, self._syntax.new_id(), name)]

    def _end_call(self) -> list[Part]:
        """End the current call. It becomes text if it is malformed and was not reported."""
        parts = self._progress() if self._started else []
        arguments = _arguments(self._scanner, self._names)
        if arguments is not None:
            if not self._started:
                parts = [*self._start(str(self._scanner.name)), Arguments(self.calls - 1, arguments)]
            self._state, self._in_group = self._group, self._in_group + 1
            return parts
        lead, self._lead, self._state = self._lead, "", self._text
        self.broken += self._started
        is_call = self._syntax.opener in lead or self._in_group > 0 or self._scanner.name is not None
        self.malformed += not self._started and is_call
        return parts if self._started else [Text(lead + self._scanner.raw)]


def _arguments(scanner: CallScanner, names: Set[str]) -> str | None:
    """Return an ended call's arguments as JSON, or None if the call is malformed. They may be a JSON string of it."""
    value = scanner.value()
    if value is None or scanner.name not in names:
        return None
    arguments = value.get(scanner.arguments_key)
    if arguments is None:
        return "{}"
    if isinstance(arguments, dict):
        return scanner.arguments
    return arguments if isinstance(arguments, str) and isinstance(load_json(arguments), dict) else None


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest end of `text` that begins `word`."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
