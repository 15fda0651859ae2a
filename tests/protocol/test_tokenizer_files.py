"""Packed tokenizers: what they hold, and refusals of what a foreign server may send."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.load import load_tokenizer
from outrider.errors import DataError
from outrider.protocol import tokenizer_files
from outrider.protocol.tokenizer_files import MAX_UNPACKED, digest_of, pack_tokenizer, unpack_tokenizer
from tests.support.tokenizers import CORPUS, trained


def packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())


@pytest.mark.parametrize("kind", ["byte level", "llama", "unigram", "wordpiece"])
def test_an_unpacked_tokenizer_is_the_packed_one(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    data = pack_tokenizer(tokenizer)
    assert digest_of(data) == digest_of(pack_tokenizer(tokenizer))
    unpack_tokenizer(data, tmp_path)
    other = load_tokenizer(str(tmp_path))
    assert other.get_vocab() == tokenizer.get_vocab()
    assert other.eos_token_id == tokenizer.eos_token_id
    for text in CORPUS:
        assert other(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_chat_template_is_packed_too(tmp_path: Path) -> None:
    tokenizer = trained("llama")
    tokenizer.chat_template = "{{ messages[0].content }}"
    try:
        unpack_tokenizer(pack_tokenizer(tokenizer), tmp_path)
    finally:
        tokenizer.chat_template = None
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages[0].content }}"


def test_tokenizers_that_cannot_be_sent_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack_tokenizer(None) == b""
    monkeypatch.setattr(tokenizer_files, "MAX_PACKED", 100)
    assert pack_tokenizer(trained("llama")) == b""


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "cannot be read"),
        (b"no zlib", "cannot be read"),
        (zlib.compress(b"{"), "cannot be read"),
        (packed({"tokenizer.json": "{}"})[:-3], "incomplete"),
        (packed([]), "are not texts"),
        (packed({"tokenizer_config.json": "{}"}), "are not texts"),
        (packed({"tokenizer.json": 1}), "are not texts"),
        (packed({"tokenizer.json": "{}", "../evil.py": ""}), "are not texts"),
        (packed({"tokenizer.json": "{}", "tokenizer.py": ""}), "are not texts"),
    ],
)
def test_other_files_are_refused(data: bytes, named: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=named):
        unpack_tokenizer(data, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_unpacked_size_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert MAX_UNPACKED < 2**28
    monkeypatch.setattr(tokenizer_files, "MAX_UNPACKED", 1000)
    with pytest.raises(DataError):
        unpack_tokenizer(packed({"tokenizer.json": "x" * 10_000}), tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_by_name(data: bytes) -> None:
    for sent in (data, zlib.compress(data)):
        with pytest.raises(DataError):
            unpack_tokenizer(sent, Path("/no/such/folder"))
