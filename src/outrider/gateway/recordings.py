"""From a request's recording to a waveform: a file in base64, of which nothing is unpacked before its size is known."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any, Final

import numpy as np

from outrider.errors import AudioError
from outrider.gateway.refusing import Refused
from outrider.prompts.audio import MAX_CHANNELS

MOST_SAMPLES: Final = 2**25  # of a recording, all channels, before it becomes 16 kHz mono: 128 MiB of floats
BLOCK: Final = 2**16  # samples of all channels that are unpacked at once
CONTAINERS: Final = {  # what libsndfile calls the formats
    "wav": ("WAV", "WAVEX", "RF64"),
    "mp3": ("MP3", "MPEG"),
    "flac": ("FLAC",),
    "ogg": ("OGG",),
    "aiff": ("AIFF",),
}


def decoded(data: str, kind: str, most_seconds: float) -> tuple[np.ndarray, int]:
    """The waveform (float32 [samples], the channels' mean) and the rate of a file in base64.

    Raises:
        Refused: it is not base64, or another format than is said.
        AudioError: it is no recording, or longer than `most_seconds`.
    """
    import soundfile

    where = "messages.0.content.input_audio"
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(f"input_audio.data is not base64: {error}", param=f"{where}.data") from error
    if not raw:
        raise Refused("input_audio.data is empty", param=f"{where}.data")
    try:
        with soundfile.SoundFile(io.BytesIO(raw)) as file:
            if file.format not in CONTAINERS[kind]:
                raise Refused(f"input_audio.format is {kind}, the data is {file.format}", param=f"{where}.format")
            _check_size(file, most_seconds)
            return _mixed(file), int(file.samplerate)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        reason = getattr(error, "error_string", "it breaks off, or is no recording")  # not str: that names an object
        raise AudioError(f"the recording is not {kind} that can be read: {reason}") from error


def _mixed(file: Any) -> np.ndarray:
    """The mean of all channels, float32 [samples]; they are never all in memory at once."""
    mixed, end = np.empty(file.frames, np.float32), 0
    for block in file.blocks(max(1, BLOCK // file.channels), dtype="float32", always_2d=True):
        mixed[end : end + len(block)] = block.mean(axis=1)
        end += len(block)
    return mixed[:end]


def _check_size(file: Any, most_seconds: float) -> None:
    """Before anything is unpacked: what a header claims, a small file can hold."""
    seconds = file.frames / file.samplerate
    if seconds > most_seconds:
        raise AudioError(f"the recording lasts {seconds:.1f} s; at most {most_seconds:g} s are taken: split it")
    if file.channels > MAX_CHANNELS or file.frames * file.channels > MOST_SAMPLES:
        raise AudioError(
            f"the recording has {file.channels} channels of {file.frames} samples; "
            f"{MAX_CHANNELS} channels and {MOST_SAMPLES} samples in all are read"
        )
