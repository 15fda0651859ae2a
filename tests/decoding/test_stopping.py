"""Where the output ends, token by token; and what does not end it."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.stopping import StopRules, count_sentences, find_finish_reason

EOS = 0


class Words:
    """A tokenizer of whole words or bytes: token i+1 is parts[i], token 0 the EOS (without text)."""

    def __init__(self, parts: list[str | bytes]) -> None:
        self.parts = [b"", *(part.encode() if isinstance(part, str) else part for part in parts)]
        self.ids = list(range(1, len(parts) + 1))

    def decode(self, ids: list[int]) -> str:
        return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(self.parts[token] for token in ids))


def ending(rules: StopRules, words: Words, ids: list[int] | None = None) -> tuple[str | None, int]:
    """(reason, number of tokens) of the output, fed token by token as the decoder does."""
    ids = words.ids if ids is None else ids
    for n in range(1, len(ids) + 1):
        if reason := find_finish_reason(rules, ids[:n], words.decode):
            return reason, n
    return None, len(ids)


def stop(strings: tuple[str, ...], *parts: str | bytes) -> tuple[str | None, int]:
    return ending(StopRules(99, (EOS,), strings), Words(list(parts)))


def sentences(count: int, *parts: str | bytes, least: int = 0) -> tuple[str | None, int]:
    return ending(StopRules(max(99, len(parts) + 1), (EOS,), (), count, least), Words(list(parts)))


# EOS, length, and which rule comes first ------------------------------------------------------------------------


def test_eos_and_length_need_no_text() -> None:
    rules = StopRules(3, (7, 8))
    assert not rules.needs_text
    assert find_finish_reason(rules, [1, 8], None) == "eos"
    assert find_finish_reason(rules, [1, 2], None) is None
    assert find_finish_reason(rules, [1, 2, 3], None) == "length"
    assert find_finish_reason(rules, [1, 2, 7], None) == "eos"


def test_an_earlier_eos_is_not_looked_at_again() -> None:
    assert find_finish_reason(StopRules(9, (7,)), [7, 1], None) is None


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (StopRules(2, (2,), ("done.",), 1), "eos"),
        (StopRules(2, (), ("done.",), 1), "stop"),
        (StopRules(2, (), ("x",), 1), "sentences"),
        (StopRules(2, (), ("x",), 2), "length"),
        (StopRules(3, (), ("x",), 2), None),
    ],
)
def test_precedence_on_one_token(rules: StopRules, expected: str | None) -> None:
    assert find_finish_reason(rules, [1, 2], Words(["all ", "done."]).decode) == expected


def test_the_earlier_token_wins_whatever_its_rule() -> None:
    words = Words(["One", ".", " STOP", " more"])
    assert ending(StopRules(4, (), ("STOP",), 1), words) == ("sentences", 2)
    assert ending(StopRules(4, (), ("STOP",), 2), words) == ("stop", 3)
    assert ending(StopRules(2, (), ("STOP",), 2), words) == ("length", 2)


@pytest.mark.parametrize("text", ["\n", "\n\n", "Human", "Human:", "User:", "Assistant", "<|im_start|>", "```"])
def test_nothing_ends_the_output_that_was_not_asked_for(text: str) -> None:
    assert ending(StopRules(99, (EOS,)), Words(["Hi", text, " there", text])) == (None, 4)
    assert ending(StopRules(99, (EOS,), ("STOP",), 1), Words(["Hi", text, " there", text])) == (None, 4)


# Stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "length"),
    [
        (("a", "STOP", "b"), 2),  # a token of its own
        (("a", "xSTOPy", "b"), 2),  # inside one token
        (("a", "xST", "OPy", "b"), 3),  # across two
        (("a", "S", "T", "O", "P", "b"), 5),  # across four
        (("S", "ST", "STO", "STOP"), 4),  # false starts
        (("STOP",), 1),  # at once
        (("a", "STO", "p", "STOP"), 4),
    ],
)
def test_the_token_that_completes_the_string_is_the_last(parts: tuple[str, ...], length: int) -> None:
    assert stop(("STOP",), *parts) == ("stop", length)


def test_any_of_several_strings() -> None:
    assert stop(("\n\n", "###"), "a\n", "b#", "##", "\n\n") == ("stop", 3)
    assert stop(("\n\n", "###"), "a\n", "\nb", "###") == ("stop", 2)


def test_an_unfinished_string_does_not_stop() -> None:
    assert stop(("STOP",), "a", "STO", "b") == (None, 3)


def test_a_long_string_is_found_though_every_byte_is_a_token() -> None:
    """One character is up to four bytes, and each byte may be a token: the look back counts bytes."""
    text = "社区三层四号楼的会议记录到此结束"
    parts = [bytes([b]) for b in f"前言。{text}后".encode()]
    assert stop((text,), *parts) == ("stop", len(f"前言。{text}".encode()))


@settings(max_examples=100, deadline=None)
@given(st.text("ab社", max_size=12), st.text("ab社", min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1))
def test_stop_strings_are_found_wherever_tokens_are_cut(text: str, string: str, cut: list[int]) -> None:
    rest, parts = text.encode(), []
    while rest:
        size = cut[len(parts) % len(cut)]
        parts.append(rest[:size])
        rest = rest[size:]
    ends = [n for n in range(1, len(parts) + 1) if string.encode() in b"".join(parts[:n])]
    assert stop((string,), *parts) == (("stop", ends[0]) if ends else (None, len(parts)))


def test_stop_strings_do_not_wait_for_min_new_tokens() -> None:
    """As in transformers, where the minimum only bans the EOS."""
    assert ending(StopRules(99, (), ("b",), None, min_new_tokens=5), Words(["a", "b", "c"])) == ("stop", 2)


# Sentences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("no end", 0),
        ("One.", 1),
        ("One. Two.", 2),
        ("One! Two? Three.", 3),
        ("Really?! Yes.", 2),
        ("It costs 3.5 dollars.", 1),
        ("It costs 3.", 0),  # may become 3.5
        ("It costs 3. Then", 1),
        ("Version 3.0.1 is out.", 1),
        ("Mr. Smith met Dr. Jones.", 1),
        ("J. R. Smith sings.", 1),
        ("Birds, e.g. crows, sing.", 1),
        ("Birds, i.e. crows, sing.", 1),
        ("At 5 p.m. it rains.", 1),
        ("Tools, toys, etc. were sold.", 1),
        ("He did, and so did I.", 1),
        ("Well...", 0),  # may go on
        ("He left... Then he came.", 2),
        ("...", 0),
        ("See example.com now", 0),
        ('He said "Go." Then he left.', 2),
        ('"Go!" he said.', 2),
        ("(It rains.) It pours.", 2),
        ("Line one.\nLine two.\n", 2),
        ("你好。", 1),
        ("你好。再见！真的吗？", 3),
        ("真的吗？！是的。", 2),
        ("他说：“好。”她笑了。", 2),
        ("“好！”", 1),
        ("价格是3.5元。", 1),
        ("版本3.0，发布了", 0),
        ("一，二；三：四、五", 0),
        ("Hello. 你好。", 2),
    ],
)
def test_counting(text: str, expected: int) -> None:
    assert count_sentences(text) == expected


def test_a_decimal_that_arrives_in_pieces_does_not_end_the_sentence() -> None:
    assert sentences(1, "It costs", " 3", ".", "5", " dollars", ".", " More") == ("sentences", 6)
    assert sentences(1, "It costs", " 3.", "5", " dollars.", " More") == ("sentences", 4)
    assert sentences(1, "价格", "3", ".", "5", "元", "。", "好") == ("sentences", 6)


def test_abbreviations_that_arrive_in_pieces() -> None:
    assert sentences(1, "Mr", ".", " Smith", " sings", ".") == ("sentences", 5)
    assert sentences(1, "Birds, e", ".", "g", ".", " crows", ", sing", ".") == ("sentences", 7)


def test_an_ellipsis_does_not_end_the_output_at_once() -> None:
    assert sentences(1, "Well", "...") == (None, 2)
    assert sentences(1, "Well", ".", "..") == ("sentences", 2)  # nobody can tell what will follow a full stop


@pytest.mark.parametrize("mark", ["。", "！", "？", "!", "?"])
def test_marks_that_end_a_sentence_at_once(mark: str) -> None:
    assert sentences(1, "好", mark, "”") == ("sentences", 2)
    assert sentences(1, "好", f"{mark}”", "她") == ("sentences", 2)
    assert sentences(2, "好", f"{mark}”", "她笑", mark) == ("sentences", 4)


def test_a_closing_quote_of_its_own_is_not_another_sentence() -> None:
    assert sentences(2, "好", "。", "”", "她笑", "。") == ("sentences", 5)
    assert sentences(2, '"Go', ".", '"', " Then", " stop", ".") == ("sentences", 6)


def test_marks_that_are_split_over_tokens() -> None:
    full_stop = "。".encode()
    assert sentences(1, "好", full_stop[:1], full_stop[1:2], full_stop[2:], "后") == ("sentences", 4)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_nth_sentence_ends_the_output_in_both_languages(count: int) -> None:
    assert sentences(count, "One", ".", " Two", ".", " Three", ".", " Four") == ("sentences", 2 * count)
    assert sentences(count, "一", "。", "二", "。", "三", "。", "四") == ("sentences", 2 * count)


def test_not_before_min_new_tokens() -> None:
    parts = ("One", ".", " Two", ".", " Three", ".")
    assert sentences(1, *parts, least=2) == ("sentences", 2)
    assert sentences(2, *parts, least=4) == ("sentences", 4)
    assert sentences(3, *parts, least=2) == ("sentences", 6)
    reason, length = sentences(1, *parts, least=3)
    assert reason == "sentences"
    assert length >= 3


def test_min_new_tokens_never_cuts_a_sentence_in_two() -> None:
    """Once the minimum is reached the output ends with a sentence, not wherever the minimum happens to fall."""
    assert sentences(1, "One", ".", " Two", " three", ".", " Four", least=3) == ("sentences", 5)


SENTENCES = ("It rains.", "Mr. Smith sings!", "It costs 3.5 dollars.", "Is it 5 p.m. now?", "你好。", "价格是3.5元！")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=5), st.lists(st.integers(1, 3), min_size=1), st.data())
def test_the_nth_sentence_is_the_nth_however_tokens_are_cut(
    text: list[str], cut: list[int], data: st.DataObject
) -> None:
    wanted = data.draw(st.integers(1, len(text)))
    rest, parts = " ".join(text), []
    while rest:
        size = cut[len(parts) % len(cut)]
        parts.append(rest[:size])
        rest = rest[size:]
    reason, length = sentences(wanted, *parts)
    shown = "".join(parts[:length])
    assert reason == "sentences"
    assert shown.startswith(" ".join(text[:wanted]))
    assert not "".join(parts[: length - 1]).startswith(" ".join(text[:wanted]))
