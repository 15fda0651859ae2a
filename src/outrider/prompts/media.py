"""Serialisation of recordings and of their features for a network.

Clients in any language can write both formats. Decoding returns the same values bit for bit.

    audio      1 byte e (0 to 7), then a FLAC file: 16 bits, mono, 16 kHz, its header giving the number of samples.
               Sample n stands for n · 2^(e−15): 0 is the ordinary e, larger ones are for recordings louder than ±1.
    features   uint32 mels, uint32 frames (little-endian), then a zlib stream of four planes: byte 0 of every value,
               then byte 1, 2 and 3. The values are little-endian float32, all frames of one mel after the other.

Decoding compares all sizes with the model's limits before it decompresses any data.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from typing import Any

import numpy as np

from outrider.errors import AudioError
from outrider.prompts.audio import MAX_EXPONENT, from_int16, grid_exponent, to_int16
from outrider.prompts.recordings import MIN_SECONDS, SAMPLE_RATE
from outrider.prompts.sound_file import LIBRARY_ERRORS, Source, Unreadable, open_sound

_SIZES = struct.Struct("<II")
_MD5 = slice(26, 42)  # of the samples: after the magic (4), a block's head (4) and the sizes (18)


def pack_audio(waveform: np.ndarray) -> bytes:
    """Serialise a waveform of `prompts.audio.load`: float32 [samples], 16 kHz mono.

    Raises:
        AudioError: the waveform is not on the 16-bit grid, so FLAC would change it.
    """
    import soundfile

    e = grid_exponent(waveform)
    integers = to_int16(waveform, e)
    if not np.array_equal(from_int16(integers, e), waveform):
        raise AudioError("the waveform is not on a 16-bit grid: take it from outrider.prompts.audio.load")
    file = io.BytesIO()
    soundfile.write(file, integers, SAMPLE_RATE, format="FLAC", subtype="PCM_16", compression_level=1.0)
    return bytes([e]) + file.getvalue()


def unpack_audio(data: bytes, max_seconds: float) -> np.ndarray:
    """Return the waveform that `pack_audio` serialised: float32 [samples].

    Raises:
        AudioError: the bytes have another format, are damaged, or are shorter than 0.1 s or longer than `max_seconds`.
    """
    e, file = data[:1], data[1:]
    if not file.startswith(b"fLaC"):
        raise AudioError("the recording is not a byte and a FLAC file")
    if e[0] > MAX_EXPONENT:
        raise AudioError(f"the recording's exponent is {e[0]}; 0 to {MAX_EXPONENT} are known")
    integers = _decode(file, max_seconds)
    # A checksum of zeros means that the encoder did not compute it.
    if any(file[_MD5]) and hashlib.md5(integers.astype("<i2").tobytes(), usedforsecurity=False).digest() != file[_MD5]:
        raise AudioError("the recording is damaged: its samples do not have the checksum in its header")
    return from_int16(integers, e[0])


def _decode(file: bytes, max_seconds: float) -> np.ndarray:
    try:
        with open_sound(Source(io.BytesIO(file), len(file))) as sound:
            _check_header(sound, max_seconds)
            claimed = sound.frames
            integers = np.zeros(claimed, np.int16)
            count = len(sound.read(claimed, dtype="int16", out=integers))
    except (Unreadable, *LIBRARY_ERRORS) as error:
        raise AudioError(f"the recording is not FLAC that can be read ({error})") from error
    if count != claimed:
        raise AudioError(f"the recording is damaged: {count} of its {claimed} samples can be read")
    return integers


def _check_header(reader: Any, max_seconds: float) -> None:
    kind = (reader.format, reader.subtype, reader.samplerate, reader.channels)
    if kind != ("FLAC", "PCM_16", SAMPLE_RATE, 1):
        raise AudioError(f"the recording is {kind}; expected FLAC with 16 bits, {SAMPLE_RATE} Hz, one channel")
    seconds = reader.frames / SAMPLE_RATE
    if not MIN_SECONDS <= seconds <= max_seconds:
        raise AudioError(f"the recording lasts {seconds:.4g} s; expected {MIN_SECONDS} s to {max_seconds:g} s")


def pack_features(features: np.ndarray) -> bytes:
    """Serialise features of `AudioInput.features`: float32 [mels, frames]."""
    planes = np.ascontiguousarray(features, "<f4").view(np.uint8).reshape(-1, 4).T
    return _SIZES.pack(*features.shape) + zlib.compress(planes.tobytes())


def unpack_features(data: bytes, mels: int, max_frames: int) -> np.ndarray:
    """Return the features that `pack_features` serialised: float32 [mels, frames].

    Raises:
        AudioError: the bytes have another format or another number of mels, no frames or more than `max_frames`, or
            values that are not finite.
    """
    if len(data) < _SIZES.size:
        raise AudioError("the features are empty")
    rows, frames = _SIZES.unpack_from(data)
    if rows != mels:
        raise AudioError(f"features of {rows} mels; the model takes {mels}")
    if not 0 < frames <= max_frames:
        raise AudioError(f"features of {frames} frames; 1 to {max_frames} are taken")
    planes = np.frombuffer(_inflate(data[_SIZES.size :], 4 * rows * frames), np.uint8)
    features = np.ascontiguousarray(planes.reshape(4, -1).T).view("<f4").reshape(rows, frames)
    if not np.isfinite(features).all():
        raise AudioError("the features hold values that are not finite (NaN or infinity)")
    return features.astype(np.float32)


def _inflate(stream: bytes, size: int) -> bytes:
    """Decompress a zlib stream of exactly `size` bytes. At most one more byte is decompressed."""
    inflater = zlib.decompressobj()
    try:
        unpacked = inflater.decompress(stream, size + 1)
    except zlib.error as error:
        raise AudioError(f"the features are damaged ({error})") from error
    if len(unpacked) != size or not inflater.eof or inflater.unused_data:
        raise AudioError(f"the features are damaged: they do not unpack to the {size} bytes of their sizes")
    return unpacked
