"""The base64 text of a recording: plain, as in OpenAI's API, or in a data URL, as from browsers."""

from __future__ import annotations

import re
from typing import Final

from outrider.gateway.errors import RequestError

MAX_DATA_URL_HEAD: Final = 256  # characters of a data URL before its comma
DATA_URL_HEAD: Final = re.compile(
    r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?", re.ASCII | re.IGNORECASE
)
# Browsers label some audio as video.
ACCEPTED_TYPES: Final = ("audio/", "video/", "application/ogg", "application/octet-stream")


def extract_base64(data: str, param: str) -> str:
    """Return the base64 text in `data`, without the head of a data URL.

    Raises:
        RequestError: the data URL has another type, or the base64 another alphabet. The error names `param`.
    """
    if data[:5].lower() == "data:":
        data = _strip_data_url(data, param)
    if found := re.search("[-_]", data):
        raise RequestError(
            f"input_audio.data is not base64: {found[0]!r} is URL-safe base64: use + and / instead of - and _",
            param=param,
            code="invalid_value",
        )
    return data


def _strip_data_url(data: str, param: str) -> str:
    end = data.find(",", 0, MAX_DATA_URL_HEAD)
    found = DATA_URL_HEAD.fullmatch(data, 0, end) if end >= 0 else None
    if found is None or found[3] is None:
        raise RequestError(
            "input_audio.data is a data URL without ;base64: send data:audio/wav;base64,… or the base64 alone",
            param=param,
            code="invalid_value",
        )
    if not (found[1] or "").lower().startswith(ACCEPTED_TYPES):
        raise RequestError(
            f"input_audio.data is a data URL of {found[1] or 'text/plain'}: expected a recording",
            param=param,
            code="invalid_value",
        )
    return data[end + 1 :]
