"""Synthetic speech with known attributes: espeak-ng, driven through ctypes, one clip per seed.

What a clip is (`Spec`) is drawn from the seed alone. Pitch and intonation are then *measured* on the clean voice, and
a clip that falls between two classes is drawn again, so that a label says what can be heard.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.grammar import VALUES, Attributes
from training.sentences import join, sentences

Wave = npt.NDArray[np.float32]

SAMPLE_RATE: Final = 16_000
MAX_SECONDS: Final = 8.0
LEVELS: Final = {"soft": (-43.0, -36.0), "medium": (-28.0, -23.0), "loud": (-17.5, -13.5)}  # dBFS of the voiced part
RATES: Final = {"slow": (80, 110), "medium": (160, 192), "fast": (285, 360)}  # espeak words per minute
PITCH_HZ: Final = {"low": (70.0, 108.0), "medium": (135.0, 185.0), "high": (225.0, 340.0)}  # measured median F0
SPREAD: Final = {"flat": (0.0, 0.9), "lively": (3.0, 9.0)}  # measured spread of F0, in semitones
RANGES: Final = {"flat": (0, 6), "lively": (80, 99)}  # espeak pitch range
SWINGS: Final = {"flat": (0, 0), "lively": (26, 42)}  # how far the pitch of a word moves, in espeak's units
MIXED: Final = 0.6  # how often a training clip is words from several sentences
MALE: Final = ("", "+m1", "+m2", "+m3", "+m4", "+m5", "+m6", "+m7")
FEMALE: Final = ("+f1", "+f2", "+f3", "+f4", "+f5")
VOICES: Final = {"zh": "cmn", "en": "en-us"}
_RATE, _VOLUME, _PITCH, _RANGE = 1, 2, 3, 4  # espeak_PARAMETER


@dataclass(frozen=True)
class Spec:
    """Everything that fixes the clean voice of a clip."""

    seed: int
    lang: str
    chunks: tuple[str, ...]
    text: str
    attributes: tuple[tuple[str, str], ...]
    voice: str
    rate: int
    pitch: int
    pitch_range: int
    level_db: float
    gaps: tuple[float, ...]


def draw_spec(seed: int, held_out: bool, lang: str | None = None, wanted: Attributes | None = None) -> Spec:
    """The clip of a seed: attributes, sentence, voice. `wanted` fixes the attributes, `lang` the language."""
    rng = random.Random(seed)
    attributes = {name: rng.choice(values) for name, values in VALUES.items()}
    attributes.update(wanted or {})
    lang = rng.choice(("zh", "en")) if lang is None else lang
    units = _mixed(lang, rng) if not held_out and rng.random() < MIXED else rng.choice(sentences(lang, held_out))
    voice, pitch = _voice(attributes["pitch"], rng)
    marked = _melody(units, pitch, SWINGS[attributes["intonation"]], rng)
    chunks = _chunks(marked, lang, attributes["pauses"] == "many", rng)
    return Spec(
        seed=seed,
        lang=lang,
        chunks=tuple(chunks),
        text=join(units, lang),
        attributes=tuple(attributes.items()),
        voice=VOICES[lang] + voice,
        rate=rng.randint(*RATES[attributes["rate"]]),
        pitch=pitch,
        pitch_range=rng.randint(*RANGES[attributes["intonation"]]),
        level_db=rng.uniform(*LEVELS[attributes["loudness"]]),
        gaps=tuple(rng.uniform(0.3, 0.5) for _ in chunks[1:]),
    )


def _voice(pitch: str, rng: random.Random) -> tuple[str, int]:
    """A voice variant and the espeak pitch that brings it near the class; the result is measured afterwards."""
    male = pitch == "low" or (pitch == "medium" and rng.random() < 0.5)
    span = {"low": (30, 64), "medium": (84, 99) if male else (28, 58), "high": (74, 98)}[pitch]
    return rng.choice(MALE if male else FEMALE), rng.randint(*span)


def _mixed(lang: str, rng: random.Random) -> list[str]:
    """Words from anywhere in the training sentences, so that no sentence can be learnt by heart."""
    lines = sentences(lang, held_out=False)
    return [rng.choice(rng.choice(lines)) for _ in range(rng.randint(*((3, 6) if lang == "zh" else (5, 9))))]


def _melody(units: list[str], pitch: int, swings: tuple[int, int], rng: random.Random) -> list[str]:
    """The units, each behind an embedded espeak command that sets its pitch, by turns above and below the voice's."""
    sign = rng.choice((1, -1))
    marked: list[str] = []
    for i, unit in enumerate(units):
        turned = pitch + sign * (-1) ** i * rng.randint(*swings)
        marked.append(f"\x01{min(99, max(0, turned))}P{unit}")
    return marked


def _chunks(units: list[str], lang: str, broken: bool, rng: random.Random) -> list[str]:
    """The sentence as it is spoken: in one piece, or in three or four with a pause between them."""
    if not broken:
        return [join(units, lang)]
    count = min(len(units), rng.choice((3, 4)))
    cuts = sorted(rng.sample(range(1, len(units)), count - 1))
    return [join(units[a:b], lang) for a, b in zip([0, *cuts], [*cuts, len(units)], strict=True)]


class Espeak:
    """One espeak-ng per process (the library keeps global state)."""

    def __init__(self) -> None:
        import espeakng_loader

        self._lib = ctypes.CDLL(espeakng_loader.get_library_path())
        self._lib.espeak_Initialize.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        self.rate: int = self._lib.espeak_Initialize(2, 0, espeakng_loader.get_data_path().encode(), 0)
        self._parts: list[npt.NDArray[np.int16]] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._receive)  # kept: the library holds only a pointer
        self._lib.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: Any, count: int, _events: Any) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, shape=(count,)).copy())
        return 0

    def say(self, text: str, spec: Spec) -> Wave:
        """The text in the voice of `spec`, at 16 kHz, trimmed of the silence around it."""
        import soxr

        self._parts.clear()
        if self._lib.espeak_SetVoiceByName(spec.voice.encode()):
            raise ValueError(f"espeak-ng has no voice {spec.voice!r}")
        for parameter, value in ((_RATE, spec.rate), (_PITCH, spec.pitch), (_RANGE, spec.pitch_range), (_VOLUME, 100)):
            self._lib.espeak_SetParameter(parameter, value, 0)
        data = text.encode() + b"\0"
        self._lib.espeak_Synth(data, len(data), 0, 0, 0, 1, None, None)
        wave = np.concatenate(self._parts).astype(np.float32) / 32768
        return _trim(np.asarray(soxr.resample(wave, self.rate, SAMPLE_RATE), dtype=np.float32))


@lru_cache(maxsize=1)
def espeak() -> Espeak:
    """This process's espeak-ng."""
    return Espeak()


def _trim(wave: Wave) -> Wave:
    loud = np.flatnonzero(np.abs(wave) > 0.01 * np.abs(wave).max())
    return wave[loud[0] : loud[-1] + 1] if len(loud) else wave


def clean(spec: Spec) -> Wave | None:
    """The clean voice of a clip, or None where it falls between two classes or lasts too long."""
    pieces = [espeak().say(chunk, spec) for chunk in spec.chunks]
    if sum(map(len, pieces)) / SAMPLE_RATE + sum(spec.gaps) > MAX_SECONDS - 1.0:
        return None
    labels = dict(spec.attributes)
    hertz, spread = pitch_of(np.concatenate(pieces))
    low, high = PITCH_HZ[labels["pitch"]]
    narrow, wide = SPREAD[labels["intonation"]]
    if not (low <= hertz <= high and narrow <= spread <= wide):
        return None
    parts = [pieces[0]]
    for gap, piece in zip(spec.gaps, pieces[1:], strict=True):
        parts += [np.zeros(int(gap * SAMPLE_RATE), np.float32), piece]
    return np.concatenate(parts)


def pitch_of(wave: Wave) -> tuple[float, float]:
    """Median F0 in Hz and its spread (as a standard deviation) in semitones, by autocorrelation of voiced frames."""
    x, rate, width, hop = wave[::2], SAMPLE_RATE / 2, 384, 160
    if len(x) < 2 * width:
        return 0.0, 0.0
    window = np.hanning(width).astype(np.float32)
    frames = np.lib.stride_tricks.sliding_window_view(x, width)[::hop] * window
    power = np.abs(np.fft.rfft(frames, 2 * width)) ** 2
    shape = np.fft.irfft(np.abs(np.fft.rfft(window, 2 * width)) ** 2)[:width]
    corr = np.fft.irfft(power)[:, :width]
    corr = corr / np.clip(corr[:, :1], 1e-9, None) / (shape / shape[0] + 1e-3)
    low, high = int(rate / 450), int(rate / 55)
    band = corr[:, low:high]
    best = band.max(1)
    peak = (band[:, 1:-1] > band[:, :-2]) & (band[:, 1:-1] > band[:, 2:]) & (band[:, 1:-1] > 0.88 * best[:, None])
    lag = np.where(peak.any(1), peak.argmax(1) + 1, band.argmax(1)) + low
    energy = (frames**2).mean(1)
    voiced = (best > 0.6) & (energy > 0.05 * np.quantile(energy, 0.9))
    if voiced.sum() < 5:
        return 0.0, 0.0
    hertz = rate / lag[voiced]
    low_hz, median, high_hz = (float(q) for q in np.quantile(hertz, (0.1, 0.5, 0.9)))
    return median, 12 * float(np.log2(high_hz / low_hz)) / 2.56  # deciles: an octave error here and there is harmless
