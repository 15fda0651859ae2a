"""Forms with files: what clients send, and what is no form."""

from __future__ import annotations

from contextlib import suppress

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.errors import RequestError
from outrider.gateway.multipart import MAX_FIELDS, FormField, parse_form

KIND = 'multipart/form-data; boundary="b"'


@given(st.binary(max_size=60) | st.sampled_from([b"\r\n", b"\r\n--", b"--b--", b"\r\n\r\n"]), st.text(max_size=20))
def test_what_a_client_sends_is_read_unchanged(data: bytes, text: str) -> None:
    request = httpx2.Request("POST", "http://x", files={"file": ("a.wav", data)}, data={"language": text})
    fields = parse_form(request.read(), request.headers["content-type"])
    assert fields == {"file": FormField(data, True), "language": FormField(text.encode(), False)}


@pytest.mark.parametrize(
    ("more", "is_file"),
    [
        (b'; filename="a.wav"', True),
        (b"; filename=a.wav", True),
        (b"; filename*=UTF-8''%C3%A4.wav", True),
        (b'; FileName = "a.wav"', True),
        (b'; filename=""', True),
        (b"", False),
        (b'; title="a; filename=b"', False),
    ],
)
def test_a_field_with_a_file_name_is_a_file(more: bytes, is_file: bool) -> None:
    assert parse_form(PART.replace(b'"a"', b'"a"' + more) + b"--b--", KIND) == {"a": FormField(b"1", is_file)}


PART = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
BAD = {
    "no boundary": (PART + b"--b--", "multipart/form-data", "has no boundary"),
    "no end": (PART, KIND, "last boundary is missing"),
    "nothing": (b"", KIND, "last boundary is missing"),
    "no name": (b"--b\r\nContent-Disposition: form-data\r\n\r\n1\r\n--b--", KIND, "Content-Disposition|no name"),
    "no head": (b"--b\r\n1\r\n--b--", KIND, "no Content-Disposition"),
    "a name that is not UTF-8": (PART.replace(b'"a"', b'"\xff"') + b"--b--", KIND, "no name"),
    "two of a name": (PART + PART + b"--b--", KIND, "two fields"),
    "many": (b"".join(PART.replace(b'"a"', b'"%d"' % n) for n in range(MAX_FIELDS + 1)), KIND, "more than 64"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_form_is_refused(name: str) -> None:
    body, kind, reason = BAD[name]
    with pytest.raises(RequestError, match=reason):
        parse_form(body, kind)


@given(st.binary(max_size=200))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    with suppress(RequestError):
        parse_form(b"--b\r\n" + body, KIND)
