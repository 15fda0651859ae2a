"""Two tokenizers are compared by what they make of the same ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import VocabularyMismatch
from outrider.verifiers.base import MAX_EXTRA_TOKENS, ModelInfo
from outrider.verifiers.llm_server.vocabulary_check import MAX_IDS_PER_REQUEST, count_shared_tokens

Tokens = Sequence[bytes]


def text(tokens: Tokens, ids: Sequence[int]) -> str:
    """As byte-level tokenizers decode: bytes that are no character become U+FFFD; ids without a token are nothing."""
    return b"".join(tokens[n] for n in ids if n < len(tokens)).decode("utf-8", errors="replace")


class Server:
    """Decodes, and counts what it is asked."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.asked = tokens, list[int]()

    async def __call__(self, ids: Sequence[int]) -> str:
        self.asked.append(len(ids))
        return text(self.tokens, ids)


def met(ours: Tokens, theirs: Tokens) -> int:
    return asyncio.run(count_shared_tokens(drafter(ours), "vllm://cloud:1", Server(theirs)))


def drafter(tokens: Tokens) -> ModelInfo:
    def decode(ids: Sequence[int]) -> str:
        return text(tokens, ids)

    return ModelInfo("an-edge", len(tokens), len(tokens) + 7, (0,), "fingerprint", None, decode=decode)


def words(count: int, first: int = 0) -> list[bytes]:
    return [f"w{n} ".encode() for n in range(first, first + count)]


def test_equal_tokens_are_counted() -> None:
    for count in (1, 2, 300):
        assert met(words(count), words(count)) == count


@settings(max_examples=80)
@given(st.integers(1, 300), st.data())
def test_a_token_that_differs_is_named_with_both_texts(count: int, data: st.DataObject) -> None:
    theirs = words(count)
    token = data.draw(st.integers(0, count - 1))
    theirs[token] = data.draw(st.sampled_from([b"", b"other", b"w", "区".encode(), b"W" + theirs[token][1:]]))
    named = f"token {token} is {words(count)[token].decode()!r} in the first and {theirs[token].decode()!r} in the sec"
    with pytest.raises(VocabularyMismatch) as caught:
        met(words(count), theirs)
    assert named in str(caught.value)
    assert "the drafter an-edge and the target vllm://cloud:1 do not share" in str(caught.value)


@settings(max_examples=80)
@given(st.sets(st.integers(0, 199), min_size=1, max_size=9))
def test_the_first_of_several_is_named(differ: set[int]) -> None:
    theirs = [b"x" if n in differ else word for n, word in enumerate(words(200))]
    with pytest.raises(VocabularyMismatch, match=rf": token {min(differ)} is 'w{min(differ)} ' "):
        met(words(200), theirs)


def test_swapped_tokens_are_told_from_each_other() -> None:
    theirs = words(50)
    theirs[20], theirs[21] = theirs[21], theirs[20]
    with pytest.raises(VocabularyMismatch, match="token 20 is 'w20 ' in the first and 'w21 ' in the second"):
        met(words(50), theirs)


@settings(max_examples=40)
@given(st.text("社区삼겹살é🙂\u200da", min_size=1, max_size=30), st.lists(st.integers(1, 4), min_size=40, max_size=40))
def test_characters_that_are_spread_over_tokens_may_merge(characters: str, lengths: list[int]) -> None:
    data, tokens = characters.encode(), list[bytes]()
    for length in lengths:
        tokens.append(data[:length])
        data = data[length:]
    tokens = [token for token in tokens if token]
    assert met(tokens, list(tokens)) == len(tokens)


def test_single_bytes_are_equal_whatever_follows() -> None:
    every_byte = [bytes([n]) for n in range(256)]
    assert met(every_byte, every_byte) == 256


@pytest.mark.parametrize("at", [0, 3])
def test_bytes_that_only_together_show_a_difference(at: int) -> None:
    """Each of them alone is U+FFFD on both sides; 社 and 礼 are not the same all the same."""
    ours = [*words(at), *(bytes([byte]) for byte in "社".encode()), *words(8 - at, at)]
    theirs = [*words(at), *(bytes([byte]) for byte in "礼".encode()), *words(8 - at, at)]
    assert text(ours, range(len(ours))) != text(theirs, range(len(theirs)))
    with pytest.raises(VocabularyMismatch):
        met(ours, theirs)


@pytest.mark.parametrize("extra", [0, 1, 5, MAX_EXTRA_TOKENS])
def test_tokens_beyond_the_drafters_are_counted(extra: int) -> None:
    assert met(words(20), words(20 + extra)) == 20 + extra


@pytest.mark.parametrize("extra", [MAX_EXTRA_TOKENS + 1, 1000])
def test_too_many_tokens_beyond_the_drafters_are_refused(extra: int) -> None:
    named = r"the target .* has over 128 tokens more than the drafter an-edge, the first 20"
    with pytest.raises(VocabularyMismatch, match=named):
        met(words(20), words(20 + extra))


def test_a_token_that_the_server_lacks_is_named() -> None:
    with pytest.raises(VocabularyMismatch, match="token 19 is 'w19 ' in the first and '' in the second"):
        met(words(20), words(19))


def test_without_a_tokenizer_there_is_nothing_to_compare() -> None:
    server = Server(words(3))
    with pytest.raises(VocabularyMismatch, match="the drafter an-edge came without a tokenizer"):
        asyncio.run(count_shared_tokens(replace(drafter(words(3)), decode=None), "a server", server))
    assert server.asked == []


def test_no_request_is_too_long_and_few_are_made() -> None:
    tokens, size = words(3 * MAX_IDS_PER_REQUEST + 1), 3 * MAX_IDS_PER_REQUEST + 1
    server = Server(tokens)
    assert asyncio.run(count_shared_tokens(drafter(tokens), "a server", server)) == size
    assert server.asked == [MAX_IDS_PER_REQUEST] * 3 + [1, 1]
    tokens = [*tokens[:-1], b"other"]
    with pytest.raises(VocabularyMismatch, match=f"token {size - 1} "):
        asyncio.run(count_shared_tokens(drafter(tokens), "a server", server))


def test_a_difference_is_found_by_halving() -> None:
    theirs = words(MAX_IDS_PER_REQUEST)
    theirs[12_345] = b"other"
    server = Server(theirs)
    with pytest.raises(VocabularyMismatch, match="token 12345 "):
        asyncio.run(count_shared_tokens(drafter(words(MAX_IDS_PER_REQUEST)), "a server", server))
    assert len(server.asked) <= 1 + 2 * 14
