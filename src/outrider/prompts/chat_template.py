"""Chat templates, with a check that no message's text is lost.

Some templates expect content as a text, others as a list of parts, and they silently drop the other form. So a
conversation of the same shape is rendered first, with marks in place of its texts. Content is given in the form in
which every mark appears in the prompt. If there is none, the conversation is refused.

A control token of the tokenizer in a message's text is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any, Final

from jinja2 import TemplateError

from outrider.errors import PromptError, quote
from outrider.prompts import template_sandbox
from outrider.prompts.tool_template import Tools, check_marks, holds_result, iterate_strings, mark_calls, mark_tools

Messages = Seq[dict[str, Any]]
Special = tuple[tuple[str, str], ...]  # names and texts of special tokens

_MARK: Final = "Mark{}of9Texts"
_PRINTED_LIST: Final = re.compile(r"""['"]text['"]\s*:\s*['"]Mark\d+of9Texts""")  # a list printed as Python or JSON
_CONTINUE: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' tag, with the blank by which it detects trimming
_REASONING_END: Final = "</think>"  # templates leave out the assistant's reasoning before it
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
# A template's comparison of a role with one name or with a list of names.
_ROLE_TEST: Final = re.compile(
    r"""role['"]?\]?\s*(?:[!=]=\s*(['"]\w+['"])|(?:not\s+)?in\s*[\[(]([^\])]*))""",
)
_KINDS: Final = [("type", kind) for kind in ("text", "audio", "function")]
_CONTENT_FORMS: Final = ("given", "text", "parts")
MAX_CACHED_SHAPE: Final = 2**14  # characters of a conversation's shape whose form is cached


def render(name: str, tokenizer: Any, messages: Messages, *, recording: bool = False, tools: Tools = ()) -> str:
    """Return a conversation's prompt. The model continues the last message if it is the assistant's, else answers it.

    recording: whether there is a recording for an audio part.

    Raises:
        PromptError: the template drops or changes a text, a tool or a call, fails, or does not exist. Or a text holds a
            control token, a part is neither text nor that recording, or the assistant's last message has no text.
    """
    source = _source(name, tokenizer, tools)
    messages = _validate(messages, recording=recording)
    check_messages(name, tokenizer, messages, tools)
    _check_roles(source, messages)
    continued = messages[-1].get("role") == "assistant"
    if continued and messages[-1].get("tool_calls"):
        raise _error(messages, -1, "the last message calls tools: add messages with their results", "tool_calls")
    if continued and not _texts(messages[-1]):
        raise _error(messages, -1, "the assistant's last message has no text to continue")
    special = tuple(sorted(tokenizer.special_tokens_map.items()))
    form = _find_form(name, source, special, continued, messages, tools)
    template = _Template(name, source, special, continued, tools)
    text = template.render(_convert(messages, form))
    _check_texts(name, messages, text, continued=continued)
    return text


def _source(name: str, tokenizer: Any, tools: Tools) -> str:
    if not tokenizer.chat_template:
        raise PromptError(f"{name} has no chat template: give plain text or token ids")
    try:
        return str(tokenizer.get_chat_template(tools=list(tools) or None))
    except ValueError as error:
        known = ", ".join(sorted(tokenizer.chat_template))
        raise PromptError(f"the chat templates of {name} ({known}) have no default among them") from error


def _validate(messages: Messages, *, recording: bool) -> list[dict[str, Any]]:
    """Return the messages in the form for templates: without None, and with JSON values only."""
    if not all(isinstance(message, dict) for message in messages):
        raise PromptError("chat messages are dictionaries with a role and a content")
    try:
        kept = [{key: value for key, value in message.items() if not _is_unset(message, key)} for message in messages]
        plain: list[dict[str, Any]] = json.loads(json.dumps(kept, default=lambda value: f"<{type(value).__name__}>"))
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"the chat messages cannot be read: {error}") from error
    for number, message in enumerate(plain):
        if not isinstance(role := message.get("role"), str):
            raise _error(
                plain, number, "it has no role" if role is None else f"the role {quote(role)} is not a text", "role"
            )
        content = message.get("content", "" if "tool_calls" in message else None)
        if not isinstance(content, str | list):
            raise _error(plain, number, "content is a text or a list of parts")
        for part in [] if isinstance(content, str) else content:
            _check_part(_label(plain, number), part, recording=recording)
    return plain


def _check_roles(source: str, messages: Messages) -> None:
    """Raise PromptError for a role that is neither a usual one nor named in the template. It is probably a typo."""
    named = "".join(map("".join, _ROLE_TEST.findall(source)))
    known = list(dict.fromkeys([*ROLES, *re.findall(r"""['"](\w+)['"]""", named)]))
    for number, message in enumerate(messages):
        if message["role"] not in known:
            reason = f"the role {quote(message['role'])}: expected one of {', '.join(known)}"
            raise _error(messages, number, reason, "role")


def _is_unset(message: dict[str, Any], key: str) -> bool:
    """Return whether a field has the same meaning as its absence."""
    value = message[key]
    if key == "content" and message.get("tool_calls"):
        return not value or (isinstance(value, str) and not value.strip())
    return value is None or (key == "tool_calls" and not value)


def _check_part(label: str, part: Any, *, recording: bool) -> None:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if _is_text(part) or (recording and kind == "audio"):
        return
    if "audio" in str(kind):
        raise PromptError(f"{label} has an audio part but no recording comes with it: give outrider.Audio")
    raise PromptError(f'{label}: a part of kind {quote(kind)}: parts are {{"type": "text", "text": …}}')


def _error(messages: Messages, number: int, reason: str, field: str = "content") -> PromptError:
    """Return the error about a field of the chat message `number`."""
    return PromptError(f"{_label(messages, number)}: {reason}", place=f"messages.{number % len(messages)}.{field}")


def _label(messages: Messages, number: int) -> str:
    """Return a message's name for errors."""
    if len(messages) > 1:
        return f"messages.{number % len(messages)}"
    return "the message"


# Texts and their forms ----------------------------------------------------------------------------------------


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content", [])
    return [content] if isinstance(content, str) else [part["text"] for part in content if _is_text(part)]


def _convert(messages: Messages, form: str) -> list[dict[str, Any]]:
    """Return the messages with text-only contents in another form: one text (parts become lines), or parts."""
    if form == "given":
        return [message if "content" in message else {**message, "content": None} for message in messages]
    changed = []
    for message in messages:
        content, texts = message.get("content", []), _texts(message)
        if "content" not in message:
            message = {**message, "content": ""}  # of a message that calls tools
        elif isinstance(content, str) or (content and len(texts) == len(content)):
            parts = [{"type": "text", "text": text} for text in texts]
            message = {**message, "content": "\n".join(texts) if form == "text" else parts}
        changed.append(message)
    return changed


def _mark_texts(messages: Messages) -> list[dict[str, Any]]:
    """Return the conversation with a mark of its own in place of each text."""
    marked, count = [], 0
    for message in messages:
        content = message.get("content", [])
        if isinstance(content, str):
            message, count = {**message, "content": _MARK.format(count)}, count + 1
        else:
            parts = []
            for part in content:
                if _is_text(part):
                    part, count = {**part, "text": _MARK.format(count)}, count + 1
                parts.append(part)
            message = {**message, "content": parts} if content else message
        marked.append(message)
    return marked


class _Template:
    """A template with its arguments. continued: the prompt ends with the last message's text."""

    def __init__(self, name: str, source: str, special: Special, continued: bool, tools: Tools) -> None:
        self._name, self._source, self._special, self._continued = name, source, special, continued
        self._tools = list(tools) or None

    def render(self, messages: Messages) -> str:
        """Return the prompt. Raise PromptError if the template fails."""
        try:
            return self._render(messages)
        except PromptError:
            raise
        except Exception as error:  # a template is a program of the checkpoint and may raise anything
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise PromptError(f"the chat template of {self._name} failed: {reason}") from error

    def _render(self, messages: Messages) -> str:
        options = {"tools": self._tools, "documents": None, "add_generation_prompt": not self._continued}
        if not self._continued:
            return template_sandbox.render(self._source, messages=messages, **options, **dict(self._special))
        tagged = [*messages[:-1], _append_tag(messages[-1])]
        text = template_sandbox.render(self._source, messages=tagged, **options, **dict(self._special))
        at = text.rfind(_CONTINUE.strip())
        if at < 0:
            raise _continuation_error(self._name)
        return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()


def _append_tag(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with a tag after its last text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE}
    last = max(number for number, part in enumerate(content) if _is_text(part))
    parts = [*content[:last], {**content[last], "text": content[last]["text"] + _CONTINUE}, *content[last + 1 :]]
    return {**message, "content": parts}


def _continuation_error(name: str) -> PromptError:
    return PromptError(
        f"the chat template of {name} cannot continue a message of the assistant: end the conversation with the user's"
    )


def _find_form(name: str, source: str, special: Special, continued: bool, messages: Messages, tools: Tools) -> str:
    """Return the form in which all marks of a conversation of this shape appear in the prompt."""
    shape = json.dumps([mark_calls(_mark_texts(messages)), mark_tools(tools)])
    find = _form if len(shape) <= MAX_CACHED_SHAPE else _form.__wrapped__
    return find(name, source, special, continued, shape)


@lru_cache(256)
def _form(name: str, source: str, special: Special, continued: bool, shape: str) -> str:
    messages, tools = json.loads(shape)
    template = _Template(name, source, special, continued, tools)
    found: dict[str, list[int]] = {}
    failures: dict[str, PromptError] = {}
    for form in _CONTENT_FORMS:
        try:
            text = template.render(_convert(messages, form))
            check_marks(name, text, messages, tools)
            found[form] = _count_marks(text, sum(len(_texts(m)) for m in messages))
        except PromptError as error:
            failures[form] = error
    unique = [form for form, counts in found.items() if all(count == 1 for count in counts)]
    for form in (*unique, *(form for form, counts in found.items() if all(counts))):
        return form
    raise failures["given"] if "given" in failures else _dropped_text_error(name, messages, found["given"])


def _count_marks(text: str, count: int) -> list[int]:
    """Return the count of each mark in a prompt, without marks in a printed list."""
    if _PRINTED_LIST.search(text):
        return [0] * count
    return [text.count(_MARK.format(number)) for number in range(count)]


def _dropped_text_error(name: str, messages: Messages, counts: list[int]) -> PromptError:
    number, at = 0, counts.index(0)
    while at >= len(_texts(messages[number])):
        at, number = at - len(_texts(messages[number])), number + 1
    role = messages[number]["role"]
    advice = "; put it into the user's message" if role in ("system", "developer") else ""
    reason = f"the chat template of {name} drops the text of this message (role {role}), as a text and as a list of"
    return _error(messages, number, f"{reason} parts{advice}")


def _check_texts(name: str, messages: Messages, prompt: str, *, continued: bool) -> None:
    """Raise PromptError if a text is not in the prompt unchanged, but for surrounding white space."""
    if continued and not prompt.rstrip().endswith(_texts(messages[-1])[-1].rpartition(_REASONING_END)[2].strip()):
        raise _continuation_error(name)
    for number, message in enumerate(messages):
        for text in _texts(message):
            kept = text.rpartition(_REASONING_END)[2] if message["role"] == "assistant" else text
            if not (holds_result(text, prompt) if message["role"] == "tool" else kept.strip() in prompt):
                changed = f"the chat template of {name} changes the text of this message (role {message['role']})"
                advice = "so the model would read another text: give the whole prompt as plain text"
                raise _error(messages, number, f"{changed}, {advice}")


# Control tokens -----------------------------------------------------------------------------------------------


def check_messages(name: str, tokenizer: Any, messages: Messages, tools: Tools = ()) -> None:
    """Raise PromptError if a message or a tool holds invalid text or a control token.

    Control tokens are the tokens that the tokenizer marks as special or that look like <|this|>, and other added tokens
    that the chat template writes. The last kind, such as <think>, is allowed in assistant messages.
    """
    controls = control_tokens(tokenizer, str(tokenizer.chat_template))
    for path, text in iterate_strings("tools", list(tools)):
        controls.check(name, path, path, text, controls.all)
    for number, message in enumerate(messages):
        label = _label(messages, number)
        tokens = controls.special if message["role"] == "assistant" else controls.all
        for path, text in _iterate_texts(f"messages.{number}", message):
            controls.check(name, label if len(messages) == 1 else path, path, text, tokens)
        texts = _texts(message)
        if len(texts) > 1:  # a template may write parts without anything between them
            controls.check(name, label, f"messages.{number}.content", "".join(texts), tokens)


def _iterate_texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield all texts in a message, each with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key == "tool_calls":
                yield from iterate_strings(f"{path}.{key}", inner)
            elif (key, inner) not in _KINDS and not (key == "role" and inner in ROLES):
                yield from _iterate_texts(f"{path}.{key}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _iterate_texts(f"{path}.{number}", inner)


class ControlTokens:
    """The control tokens of a tokenizer, as text."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        added = list(getattr(tokenizer, "added_tokens_decoder", {}).items())
        by_shape = {each.content for _, each in added if re.fullmatch(r"<\|.*\|>", each.content)}
        special = by_shape | {each.content for _, each in added if each.special} | set(tokenizer.all_special_tokens)
        written = {each.content for _, each in added if each.content in template}
        self.special = tuple(sorted(filter(str.strip, special)))
        self.all = tuple(sorted(filter(str.strip, special | written)))
        # Only the tokenizer finds tokens in normalised text, for example in lower case.
        self._normalised = {n: each.content for n, each in added if each.special and each.normalized}
        self._tokenizer = tokenizer

    def check(self, name: str, label: str, place: str, text: str, tokens: Seq[str]) -> None:
        """Raise PromptError if a text is not valid Unicode or holds one of the tokens.

        label: the text's name in the error's message. place: its path in the chat.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            reason = f"{label} is not UTF-8, or holds half a surrogate pair: it is not text"
            raise PromptError(reason, place=place) from error
        for token in tokens:
            if token in text:
                raise _control_token_error(label, place, token, name)
        if self._normalised:
            ids = set(self._tokenizer(text, add_special_tokens=False)["input_ids"]) - {self._tokenizer.unk_token_id}
            for token in ids & self._normalised.keys():
                raise _control_token_error(label, place, self._normalised[token], name)


def _control_token_error(label: str, place: str, token: str, name: str) -> PromptError:
    return PromptError(
        f"{label} contains the control token {quote(token)} of {name}, which a message's text cannot hold: leave it "
        "out, or give the whole prompt as plain text or token ids",
        place=place,
    )


@lru_cache(16)
def control_tokens(tokenizer: Any, template: str = "") -> ControlTokens:
    """Return the tokenizer's control tokens, and those that a template writes."""
    return ControlTokens(tokenizer, template)
