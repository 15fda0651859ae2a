"""Prompt encoding: conversion of text, token ids, chat messages or a recording to the models' input."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import Any, TypeVar

from outrider.engines.base import Prompt
from outrider.engines.vocabulary import tokenize
from outrider.errors import ContextError, PromptError, quote
from outrider.numeric import as_integer, is_integer
from outrider.prompts import audio as recordings
from outrider.prompts import captions, chat_template
from outrider.prompts.audio import Audio
from outrider.prompts.chat_template import Messages
from outrider.prompts.tool_template import ToolChat, Tools

Ids = TypeVar("Ids", list[int], tuple[int, ...])
PromptLike = str | Seq[int] | Messages | ToolChat | Audio


def check_text(prompt: str) -> None:
    """Raise PromptError for invalid Unicode. Bytes that are not UTF-8 become halves of surrogate pairs."""
    if not prompt.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise PromptError("the prompt is not UTF-8, or holds half a surrogate pair: it is not text")


def encode(engine: Any, prompt: PromptLike) -> Prompt:
    """Return the prompt as the input of the engine's model.

    Raises:
        PromptError: the prompt is empty, has an id outside the vocabulary, or needs a tokenizer or chat template that
            the model lacks.
        ContextError: the prompt is longer than the model's context.
        AudioError: the recording cannot be used.
    """
    if isinstance(prompt, Audio):
        return _encode_audio(engine, prompt)
    if isinstance(prompt, ToolChat):
        ids = _from_messages(engine, prompt.messages, tools=prompt.tools)
        return Prompt(_check_ids(engine, _check_no_placeholder(engine, ids)))
    if isinstance(prompt, str):
        check_text(prompt)
        return Prompt(_check_ids(engine, _check_no_placeholder(engine, _read(engine, prompt))))
    if not isinstance(prompt, list | tuple):
        kind = type(prompt).__name__
        raise PromptError(f"a prompt is text, a list of token ids, a list of chat messages, or Audio, not {kind}")
    if len(prompt) and isinstance(prompt[0], dict):
        return Prompt(_check_ids(engine, _check_no_placeholder(engine, _from_messages(engine, prompt))))
    return Prompt(_check_no_placeholder(engine, _check_ids(engine, prompt)))


def _encode_audio(engine: Any, prompt: Audio) -> Prompt:
    messages = captions.messages(prompt.task, prompt.lang)
    if prompt.instruction is not None:
        messages[0]["content"][1]["text"] = prompt.instruction
    recording = recordings.read(prompt)
    waveform = recording.waveform
    encoder = getattr(engine, "audio", None)
    if encoder is None:
        raise PromptError(f"{engine.name} takes no audio: give an audio-language model")
    name = "the recording" if hasattr(prompt.source, "dtype") else str(prompt.source)
    recordings.check_length(waveform, encoder.max_seconds, engine.name, name)
    ids = _from_messages(engine, messages, recording=True)
    expanded = _expand(ids, encoder.placeholder, encoder.token_count(len(waveform)))
    return Prompt(_check_ids(engine, expanded), waveform, warnings=recording.warnings)


def _expand(ids: Seq[int], placeholder: int, count: int) -> list[int]:
    """Replace the template's placeholder by `count` placeholders."""
    if list(ids).count(placeholder) != 1:
        raise PromptError(f"the chat template places {list(ids).count(placeholder)} recordings; exactly one is needed")
    at = list(ids).index(placeholder)
    return [*ids[:at], *[placeholder] * count, *ids[at + 1 :]]


def _from_messages(engine: Any, messages: Messages, *, recording: bool = False, tools: Tools = ()) -> list[int]:
    tokenizer = _tokenizer(engine)
    _check_fits(engine, sum(len(text) for text in _contents(messages)))
    text = chat_template.render(engine.name, tokenizer, messages, recording=recording, tools=tools)
    return _read(engine, text, add_special_tokens=False)


def _contents(messages: Messages) -> Iterator[str]:
    """Yield the texts of messages that are not validated yet."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list | tuple) else [content]
        texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
        yield from (text for text in texts if isinstance(text, str))


def _read(engine: Any, text: str, **options: Any) -> list[int]:
    """Return the text's tokens."""
    _check_fits(engine, len(text))
    return tokenize(_tokenizer(engine), text, **options)


def _check_fits(engine: Any, characters: int) -> None:
    """Raise ContextError for a text that exceeds the context even in the longest tokens.

    Encoding it would take seconds, without a way to interrupt it.
    """
    limit = engine.max_length
    # The first comparison avoids listing the vocabulary, which is slow, for nearly all texts.
    if limit is not None and characters > limit and characters > limit * _longest_token(_tokenizer(engine)):
        raise ContextError(f"a prompt of {characters} characters: {engine.name} holds {limit} tokens")


@lru_cache(16)
def _longest_token(tokenizer: Any) -> int:
    """Return the characters of the longest token.

    In a byte-level vocabulary one character stands for one byte, so the result is not too small for any text.
    """
    return max(len(token) for token in tokenizer.get_vocab())


def _check_no_placeholder(engine: Any, ids: Ids) -> Ids:
    """Raise PromptError for a recording's placeholder without a recording, as the output would be made up."""
    encoder = getattr(engine, "audio", None)
    if encoder is not None and encoder.placeholder in ids:
        mark = engine.tokenizer.convert_ids_to_tokens(encoder.placeholder) if engine.tokenizer is not None else ""
        raise PromptError(
            f"the prompt has a recording's placeholder "
            f"(token {encoder.placeholder}{f', {mark}' * bool(mark)}), but no "
            "recording comes with it: leave it out, or give the recording as well"
        )
    return ids


def _tokenizer(engine: Any) -> Any:
    if engine.tokenizer is None:
        raise PromptError(f"{engine.name} came without a tokenizer: give token ids")
    return engine.tokenizer


def _check_ids(engine: Any, ids: Seq[int]) -> tuple[int, ...]:
    if not len(ids):
        raise PromptError("the prompt is empty: it has no tokens")
    if engine.max_length is not None and len(ids) > engine.max_length:
        raise ContextError(f"a prompt of {len(ids)} tokens: {engine.name} holds {engine.max_length}")
    numbers = tuple(map(as_integer, ids))
    for token in numbers:
        if not is_integer(token):
            raise PromptError(f"a token id is a whole number, not {quote(token)}")
        if not 0 <= token < engine.vocab_size:
            raise PromptError(
                f"token id {quote(token)} is outside the vocabulary of {engine.name} (0 to {engine.vocab_size - 1})"
            )
    return numbers
