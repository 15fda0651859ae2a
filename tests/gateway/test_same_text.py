"""Result, stream and both forms of the API's answer hold the same text, for every tokenizer, limit and stop string."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.api import SpeculativeDecoder, StreamEvent, local
from outrider.decoding.result import Result
from outrider.gateway.decoder_pool import RequestOptions
from outrider.gateway.request_parsing import ParsedRequest
from outrider.gateway.response_building import Answer, visible_text
from tests.support.fakes import ScriptedEngine, replay
from tests.support.tokenizers import ALL, BYTES, ids_of

PROMPT = [3, 4]
TEXTS = ("社区", "쐈뜁뀁뮐 ok", "नमस्ते 👩‍👩‍👧‍👦", "naïve\ufffd", "Привет, γειά", "שלום مرحبا")


def pair(tokenizer: Any, said: list[int], every: int) -> SpeculativeDecoder:
    """A pair that says these ids; each `every`th draft is wrong."""
    size = len(tokenizer)
    drafted = [token if (n + 1) % every else (token + 1) % size for n, token in enumerate(said)]
    draft, target = (
        ScriptedEngine(replay(len(PROMPT), output, size, tail=(1,)), size, eos_ids=(1,), tokenizer=tokenizer)
        for output in (drafted, said)
    )
    return SpeculativeDecoder(draft, local(target), k=3, on_loop="ignore")


def streamed(decoder: SpeculativeDecoder, stop: tuple[str, ...], limit: int) -> tuple[list[StreamEvent], Result]:
    events, stream = [], decoder.stream(PROMPT, max_new_tokens=limit, stop=stop)
    while True:
        try:
            events.append(next(stream))
        except StopIteration as end:
            return events, end.value


def shown(events: list[StreamEvent]) -> str:
    """What a screen shows in the end."""
    pieces: list[str] = []
    for event in events:
        if event.kind == "revised":
            del pieces[event.index :]
        pieces[event.index : event.index + 1] = [event.text]
    return "".join(pieces)


def deltas(events: list[StreamEvent], result: Result, stop: tuple[str, ...]) -> str:
    """The text of the API's stream, event by event."""
    answer = Answer(ParsedRequest(PROMPT, {}, RequestOptions(), stream=True, stop=stop), chat=False)
    (choice,) = answer.choices
    sent = b"".join([*(choice.chunk([event]) for event in events), choice.last(result), answer.end([result])])
    lines = [line.removeprefix("data: ") for line in sent.decode().split("\n\n") if line and "[DONE]" not in line]
    return "".join(options["text"] for line in lines for options in json.loads(line)["choices"])


def check(decoder: SpeculativeDecoder, stop: tuple[str, ...], limit: int) -> Result:
    events, result = streamed(decoder, stop, limit)
    body = json.loads(Answer(ParsedRequest(PROMPT, {}, RequestOptions(), stop=stop), chat=False).body([result]))
    assert decoder.generate(PROMPT, max_new_tokens=limit, stop=stop).text == result.text
    assert shown([event for event in events if event.index < len(result.token_ids)]) == result.text
    assert deltas(events, result, stop) == body["choices"][0]["text"] == visible_text(result, stop)
    return result


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("text", TEXTS)
def test_every_length_limit_cuts_at_a_complete_character(kind: str, text: str) -> None:
    tokenizer = BYTES[kind]()
    said = ids_of(text, tokenizer)
    decoder = pair(tokenizer, said, 4)
    for limit in range(1, len(said) + 1):
        complete = max(n for n in range(len(text) + 1) if len(text[:n].encode()) <= limit)
        assert check(decoder, (), limit).text == text[:complete]


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("text", TEXTS)
def test_every_character_as_stop_string(kind: str, text: str) -> None:
    tokenizer = BYTES[kind]()
    said = ids_of(text, tokenizer)
    decoder = pair(tokenizer, said, 3)
    for at, stop in enumerate(text):
        result = check(decoder, (stop,), len(said))
        assert result.finish_reason == "stop"
        assert result.text == text[: text.index(stop) + 1]
        assert len(text[: at + 1].encode()) >= len(result.token_ids)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tokens_any_limit_any_stop(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]()
    said = data.draw(st.lists(st.integers(3, len(tokenizer) - 1), min_size=1, max_size=16))
    stop = tuple(data.draw(st.lists(st.text("ok社 é\ufffd", min_size=1, max_size=2), max_size=2)))
    decoder = pair(tokenizer, said, data.draw(st.integers(2, 5)))
    check(decoder, stop, data.draw(st.integers(1, len(said) + 1)))
