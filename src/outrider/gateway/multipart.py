"""Parser of multipart/form-data (RFC 7578)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from outrider.gateway.errors import RequestError

MAX_FIELDS: Final = 64
MAX_HEAD: Final = 2**13  # bytes of the headers of one field
_BOUNDARY: Final = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s";,]{1,70}))', re.IGNORECASE)
_DISPOSITION: Final = re.compile(rb"(?:^|\r\n)content-disposition:\s*form-data\s*;([^\r\n]*)", re.IGNORECASE)
_QUOTED: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_FILE_NAME: Final = re.compile(rb";\s*filename\*?\s*=", re.IGNORECASE)
_PARAMETER: Final = re.compile(rb'(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True)
class FormField:
    """A field's value. is_file: the field has a file name."""

    data: bytes
    is_file: bool


def parse_form(body: bytes, content_type: str) -> dict[str, FormField]:
    """Return the fields of a form by name.

    Raises:
        RequestError: the body is not a form, has too many fields, or has two fields of the same name.
    """
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise _invalid("the content type has no boundary")
    delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
    _, *parts = (b"\r\n" + body).split(delimiter, MAX_FIELDS + 1)
    fields: dict[str, FormField] = {}
    for number, part in enumerate(parts):
        if part.startswith(b"--"):
            return fields
        if number == MAX_FIELDS:
            raise _invalid(f"it has more than {MAX_FIELDS} fields")
        name, field = _parse_field(part)
        if name in fields:
            raise RequestError(f"{name}: the form has two fields of this name", param=name, code="invalid_value")
        fields[name] = field
    raise _invalid("its last boundary is missing")


def _parse_field(part: bytes) -> tuple[str, FormField]:
    end = part.find(b"\r\n\r\n", 0, MAX_HEAD)
    disposition = _DISPOSITION.search(part, 0, end) if end >= 0 else None
    if disposition is None:
        raise _invalid("a field has no Content-Disposition")
    parameters = {key.lower(): value for key, value in _PARAMETER.findall(disposition[1])}
    try:
        name = parameters.get(b"name", b"").decode()
    except UnicodeDecodeError:
        name = ""
    if not name:
        raise _invalid("a field has no name")
    is_file = _FILE_NAME.search(_QUOTED.sub(b"", disposition[1])) is not None
    return name, FormField(part[end + 4 :], is_file)


def _invalid(reason: str) -> RequestError:
    return RequestError(f"the body is not a form of multipart/form-data: {reason}", code="invalid_form")
