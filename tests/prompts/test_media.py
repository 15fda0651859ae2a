"""What crosses the network comes back bit for bit, and what a stranger sends is not trusted."""

import io
import struct
import zlib

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import AudioError
from outrider.prompts.audio import Audio, load
from outrider.prompts.media import pack_audio, pack_features, unpack_audio, unpack_features
from outrider.prompts.recordings import SAMPLE_RATE


def recording(samples: int = 16_000, peak: float = 0.5, seed: int = 0) -> np.ndarray:
    wave = np.random.default_rng(seed).uniform(-peak, peak, samples).astype(np.float32)
    return load(Audio(wave))


def flac(samples: np.ndarray, rate: int = SAMPLE_RATE, kind: str = "FLAC", subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1_600, 20_000), peak=st.floats(0.0, 100.0), seed=st.integers(0, 99))
def test_a_recording_comes_back_bit_for_bit(samples: int, peak: float, seed: int) -> None:
    wave = recording(samples, peak, seed)
    assert unpack_audio(pack_audio(wave), 2.0).tobytes() == wave.tobytes()


def test_speech_is_sent_in_less_than_its_16_bits() -> None:
    quiet = load(Audio(0.01 * np.sin(np.arange(32_000) / 9)))
    assert len(pack_audio(quiet)) < len(quiet)  # bytes, a sample each


def test_a_waveform_that_would_change_on_the_way_is_not_sent() -> None:
    with pytest.raises(AudioError, match="16-bit grid"):
        pack_audio(np.full(16_000, 0.3, np.float32))


ORDINARY = np.arange(-8_000, 8_000, dtype=np.int16)
STRANGE = {
    "nothing": b"",
    "only the exponent": b"\0",
    "no FLAC": b"\0" + b"RIFF" * 100,
    "a wav file": b"\0" + flac(ORDINARY, kind="WAV"),
    "the magic alone": b"\0fLaC",
    "another rate": b"\0" + flac(ORDINARY, 44_100),
    "two channels": b"\0" + flac(np.stack([ORDINARY, ORDINARY], 1)),
    "24 bits": b"\0" + flac(ORDINARY, subtype="PCM_24"),
    "too long": b"\0" + flac(np.zeros(16_001, np.int16)),
    "too short": b"\0" + flac(ORDINARY[:1_599]),
    "no samples": b"\0" + flac(ORDINARY[:0]),
    "an unknown exponent": b"\x08" + flac(ORDINARY),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_no_such_recording_is_refused(name: str) -> None:
    with pytest.raises(AudioError):
        unpack_audio(STRANGE[name], 1.0)


def with_length(file: bytes, samples: int) -> bytes:
    """The FLAC file with another number of samples in its header (36 bits) and no checksum."""
    head = bytearray(file)
    head[21] = head[21] & 0xF0 | samples >> 32
    head[22:26] = struct.pack(">I", samples & 0xFFFFFFFF)
    head[26:42] = bytes(16)
    return bytes(head)


@pytest.mark.parametrize("claimed", [0, 16_001, 2**36 - 1])
def test_a_header_is_believed_only_within_the_limit_and_before_anything_is_decoded(
    claimed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *args, **kwargs: pytest.fail("decoded"))
    with pytest.raises(AudioError, match="the recording lasts"):
        unpack_audio(b"\0" + with_length(flac(ORDINARY), claimed), 1.0)


def test_fewer_samples_than_the_header_claims_are_a_damaged_recording() -> None:
    with pytest.raises(AudioError):
        unpack_audio(b"\0" + with_length(flac(ORDINARY[:8_000]), 16_000), 1.0)


def test_an_encoder_that_computes_no_checksum_is_understood() -> None:
    file = with_length(flac(ORDINARY), len(ORDINARY))
    assert unpack_audio(b"\1" + file, 1.0).tobytes() == (ORDINARY / np.float32(16384)).tobytes()


PACKED = pack_audio(recording())


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len(PACKED) - 1), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_is_named_or_harmless(at: int, bit: int, cut: bool) -> None:
    damaged = bytearray(PACKED[:at] if cut else PACKED)
    if not cut:
        damaged[at] ^= 1 << bit
    try:
        heard = unpack_audio(bytes(damaged), 1.0)
    except AudioError:
        return
    scale = np.float32(2.0 ** damaged[0])  # the exponent is the one byte that nothing checks
    np.testing.assert_array_equal(heard, scale * recording())


@settings(max_examples=60, deadline=None)
@given(mels=st.sampled_from([1, 80, 128]), frames=st.integers(1, 300), seed=st.integers(0, 99))
def test_features_come_back_bit_for_bit(mels: int, frames: int, seed: int) -> None:
    features = np.random.default_rng(seed).standard_normal((mels, frames)).astype(np.float32)
    features[0, 0] = -0.0
    back = unpack_features(pack_features(features), mels, 300)
    assert back.dtype == np.float32
    assert back.shape == features.shape
    assert back.tobytes() == features.tobytes()


def packed(mels: int, frames: int, body: bytes) -> bytes:
    return struct.pack("<II", mels, frames) + body


FEATURES = np.random.default_rng(0).standard_normal((80, 50)).astype(np.float32)
RIGHT = pack_features(FEATURES)
WRONG = {
    "nothing": (b"", "empty"),
    "half a header": (RIGHT[:7], "empty"),
    "other mels": (pack_features(FEATURES[:64]), "64 mels; the model takes 80"),
    "too many frames": (pack_features(np.zeros((80, 101), np.float32)), "101 frames"),
    "no frames": (packed(80, 0, zlib.compress(b"")), "0 frames"),
    "other sizes than its values": (packed(80, 49, RIGHT[8:]), "do not unpack"),
    "too few values": (packed(80, 51, RIGHT[8:]), "do not unpack"),
    "no zlib": (packed(80, 50, b"x" * 400), "damaged"),
    "cut short": (RIGHT[:-20], "damaged"),
    "no checksum": (RIGHT[:-4], "do not unpack"),
    "something after the end": (RIGHT + b"x", "do not unpack"),
    "not a number": (pack_features(np.full((80, 50), np.nan, np.float32)), "not finite"),
    "infinity": (pack_features(np.full((80, 50), np.inf, np.float32)), "not finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_are_no_such_features_is_refused(name: str) -> None:
    data, message = WRONG[name]
    with pytest.raises(AudioError, match=message):
        unpack_features(data, 80, 100)


def test_a_bomb_is_never_unpacked() -> None:
    import tracemalloc

    bomb = packed(80, 50, zlib.compress(bytes(64 << 20), 9))
    tracemalloc.start()
    with pytest.raises(AudioError, match="do not unpack"):
        unpack_features(bomb, 80, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len(RIGHT) - 1), bit=st.integers(0, 7))
def test_damaged_features_are_named(at: int, bit: int) -> None:
    damaged = bytearray(RIGHT)
    damaged[at] ^= 1 << bit
    with pytest.raises(AudioError):
        unpack_features(bytes(damaged), 80, 100)
