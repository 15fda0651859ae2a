"""Decode a request's recording from base64 or a data URL to a waveform, within the limits of a request."""

from __future__ import annotations

import base64
import binascii
import re
import string
from typing import Final

from outrider.gateway.errors import RequestError
from outrider.prompts.audio import Recording, prepare
from outrider.prompts.recordings import Decoded, Limits, decode_bytes

MAX_SAMPLES: Final = 2**25  # samples of a recording in a request, counted over all channels
NAME: Final = "the recording"
WHERE: Final = "messages.0.content.input_audio"
ADVICE: Final = "send it in pieces, one request for each (ffmpeg -i IN -f segment -segment_time {} piece%d.wav)"
CONTAINERS: Final = {  # the decoders' names of each format
    "wav": ("WAV", "WAVEX", "RF64", "W64"),
    "mp3": ("MP3", "MPEG"),
    "flac": ("FLAC",),
    "ogg": ("OGG", "ogg"),
    "opus": ("OGG",),
    "aiff": ("AIFF",),
    "m4a": ("mov",),
    "mp4": ("mov",),
    "3gp": ("mov",),
    "webm": ("matroska",),
    "aac": ("aac",),
    "amr": ("amr",),
    "wma": ("asf",),
}
MAX_DATA_URL_HEAD: Final = 256  # characters of a data URL before its comma
DATA_URL_HEAD: Final = re.compile(
    r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?", re.ASCII | re.IGNORECASE
)
# Browsers label some audio as video.
ACCEPTED_TYPES: Final = ("audio/", "video/", "application/ogg", "application/octet-stream")
_NO_SPACE: Final = dict.fromkeys(map(ord, string.whitespace))  # MIME breaks base64 into lines


def extract_base64(data: str, param: str) -> str:
    """Return the base64 text in `data`, without the head of a data URL.

    Raises:
        RequestError: the data URL has another type, or the base64 another alphabet. The error names `param`.
    """
    problem = None
    if data[:5].lower() == "data:":
        end = data.find(",", 0, MAX_DATA_URL_HEAD)
        found = DATA_URL_HEAD.fullmatch(data, 0, end) if end >= 0 else None
        if found is None or found[3] is None:
            problem = "a data URL without ;base64: send data:audio/wav;base64,… or the base64 alone"
        elif not (found[1] or "").lower().startswith(ACCEPTED_TYPES):
            problem = f"a data URL of {found[1] or 'text/plain'}: expected a recording"
        data = data[end + 1 :]
    if problem is None and (letter := re.search("[-_]", data)):
        problem = f"not base64: {letter[0]!r} is URL-safe base64: use + and / instead of - and _"
    if problem is not None:
        raise RequestError(f"input_audio.data is {problem}", param=param, code="invalid_value")
    return data


def decode_recording(data: str, kind: str, most_seconds: float, where: str = WHERE) -> Recording:
    """Decode a file in base64. where: the request's field that holds it, for errors.

    Raises:
        RequestError: the data is not base64, or of another format than `kind`.
        AudioError: the audio cannot be decoded, or is longer than `most_seconds`.
    """
    try:
        raw = base64.b64decode(data.translate(_NO_SPACE), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"input_audio.data is not base64: {error}", param=f"{where}.data") from error
    if not raw:
        raise RequestError("input_audio.data is empty", param=f"{where}.data")
    found = _decode(raw, most_seconds)
    if found.kind not in CONTAINERS[kind]:
        names = [name for name, kinds in CONTAINERS.items() if found.kind in kinds]
        raise RequestError(
            f"input_audio.format is {kind}, but the data is {' or '.join(names) or found.kind}", param=f"{where}.format"
        )
    return prepare(NAME, found)


def decode_file(raw: bytes, most_seconds: float) -> Recording:
    """Decode a file of any format.

    Raises:
        AudioError: the audio cannot be decoded, or is longer than `most_seconds`.
    """
    return prepare(NAME, _decode(raw, most_seconds))


def _decode(raw: bytes, most_seconds: float) -> Decoded:
    return decode_bytes(raw, NAME, Limits(most_seconds, MAX_SAMPLES, ADVICE.format(_piece_seconds(most_seconds))))


def _piece_seconds(most: float) -> int:
    """Return the seconds of a piece, below the limit: ffmpeg cuts at a packet's end, and resampling adds samples."""
    return max(1, int(0.95 * most))
