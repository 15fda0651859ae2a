"""The prompts of requests: conversations, recordings, texts and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import AudioError, PromptError
from outrider.gateway.completion_schema import CompletionRequest
from outrider.gateway.defaults import Defaults
from outrider.gateway.errors import JsonObject, RequestError, with_param
from outrider.gateway.recordings import decode_recording, extract_base64
from outrider.gateway.request_schema import (
    AudioPart,
    ChatRequest,
    Message,
    OutriderOptions,
    Request,
    TextPart,
)
from outrider.gateway.tool_history import check_results, message_fields
from outrider.gateway.tools import RequestedTools
from outrider.prompts.audio import Audio
from outrider.prompts.chat import PromptLike, check_text
from outrider.prompts.tool_template import ToolChat


@dataclass(frozen=True)
class RequestPrompts:
    """The prompts of a request and the field of each. recording_field: the field of the recording, if there is one."""

    prompts: Sequence[PromptLike]
    fields: tuple[str, ...]
    recording_field: str | None = None


def build_prompts(
    request: Request, options: OutriderOptions, defaults: Defaults, tools: RequestedTools | None
) -> RequestPrompts:
    """Return the prompts of a request. A chat has one, and a completion one or more.

    Raises:
        RequestError: a prompt is invalid. The error names the field.
    """
    if isinstance(request, ChatRequest):
        if any(isinstance(part, AudioPart) for message in request.messages for part in message.content or ()):
            if tools is not None:
                raise RequestError("tools: not supported together with a recording: leave them out", param="tools")
            audio, field = _decode_recording(request, options, defaults)
            return RequestPrompts([audio], ("messages",), field)
        _check_no_task(options)
        return RequestPrompts([build_chat(request, tools)], ("messages",))
    _check_no_task(options)
    assert isinstance(request, CompletionRequest)  # the only other kind
    prompt = request.prompt
    is_batch = isinstance(prompt, list) and isinstance(prompt[0], str | list)
    prompts: list[PromptLike] = [*prompt] if is_batch else [prompt]  # type: ignore[list-item]
    fields = tuple(f"prompt.{number}" if is_batch else "prompt" for number, _ in enumerate(prompts))
    for each, field in zip(prompts, fields, strict=True):
        if isinstance(each, str):
            _check_text(each, field)
            if not each:
                raise RequestError("the prompt is empty", param=field)
    return RequestPrompts(prompts, fields)


def build_echo(prompts: Sequence[PromptLike], defaults: Defaults, *, logprobs: bool) -> tuple[str, ...]:
    """Return the texts of a completion's prompts.

    Raises:
        RequestError: log-probabilities are requested as well, or token ids cannot be decoded.
    """
    if logprobs:
        raise RequestError("echo: the prompt's log-probabilities are not computed: leave out logprobs", param="echo")
    if isinstance(prompts[0], str):
        return tuple(map(str, prompts))
    if defaults.decode is None:
        raise RequestError(f"echo: {defaults.edge} came without a tokenizer", param="echo", code="unsupported")
    try:
        return tuple(defaults.decode(list(prompt)) for prompt in prompts)  # type: ignore[arg-type]
    except RequestError as error:
        raise RequestError(str(error), param="prompt") from error


def build_chat(request: ChatRequest, tools: RequestedTools | None) -> PromptLike:
    """Return a conversation without a recording as a prompt.

    Raises:
        RequestError: a message is invalid. The error names the field.
    """
    for at, message in enumerate(request.messages):
        _check_texts(at, message)
    messages = [_build_message(at, message) for at, message in enumerate(request.messages)]
    check_results(request.messages)
    return messages if tools is None else ToolChat(messages, tools.definitions)


def _build_message(at: int, message: Message) -> JsonObject:
    """Return a message in the form of chat templates."""
    role = "system" if message.role == "developer" else message.role
    content = {} if message.content is None else {"content": _texts(message)}
    return {"role": role, **content, **message_fields(at, message)}


def _check_no_task(options: OutriderOptions) -> None:
    for name in ("task", "lang"):
        if getattr(options, name) is not None:
            message = f"outrider.{name} applies to recordings, and the request has none"
            raise RequestError(message, param=f"outrider.{name}")


def _texts(message: Message) -> str:
    """Return a message's text, with a line for each part."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content or () if isinstance(part, TextPart))


def _check_texts(at: int, message: Message) -> None:
    """Refuse half a surrogate pair in a message's texts."""
    if isinstance(message.content, str):
        _check_text(message.content, f"messages.{at}.content")
        return
    for n, part in enumerate(message.content or ()):
        if isinstance(part, TextPart):
            _check_text(part.text, f"messages.{at}.content.{n}.text")


def _check_text(text: str, param: str) -> None:
    """Refuse half a surrogate pair."""
    try:
        check_text(text)
    except PromptError as error:
        raise RequestError(str(error), param=param) from error


def _decode_recording(request: ChatRequest, options: OutriderOptions, defaults: Defaults) -> tuple[Audio, str]:
    """Return the recording with its question or task, and the recording's field."""
    if not defaults.audio_seconds:
        raise RequestError(defaults.audio_refusal, param="messages")
    if len(request.messages) > 1 or request.messages[0].role != "user":
        raise RequestError(
            "a request with a recording must have a single message, from the user: remove the others", param="messages"
        )
    message = request.messages[0]
    (at, found), *others = [(n, part) for n, part in enumerate(message.content or ()) if isinstance(part, AudioPart)]
    if others:
        param = f"messages.0.content.{others[0][0]}"
        raise RequestError("more than one recording: send a request for each", param=param)
    question = _texts(message).strip() or None
    if question is not None:
        _check_texts(0, message)
        if options.task is not None or options.lang is not None:
            raise RequestError(
                "the text beside a recording replaces outrider.task and outrider.lang: give one or the other",
                param="outrider.task" if options.task is not None else "outrider.lang",
            )
    where = f"messages.0.content.{at}.input_audio"
    try:
        data = extract_base64(found.input_audio.data, f"{where}.data")
        recording = decode_recording(data, found.input_audio.format, defaults.audio_seconds, where)
    except AudioError as error:
        raise with_param(error, f"{where}.data") from error
    task, lang = options.task or "default", options.lang or "en"
    return Audio(recording.waveform, task, lang, instruction=question, warnings=recording.warnings), where
