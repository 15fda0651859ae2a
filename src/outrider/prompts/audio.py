"""Recordings: from a file or an array to 16 kHz mono, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider.errors import AudioError

SAMPLE_RATE = 16_000
MIN_SECONDS = 0.1
MAX_CHANNELS = 64
MAX_SECONDS = 3600.0  # refused before anything is decoded; a model's own limit comes on top
MAX_PEAK = 100.0  # beyond this it is no waveform in [−1, 1], however clipped
SILENCE_PEAK = 1e-4  # −80 dBFS
FULL_SCALE = 32_768  # steps of a 16-bit sample from 0 to 1
MAX_EXPONENT = 7  # 2^7 holds MAX_PEAK


@dataclass(frozen=True)
class Audio:
    """A recording to caption: `Audio("a.wav", task="detailed", lang="zh")`.

    source: a path, or a waveform as floats in [−1, 1], [samples] or [samples, channels], with its sampling_rate.
    instruction: what to ask instead of the caption task.
    """

    source: str | Path | np.ndarray
    task: str = "default"
    lang: str = "en"
    sampling_rate: int = SAMPLE_RATE
    instruction: str | None = field(default=None, kw_only=True)


def load(audio: Audio) -> np.ndarray:
    """The waveform: float32 [samples], 16 kHz mono, on a 16-bit grid (`on_grid`), so that it can be sent unchanged.

    Raises:
        AudioError: unreadable, not audio, empty, shorter than 0.1 s, longer than an hour, or not finite.
    """
    if not isinstance(audio.source, (str, Path, np.ndarray)):
        kind = type(audio.source).__name__
        raise AudioError(f"a recording is a path or a numpy array of floats, not {kind}")
    if isinstance(audio.source, np.ndarray):
        name, wave, rate = "the waveform", audio.source, audio.sampling_rate
    else:
        name = str(audio.source)
        wave, rate = _read(Path(audio.source))
    return _prepare(name, wave, rate)


def exponent(waveform: np.ndarray) -> int:
    """The e of the grid that a waveform is put on: the smallest for which nothing clips.

    A recording with a peak of 1 stays at 0, though +1 is one step more than 16 bits hold: it is set to the last step,
    as sound cards do. That the limit for this is one step higher makes `on_grid` idempotent: what is rounded on the
    next, coarser grid never comes back to 0.
    """
    peak, low, high = np.abs(waveform).max(), waveform.min(), waveform.max()
    if peak * FULL_SCALE <= FULL_SCALE + 1:
        return 0
    held = (
        e
        for e in range(1, MAX_EXPONENT + 1)
        if np.rint(high * FULL_SCALE / 2**e) < FULL_SCALE and np.rint(low * FULL_SCALE / 2**e) >= -FULL_SCALE
    )
    return next(held, MAX_EXPONENT)


def steps(waveform: np.ndarray, e: int) -> np.ndarray:
    """The integers n of a waveform n · 2^(e−15): int16 [samples]."""
    scaled = np.rint(waveform * np.float32(FULL_SCALE / 2**e))
    return np.clip(scaled, -FULL_SCALE, FULL_SCALE - 1).astype(np.int16)


def from_steps(integers: np.ndarray, e: int) -> np.ndarray:
    """The waveform n · 2^(e−15) of int16 [samples]: float32, exactly."""
    return integers.astype(np.float32) * np.float32(2**e / FULL_SCALE)


def on_grid(waveform: np.ndarray) -> np.ndarray:
    """A waveform rounded to n · 2^(e−15), with n a 16-bit integer and the `exponent` e: what FLAC carries unchanged.

    float32 [samples] → float32 [samples]; one that is on the grid already is returned as it is, bit for bit.
    """
    e = exponent(waveform)
    return from_steps(steps(waveform, e), e)


def is_silent(waveform: np.ndarray) -> bool:
    """True where nothing reaches −80 dBFS: there is no speech to describe."""
    return bool(np.abs(waveform).max() < SILENCE_PEAK)


def check_length(waveform: np.ndarray, limit: float, model: str, name: str = "the recording") -> None:
    """Raise AudioError where the model would have to cut the recording."""
    seconds = len(waveform) / SAMPLE_RATE
    if seconds > limit:
        raise AudioError(f"{name} lasts {seconds:.1f} s; {model} takes at most {limit:g} s: split it")


def _read(path: Path) -> tuple[np.ndarray, int]:
    import soundfile

    if not path.exists():
        raise AudioError(f"{path}: no such file")
    if not path.is_file():
        raise AudioError(f"{path}: not a file")
    try:
        file = os.fsencode(path)  # a name need not be valid text
        info: Any = soundfile.info(file)
        if info.duration > MAX_SECONDS:
            raise AudioError(f"{path}: lasts {info.duration:.0f} s; at most {MAX_SECONDS:.0f} s are read")
        wave, rate = soundfile.read(file, dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, OSError) as error:
        kind = "empty file" if path.stat().st_size == 0 else f"not audio that can be read ({error})"
        raise AudioError(f"{path}: {kind}") from error
    return wave, int(rate)


def _prepare(name: str, wave: np.ndarray, rate: int) -> np.ndarray:
    if wave.ndim not in (1, 2) or not np.issubdtype(wave.dtype, np.floating):
        raise AudioError(f"{name}: expected floats [samples] or [samples, channels], not {wave.dtype} {wave.shape}")
    if rate <= 0:
        raise AudioError(f"{name}: a sampling rate of {rate} Hz")
    if not np.isfinite(wave).all():
        raise AudioError(f"{name}: holds samples that are not finite (NaN or infinity)")
    if wave.ndim == 2 and wave.shape[1] > MAX_CHANNELS:
        raise AudioError(f"{name}: {wave.shape[1]} channels; expected [samples, channels], the axes may be swapped")
    seconds = len(wave) / rate
    if seconds < MIN_SECONDS:
        raise AudioError(
            f"{name}: lasts {seconds:.3f} s; at least {MIN_SECONDS} s are needed" if len(wave) else f"{name}: empty"
        )
    _check_peak(name, wave, MAX_PEAK)
    resampled = _to_16k(_to_mono(wave.astype(np.float32)), rate)
    _check_peak(name, resampled, (FULL_SCALE - 1) * 2**MAX_EXPONENT / FULL_SCALE)  # resampling overshoots
    return on_grid(resampled)


def _check_peak(name: str, wave: np.ndarray, limit: float) -> None:
    if np.abs(wave).max() > limit:
        raise AudioError(f"{name}: samples as large as {np.abs(wave).max():.3g}; expected floats in [−1, 1]")


def _to_mono(wave: np.ndarray) -> np.ndarray:
    return wave if wave.ndim == 1 else wave.mean(axis=1)


def _to_16k(wave: np.ndarray, rate: int) -> np.ndarray:
    if rate == SAMPLE_RATE:
        return wave
    import soxr

    return np.asarray(soxr.resample(wave, rate, SAMPLE_RATE), dtype=np.float32)
