"""From a clean voice to a recording: room, equaliser, telephone, level, noise, silence around it.

The level is set last but for the noise, so that the loudness label (absolute, in dBFS of the voiced part) stays true.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from training.speech import SAMPLE_RATE, Spec, Wave, clean, draw_spec

Generator = np.random.Generator


def recording(seed: int, held_out: bool, lang: str | None = None, plain: bool = False) -> tuple[Spec, Wave]:
    """The clip of a seed: drawn again, with the same attributes, until the clean voice is clear-cut.

    Args:
        plain: leave out the room, the telephone and all but a trace of noise (the bundled clips).
    """
    first = draw_spec(seed, held_out, lang)
    for attempt in range(1000):
        spec = draw_spec(seed + attempt * 1_000_003, held_out, first.lang, dict(first.attributes))
        voice = clean(spec)
        if voice is not None:
            return spec, _record(voice, spec, np.random.default_rng(spec.seed), plain)
    raise RuntimeError(f"no clear-cut voice for seed {seed}: {first}")


def _record(voice: Wave, spec: Spec, rng: Generator, plain: bool) -> Wave:
    lead, trail = rng.uniform(0.02, 0.45, 2)
    size = int((lead + trail) * SAMPLE_RATE) + len(voice)
    wave = np.zeros(_round_up(size))
    wave[int(lead * SAMPLE_RATE) :][: len(voice)] = voice
    active = _active(wave)
    telephone = not plain and rng.random() < 0.3
    if not plain and rng.random() < 0.25:
        wave = _room(wave, rng)
    if not plain and rng.random() < 0.6:
        wave = _equalise(wave, rng)
    if telephone:
        wave = _band(wave, 300.0, 3400.0)
    wave = wave * 10 ** (spec.level_db / 20) / np.sqrt((wave[active] ** 2).mean() + 1e-12)
    wave = wave + _noise(len(wave), spec.level_db - (rng.uniform(35, 45) if plain else rng.uniform(10, 40)), rng)
    if telephone and rng.random() < 0.6:
        wave = _mu_law(wave)
    return np.clip(wave[:size], -1.0, 1.0).astype(np.float32)


def _round_up(size: int) -> int:
    """A length whose Fourier transform is fast."""
    return -(-size // 3200) * 3200


def _active(wave: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Where the voice sounds: within 25 dB of its loudest 10 ms."""
    size = SAMPLE_RATE // 100
    blocks = wave[: len(wave) // size * size].reshape(-1, size)
    power = (blocks**2).mean(1)
    mask = np.repeat(power > power.max() * 10**-2.5, size)
    return np.concatenate([mask, np.zeros(len(wave) - len(mask), bool)])


def _room(wave: npt.NDArray[np.float64], rng: Generator) -> npt.NDArray[np.float64]:
    """A mild synthetic room: a decaying noise tail under the direct sound."""
    decay = rng.uniform(0.08, 0.3)
    t = np.arange(int(decay * SAMPLE_RATE)) / SAMPLE_RATE
    tail = rng.standard_normal(len(t)) * 10 ** (-3 * t / decay)
    tail *= rng.uniform(0.1, 0.5) / np.sqrt((tail**2).sum())
    tail[0] = 1.0
    size = _round_up(len(wave) + len(tail))
    return np.fft.irfft(np.fft.rfft(wave, size) * np.fft.rfft(tail, size), size)[: len(wave)]


def _equalise(wave: npt.NDArray[np.float64], rng: Generator) -> npt.NDArray[np.float64]:
    """A random smooth frequency response within 7 dB, as microphones and codecs have."""
    spectrum = np.fft.rfft(wave)
    hertz = np.fft.rfftfreq(len(wave), 1 / SAMPLE_RATE)
    knots = np.log([60, 150, 400, 1000, 2500, 5000, 8000])
    gains = np.interp(np.log(np.maximum(hertz, 60)), knots, rng.uniform(-7, 7, len(knots)))
    return np.fft.irfft(spectrum * 10 ** (gains / 20), len(wave))


def _band(wave: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.float64]:
    """The telephone's band, with soft edges."""
    hertz = np.fft.rfftfreq(len(wave), 1 / SAMPLE_RATE)
    gain = np.clip((hertz - low * 0.7) / (low * 0.4), 0.003, 1) * np.clip((high * 1.1 - hertz) / (high * 0.15), 0.0, 1)
    return np.fft.irfft(np.fft.rfft(wave) * gain, len(wave))


def _noise(size: int, level_db: float, rng: Generator) -> npt.NDArray[np.float64]:
    """Coloured noise at a level: white, pink or brown, at times with mains hum."""
    spectrum = np.fft.rfft(rng.standard_normal(size))
    hertz = np.maximum(np.fft.rfftfreq(size, 1 / SAMPLE_RATE), 40.0)
    noise = np.fft.irfft(spectrum * hertz ** -rng.choice([0.0, 0.5, 1.0]), size)
    noise /= np.sqrt((noise**2).mean() + 1e-12)
    if rng.random() < 0.15:
        noise += np.sin(2 * np.pi * rng.choice([50, 60, 100, 120]) * np.arange(size) / SAMPLE_RATE)
    return noise * 10 ** (max(level_db, -75.0) / 20)


def _mu_law(wave: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Through an 8 kHz, 8-bit mu-law channel and back to 16 kHz."""
    narrow = np.clip(_band(wave, 1.0, 3700.0)[::2], -1, 1)
    code = np.round(np.sign(narrow) * np.log1p(255 * np.abs(narrow)) / np.log(256) * 127) / 127
    decoded = np.sign(code) * np.expm1(np.abs(code) * np.log(256)) / 255
    spectrum = np.zeros(len(wave) // 2 + 1, complex)
    half = np.fft.rfft(decoded)[: len(spectrum)]
    spectrum[: len(half)] = half * 2
    return np.fft.irfft(spectrum, len(wave))
