"""Conversations: each turn equals a generation from the whole history, and a failed turn changes nothing."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import cache
from typing import Any

import pytest

from outrider import ContextError, Conversation, PromptError, SettingsError, SpeculativeDecoder, StateError, load_engine
from outrider import local as local_verifier
from outrider.decoding.result import Result

SETTINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 8},
    {"max_new_tokens": 8, "temperature": 0.9, "seed": 7, "top_k": 20},
]
SYSTEM = {"role": "system", "content": "Be brief."}


@cache
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(load_engine("demo:edge"), local_verifier(load_engine("demo:cloud")))


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(result: Result) -> dict[str, str | None]:
    return {"role": "assistant", "content": result.text}


def finish(stream: Any) -> Result:
    """The result at the end of a stream."""
    while True:
        try:
            next(stream)
        except StopIteration as end:
            return end.value


def drain(chat: Conversation, text: str) -> Result:
    """The result at the end of an asynchronous stream, whose events make up its text."""

    async def work() -> list[str]:
        texts: list[str] = []
        async for event in chat.astream(text):
            texts[event.index :] = [event.text]
        return texts

    texts = asyncio.run(work())
    assert chat.result is not None
    assert "".join(texts[: len(chat.result.token_ids)]) == chat.result.text
    return chat.result


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
def test_each_turn_equals_a_generation_from_the_whole_history(settings: dict[str, Any]) -> None:
    chat, history = decoder().chat("Be brief.", **settings), [SYSTEM]
    sends = [
        chat.send,
        lambda text: finish(chat.stream(text)),
        lambda text: asyncio.run(chat.asend(text)),
        lambda text: drain(chat, text),
    ]
    for number, send in enumerate(sends):
        text = f"Question {number}"
        result = send(text)
        alone = decoder().generate([*history, asked(text)], **settings)
        assert (result.token_ids, result.text, result.guarantee) == (alone.token_ids, alone.text, "exact")
        history += [asked(text), answered(result)]
        assert chat.messages == history
        assert chat.result is result


def test_each_turn_continues_from_the_kv_caches_of_the_turn_before() -> None:
    chat = decoder().chat(max_new_tokens=4, cache_salt="alone")
    sends = [chat.send, lambda text: asyncio.run(chat.asend(text)), chat.send, lambda text: drain(chat, text)]
    read = [send(f"Question {number}").stats.cached_tokens for number, send in enumerate(sends)]
    assert read[0] == 0
    assert 0 < read[2] < read[3]  # the change to shared engines, at the first `asend`, starts anew


def test_a_turn_overrides_the_settings_of_the_conversation() -> None:
    chat = decoder().chat(max_new_tokens=8, ignore_eos=True)
    assert len(chat.send("a", max_new_tokens=3).token_ids) == 3
    assert len(chat.send("b").token_ids) == 8


def test_a_history_is_copied_in_and_out() -> None:
    history = [asked("a"), {"role": "assistant", "content": "b"}]
    chat = decoder().chat(messages=history, max_new_tokens=4)
    history[0]["content"] = "changed"
    chat.messages[0]["content"] = "changed"
    assert chat.messages[0] == asked("a")
    assert chat.send("c").token_ids == decoder().generate([*chat.messages[:2], asked("c")], max_new_tokens=4).token_ids


def test_undo_and_edit_replace_the_last_turn() -> None:
    chat = decoder().chat("Be brief.", max_new_tokens=6)
    chat.send("a")
    kept = chat.messages
    last = chat.send("b")
    edited = chat.edit("c")
    assert chat.messages == [*kept, asked("c"), answered(edited)]
    assert chat.undo() == [asked("c"), answered(edited)]
    assert chat.messages == kept
    assert chat.send("b").token_ids == last.token_ids
    chat.undo()
    chat.undo()
    assert chat.messages == [SYSTEM]
    for change in (chat.undo, lambda: chat.edit("a")):
        with pytest.raises(StateError, match="no turn"):
            change()


def test_a_turn_that_fails_changes_nothing() -> None:
    chat = decoder().chat(max_new_tokens=4)
    chat.send("a")
    before = chat.messages
    with pytest.raises(ContextError):
        chat.send("word " * 20_000)
    with pytest.raises(ContextError):
        chat.edit("word " * 20_000)
    with pytest.raises(PromptError, match="a turn of a conversation is a text, not list"):
        chat.send([1, 2])  # type: ignore[arg-type]
    with pytest.raises(SettingsError):
        chat.send("b", temperature=-1)
    with pytest.raises(SettingsError):
        chat.stream("b", temperature=-1)
    assert chat.messages == before


def test_a_stream_that_is_not_read_to_its_end_changes_nothing() -> None:
    chat = decoder().chat(max_new_tokens=8, ignore_eos=True)
    chat.stream("never read")
    stream = chat.stream("a")
    next(stream)
    for other in (lambda: chat.send("b"), chat.undo, lambda: next(chat.stream("b"))):
        with pytest.raises(StateError, match="unfinished"):
            other()
    stream.close()
    assert chat.messages == []
    assert chat.send("b").token_ids


def test_a_stream_of_an_old_history_is_refused() -> None:
    chat = decoder().chat(max_new_tokens=4)
    old = chat.stream("a")
    chat.send("b")
    with pytest.raises(StateError, match="has changed"):
        next(old)
    assert len(chat.messages) == 2


def test_a_cancelled_turn_changes_nothing() -> None:
    chat = decoder().chat(max_new_tokens=50, ignore_eos=True)

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await chat.asend("a")
        assert chat.messages == []
        async with aclosing(chat.astream("a")) as stream:
            await anext(stream)
            with pytest.raises(StateError, match="unfinished"):
                await chat.asend("b")
        assert chat.messages == []
        await chat.asend("b", max_new_tokens=4)

    asyncio.run(work())
    assert len(chat.messages) == 2


@pytest.mark.parametrize("arguments", [{"system": 5}, {"messages": "a"}, {"messages": ["a"]}])
def test_an_invalid_history_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PromptError):
        decoder().chat(**arguments)
    with pytest.raises(SettingsError):
        decoder().chat(temperature=-1)


def test_a_conversation_is_public() -> None:
    assert isinstance(decoder().chat(), Conversation)
