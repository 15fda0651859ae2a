"""What goes out of an answer, and when."""

from __future__ import annotations

import codecs
import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.api import StreamEvent
from outrider.decoding.detokenizer import REPLACEMENT_CHARACTER
from outrider.decoding.incremental_text import IncrementalDetokenizer
from outrider.decoding.result import Result
from outrider.decoding.sequence import Source
from outrider.decoding.token_logprob import TokenLogprob
from outrider.errors import StateError
from outrider.gateway import response_schema
from outrider.gateway.decoder_pool import RequestOptions
from outrider.gateway.request_parsing import ParsedRequest
from outrider.gateway.response_building import DONE, Answer, StableText, TokenReports, usage, visible_text
from outrider.sampling.sampler import Signals
from tests.support.scripted_gateway import event, result_of

LETTERS = st.text(alphabet="ab社区👩‍👩‍👧é\n ", max_size=24)


def decode(pieces: list[bytes], ids: list[int]) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces[n] for n in ids))


def split(text: str, cuts: list[int]) -> list[bytes]:
    """The text's bytes as tokens, cut anywhere."""
    raw = text.encode()
    at = sorted({cut % (len(raw) + 1) for cut in cuts} | {0, len(raw)})
    return [raw[a:b] for a, b in pairwise(at)]


def told(tokens: list[bytes]) -> list[StreamEvent]:
    """The events of these tokens, with the pieces that `SpeculativeDecoder.stream` gives them."""
    transcript = IncrementalDetokenizer(lambda ids: decode(tokens, ids))
    return [event(index, transcript.append(index)) for index in range(len(tokens))]


def batches(events: list[StreamEvent], sizes: list[int]) -> list[list[StreamEvent]]:
    taken: list[list[StreamEvent]] = []
    for size in sizes:
        taken.append(events[:size])
        events = events[size:]
    return [*taken, events]


@given(LETTERS, st.lists(st.integers(0, 200)), st.lists(st.integers(0, 5)))
def test_however_text_is_cut_into_tokens_deltas_make_it_up_and_break_no_character(
    text: str, cuts: list[int], sizes: list[int]
) -> None:
    tokens = split(text, cuts)
    stable = StableText()
    deltas = [stable.add(batch) for batch in batches(told(tokens), sizes)]
    deltas.append(stable.end(result_of(text, len(tokens))))
    assert "".join(deltas) == text
    assert not any(REPLACEMENT_CHARACTER in delta for delta in deltas)


def test_half_a_character_at_the_end_of_the_output_is_not_shown() -> None:
    tokens = [b"a", "社".encode()[:2]]
    stable = StableText()
    assert stable.add(told(tokens)) == "a"
    assert stable.end(result_of("a", 2, "length")) == ""


@given(LETTERS, st.lists(st.integers(0, 200)), st.lists(st.integers(0, 5)), st.lists(LETTERS, min_size=1, max_size=3))
def test_a_stop_string_ends_the_text_and_no_part_of_it_goes_out(
    text: str, cuts: list[int], sizes: list[int], stop: list[str]
) -> None:
    assume(all(stop))
    tokens = split(text, cuts)
    ends = [n for n in range(1, len(tokens) + 1) if any(s in decode(tokens, list(range(n))) for s in stop)]
    tokens = tokens[: ends[0]] if ends else tokens
    whole = decode(tokens, list(range(len(tokens))))
    result = result_of(whole, len(tokens), "stop" if ends else "eos")
    places = [whole.find(s) for s in stop if s in whole]
    expected = whole[: min(places)] if ends else whole
    stable = StableText(stop)
    deltas = [stable.add(batch) for batch in batches(told(tokens), sizes)]
    assert expected.startswith("".join(deltas))
    assert "".join(deltas) + stable.end(result) == expected == visible_text(result, stop)


def test_only_a_possible_stop_string_prefix_is_held_back() -> None:
    stable = StableText(["END"])
    assert stable.add([event(0, "a E")]) == "a "
    assert stable.add([event(1, "N")]) == ""
    assert stable.add([event(2, "T")]) == "ENT"


def test_a_stop_string_that_a_special_token_divides_is_none() -> None:
    stable = StableText(["END"])
    assert stable.add([event(0, "EN")]) == ""
    assert stable.add([event(1, "D")]) == ""  # looks like one
    assert stable.add([]) == ""
    assert stable.add([event(2, "x")]) == "ENDx"  # it went on, so it was none


def test_a_stop_string_behind_one_that_was_none_ends_the_text() -> None:
    stable = StableText(["END"])
    said = [stable.add([event(n, piece)]) for n, piece in enumerate(["EN", "D", "x", "END"])]
    assert "".join(said) + stable.end(result_of("ENDxEND", 4, "stop")) == "ENDx"


def test_a_result_that_is_not_what_went_out_is_an_error() -> None:
    stable = StableText()
    stable.add([event(0, "a"), event(1, "b")])
    with pytest.raises(StateError, match="not the result's"):
        stable.end(result_of("ax", 2))


def test_provisional_text_never_goes_out() -> None:
    stable = StableText()
    drafted = [event(0, "a", "provisional"), event(1, "b", "provisional")]
    assert stable.add(drafted) == ""
    assert stable.add([event(0, "a")]) == "a"
    assert stable.add([event(1, "c", "revised", Source.CORRECTION)]) == "c"


def test_text_waits_until_it_is_settled() -> None:
    stable = StableText()
    skipped = [replace(event(n, text, source=Source.EDGE), settled=0) for n, text in enumerate("ab")]
    assert stable.add(skipped) == ""
    verdict = [event(0, "a", source=Source.ACCEPTED), event(1, "x", "revised", Source.CORRECTION)]
    assert stable.add(verdict) == "ax"
    assert stable.add([replace(event(2, "y", source=Source.EDGE), settled=2)]) == ""
    assert stable.add([event(3, "z", source=Source.EDGE)]) == "yz"  # no cloud is there any more


# Tokens -----------------------------------------------------------------------------------------------------


def signalled(index: int, token: int, kind: str) -> StreamEvent:
    return StreamEvent(kind, index, token, "t", Source.ACCEPTED, Signals(1.0, 0.5, 0.2, 0.3))  # type: ignore[arg-type]


def test_confirmed_tokens_carry_the_signals_of_their_draft() -> None:
    tokens = TokenReports()
    assert tokens.add([signalled(0, 7, "provisional")]) == []
    (report,) = tokens.add([event(0, "t", token=7)])
    assert report["signals"] == {"entropy": 1.0, "margin": 0.5, "maxprob": 0.2, "logprob": 0.3}
    assert response_schema.TokenReport.model_validate(report)


def test_a_token_in_another_s_place_has_not_its_signals() -> None:
    tokens = TokenReports()
    tokens.add([signalled(0, 7, "provisional")])
    (report,) = tokens.add([event(0, "x", "revised", Source.CORRECTION, token=8)])
    assert report["signals"] is None


def test_provisional_tokens_are_sent_on_request() -> None:
    assert [r["kind"] for r in TokenReports(provisional=True).add([signalled(0, 7, "provisional")])] == ["provisional"]


def test_the_final_tokens_are_those_that_were_not_voided() -> None:
    tokens = TokenReports()
    tokens.add([event(0, "a"), event(1, "b"), event(2, "c")])
    tokens.add([event(1, "x", "revised", Source.CORRECTION)])
    assert [report["text"] for report in tokens.final] == ["a", "x"]
    tokens.add([event(0, "a"), event(1, "x")])  # a verdict confirms them again
    assert [report["text"] for report in tokens.final] == ["a", "x"]


# Bodies -----------------------------------------------------------------------------------------------------


def asked(**more: Any) -> ParsedRequest:
    return ParsedRequest("a prompt", {}, RequestOptions(), **more)


def events_of(said: bytes) -> list[dict[str, Any]]:
    parts = said.decode().split("\n\n")
    assert parts[-1] == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1] if part != "data: [DONE]"]


@pytest.mark.parametrize(
    ("chat", "reply"), [(True, response_schema.ChatCompletion), (False, response_schema.Completion)]
)
@pytest.mark.parametrize("tokens", [False, True])
def test_bodies_are_what_the_document_says(chat: bool, reply: type[response_schema.Reply], tokens: bool) -> None:
    answer = Answer(asked(tokens=tokens, notes=("user was not used",)), chat=chat)
    answer.choices[0].note([event(0, "a"), event(1, " b")])
    body = json.loads(answer.body([result_of("a b", 2)]))
    found = reply.model_validate(body)
    assert found.outrider.warnings == ["user was not used"]  # type: ignore[attr-defined]
    assert (found.outrider.tokens is not None) == tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_sends_role_text_finish_reason_and_usage_in_order(chat: bool) -> None:
    answer = Answer(asked(stream=True, include_usage=True), chat=chat)
    (choice,) = answer.choices
    said = events_of(choice.chunk([event(0, "a")]) + choice.chunk([event(1, "")]) + choice.chunk([event(2, "b")]))
    end = choice.last(result_of("ab", 3)) + answer.end([result_of("ab", 3)])
    assert end.endswith(DONE)
    said += events_of(end)
    if chat:
        assert said.pop(0)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [(c["delta"].get("content", "") if chat else c["text"]) for e in said for c in e["choices"]]
    assert texts == ["a", "b", ""]
    assert [e["usage"] for e in said] == [None, None, None, usage([result_of("ab", 3)])]
    assert said[-2]["choices"][0]["finish_reason"] == "stop"
    assert said[-2]["outrider"]["guarantee"] == "exact"
    assert len({e["id"] for e in said}) == 1


def test_an_empty_stream_still_has_its_opening() -> None:
    said = events_of(Answer(asked(stream=True), chat=True).choices[0].last(result_of("", 1)))
    assert said[0]["choices"][0]["delta"]["role"] == "assistant"


def test_nothing_is_sent_while_there_is_nothing_to_say() -> None:
    assert Answer(asked(stream=True), chat=True).choices[0].chunk([event(0, "a", "provisional")]) == b""


# Log-probabilities --------------------------------------------------------------------------------------------


def scored(
    index: int, text: str, kind: str = "confirmed", source: Source = Source.ACCEPTED, **more: Any
) -> StreamEvent:
    return replace(event(index, text, kind, source), logprob=logprob_of(text.encode()), **more)


def logprob_of(data: bytes) -> TokenLogprob:
    return TokenLogprob(5, -0.5, data, (TokenLogprob(5, -0.5, data), TokenLogprob(6, -math.inf, b"\xe7")))


def scored_result(*texts: str, sources: list[Source] | None = None) -> Result:
    result = result_of("".join(texts), len(texts))
    logprobs = [logprob_of(text.encode()) for text in texts]
    return replace(result, pieces=list(texts), logprobs=logprobs, sources=sources or result.sources)


def with_logprobs(**more: Any) -> ParsedRequest:
    return asked(logprobs=True, **more)


@pytest.mark.parametrize("chat", [True, False])
def test_log_probabilities_of_a_body_are_what_the_document_says(chat: bool) -> None:
    sources = [Source.EDGE, Source.CORRECTION]
    body = json.loads(Answer(with_logprobs(), chat=chat).body([scored_result("a", " b", sources=sources)]))
    (response_schema.ChatCompletion if chat else response_schema.Completion).model_validate(body)
    logprobs = body["choices"][0]["logprobs"]
    if chat:
        assert [each["token"] for each in logprobs["content"]] == ["a", " b"]
        assert [each["source"] for each in logprobs["content"]] == ["edge", "correction"]
        assert logprobs["content"][1]["bytes"] == [32, 98]
        least = logprobs["content"][0]["top_logprobs"][1]
        assert least == {"token": REPLACEMENT_CHARACTER, "logprob": -9999.0, "bytes": [0xE7]}
    else:
        assert logprobs["tokens"] == ["a", " b"]
        assert logprobs["text_offset"] == [0, 1]
        assert logprobs["sources"] == ["edge", "correction"]
        assert logprobs["top_logprobs"][0] == {"a": -0.5, "bytes:\\xe7": -9999.0}


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_s_log_probabilities_are_the_body_s(chat: bool) -> None:
    """Held-back text, a revision, tokens that are confirmed twice, and an end-of-sequence token without text."""
    request = with_logprobs(stream=True, stop=(" bc",))
    (answer,) = Answer(request, chat=chat).choices
    said = answer.chunk([scored(0, "a"), scored(1, "x", "confirmed", Source.EDGE, settled=1)])
    said += answer.chunk([scored(1, " b", "revised", Source.CORRECTION), scored(2, "", "provisional")])
    said += answer.chunk([scored(1, " b", source=Source.CORRECTION), scored(2, "d")])
    result = scored_result("a", " b", "d", "", sources=[Source.ACCEPTED, Source.CORRECTION, *[Source.ACCEPTED] * 2])
    said += answer.last(result)
    reports = [choice["logprobs"] for chunk in events_of(said) for choice in chunk["choices"]]
    whole = json.loads(Answer(with_logprobs(), chat=chat).body([result]))["choices"][0]["logprobs"]
    for name in ("content",) if chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset", "sources"):
        assert [entry for report in reports if report for entry in report[name]] == whole[name]


def test_without_a_request_there_are_none() -> None:
    assert json.loads(Answer(asked(), chat=True).body([result_of("a", 1)]))["choices"][0]["logprobs"] is None


# Choices --------------------------------------------------------------------------------------------------------


def likely(text: str, *logprobs: float) -> Result:
    found = [TokenLogprob(5, value, b"x") for value in logprobs]
    return replace(result_of(text, len(logprobs)), logprobs=found, pieces=[text, *[""] * (len(logprobs) - 1)])


@pytest.mark.parametrize("chat", [True, False])
def test_several_choices_have_an_index_and_an_outcome_each(chat: bool) -> None:
    answer = Answer(asked(n=3, candidates=3), chat=chat)
    body = json.loads(answer.body([result_of(text, tokens) for text, tokens in (("a", 1), ("b", 2), ("c", 3))]))
    (response_schema.ChatCompletion if chat else response_schema.Completion).model_validate(body)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["outrider"]["guarantee"] for choice in body["choices"]] == ["exact"] * 3
    assert "outrider" not in body
    assert body["usage"]["prompt_tokens"] == 7
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (6, 13)


@pytest.mark.parametrize(("n", "texts"), [(1, ["b"]), (2, ["b", "c"])])
def test_best_of_sends_the_likeliest_by_token_and_counts_all(n: int, texts: list[str]) -> None:
    """The sum would prefer a shorter text."""
    results = [likely("a", -1.0), likely("b", -0.5, -0.5, -0.6), likely("c", -0.9, -0.8)]
    body = json.loads(Answer(asked(n=n, candidates=3), chat=False).body(results))
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == [*range(n)]
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * n
    assert ("outrider" in body) == (n == 1)
    assert body["usage"]["completion_tokens"] == 6


def test_the_choices_of_a_stream_are_told_apart_by_their_index() -> None:
    answer = Answer(asked(stream=True, n=2, candidates=2, include_usage=True), chat=True)
    first, second = answer.choices
    said = second.chunk([event(0, "x")]) + first.chunk([event(0, "a")]) + second.last(result_of("x", 1))
    said += first.chunk([event(1, "b")]) + first.last(result_of("ab", 2))
    chunks = events_of(said + answer.end([result_of("x", 1), result_of("ab", 2)]))
    found = [(choice["index"], choice["delta"].get("content")) for chunk in chunks for choice in chunk["choices"]]
    assert found == [(1, ""), (1, "x"), (0, ""), (0, "a"), (1, None), (0, "b"), (0, None)]
    assert [chunk["choices"][0]["index"] for chunk in chunks if "outrider" in chunk] == [1, 0]
    assert chunks[-1]["usage"]["completion_tokens"] == 3


# Echo -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_an_echoed_prompt_comes_first(chat: bool) -> None:
    request = asked(stream=True, echo=() if chat else ("The",))
    answer = Answer(request, chat=chat)
    (choice,) = answer.choices
    data = choice.chunk([event(0, " end")]) + choice.chunk([event(1, ".")]) + choice.last(result_of(" end.", 2))
    texts = [each["text"] for chunk in events_of(data) for each in chunk["choices"] if "text" in each]
    assert "".join(texts) == ("" if chat else "The end.")
    whole = json.loads(Answer(replace(request, stream=False), chat=chat).body([result_of(" end.", 2)]))["choices"][0]
    assert whole["message"]["content"] == " end." if chat else whole["text"] == "The end."


def test_an_echoed_prompt_comes_before_an_empty_answer() -> None:
    answer = Answer(asked(stream=True, echo=("The",)), chat=False)
    assert b'"text": "The"' in answer.choices[0].last(result_of("", 1))


# Several prompts --------------------------------------------------------------------------------------------------


def test_each_prompt_has_its_choices_and_counts_once() -> None:
    request = asked(more_prompts=("second",), n=1, candidates=2, echo=("A", "B"))
    answer = Answer(request, chat=False)
    assert len(answer.choices) == 4
    results = [likely("a", -1.0), likely("b", -0.5), likely("c", -0.1), likely("d", -0.2)]
    body = json.loads(answer.body(results))
    response_schema.Completion.model_validate(body)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "Ab"), (1, "Bc")]
    assert body["usage"]["prompt_tokens"] == 14
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (4, 18)
    assert all("outrider" in choice for choice in body["choices"])


def test_the_seed_of_a_choice_depends_on_its_place_among_its_prompt_s_alone() -> None:
    request = asked(more_prompts=("second",), n=2, candidates=2)
    assert [request.choice_settings(index)["seed"] for index in range(4)] == [0, 1, 0, 1]
