"""Characters that are split over tokens are never shown broken, dropped or doubled."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.detokenizer import REPLACEMENT_CHARACTER
from outrider.decoding.incremental_text import IncrementalDetokenizer

FAMILY = "👩‍👩‍👧‍👦"  # four emoji, three joiners: 25 bytes


class Tokens:
    """A byte-level tokenizer: `cut` says how many bytes each token takes."""

    def __init__(self, text: str | bytes, cut: list[int]) -> None:
        rest, self.parts = text.encode() if isinstance(text, str) else text, []
        while rest:
            size = cut[len(self.parts) % len(cut)]
            self.parts.append(rest[:size])
            rest = rest[size:]
        self.ids = list(range(len(self.parts)))

    def decode(self, ids: list[int]) -> str:
        return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(self.parts[token] for token in ids))


def written(tokens: Tokens, ids: list[int] | None = None) -> IncrementalDetokenizer:
    transcript = IncrementalDetokenizer(tokens.decode)
    for token in tokens.ids if ids is None else ids:
        transcript.append(token)
    return transcript


anything = st.integers(0, 0x10FFFF).filter(lambda code: not 0xD800 <= code < 0xE000).map(chr)
likely = st.sampled_from("社区삼겹살é👩\u200d🏽 a")
texts = st.lists(anything | likely, max_size=12).map("".join)
cuts = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@pytest.mark.parametrize("text", ["社区", "삼겹살", FAMILY, f"a社{FAMILY}b 삼", "é"])
@pytest.mark.parametrize("cut", [[1], [2], [1, 3, 2], [4], [5]])
def test_pieces_make_the_text_and_none_is_broken(text: str, cut: list[int]) -> None:
    tokens = Tokens(text, cut)
    transcript = IncrementalDetokenizer(tokens.decode)
    shown = ""
    for n, token in enumerate(tokens.ids):
        shown += transcript.append(token)
        assert REPLACEMENT_CHARACTER not in shown
        assert shown == transcript.text
        so_far = tokens.decode(tokens.ids[: n + 1])
        assert so_far.startswith(shown)
        assert shown == so_far
    assert shown == text


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    assert written(Tokens("社a区", [1])).pieces == ["", "", "社", "a", "", "", "区"]


@settings(max_examples=150, deadline=None)
@given(texts, cuts)
def test_any_text_cut_anywhere(text: str, cut: list[int]) -> None:
    transcript = written(Tokens(text, cut))
    assert transcript.text == text
    assert len(transcript.pieces) == len(transcript.ids)


@settings(max_examples=150, deadline=None)
@given(texts, cuts, st.data())
def test_at_any_end_the_pieces_are_the_text(text: str, cut: list[int], data: st.DataObject) -> None:
    tokens = Tokens(text, cut)
    ids = tokens.ids[: data.draw(st.integers(0, len(tokens.ids)))]
    transcript = written(tokens, ids)
    assert transcript.text == tokens.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=14), cuts)
def test_bytes_that_make_no_text_are_shown_as_the_decoder_shows_them(raw: bytes, cut: list[int]) -> None:
    tokens = Tokens(raw, cut)
    transcript = written(tokens)
    assert transcript.text == tokens.decode(tokens.ids)


@settings(max_examples=150, deadline=None)
@given(texts, cuts, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5))
def test_rewinding_leaves_no_trace(text: str, cut: list[int], jumps: list[tuple[int, int]]) -> None:
    tokens = Tokens(text, cut)
    transcript = written(tokens)
    for back, forth in jumps:
        length = min(back, len(transcript.ids))
        transcript.truncate(length)
        for token in tokens.ids[length : length + forth]:
            transcript.append(token)
        fresh = written(tokens, tokens.ids[: len(transcript.ids)])
        assert (transcript.ids, transcript.pieces) == (fresh.ids, fresh.pieces)


def test_another_continuation_after_a_rewind_in_mid_character() -> None:
    parts = ["社".encode()[:2], "社".encode()[2:], "区".encode()[:1], b"!", "社".encode()[:1], "区".encode()[1:]]
    tokens = Tokens("", [1])
    tokens.parts = parts
    transcript = written(tokens, [0, 1, 2])
    assert transcript.text == "社"
    transcript.truncate(1)
    assert transcript.text == ""
    assert [transcript.append(token) for token in (1, 3, 2, 5)] == ["社", "!", "", "区"]


def test_a_decoder_that_trims_the_first_token_loses_no_spaces() -> None:
    """As SentencePiece decoders do: pieces are cut with context, so the space of a later token stays."""
    words = [" The", " cat", " sat", ".", " It", " ran"]

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).removeprefix(" ")

    transcript = IncrementalDetokenizer(decode)
    assert [transcript.append(i) for i in range(6)] == ["The", " cat", " sat", ".", " It", " ran"]


def test_tokens_without_text_have_empty_pieces() -> None:
    words = ["a", "", "b", "", ""]
    transcript = IncrementalDetokenizer(lambda ids: "".join(words[i] for i in ids))
    assert [transcript.append(i) for i in (3, 0, 1, 2, 4, 2)] == ["", "a", "", "b", "", "b"]
