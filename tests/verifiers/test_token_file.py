"""A token file is read with or without a byte-order mark, and an unreadable one is never quoted."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import SettingsError
from outrider.verifiers.connect import _read_token


def test_a_byte_order_mark_is_not_part_of_the_token(tmp_path: Path) -> None:
    path = tmp_path / "token.txt"
    path.write_bytes(b"\xef\xbb\xbfa-token\r\n")
    assert _read_token(str(path)) == "a-token"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_another_encoding_is_refused_without_a_quote(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "token.txt"
    path.write_bytes("sécret".encode(encoding))
    with pytest.raises(SettingsError, match=r"token\.txt does not hold a token: it is not UTF-8 text") as caught:
        _read_token(str(path))
    assert "cret" not in str(caught.value)
