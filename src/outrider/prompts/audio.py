"""Recordings: conversion of a file or an array to 16 kHz mono on a 16-bit grid, with checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import AudioError, PromptError, quote
from outrider.prompts.recordings import (
    MAX_CHANNELS,
    MAX_RATE,
    MAX_SECONDS,
    MIN_RATE,
    SAMPLE_RATE,
    Decoded,
    Downmix,
    check_samples,
    decode_path,
)
from outrider.prompts.sound_file import BLOCK

SILENCE_PEAK = 1e-4  # −80 dBFS
FULL_SCALE = 32_768  # steps of a 16-bit sample from 0 to 1
MAX_EXPONENT = 7  # 2^7 holds MAX_PEAK
SPLIT = "split it into pieces (--split on the command line, outrider.prompts.audio.split in Python)"


@dataclass(frozen=True)
class Audio:
    """A recording to caption: `Audio("a.wav", task="detailed", lang="zh")`.

    source: a path, or a waveform as floats in [−1, 1], [samples] or [samples, channels], with its sampling_rate in Hz.
    instruction: a question, which replaces task and lang. warnings: of an earlier decoding, for the result.

    Raises:
        PromptError: an argument is of another type, or there are both an instruction and a task or language.
        AudioError: sampling_rate is given for a file, which has its own.
    """

    source: str | Path | np.ndarray
    task: str = "default"
    lang: str = "en"
    sampling_rate: int = SAMPLE_RATE
    instruction: str | None = field(default=None, kw_only=True)
    warnings: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        instruction = self.instruction
        if instruction is not None and not (isinstance(instruction, str) and instruction):
            raise PromptError(f"instruction is a text that is not empty, or None, not {quote(instruction)}")
        if instruction is not None and (self.task, self.lang) != (Audio.task, Audio.lang):
            raise PromptError("instruction replaces task and lang: leave them out, or leave out instruction")
        if isinstance(self.source, str | Path) and self.sampling_rate != SAMPLE_RATE:
            raise AudioError(
                f"sampling_rate is that of a waveform, and a file has its own: not {quote(self.sampling_rate)}"
            )
        if not isinstance(self.warnings, tuple) or not all(isinstance(each, str) for each in self.warnings):
            raise PromptError(f"warnings is a tuple of texts, not {quote(self.warnings)}")


@dataclass(frozen=True)
class Recording:
    """A recording in the models' input format.

    waveform: float32 [samples], 16 kHz mono, on a 16-bit grid (`quantize`), so that it can be sent unchanged. warnings:
    about missing parts of the file. holes: their places in seconds, where they are not at the end.
    """

    waveform: np.ndarray
    warnings: tuple[str, ...] = ()
    holes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return len(self.waveform) / SAMPLE_RATE

    def warnings_within(self, start: float, end: float) -> Iterator[str]:
        """Yield the warnings about a part, from `start` to `end` in seconds. One without holes is about the end."""
        last = (len(self.waveform) - 1) / SAMPLE_RATE
        for warning in self.warnings:
            if any(start <= min(place, last) < end for place in self.holes.get(warning) or (last,)):
                yield warning


@dataclass(frozen=True)
class Piece:
    """A part of a recording, from `start` to `end`, in seconds."""

    audio: Audio
    start: float
    end: float


def read(audio: Audio) -> Recording:
    """Decode a recording, mix it down and resample it.

    Raises:
        AudioError: the recording is unreadable, not audio, empty, shorter than 0.1 s, longer than an hour, or not
            finite.
    """
    if isinstance(audio.source, np.ndarray):
        waveform = _from_array(audio.source, audio.sampling_rate)
        return prepare("the waveform", Decoded(waveform, "array", audio.warnings))
    if not isinstance(audio.source, (str, Path)):
        kind = type(audio.source).__name__
        raise AudioError(f"a recording is a path or a numpy array of floats, not {kind}")
    return prepare(str(audio.source), decode_path(Path(audio.source)))


def load(audio: Audio) -> np.ndarray:
    """Return the waveform of `read`."""
    return read(audio).waveform


def prepare(name: str, decoded: Decoded) -> Recording:
    """Put a decoded recording on the 16-bit grid.

    Raises:
        AudioError: resampling overshot by more than the grid holds.
    """
    check_samples(name, decoded.waveform, (FULL_SCALE - 1) * 2**MAX_EXPONENT / FULL_SCALE)
    return Recording(quantize(decoded.waveform), decoded.warnings, decoded.holes)


def split(audio: Audio, max_seconds: float) -> list[Piece]:
    """Divide a recording into the fewest pieces of equal length that are no longer than `max_seconds`.

    Raises:
        AudioError: see `read`.
    """
    recording = read(audio)
    wave, count = recording.waveform, math.ceil(recording.seconds / max_seconds)
    bounds = [len(wave) * n // count for n in range(count + 1)]
    pieces = []
    for start, end in pairwise(bounds):
        warnings = tuple(recording.warnings_within(start / SAMPLE_RATE, end / SAMPLE_RATE))
        part = replace(audio, source=wave[start:end], sampling_rate=SAMPLE_RATE, warnings=warnings)
        pieces.append(Piece(part, start / SAMPLE_RATE, end / SAMPLE_RATE))
    return pieces


def grid_exponent(waveform: np.ndarray) -> int:
    """Return the exponent e of a waveform's grid: the smallest for which no sample is clipped.

    A recording with a peak of 1 stays at 0, although +1 is one step more than 16 bits hold. It is set to the last step,
    as sound cards do. The limit for this is one step higher, which makes `quantize` idempotent: a waveform that was
    rounded on the next, coarser grid never returns to 0.
    """
    peak, low, high = np.abs(waveform).max(), waveform.min(), waveform.max()
    if peak * FULL_SCALE <= FULL_SCALE + 1:
        return 0
    exponents = (
        e
        for e in range(1, MAX_EXPONENT + 1)
        if np.rint(high * FULL_SCALE / 2**e) < FULL_SCALE and np.rint(low * FULL_SCALE / 2**e) >= -FULL_SCALE
    )
    return next(exponents, MAX_EXPONENT)


def to_int16(waveform: np.ndarray, e: int) -> np.ndarray:
    """Return the integers n of a waveform n · 2^(e−15): int16 [samples]."""
    scaled = np.rint(waveform * np.float32(FULL_SCALE / 2**e))
    return np.clip(scaled, -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def from_int16(integers: np.ndarray, e: int) -> np.ndarray:
    """Return the exact waveform n · 2^(e−15) of the integers n, int16 [samples]: float32 [samples]."""
    return integers.astype(np.float32) * np.float32(2**e / FULL_SCALE)


def quantize(waveform: np.ndarray) -> np.ndarray:
    """Round a waveform, float32 [samples], to n · 2^(e−15) with 16-bit integers n and e = grid_exponent.

    FLAC stores the result exactly. A waveform on the grid is returned bit for bit.
    """
    e = grid_exponent(waveform)
    return from_int16(to_int16(waveform, e), e)


def is_silent(waveform: np.ndarray) -> bool:
    """Return whether all samples are below −80 dBFS: such a recording has no speech to describe."""
    return bool(np.abs(waveform).max() < SILENCE_PEAK)


def check_length(
    waveform: np.ndarray, limit: float, model: str, name: str = "the recording", advice: str = SPLIT
) -> None:
    """Raise AudioError if the recording is longer than `limit`, the model's window in seconds."""
    seconds = len(waveform) / SAMPLE_RATE
    if seconds > limit:
        raise AudioError(f"{name} lasts {seconds:.1f} s; {model} takes at most {limit:g} s: {advice}")


def _from_array(wave: np.ndarray, rate: Any) -> np.ndarray:
    """Convert floats [samples] or [samples, channels] to 16 kHz mono: float32 [samples]."""
    name = "the waveform"
    is_whole = isinstance(rate, Real) and not isinstance(rate, bool) and float(rate).is_integer()
    if not is_whole or not MIN_RATE <= rate <= MAX_RATE:
        raise AudioError(f"sampling_rate: a whole number of Hz, {MIN_RATE} to {MAX_RATE}, not {quote(rate)}")
    rate = int(rate)
    if wave.ndim not in (1, 2) or not np.issubdtype(wave.dtype, np.floating):
        advice = "integers of 16 bits become floats in [−1, 1] with wave / 32768.0"
        raise AudioError(
            f"{name}: expected floats [samples] or [samples, channels], not {wave.dtype} {wave.shape}: {advice}"
        )
    channels = wave.shape[1] if wave.ndim == 2 else 1
    if channels > MAX_CHANNELS:
        raise AudioError(f"{name}: {channels} channels; expected [samples, channels], the axes may be swapped")
    if not wave.size:
        raise AudioError(f"{name}: empty")
    if len(wave) / rate > MAX_SECONDS:
        raise AudioError(f"{name}: lasts {len(wave) / rate:.0f} s; at most {MAX_SECONDS:.0f} s are taken")
    downmix = Downmix(name)
    for start in range(0, len(wave), BLOCK):
        downmix.add(np.asarray(wave[start : start + BLOCK]).reshape(-1, channels), rate)
    downmix.check_length()
    return downmix.finish()
