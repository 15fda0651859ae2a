"""The decoder of recordings: any file to 16 kHz mono, block by block, with limits checked during decoding.

The libraries are libsndfile and, for formats of phones and browsers, PyAV. Lengths come from decoding alone: only the
frames that the library reports are used of a block, and decoding continues until the library returns nothing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from outrider.errors import AudioError
from outrider.hints import install_command
from outrider.prompts import containers, media_decoder, ogg
from outrider.prompts.sound_file import SoundDecoder, Source, Unreadable

SAMPLE_RATE: Final = 16_000
MIN_SECONDS: Final = 0.1
MAX_SECONDS: Final = 3600.0  # a model's own limit comes on top
MIN_RATE, MAX_RATE = 1_000, 768_000
MAX_CHANNELS: Final = 64
MAX_SAMPLES: Final = 2**32  # of all channels: an hour of one at 768 kHz, of two at 384 kHz
MAX_PEAK: Final = 100.0  # even clipped audio in [−1, 1] stays below
ASSUMED_SIZE: Final = 2**30  # bytes; with a smaller size libsndfile stops at an estimate of the length
FORMATS: Final = "wav, flac, ogg, opus, mp3, aiff, au, caf and w64"


@dataclass(frozen=True)
class Limits:
    """Limits of decoding: seconds, and samples of all channels. advice: the end of the error message."""

    seconds: float = MAX_SECONDS
    samples: int = MAX_SAMPLES
    advice: str = ""


@dataclass(frozen=True)
class Decoded:
    """A decoded recording.

    waveform: float32 [samples], 16 kHz mono. kind: the library's name of the format. warnings: about missing audio.
    holes: the places of each warning, in seconds of the waveform. A warning without places is about the end.
    """

    waveform: np.ndarray
    kind: str
    warnings: tuple[str, ...] = ()
    holes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def decode_path(path: Path, limits: Limits = Limits()) -> Decoded:
    """Decode a file.

    Raises:
        AudioError: the file does not exist or cannot be read, or see `decode`.
    """
    try:
        if not path.exists():
            raise AudioError(f"{path}: no such file")
        if not path.is_file():
            raise AudioError(f"{path}: not a file")
        with path.open("rb") as file:
            return decode(file, str(path), limits)
    except (OSError, ValueError) as error:
        raise AudioError(f"{path}: cannot be read: {error}") from error


def decode(file: BinaryIO, name: str, limits: Limits = Limits()) -> Decoded:
    """Decode an open file. Errors call it `name`.

    Raises:
        AudioError: not audio that can be decoded, shorter than 0.1 s, beyond the limits, or not finite.
    """
    size = file.seek(0, os.SEEK_END)
    if not size:
        raise AudioError(f"{name}: empty file")
    file.seek(0)
    head = file.read(64)
    if containers.is_sample_dump(head):
        raise AudioError(_unreadable(name, "a MIDI sample dump"))
    media = containers.media_format(head)
    if media is not None:
        return _decode_media(file, name, limits, media)
    try:
        return _decode_sound(file, size, head, name, limits)
    except Unreadable as error:
        if head.startswith(b"ID3"):
            return _decode_tagged(file, size, head, name, limits)
        raise AudioError(_unreadable(name, error)) from error


def _decode_tagged(file: BinaryIO, size: int, head: bytes, name: str, limits: Limits) -> Decoded:
    """Decode AAC behind an ID3 tag."""
    start = containers.find_mpeg_start(head) or size
    file.seek(min(start, size))
    if containers.is_adts(file.read(2)):
        return _decode_media(file, name, limits, "aac")
    where = (
        "states a size beyond the file's end" if start >= size else f"has no MP3 or AAC audio behind its {start} bytes"
    )
    raise AudioError(
        f"{name}: damaged: its ID3 tag {where}: convert it without the tag: "
        f"ffmpeg -skip_initial_bytes 10 -f mp3 -i IN out.wav"
    )


class Downmix:
    """A conversion of blocks of any rate and number of channels to 16 kHz mono, with limits checked at each block.

    name: of the recording, for errors. Blocks are floats [frames, channels].
    """

    def __init__(self, name: str, limits: Limits = Limits()) -> None:
        self._name, self._limits = name, limits
        self._rate = 0
        self._stream: Any = None
        self._parts: list[np.ndarray] = []
        self._samples = 0
        self.seconds = 0.0

    def check(self, rate: int, channels: int) -> None:
        """Raise AudioError for an unsupported rate or number of channels."""
        if not MIN_RATE <= rate <= MAX_RATE:
            raise AudioError(f"{self._name}: a sampling rate of {rate} Hz; expected {MIN_RATE} to {MAX_RATE} Hz")
        if not 0 < channels <= MAX_CHANNELS:
            raise AudioError(f"{self._name}: {channels} channels; expected 1 to {MAX_CHANNELS}")

    def add(self, block: np.ndarray, rate: int) -> None:
        """Convert a block. A stream may change its rate.

        Raises:
            AudioError: a limit is exceeded, or samples are not finite or out of range.
        """
        self.check(rate, block.shape[1])
        self.seconds += len(block) / rate
        self._samples += block.size
        self._check_limits()
        check_samples(self._name, block)
        if rate != self._rate:
            self._flush()
            self._rate, self._stream = rate, _resampler(rate)
        mono = np.mean(block.astype(np.float32, copy=False), axis=1)
        self._parts.append(mono if self._stream is None else self._stream.resample_chunk(mono))

    def finish(self) -> np.ndarray:
        """Return the waveform: float32 [samples]."""
        self._flush()
        return np.concatenate([np.zeros(0, np.float32), *self._parts])

    def check_length(self) -> None:
        """Raise AudioError for less than 0.1 s."""
        _check_duration(self._name, self.seconds)

    def _flush(self) -> None:
        if self._stream is not None:
            self._parts.append(self._stream.resample_chunk(np.zeros(0, np.float32), last=True))
        self._stream = None

    def _check_limits(self) -> None:
        limits = self._limits
        advice = f": {limits.advice}" if limits.advice else ""
        if self.seconds > limits.seconds:
            raise AudioError(f"{self._name}: lasts more than {limits.seconds:g} s, the limit{advice}")
        if self._samples > limits.samples:
            raise AudioError(
                f"{self._name}: more than {limits.samples} samples, counted over all channels, after "
                f"{self.seconds:.1f} s: convert it to 16 kHz mono (ffmpeg -i IN -ar 16000 -ac 1 out.wav)"
            )


def _check_duration(name: str, seconds: float) -> None:
    if seconds < MIN_SECONDS:
        lasts = f"lasts {seconds:.3f} s" if seconds else "holds no audio that can be decoded"
        raise AudioError(f"{name}: {lasts}; at least {MIN_SECONDS} s are needed")


def check_samples(name: str, wave: np.ndarray, limit: float = MAX_PEAK) -> None:
    """Raise AudioError for samples that are not finite or larger than `limit`."""
    peak = np.abs(wave).max(initial=0.0)
    if not np.isfinite(peak):
        raise AudioError(f"{name}: holds samples that are not finite (NaN or infinity)")
    if peak > limit:
        raise AudioError(f"{name}: samples as large as {peak:.3g}; expected floats in [−1, 1]")


def _resampler(rate: int) -> Any:
    if rate == SAMPLE_RATE:
        return None
    import soxr

    return soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")


# libsndfile -------------------------------------------------------------------------------------------------


def _decode_sound(file: BinaryIO, size: int, head: bytes, name: str, limits: Limits) -> Decoded:
    start = containers.find_mpeg_start(head)
    if start is not None and start < size:
        return _decode_mpeg(file, size, start, name, limits)
    data, source = containers.find_audio_data(file, size), Source(file, size)
    is_strict = head[:4] in (b"caff", b"riff")  # libsndfile accepts these two only with the true size
    if data is not None and (data.claimed is None or is_strict) and data.true_size:
        source.patches[data.at] = data.true_size
    claimed = containers.flac_length(head)
    if claimed:
        source.patches[21] = bytes([head[21] & 0xF0]) + bytes(4)  # unknown: the header may be wrong
    run, wave = _decode_source(source, name, limits)
    if claimed and run.is_broken:  # by damage, or only by a tag behind the header's length
        counted, again = _decode_source(source.reopen({}), name, limits)
        run, wave = (counted, again) if counted.frames >= run.frames else (run, wave)
    _check_duration(name, run.seconds)
    holes = ogg.survey(file, size).holes(run.seconds) if run.kind == "OGG" else {}
    return Decoded(wave, run.kind, tuple(_missing_audio_warnings(run, claimed, data, file, size)), holes)


def _decode_source(source: Source, name: str, limits: Limits) -> tuple[SoundDecoder, np.ndarray]:
    """Decode a source to its end: float32 [samples].

    Raises:
        Unreadable: libsndfile cannot open it, or the format is one whose truncation cannot be detected.
    """
    run, downmix = SoundDecoder(source), Downmix(name, limits)
    for block in run.blocks(downmix.check):
        downmix.add(block, run.rate)
    return run, downmix.finish()


def _decode_longer(
    run: SoundDecoder, wave: np.ndarray, patches: dict[int, bytes], name: str, limits: Limits
) -> tuple[SoundDecoder, np.ndarray]:
    """Decode again without the header's length, and return the run that got further."""
    whole, longer = _decode_source(run.source.reopen(patches), name, limits)
    return (whole, longer) if len(longer) > len(wave) + SAMPLE_RATE // 4 else (run, wave)


def _decode_mpeg(file: BinaryIO, size: int, start: int, name: str, limits: Limits) -> Decoded:
    """Decode MPEG audio to its end. libsndfile itself would stop at an estimate of the length."""
    size = max(containers.find_mpeg_end(file, size), start)
    file.seek(start)
    tag = containers.find_vbr_tag(file.read(64))
    run, wave = _decode_source(_mpeg_source(file, size, start, tag), name, limits)
    if tag is not None and run.source.unread > containers.TRAILING:  # more than the tag counts
        run, wave = _decode_longer(run, wave, {start + tag: bytes(4)}, name, limits)
    _check_duration(name, run.seconds)
    claimed = run.claimed if tag is not None and run.claimed < ASSUMED_SIZE else None
    return Decoded(wave, run.kind, tuple(_truncation_warnings(run, claimed, slack=2 * 1152)))


def _mpeg_source(file: BinaryIO, size: int, start: int, tag: int | None) -> Source:
    source = Source(file, size, max(ASSUMED_SIZE, 2 * size))
    if tag is not None:
        file.seek(start + tag)
        head = file.read(16)
        if len(head) == 16 and head[7] & 2:  # the stream's size in the tag: mpg123 prints a line if it is wrong
            source.patches[start + tag + (12 if head[7] & 1 else 8)] = (source.size - start).to_bytes(8, "big")[-4:]
    return source


def _missing_audio_warnings(
    run: SoundDecoder, flac_length: int, data: containers.Data | None, file: BinaryIO, size: int
) -> Iterator[str]:
    """Yield warnings about audio that could not be decoded. flac_length: in the header, 0 if unknown."""
    if data is not None and data.claimed is not None and data.present < data.claimed:
        whole = run.frames * data.claimed // max(1, data.present)
        yield from _truncation_warnings(run, max(whole, run.frames + 1))
    elif run.kind == "OGG":
        yield from ogg.survey(file, size).warnings(run.seconds)
    elif run.kind == "FLAC":
        yield from _truncation_warnings(run, flac_length or None)
    else:
        yield from _truncation_warnings(run, None)


def _truncation_warnings(run: SoundDecoder, claimed: int | None, slack: int = 0) -> Iterator[str]:
    if claimed is not None and run.frames < claimed - slack:
        lost, whole = (claimed - run.frames) / run.rate, claimed / run.rate
        if claimed > containers.IMPLAUSIBLE * run.frames or (run.kind == "FLAC" and not run.is_broken):
            yield f"the header claims {whole:.2f} s; {run.seconds:.2f} s were found"
            return
        yield f"the recording is damaged or breaks off: {lost:.2f} s of its {whole:.2f} s are missing"
    elif run.is_broken:
        yield f"the recording is damaged or breaks off after {run.seconds:.2f} s: the rest is missing"
    elif run.kind in ("FLAC", "MP3", "MPEG") and run.source.unread > containers.TRAILING:
        yield f"the recording ends after {run.seconds:.2f} s; {run.source.unread} bytes behind its end were not read"


# PyAV -------------------------------------------------------------------------------------------------------


def _decode_media(file: BinaryIO, name: str, limits: Limits, kind: str) -> Decoded:
    if not media_decoder.is_installed():
        names = ", ".join(containers.MEDIA[kind])
        raise AudioError(
            f"{name}: recordings of this kind ({names}) are read with PyAV, which is not installed: "
            f"{install_command('media')}, or convert it: ffmpeg -i in.{containers.MEDIA[kind][0]} out.wav. "
            f"Without PyAV {FORMATS} are read"
        )
    size = file.seek(0, os.SEEK_END)
    if kind == "mov" and containers.has_inflated_sample_count(file, 0, size, size):
        raise AudioError(f"{name}: damaged: its index has more samples than the file has bytes")
    downmix, state = Downmix(name, limits), media_decoder.State()
    file.seek(0)
    try:
        for block, rate in media_decoder.blocks(file, kind, name, state, downmix.check):
            downmix.add(block, rate)
        downmix.check_length()
    except AudioError as error:
        if kind == "mov" and not downmix.seconds and not containers.has_index(file, size):
            raise AudioError(
                f"{name}: truncated: its index, which may stand at the end, is cut off or missing"
            ) from error
        raise
    wave = downmix.finish()
    if kind == "ogg":
        pages = ogg.survey(file, size)
        return Decoded(wave, kind, tuple(pages.warnings(downmix.seconds)), pages.holes(downmix.seconds))
    warnings = tuple(state.warnings(downmix.seconds))
    return Decoded(wave, kind, warnings, dict.fromkeys(warnings, tuple(state.holes)))


def _unreadable(name: str, error: Exception | str) -> str:
    if Path(name).suffix.lower() == ".raw":
        return (
            f"{name}: samples without a header are not supported: convert them with their format, as in "
            f"ffmpeg -f s16le -ar 16000 -ac 1 -i in.raw out.wav"
        )
    return f"{name}: not readable audio ({error}); supported: {FORMATS}. Convert others with ffmpeg -i IN out.wav"


def decode_bytes(data: bytes, name: str, limits: Limits = Limits()) -> Decoded:
    """Decode the bytes of a file, as `decode` does."""
    return decode(io.BytesIO(data), name, limits)
