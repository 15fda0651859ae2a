"""The reader of recordings: lengths come from decoding, what is missing is named, nothing unwritten is heard."""

from __future__ import annotations

import base64
import io
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from outrider.errors import AudioError
from outrider.gateway.errors import RequestError
from outrider.gateway.recordings import decode_recording
from outrider.prompts import audio, containers, media_decoder
from outrider.prompts.audio import Audio, quantize
from outrider.prompts.recordings import SAMPLE_RATE, Downmix, Limits, decode_bytes, decode_path
from outrider.prompts.sound_file import SUPPORTED
from tests.fuzz import recordings as fuzzing

RATE = 48_000
SOUNDS = dict(fuzzing.sound_files())
USED = ("WAV-PCM_16", "AIFF-PCM_16", "OGG-VORBIS", "OGG-OPUS", "MP3-MPEG_LAYER_III", "FLAC-PCM_16", "AU-PCM_16")
TELEPHONE = ("GSM610", "G721_32", "NMS_ADPCM_16", "NMS_ADPCM_24", "NMS_ADPCM_32", "IMA_ADPCM", "MS_ADPCM", "ULAW")


def written(name: str, seconds: float = 4.0) -> bytes:
    kind, subtype = name.split("-", 1)
    file = io.BytesIO()
    soundfile.write(file, fuzzing.tone(RATE, seconds), RATE, format=kind, subtype=subtype)
    return file.getvalue()


# Lengths ----------------------------------------------------------------------------------------------------


def flac_of(length: int, data: bytes) -> bytes:
    """The FLAC file with another number of samples in its header."""
    head = bytearray(data)
    head[21] = head[21] & 0xF0 | length >> 32
    head[22:26] = struct.pack(">I", length & 0xFFFFFFFF)
    return bytes(head)


def with_size(name: bytes, size: int, data: bytes, order: str) -> bytes:
    """The file with another size of the chunk `name`."""
    at = data.index(name) + 4
    return data[:at] + struct.pack(order, size) + data[at + struct.calcsize(order) :]


def without_tag(data: bytes) -> bytes:
    """An MP3 without its VBR header, of another bit rate at the beginning than later."""
    at = max(data.find(b"Xing", 0, 200), data.find(b"Info", 0, 200))
    return data[:at] + bytes(4) + data[at + 4 :]


@pytest.mark.parametrize(
    ("data", "seconds"),
    [
        (flac_of(0, written("FLAC-PCM_16")), 4.0),
        (with_size(b"data", 0xFFFFFFFF, written("WAV-PCM_16"), "<I"), 4.0),
        (with_size(b"data", 0x80000000, written("WAV-PCM_16"), "<I"), 4.0),
        (with_size(b"data", 0, with_size(b"RIFF", 36, written("WAV-PCM_16"), "<I"), "<I"), 4.0),
        (with_size(b"data", 20_000, written("WAV-PCM_16"), "<I"), 4.0),
        (flac_of(9_000, written("FLAC-PCM_16")), 4.0),
        (with_size(b"data", -1, written("CAF-PCM_16"), ">q"), 4.0),
        (written("AU-PCM_16")[:8] + b"\xff" * 4 + written("AU-PCM_16")[12:], 4.0),
        (written("RF64-PCM_16")[:28] + bytes(8) + written("RF64-PCM_16")[36:], 4.0),
        (written("RF64-PCM_16")[:28] + struct.pack("<Q", 20_000) + written("RF64-PCM_16")[36:], 4.0),
    ],
    ids=["flac", "wav", "arecord", "wav0", "low", "low-flac", "caf", "au", "rf64", "low-rf64"],
)  # fmt: skip
def test_a_length_that_the_writer_did_not_know_comes_from_decoding(data: bytes, seconds: float) -> None:
    found = decode_bytes(data, "a")
    assert len(found.waveform) / SAMPLE_RATE == pytest.approx(seconds, abs=0.09)
    assert not found.warnings


def test_mp3_is_read_to_its_end_whatever_its_header_says_or_does_not() -> None:
    quiet, loud = fuzzing.tone(RATE, 1.0) * 1e-3, np.random.default_rng(0).uniform(-0.9, 0.9, 3 * RATE)
    file = io.BytesIO()
    wave = np.concatenate([quiet, loud]).astype(np.float32)
    soundfile.write(file, wave, RATE, format="MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    whole = decode_bytes(file.getvalue(), "a")
    bare = decode_bytes(without_tag(file.getvalue()), "a")
    twice = decode_bytes(file.getvalue() * 2, "a")
    assert len(whole.waveform) / SAMPLE_RATE == pytest.approx(4.0, abs=0.05)
    assert len(bare.waveform) / SAMPLE_RATE == pytest.approx(4.0, abs=0.15)
    assert len(twice.waveform) / SAMPLE_RATE == pytest.approx(8.0, abs=0.3)
    assert not (*whole.warnings, *bare.warnings)


@pytest.mark.parametrize("name", [name for name in SOUNDS if name.split("-")[0] in SUPPORTED and "DWVW" not in name])
def test_a_healthy_file_of_every_format_is_read_whole_and_without_a_warning(name: str) -> None:
    with soundfile.SoundFile(io.BytesIO(SOUNDS[name])) as file:
        wave = file.read(file.frames, dtype="float32", always_2d=True).mean(axis=1)
        rate = file.samplerate
    wanted = wave if rate == SAMPLE_RATE else soxr.resample(wave, rate, SAMPLE_RATE)
    found = decode_bytes(SOUNDS[name], "a")
    assert not found.warnings
    assert np.array_equal(found.waveform, wanted)


@pytest.mark.parametrize("name", [name for name in SOUNDS if name.split("-")[0] not in SUPPORTED])
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_formats_whose_truncation_is_not_detected_are_refused(name: str, share: float) -> None:
    with pytest.raises(AudioError, match=r"supported: wav, flac.*ffmpeg -i IN out.wav"):
        decode_bytes(SOUNDS[name][: int(share * len(SOUNDS[name]))], "a")


@pytest.mark.parametrize("name", [name for name in SOUNDS if name.split("-")[0] in SUPPORTED and "ALAC" not in name])
def test_three_fifths_of_a_file_are_never_used_without_a_warning(name: str) -> None:
    try:
        found = decode_bytes(SOUNDS[name][: len(SOUNDS[name]) * 3 // 5], "a")
    except AudioError:
        return
    assert found.warnings


@pytest.mark.parametrize("name", [name for name in SOUNDS if "DWVW" in name])
def test_a_healthy_file_of_a_format_that_soundfile_does_not_read_at_once(name: str) -> None:
    found = decode_bytes(SOUNDS[name], "a")
    assert (len(found.waveform), found.warnings) == (int(SAMPLE_RATE * fuzzing.SECONDS), ())


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000, 192_000])
def test_resampling_by_blocks_gives_the_samples_of_resampling_at_once(rate: int) -> None:
    wave = np.random.default_rng(0).uniform(-0.9, 0.9, (rate + 7, 2)).astype(np.float32)
    once = soxr.resample(wave.mean(axis=1), rate, SAMPLE_RATE)
    assert np.array_equal(audio.load(Audio(wave, sampling_rate=rate)), quantize(once))


APE = b"\xd0\x07\0\0\x88\x13\0\0\x01\0\0\0\0\0\0\0" + bytes(8)
TAGS = [b"TAG" + b"x" * 125, bytes(500), b"y" * 4968 + b"APETAGEX" + APE, b"LIST\x10\0\0\0" + b"x" * 16]


@pytest.mark.parametrize("tag", TAGS, ids=["id3v1", "zeros", "ape", "list"])
@pytest.mark.parametrize("name", ["FLAC-PCM_16", "MP3-MPEG_LAYER_III", "WAV-PCM_16", "AIFF-PCM_16"])
def test_tags_behind_the_audio_are_no_damage(name: str, tag: bytes) -> None:
    data = written(name, 1.111)
    whole, tagged = decode_bytes(data, "a"), decode_bytes(data + tag, "a")
    assert np.array_equal(tagged.waveform, whole.waveform)
    assert not tagged.warnings


# Damage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", USED)
def test_half_a_file_is_used_and_the_rest_is_named(name: str, tmp_path: Path) -> None:
    data = written(name)
    path = tmp_path / "half"
    path.write_bytes(data[: len(data) // 2])
    found = audio.read(Audio(path))
    assert 0.5 < found.seconds < 2.5
    (warning,) = found.warnings
    assert "damaged or breaks off" in warning
    whole = decode_bytes(data, "a").waveform
    kept = len(found.waveform) - 2000  # a resampler sees the end coming
    assert np.allclose(found.waveform[:kept], whole[:kept], atol=2**-14)


def test_how_much_is_missing_is_said_where_the_length_is_known() -> None:
    data = written("WAV-PCM_16")
    (warning,) = decode_bytes(data[: len(data) // 4], "a").warnings
    assert warning == "the recording is damaged or breaks off: 3.00 s of its 4.00 s are missing"


@pytest.mark.parametrize("name", USED)
def test_too_little_of_a_file_is_refused(name: str) -> None:
    with pytest.raises(AudioError):
        decode_bytes(written(name)[:300], "a")


def test_a_damaged_flac_is_used_up_to_the_damage() -> None:
    data = bytearray(written("FLAC-PCM_16"))
    data[len(data) // 2 :][:8] = bytes(8)
    data[len(data) // 2] ^= 0x55
    found = decode_bytes(bytes(data), "a")
    assert found.warnings
    assert 1.0 < len(found.waveform) / SAMPLE_RATE < 3.0


def ogg_file(name: str) -> bytes:
    if name == "OGG-FLAC":
        pytest.importorskip("av")
        return fuzzing.media_file("ogg", "flac", 4.0)
    return written(name)


def pages_of(data: bytes) -> list[int]:
    """Where the pages of an Ogg file begin, and its end."""
    return [found.start() for found in re.finditer(rb"OggS\0", data)] + [len(data)]


OGGS = ("OGG-VORBIS", "OGG-OPUS", "OGG-FLAC")


@pytest.mark.parametrize("name", OGGS)
@pytest.mark.parametrize("damage", ["hole", "flipped", "two", "byte"])
def test_a_hole_in_an_ogg_file_is_named_and_what_follows_is_used(name: str, damage: str) -> None:
    data, pages = ogg_file(name), pages_of(ogg_file(name))
    middle, late = pages[-4] + 40, pages[-3] + 40
    changed = {
        "hole": data[:middle] + data[middle + 3000 :],
        "byte": data[:middle] + data[middle + 1 :],
        "flipped": data[:middle] + bytes([data[middle] ^ 0x55]) + data[middle + 1 :],
        "two": data[: pages[3] + 50] + data[pages[3] + 90 : late] + data[late + 40 :],
    }[damage]
    whole, found = decode_bytes(data, "a"), decode_bytes(changed, "a")
    assert not whole.warnings
    heard = len(found.waveform) / SAMPLE_RATE
    assert 0.1 < heard < 3.9
    (warning,) = found.warnings
    stated = re.fullmatch(r"the recording is damaged: (.*) s of its 4.00 s are missing", warning)
    assert stated is not None
    assert float(stated[1]) == pytest.approx(4.0 - heard, abs=0.02)


@pytest.mark.parametrize("name", OGGS)
def test_a_truncated_ogg_file_and_tags_behind_one(name: str) -> None:
    data = ogg_file(name)
    assert "breaks off" in decode_bytes(data[: len(data) * 3 // 4], "a").warnings[-1]
    assert not decode_bytes(data + b"TAG" + bytes(125), "a").warnings


@pytest.mark.parametrize("length", [1, 1000, 4 * RATE + 1, 8 * RATE, 2**36 - 1])
def test_a_wrong_length_in_a_flac_header_does_not_hide_audio(length: int) -> None:
    found = decode_bytes(flac_of(length, written("FLAC-PCM_16")), "a")
    assert len(found.waveform) == 4 * SAMPLE_RATE
    assert not any("missing" in warning for warning in found.warnings)
    assert bool(found.warnings) == (length > 4 * RATE)
    assert all(warning.startswith("the header claims") for warning in found.warnings)


def test_a_wrong_length_in_the_header_of_a_small_flac_file_does_not_hide_audio() -> None:
    data = constant(16_000, 32_000)
    assert len(data) < 8192
    for length in (1, 16_000, 32_000):
        for tag in (b"", TAGS[0]):
            found = decode_bytes(flac_of(length, data) + tag, "a")
            assert len(found.waveform) == pytest.approx(32_000, abs=0 if length == 32_000 or not tag else 512)


def test_a_wrong_count_in_an_mp3_header_does_not_hide_audio() -> None:
    data = written("MP3-MPEG_LAYER_III")
    at = max(data.find(b"Xing", 0, 200), data.find(b"Info", 0, 200)) + 8
    found = decode_bytes(data[:at] + struct.pack(">I", 1) + data[at + 4 :], "a")
    assert len(found.waveform) / SAMPLE_RATE == pytest.approx(4.0, abs=0.1)


def test_a_wrong_size_of_an_id3_tag_is_named() -> None:
    data = written("MP3-MPEG_LAYER_III")
    assert not decode_bytes(b"ID3\4\0\0\0\0\0\x64" + bytes(100) + data, "a").warnings
    for size in (b"\x7f\x7f\x7f\x7f", b"\0\0\x27\x08"):
        with pytest.raises(AudioError, match=r"ID3 tag.*ffmpeg -skip_initial_bytes 10"):
            decode_bytes(b"ID3\4\0\0" + size + bytes(100) + data, "a")


def test_a_second_recording_in_an_ogg_file_is_not_dropped_in_silence() -> None:
    (warning,) = decode_bytes(written("OGG-VORBIS") * 2, "a").warnings
    assert "another recording" in warning


# Telephones -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subtype", TELEPHONE)
def test_telephone_files_are_the_same_on_every_surface(subtype: str, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, fuzzing.tone(8_000, 1.0), 8_000, format="WAV", subtype=subtype)
    here = audio.read(Audio(path))
    there = decode_recording(base64.b64encode(path.read_bytes()).decode(), "wav", 30.0)
    assert np.array_equal(here.waveform, there.waveform)
    assert 0.95 < here.seconds < 1.1


# Limits -----------------------------------------------------------------------------------------------------


def constant(rate: int, frames: int, channels: int = 1) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros((frames, channels), np.int16), rate, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def peak_of(read: Callable[[], Any]) -> int:
    """Bytes that a read has allocated at most."""
    tracemalloc.start()
    try:
        read()
    except AudioError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_a_small_file_of_a_high_rate_stays_small_in_memory() -> None:
    data = constant(655_350, 655_350 * 20)
    text = base64.b64encode(data).decode()
    assert len(data) < 64 << 10
    assert peak_of(lambda: decode_bytes(data, "a")) < 8 << 20
    assert peak_of(lambda: decode_recording(text, "flac", 30.0)) < 12 << 20
    many = constant(655_350, 655_350 * 10, 8)
    assert peak_of(lambda: decode_bytes(many, "a", Limits(5.0))) < 16 << 20


def test_limits_hold_while_decoding() -> None:
    with pytest.raises(AudioError, match="lasts more than 30 s"):
        decode_bytes(flac_of(0, constant(16_000, 16_000 * 40)), "a", Limits(30.0))
    with pytest.raises(AudioError, match="more than 1000 samples"):
        decode_bytes(constant(16_000, 16_000), "a", Limits(samples=1000))
    with pytest.raises(AudioError, match="a sampling rate of 500 Hz"):
        decode_bytes(constant(500, 5_000), "a")
    with pytest.raises(AudioError, match="100 channels"):
        decode_bytes(fuzzed_channels(100), "a")


def fuzzed_channels(channels: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros((4_000, channels), np.float32), 16_000, format="WAV", subtype="PCM_16")
    return file.getvalue()


@pytest.mark.parametrize("most", [1.5, 10.0, 30.0, 60.0])
def test_the_advice_for_long_recordings_gives_pieces_that_are_accepted(most: float) -> None:
    text = base64.b64encode(constant(16_000, int(16_000 * (most + 1)))).decode()
    with pytest.raises(AudioError) as refused:
        decode_recording(text, "flac", most)
    seconds = re.search(r"-segment_time (\d+) ", str(refused.value))
    assert seconds is not None
    assert int(seconds[1]) >= 1
    assert int(seconds[1]) + 0.25 <= most


# What is no recording ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rate", ["16000", None, float("nan"), float("inf"), 1, 16, 999, 768_001, True, -16_000, 8000.5]
)
def test_a_rate_that_is_none_is_refused_by_name(rate: Any) -> None:
    with pytest.raises(AudioError, match="sampling_rate: a whole number of Hz, 1000 to 768000, not"):
        audio.load(Audio(np.zeros(16_000, np.float32), sampling_rate=rate))


@pytest.mark.parametrize(
    ("wave", "message"),
    [
        (np.zeros((16_000, 0), np.float32), "empty"),
        (np.zeros((0, 2), np.float32), "empty"),
        (np.zeros(16_000, object), "expected floats"),
        (np.zeros(16_000, np.int16), "wave / 32768.0"),
        (np.zeros(16_000, complex), "expected floats"),
        (np.zeros((), np.float32), "expected floats"),
        (np.broadcast_to(np.float32(0), 1_000 * 3_601), "lasts 3601 s"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_waveform_are_refused(wave: np.ndarray, message: str) -> None:
    rate = 1_000 if wave.size > 1e6 else SAMPLE_RATE
    with pytest.raises(AudioError, match=message):
        audio.load(Audio(wave, sampling_rate=rate))


@pytest.mark.parametrize("name", ["a.raw", "a.wav", "a.m4a"])
def test_bytes_that_are_no_audio_are_an_audio_error_that_names_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\0" * 5_000)
    with pytest.raises(AudioError, match=name) as refused:
        audio.load(Audio(tmp_path / name))
    assert "ffmpeg" in str(refused.value)


def test_an_error_of_the_disk_is_an_audio_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(written("WAV-PCM_16"))

    def fail(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(AudioError, match=r"a.wav: cannot be read: .*Permission denied"):
        audio.load(Audio(path))


# Sizes of 64 bits -------------------------------------------------------------------------------------------

WIDE = (2**62, 2**63 - 25, 2**63 - 1, 2**63, 2**64 - 25, 2**64 - 1)
WIDE_FORMATS = {  # the byte order, and the offset of the size of the data
    "W64-PCM_16": ("little", 96),
    "W64-GSM610": ("little", 136),
    "RF64-PCM_16": ("little", 28),
    "CAF-PCM_16": ("big", 4084),
}
BOXES = (b"ftyp", b"free", b"mdat", b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsz")


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def outcomes(data: bytes, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Read the bytes from memory and from a file: the hash or the refusal of each, and exceptions in callbacks."""
    found: list[str] = []
    limits = Limits(30.0)
    path.write_bytes(data)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "unraisablehook", lambda what: found.append(repr(what.exc_value)))
        found.append(fuzzing.outcome(lambda: decode_bytes(data, "a", limits).waveform))
        found.append(fuzzing.outcome(lambda: decode_path(path, limits).waveform))
    return found


@pytest.mark.parametrize("name", WIDE_FORMATS)
def test_a_chunk_that_ends_beyond_64_bits_is_beyond_the_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size at each place of a header: memory and file give the same, and no callback of libsndfile raises."""
    whole = SOUNDS[name]
    order, data_size = WIDE_FORMATS[name]
    healthy = fuzzing.outcome(lambda: decode_bytes(whole, "a").waveform)
    start = whole.index(b"data")
    for at in [*range(4, min(start, 100)), *range(start, start + 24)]:
        for size in WIDE:
            damaged = with_bytes(whole, at, size.to_bytes(8, order))  # type: ignore[arg-type]
            found = outcomes(damaged, tmp_path / "a", monkeypatch)
            assert found == [found[-1]] * 2, (at, size)
            assert at != data_size or found[0] == healthy


@pytest.mark.parametrize("name", ["W64-PCM_16", "RF64-PCM_16", "CAF-PCM_16"])
def test_a_size_of_3_gib_that_the_file_holds_is_known(name: str, tmp_path: Path) -> None:
    """A sparse file with a chunk behind the data, which is not audio."""
    order, data_size = WIDE_FORMATS[name]
    size, header = 3 << 30, 24 if name.startswith("W64") else 0
    head = with_bytes(SOUNDS[name], data_size, (size + header).to_bytes(8, order))  # type: ignore[arg-type]
    start = head.index(b"data") + {"W64-PCM_16": 24, "RF64-PCM_16": 8, "CAF-PCM_16": 12}[name]
    with (tmp_path / "a").open("w+b") as file:
        file.write(head[:start])
        file.seek(start + size)
        file.write(b"LIST" + bytes(2**15))
        data = containers.find_audio_data(file, file.tell())
    assert data is not None
    assert (data.claimed, data.present) == (size, size)


@pytest.mark.parametrize("name", BOXES)
def test_a_box_that_ends_beyond_64_bits_is_beyond_the_end(
    av: Any, name: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = fuzzing.media_file("mp4", "aac")
    at = data.index(name) - 4
    for size in WIDE:
        damaged = with_bytes(with_bytes(data, at, struct.pack(">I", 1)), at + 8, size.to_bytes(8, "big"))
        found = outcomes(damaged, tmp_path / "a", monkeypatch)
        assert found == [found[-1]] * 2, size


# Pieces -----------------------------------------------------------------------------------------------------


def test_a_long_recording_is_split_into_equal_pieces_with_times(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(written("WAV-PCM_16", 7.0)[:-RATE])
    whole = audio.read(Audio(path))
    pieces = audio.split(Audio(path, lang="zh"), 3.0)
    assert [round(piece.end - piece.start, 1) for piece in pieces] == [2.2, 2.2, 2.2]
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert all(piece.audio.lang == "zh" for piece in pieces)
    assert np.array_equal(np.concatenate([audio.load(piece.audio) for piece in pieces]), whole.waveform)
    assert [audio.read(piece.audio).warnings for piece in pieces] == [(), (), whole.warnings]
    assert len(audio.split(Audio(path), 30.0)) == 1


@pytest.mark.parametrize("name", OGGS)
def test_a_hole_is_named_on_the_piece_that_contains_it(name: str, tmp_path: Path) -> None:
    data, pages, path = ogg_file(name), pages_of(ogg_file(name)), tmp_path / "a.ogg"
    whole = decode_bytes(data, "a").waveform
    for page in pages[3:-2]:
        path.write_bytes(data[: page + 40] + data[page + 41 :])
        found = decode_path(path).waveform
        hole = np.flatnonzero(np.abs(found - whole[: len(found)]) > 1e-3)[0] / SAMPLE_RATE
        pieces = audio.split(Audio(path), 0.3)
        (warned,) = [piece for piece in pieces if piece.audio.warnings]
        assert warned.start - 0.01 <= hole < warned.end + 0.01


def test_warnings_stand_where_their_holes_are_and_else_at_the_end() -> None:
    wave = np.zeros(4 * SAMPLE_RATE, np.float32)
    recording = audio.Recording(wave, ("holes", "cut"), {"holes": (0.0, 1.5)})
    parts = [tuple(recording.warnings_within(n, n + 1)) for n in range(4)]
    assert parts == [("holes",), ("holes",), (), ("cut",)]
    assert tuple(audio.Recording(wave, ("late",), {"late": (9.0,)}).warnings_within(3, 4)) == ("late",)


# PyAV -------------------------------------------------------------------------------------------------------

MEDIA = [("m4a", "mp4", "aac"), ("mp4", "mp4", "alac"), ("webm", "webm", "libopus"), ("aac", "adts", "aac")]
MEDIA += [("wma", "asf", "wmav2"), ("3gp", "3gp", "aac")]


@pytest.fixture
def av() -> Any:
    return pytest.importorskip("av")


@pytest.mark.parametrize(("kind", "container", "codec"), MEDIA)
def test_what_phones_and_browsers_record_is_read(av: Any, kind: str, container: str, codec: str) -> None:
    data = fuzzing.media_file(container, codec, 2.0)
    found = decode_recording(base64.b64encode(data).decode(), kind, 30.0)
    assert found.seconds == pytest.approx(2.0, abs=0.15)
    assert not found.warnings
    spectrum = np.abs(np.fft.rfft(found.waveform[8_000:24_000]))
    assert abs(int(np.argmax(spectrum)) - 220) < 3
    with pytest.raises(RequestError, match="format is wav, but the data is"):
        decode_recording(base64.b64encode(data).decode(), "wav", 30.0)
    with pytest.raises(AudioError, match="lasts more than 1 s"):
        decode_recording(base64.b64encode(data).decode(), kind, 1.0)


@pytest.mark.parametrize(("kind", "container", "codec"), MEDIA)
def test_a_hole_in_a_phone_s_recording_has_its_place(av: Any, kind: str, container: str, codec: str) -> None:
    data = fuzzing.media_file(container, codec, 6.0)
    middle, lost = len(data) // 2, len(data) // 10
    found = decode_bytes(data[:middle] + bytes(lost) + data[middle + lost :], f"a.{kind}")
    (warning,) = found.warnings
    assert found.holes[warning][0] == pytest.approx(3.0, abs=0.25)


def test_half_a_phone_s_recording_is_used_or_its_lost_index_is_named(av: Any, tmp_path: Path) -> None:
    fast = fuzzing.media_file("mp4", "aac", 4.0, {"movflags": "+faststart"}, tmp_path / "a.m4a")
    found = decode_bytes(fast[: len(fast) * 2 // 3], "a")
    assert len(found.waveform) / SAMPLE_RATE == pytest.approx(2.6, abs=0.7)
    assert "are missing" in found.warnings[0]
    plain = fuzzing.media_file("mp4", "aac", 4.0)
    with pytest.raises(AudioError, match="index"):
        decode_bytes(plain[: len(plain) // 2], "a")
    for end in range(plain.index(b"moov"), len(plain), 7):
        try:
            found = decode_bytes(plain[:end], "a")
        except AudioError as error:
            assert "index" in str(error)  # noqa: PT017
        else:
            assert found.warnings or len(found.waveform) > 3.9 * SAMPLE_RATE


def test_a_film_without_sound_is_refused(av: Any) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(10):
            out.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
        out.mux(stream.encode(None))
    with pytest.raises(AudioError, match="holds no audio stream"):
        decode_bytes(file.getvalue(), "a")


def test_more_planes_than_pyav_reads_safely_are_refused(av: Any) -> None:
    """A crash, found by fuzzing: PyAV takes whatever lies behind the eighth plane for more planes."""
    file, rate = io.BytesIO(), 48_000
    with av.open(file, "w", format="matroska") as out:
        stream = out.add_stream("aac", rate=rate, layout="7.1")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8 * 1024), np.float32), format="flt", layout="7.1")
        frame.sample_rate = rate
        for _ in range(10):
            frame.pts = None
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    with pytest.raises(AudioError, match="8 channels; 1 to 7 are supported"):
        decode_bytes(file.getvalue(), "a")


def test_a_codec_that_is_unknown_is_an_audio_error(av: Any) -> None:
    data = fuzzing.media_file("mp4", "aac")
    with pytest.raises(AudioError, match="codec"):
        decode_bytes(data.replace(b"mp4a", b"zzzz").replace(b"esds", b"free"), "a")


def test_an_index_of_more_samples_than_bytes_is_refused(av: Any) -> None:
    data = fuzzing.media_file("mp4", "aac")
    at = data.index(b"stsz") + 8
    with pytest.raises(AudioError, match="more samples than the file has bytes"):
        decode_bytes(data[:at] + struct.pack(">II", 1, 1 << 26) + data[at + 8 :], "a")


def test_boxes_in_boxes_without_end_are_an_audio_error(av: Any) -> None:
    boxes = b"".join(struct.pack(">I4s", 80_000 - 8 * n, b"moov") for n in range(10_000))
    with pytest.raises(AudioError):
        decode_bytes(b"\0\0\0\x20ftypM4A " + bytes(20) + boxes, "a")


def test_without_pyav_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_decoder, "is_installed", lambda: False)
    with pytest.raises(AudioError, match=r"pip install .*ffmpeg -i in.m4a out.wav.*wav, flac"):
        decode_bytes(b"\0\0\0\x20ftypM4A " + bytes(500), "a.m4a")


# Unwritten samples ------------------------------------------------------------------------------------------


def test_no_sample_is_unwritten_wherever_a_file_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's buffer is filled with a mark before each read: none may come out."""
    mark, whole, added = np.float32(77.125), soundfile.SoundFile.read, Downmix.add

    def read(self: Any, *args: Any, out: Any, **more: Any) -> Any:
        out[...] = mark
        return whole(self, *args, out=out, **more)

    def add(self: Any, block: np.ndarray, rate: int) -> None:
        assert not (block == mark).any()
        added(self, block, rate)

    monkeypatch.setattr(soundfile.SoundFile, "read", read)
    monkeypatch.setattr(Downmix, "add", add)
    for data in SOUNDS.values():
        for share in (0.3, 0.5, 0.77, 0.999, 1.0):
            try:
                found = decode_bytes(data[: int(len(data) * share)], "a")
            except AudioError:
                continue
            assert np.isfinite(found.waveform).all()


def test_a_client_does_not_hear_another_s_recording() -> None:
    """Half an MP3 behind a loud recording of another client: it is the beginning of the whole one, and no longer."""
    data = written("MP3-MPEG_LAYER_III")
    whole = decode_recording(base64.b64encode(data).decode(), "mp3", 30.0)
    other = base64.b64encode(written("WAV-PCM_16")).decode()
    for _ in range(3):
        decode_recording(other, "wav", 30.0)
        half = decode_recording(base64.b64encode(data[: len(data) // 2]).decode(), "mp3", 30.0)
        assert half.seconds < 2.1
        assert half.warnings
        kept = len(half.waveform) - 2_000
        assert np.allclose(half.waveform[:kept], whole.waveform[:kept], atol=2**-14)


def test_a_short_fuzzing_run_finds_nothing() -> None:
    command = [sys.executable, "-m", "tests.fuzz.recordings", "--cases", "250", "--seconds", "600", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "0 read wrongly" in done.stdout
