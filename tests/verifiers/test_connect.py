"""The texts that name a cloud."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import SettingsError, connect
from outrider.verifiers.connect import Target, parse_target


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("none", Target("none")),
        ("local:demo", Target("local", "demo:cloud")),
        ("local:demo:edge", Target("local", "demo:edge")),
        ("local:/models/a:b", Target("local", "/models/a:b")),
        ("grpc://cloud:7070", Target("grpc", host="cloud", port=7070)),
        ("grpc://cloud.example.org:7070/", Target("grpc", host="cloud.example.org", port=7070)),
        ("grpc://[::1]:7070", Target("grpc", host="::1", port=7070)),
        ("grpc://127.0.0.1:1", Target("grpc", host="127.0.0.1", port=1)),
    ],
)
def test_what_texts_name(text: str, target: Target) -> None:
    assert parse_target(text) == target


@given(st.text(max_size=30).filter(lambda text: text != "none" and not text.startswith("local:")))
def test_any_other_text_is_refused_or_an_address(text: str) -> None:
    try:
        target = parse_target(text)
    except SettingsError:
        return
    assert text.startswith("grpc://")
    assert target.host
    assert 0 < target.port < 65536


@pytest.mark.parametrize(
    ("target", "options", "named"),
    [
        ("none", {"token": "x"}, "token"),
        ("grpc://127.0.0.1:1", {"dtype": "float32"}, "dtype"),
        ("grpc://127.0.0.1:1", {"retries": 3}, "retries"),
        ("grpc://127.0.0.1:1", {"deadline": "soon"}, "deadline"),
        ("grpc://127.0.0.1:1", {"deadline": True}, "deadline"),
        ("grpc://127.0.0.1:1", {"patience": float("inf")}, "patience"),
        ("grpc://127.0.0.1:1", {"net": "rtt=fast"}, "rtt"),
        ("grpc://127.0.0.1:1", {"token": "a", "token_file": "b"}, "both"),
        ("grpc://127.0.0.1:1", {"cert": "/no/such.pem", "key": "/no/such.key"}, "/no/such"),
        ("grpc://cloud.example:1", {"token": "a-token-that-is-long-enough"}, "unencrypted"),
        ("grpc://localhost.example:1", {"token": "a-token-that-is-long-enough"}, "unencrypted"),
        ("grpc://127.0.0.1:1", {"token": "two\nlines"}, "token"),
    ],
)
def test_options_that_cannot_be_used_are_named(target: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        connect(target, **options)


@pytest.mark.parametrize("content", ["", "\n", "two words", "t\u00f6ken-that-is-long-enough"])
def test_a_token_file_holds_one_word(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match="token"):
        connect("grpc://127.0.0.1:1", token_file=str(tmp_path / "token"))
