"""The base64 of a recording: plain, as in OpenAI's API, or in a data URL, as browsers write it."""

from __future__ import annotations

import re
from typing import Final

from outrider.gateway.refusing import Refused

LONGEST_HEAD: Final = 256  # characters of a data URL before its comma
HEAD: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?", re.ASCII | re.IGNORECASE)
TAKEN: Final = ("audio/", "video/", "application/ogg", "application/octet-stream")  # browsers label some audio as video


def base64_of(data: str, param: str) -> str:
    """Return the base64 text in `data`, without the head of a data URL.

    Raises:
        Refused: a data URL of another type, or base64 of another alphabet; the error names `param`.
    """
    if data[:5].lower() == "data:":
        data = _without_head(data, param)
    if found := re.search("[-_]", data):
        raise Refused(
            f"input_audio.data is not base64: {found[0]!r} is URL-safe base64: use + and / instead of - and _",
            param=param,
            code="invalid_value",
        )
    return data


def _without_head(data: str, param: str) -> str:
    end = data.find(",", 0, LONGEST_HEAD)
    found = HEAD.fullmatch(data, 0, end) if end >= 0 else None
    if found is None or found[3] is None:
        raise Refused(
            "input_audio.data is a data URL without ;base64: send data:audio/wav;base64,… or the base64 alone",
            param=param,
            code="invalid_value",
        )
    if not (found[1] or "").lower().startswith(TAKEN):
        raise Refused(
            f"input_audio.data is a data URL of {found[1] or 'text/plain'}: expected a recording",
            param=param,
            code="invalid_value",
        )
    return data[end + 1 :]
