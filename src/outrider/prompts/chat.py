"""From what a user gives (text, ids, chat messages, a recording) to the ids that both models read."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from numbers import Integral
from typing import Any

from outrider.engines.base import Prompt
from outrider.errors import ContextError, PromptError
from outrider.prompts import audio as recordings
from outrider.prompts import captions
from outrider.prompts.audio import Audio

Messages = Seq[dict[str, Any]]
PromptLike = str | Seq[int] | Messages | Audio


def check_text(prompt: str) -> None:
    """Raise PromptError for what is no text: bytes that were not UTF-8 become halves of surrogate pairs."""
    if not prompt.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise PromptError("the prompt is not UTF-8, or holds half a surrogate pair: it is not text")


def encode(engine: Any, prompt: PromptLike) -> Prompt:
    """The prompt as the engine's model reads it.

    Raises:
        PromptError: empty, an id outside the vocabulary, no tokenizer or chat template where one is needed.
        ContextError: longer than the model holds.
        AudioError: the recording cannot be used.
    """
    if isinstance(prompt, Audio):
        return _encode_audio(engine, prompt)
    if isinstance(prompt, str):
        check_text(prompt)
        return Prompt(_checked(engine, _read(engine, prompt)))
    if not isinstance(prompt, Seq) or isinstance(prompt, bytes):
        raise PromptError(f"a prompt is text, token ids, chat messages or Audio, not {type(prompt).__name__}")
    if len(prompt) and isinstance(prompt[0], dict):
        return Prompt(_checked(engine, _without_audio(engine, _from_messages(engine, prompt))))  # type: ignore[arg-type]
    return Prompt(_checked(engine, prompt))  # type: ignore[arg-type]


def _encode_audio(engine: Any, prompt: Audio) -> Prompt:
    messages = captions.messages(prompt.task, prompt.lang)
    if prompt.instruction is not None:
        messages[0]["content"][1]["text"] = prompt.instruction
    recording = recordings.read(prompt)
    waveform = recording.waveform
    front = getattr(engine, "audio", None)
    if front is None:
        raise PromptError(f"{engine.name} takes no audio: give an audio-language model")
    name = "the recording" if hasattr(prompt.source, "dtype") else str(prompt.source)
    recordings.check_length(waveform, front.max_seconds, engine.name, name)
    ids = _from_messages(engine, messages)
    expanded = _expand(ids, front.placeholder, front.token_count(len(waveform)))
    return Prompt(_checked(engine, expanded), waveform, warnings=recording.warnings)


def _expand(ids: Seq[int], placeholder: int, count: int) -> list[int]:
    """Put `count` placeholders where the template has one."""
    if list(ids).count(placeholder) != 1:
        raise PromptError(f"the chat template places {list(ids).count(placeholder)} recordings; exactly one is needed")
    at = list(ids).index(placeholder)
    return [*ids[:at], *[placeholder] * count, *ids[at + 1 :]]


def _from_messages(engine: Any, messages: Messages) -> list[int]:
    tokenizer = _tokenizer(engine)
    if not tokenizer.chat_template:
        raise PromptError(f"{engine.name} has no chat template: give plain text or token ids")
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except (TemplateError, KeyError, TypeError, AttributeError) as error:
        raise PromptError(f"the chat template does not take these messages: {error}") from error
    return _read(engine, text, add_special_tokens=False)


def _read(engine: Any, text: str, **options: Any) -> list[int]:
    """The text's tokens. A text that would not fit if it were made of the longest tokens is not read at all: it would
    take seconds, which nobody could end."""
    tokenizer, most = _tokenizer(engine), engine.max_length
    # First without the vocabulary, whose list takes a while: few texts have more characters than that many tokens.
    if most is not None and len(text) > most and len(text) > most * _longest(tokenizer):
        raise ContextError(f"a prompt of {len(text)} characters: {engine.name} holds {most} tokens")
    return list(tokenizer(text, **options)["input_ids"])


@lru_cache(16)
def _longest(tokenizer: Any) -> int:
    """Characters of the longest token. In the vocabulary a byte of a character is a character of its own, or more."""
    return max(len(token) for token in tokenizer.get_vocab())


def _without_audio(engine: Any, ids: list[int]) -> list[int]:
    """Refuse messages that speak of a recording: the model would answer as if it had heard one."""
    front = getattr(engine, "audio", None)
    if front is not None and front.placeholder in ids:
        raise PromptError("these messages have an audio part but no recording comes with them: give outrider.Audio")
    return ids


def _tokenizer(engine: Any) -> Any:
    if engine.tokenizer is None:
        raise PromptError(f"{engine.name} came without a tokenizer: give token ids")
    return engine.tokenizer


def _checked(engine: Any, ids: Seq[int]) -> tuple[int, ...]:
    if not len(ids):
        raise PromptError("the prompt is empty: it has no tokens")
    if engine.max_length is not None and len(ids) > engine.max_length:
        raise ContextError(f"a prompt of {len(ids)} tokens: {engine.name} holds {engine.max_length}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise PromptError(f"a token id is a whole number, not {token!r}")
        if not 0 <= token < engine.vocab_size:
            raise PromptError(
                f"token id {token} is outside the vocabulary of {engine.name} (0 to {engine.vocab_size - 1})"
            )
    return tuple(int(token) for token in ids)
