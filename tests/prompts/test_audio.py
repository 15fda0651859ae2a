"""Recordings: whatever libsndfile reads becomes 16 kHz mono; everything else is named."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import AudioError
from outrider.prompts.audio import Audio, check_length, grid_exponent, is_silent, load
from outrider.prompts.recordings import SAMPLE_RATE


def tone(seconds: float, rate: int = SAMPLE_RATE, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_formats_and_rates_become_16k_mono(tmp_path: Path, suffix: str, rate: int) -> None:
    path = tmp_path / f"a.{suffix}"
    stereo = np.stack([tone(1.0, rate), tone(1.0, rate)], axis=1)
    soundfile.write(path, stereo, rate)
    wave = load(Audio(path))
    assert wave.ndim == 1
    assert wave.dtype == np.float32
    assert abs(len(wave) / SAMPLE_RATE - 1.0) < 0.15  # lossy encoders pad
    spectrum = np.abs(np.fft.rfft(wave[4000:12000]))
    assert abs(np.argmax(spectrum) * SAMPLE_RATE / 8000 - 440) < 5


def test_telephone_mu_law_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prompt.wav"
    soundfile.write(path, tone(0.5, 8000), 8000, subtype="ULAW")
    assert len(load(Audio(path))) == SAMPLE_RATE // 2


def test_a_waveform_is_taken_as_it_is_but_for_its_rounding_to_16_bits() -> None:
    wave = tone(0.3)
    np.testing.assert_allclose(load(Audio(wave)), wave, rtol=0, atol=0.5 / 32768)
    assert len(load(Audio(tone(0.3, 8000), sampling_rate=8000))) == len(wave)


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_a_16_bit_recording_comes_out_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    integers = np.random.default_rng(0).integers(-32768, 32768, 16000).astype(np.int16)
    integers[:2] = -32768, 32767
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, integers, SAMPLE_RATE)
    wave = load(Audio(path))
    assert wave.tobytes() == soundfile.read(path, dtype="float32")[0].tobytes()
    assert wave.tobytes() == (integers / np.float32(32768)).tobytes()


@settings(max_examples=200, deadline=None)
@given(
    peak=st.one_of(
        st.floats(1e-6, 100.0),
        st.sampled_from([2.0**e * (1 + n / 65536) for e in range(7) for n in range(-3, 6)]),  # where e changes
    ),
    seed=st.integers(0, 99),
    signs=st.sampled_from([(1, 1), (1, -1), (-1, 1)]),
)
def test_any_waveform_falls_on_a_16_bit_grid_and_stays_there(peak: float, seed: int, signs: tuple[int, int]) -> None:
    wave = np.random.default_rng(seed).uniform(-peak, peak, 1600).astype(np.float32)
    wave[:2] = peak * np.array(signs)
    once = load(Audio(wave))
    e = grid_exponent(once)
    scaled = once * np.float32(2.0 ** (15 - e))
    assert np.array_equal(scaled, np.rint(scaled))
    assert scaled.min() >= -32768
    assert scaled.max() <= 32767
    assert 0 <= e <= 7
    assert peak > 1 or e == 0
    assert np.abs(once - wave).max() <= 2.0 ** (e - 15) * (2 if e == 0 and peak > 1 else 1)
    assert load(Audio(once)).tobytes() == once.tobytes()


def test_a_loud_waveform_whose_resampling_overshoots_is_named() -> None:
    square = np.repeat(np.tile([100.0, -100.0], 200), 10)
    steps = np.sign(np.random.default_rng(0).standard_normal(8000)) * 100.0
    assert grid_exponent(load(Audio(square, sampling_rate=16000))) == 7
    with pytest.raises(AudioError, match="samples as large as"):
        load(Audio(steps, sampling_rate=44100))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"not audio at all, just words " * 50, "not readable audio"),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", "not readable audio"),
    ],
)
def test_what_is_not_audio_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "strange.wav"
    path.write_bytes(content)
    with pytest.raises(AudioError, match=f"strange.wav.*{message}"):
        load(Audio(path))


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match="no such file"):
        load(Audio(tmp_path / "gone.wav"))
    with pytest.raises(AudioError, match="not a file"):
        load(Audio(tmp_path))


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_too_short_is_refused(tmp_path: Path, seconds: float) -> None:
    path = tmp_path / "short.wav"
    soundfile.write(path, tone(seconds), SAMPLE_RATE)
    with pytest.raises(AudioError, match=r"short.wav"):
        load(Audio(path))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_are_refused(bad: float) -> None:
    wave = tone(0.5)
    wave[100] = bad
    with pytest.raises(AudioError, match="not finite"):
        load(Audio(wave))


def test_integers_and_three_axes_are_refused() -> None:
    for wave in (np.zeros(8000, np.int16), np.zeros((8, 8, 8), np.float32)):
        with pytest.raises(AudioError, match="expected floats"):
            load(Audio(wave))


def test_an_hour_is_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "long.flac"
    soundfile.write(path, np.zeros(8000 * 3601, np.float32), 8000)
    with pytest.raises(AudioError, match="more than 3600 s"):
        load(Audio(path))


def test_longer_than_the_model_takes_is_never_cut_in_silence() -> None:
    with pytest.raises(AudioError, match=r"31.0 s.*at most 30 s"):
        check_length(tone(31.0), 30.0, "the model")
    check_length(tone(30.0), 30.0, "the model")


def test_silence_and_clipping_are_audio() -> None:
    assert is_silent(load(Audio(np.zeros(SAMPLE_RATE, np.float32))))
    clipped = np.clip(4 * tone(0.5), -1, 1).astype(np.float32)
    assert not is_silent(load(Audio(clipped)))


@pytest.mark.parametrize("source", [None, 5, b"x", [0.1] * 16000, object()])
def test_what_is_no_recording_is_refused(source: object) -> None:
    with pytest.raises(AudioError, match="a recording is a path"):
        load(Audio(source))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e3, 1e30, 1e200])
def test_samples_that_are_no_waveform_are_refused(scale: float) -> None:
    with pytest.raises(AudioError, match="samples as large as"):
        load(Audio(tone(0.5).astype(np.float64) * scale))


def test_swapped_axes_are_pointed_out() -> None:
    with pytest.raises(AudioError, match="axes may be swapped"):
        load(Audio(np.zeros((2, 16000), np.float32)))
