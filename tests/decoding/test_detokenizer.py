"""Text of bytes: complete characters stay, half ones are not shown, and stop strings are found wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.detokenizer import REPLACEMENT_CHARACTER, Detokenizer, _byte_alphabet, get_detokenizer
from outrider.decoding.incremental_text import IncrementalDetokenizer
from outrider.decoding.stopping import StopRules, find_finish_reason
from tests.support.tokenizers import ALL, BYTES, byte_fallback, byte_level, ids_of, word_level

SCRIPTS = (  # ten, emoji, and the replacement character itself
    "Ship",
    "naïve",
    "Привет",
    "γειά",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "社区三层",
    "삼겹살",
    "こんにちは",
    "👩‍👩‍👧‍👦👍🏽",
    REPLACEMENT_CHARACTER,
)


def whole(raw: bytes) -> str:
    """The text of bytes, without a character at the end that is not complete."""
    for length in range(1, min(4, len(raw) + 1)):
        try:
            raw[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return raw[:-length].decode(errors="replace")
    return raw.decode(errors="replace")


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("text", SCRIPTS)
def test_at_every_limit_complete_characters_stay_and_half_ones_are_not_shown(kind: str, text: str) -> None:
    tokenizer = BYTES[kind]()
    decode = get_detokenizer(tokenizer)
    raw, ids = text.encode(), ids_of(text, tokenizer)
    for n in range(len(raw) + 1):
        complete = max(k for k in range(len(text) + 1) if len(text[:k].encode()) <= n)
        assert decode(ids[:n], skip_special=True) == text[:complete]


@pytest.mark.parametrize("kind", BYTES)
def test_the_bytes_of_tokens_make_up_the_text_s(kind: str) -> None:
    tokenizer = BYTES[kind]()
    decode = get_detokenizer(tokenizer)
    for text in SCRIPTS:
        assert b"".join(decode.token_bytes(token) for token in ids_of(text, tokenizer)).decode() == text
    (special,) = tokenizer.convert_tokens_to_ids(["</s>"])
    assert decode.token_bytes(special) == b"</s>"


@pytest.mark.parametrize(("kind", "token"), [("llama", "▁the"), ("metaspace", "▁ok"), ("plain", "the")])
def test_a_token_that_begins_a_word_has_its_space(kind: str, token: str) -> None:
    tokenizer = ALL[kind]()
    (number,) = tokenizer.convert_tokens_to_ids([token])
    assert get_detokenizer(tokenizer).token_bytes(number).decode() == token.replace("▁", " ")


def test_a_token_of_half_a_character_has_its_bytes() -> None:
    tokenizer = byte_level()
    half, rest = tokenizer.convert_tokens_to_ids(["eÃ", "©x"])
    decode = get_detokenizer(tokenizer)
    assert (decode.token_bytes(half), decode.token_bytes(rest)) == (b"e\xc3", b"\xa9x")


@pytest.mark.parametrize("kind", BYTES)
@settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=12))
def test_any_bytes_are_shown_as_utf_8_decoders_show_them(kind: str, raw: bytes) -> None:
    tokenizer = BYTES[kind]()
    names = [f"<0x{byte:02X}>" for byte in raw]
    if kind == "byte level":
        letters = {byte: letter for letter, byte in _byte_alphabet().items()}
        names = [letters[byte] for byte in raw]
    shown = get_detokenizer(tokenizer)(tokenizer.convert_tokens_to_ids(names))
    trims = kind in ("llama", "unigram")  # their decoders take a space off the beginning
    assert shown == (whole(raw).removeprefix(" ") if trims else whole(raw))


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_is_complete_is_what_transformers_shows(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=10))
    for visible in (True, False):
        theirs = tokenizer.decode(ids, skip_special_tokens=visible, clean_up_tokenization_spaces=False)
        if REPLACEMENT_CHARACTER not in theirs:
            assert get_detokenizer(tokenizer)(ids, skip_special=visible) == theirs


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_text_grows_at_its_end_only_and_pieces_make_it_up(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=14))

    def decode(some: list[int]) -> str:
        return get_detokenizer(tokenizer)(some, skip_special=True)

    transcript, known = IncrementalDetokenizer(decode), ""
    for n, token in enumerate(ids):
        transcript.append(token)
        text = decode(ids[: n + 1])
        assert text.startswith(known)
        assert transcript.text == text
        known = text


def first_end(tokenizer: Any, ids: list[int], stop: str) -> int | None:
    return next((n for n in range(1, len(ids) + 1) if stop in get_detokenizer(tokenizer)(ids[:n])), None)


def found_end(tokenizer: Any, ids: list[int], stop: str) -> int | None:
    rules = StopRules(10**6, (), (stop,))
    return next(
        (n for n in range(1, len(ids) + 1) if find_finish_reason(rules, ids[:n], get_detokenizer(tokenizer))), None
    )


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("text", ["쐈뜁뀁뮐 ok", *("prefix " + text + " and on" for text in SCRIPTS)])
def test_every_stop_string_is_found_in_a_run_of_bytes(kind: str, text: str) -> None:
    tokenizer = BYTES[kind]()
    ids = ids_of(text, tokenizer)
    for start in range(len(text)):
        for end in (start + 1, start + 2, len(text)):
            stop = text[start:end]
            wanted = len(text[: text.index(stop)].encode()) + len(stop.encode())
            assert found_end(tokenizer, ids, stop) == wanted == first_end(tokenizer, ids, stop)


@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stop_string_is_found_where_the_whole_text_has_it(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]()
    ids = data.draw(st.lists(st.integers(3, len(tokenizer) - 1), min_size=1, max_size=40))
    text = get_detokenizer(tokenizer)(ids)
    if not text:
        return
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, min(len(text), start + 6)))]
    assert found_end(tokenizer, ids, stop) == first_end(tokenizer, ids, stop)


def test_an_added_token_before_half_a_character_is_shown_as_it_is_written() -> None:
    """Its letters lie outside the alphabet by which byte-level vocabularies write bytes."""
    tokenizer = byte_level.__wrapped__()
    tokenizer.add_tokens(["区→"])
    added, cut = tokenizer.convert_tokens_to_ids("区→"), ids_of("社", tokenizer)[:2]
    assert get_detokenizer(tokenizer)([added, *cut]) == "区→"
    assert get_detokenizer(tokenizer)([*cut, added]) == REPLACEMENT_CHARACTER + "区→"


def test_letters_that_share_a_token_with_half_a_character_are_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(["eÃ", "©x", "eÃ"])
    transcript = IncrementalDetokenizer(get_detokenizer(tokenizer))
    assert [transcript.append(token) for token in ids] == ["e", "éx", "e"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback, lambda: byte_fallback("unigram")])
def test_a_literal_replacement_character_at_the_end_is_text(make: Any) -> None:
    tokenizer = make()
    ids = ids_of("a" + REPLACEMENT_CHARACTER, tokenizer)
    transcript = IncrementalDetokenizer(get_detokenizer(tokenizer))
    assert "".join(transcript.append(token) for token in ids) == "a" + REPLACEMENT_CHARACTER


def test_a_wrong_byte_takes_no_other_character_with_it() -> None:
    tokenizer = byte_fallback()
    ids = [*ids_of("社", tokenizer), *tokenizer.convert_tokens_to_ids(["<0xFF>", "<0xE5>"])]
    assert get_detokenizer(tokenizer)(ids) == "社" + REPLACEMENT_CHARACTER
    assert (
        get_detokenizer(tokenizer)([*ids, *tokenizer.convert_tokens_to_ids(["ok"])])
        == f"社{REPLACEMENT_CHARACTER}{REPLACEMENT_CHARACTER}ok"
    )


def test_a_special_token_between_two_bytes_of_a_character_is_not_seen() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        first, second, third = ids_of("社", tokenizer)
        special = tokenizer.eos_token_id
        decode = get_detokenizer(tokenizer)
        assert decode([first, special, second, third], skip_special=True) == "社"
        assert decode([first, second, special], skip_special=True) == ""
        assert decode([first, special], skip_special=False) == REPLACEMENT_CHARACTER + "</s>"


def test_a_decoder_that_cannot_be_looked_into_shows_no_broken_end() -> None:
    class Opaque:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode(errors="replace")

    assert Detokenizer(Opaque())(list("社".encode()[:2])) == ""
    assert Detokenizer(Opaque())(list("社".encode())) == "社"


def test_words_that_hold_a_replacement_character_keep_it() -> None:
    tokenizer = word_level("metaspace")
    ids = tokenizer.convert_tokens_to_ids(["the", REPLACEMENT_CHARACTER])
    assert get_detokenizer(tokenizer)(ids) == "the" + REPLACEMENT_CHARACTER
