"""Recordings in a model: as a waveform, as features, or withheld; and when their embeddings are given back."""

import gc
import weakref

import numpy as np
import pytest
import torch

from outrider.engines.base import Prompt
from outrider.engines.torch.attention import WINDOWED_NAME, batch_audio_windows
from outrider.engines.torch.engine import TorchEngine
from outrider.engines.torch.model_families import _fit_frames
from outrider.errors import PromptError
from outrider.prompts.media import pack_features, unpack_features
from tests.support.tiny_models import clip, feature_extractor, tiny_engine, tiny_model

FAMILIES = ("omni", "qwen2-audio")


def heard(engine: TorchEngine, samples: int) -> tuple[int, ...]:
    audio_encoder = engine.audio
    return (5, 6, *[audio_encoder.placeholder] * audio_encoder.token_count(samples), 7, 8)


def read(engine: TorchEngine, prompt: Prompt) -> torch.Tensor:
    """Return the logits of a prompt, from a slot that is closed again: other tests share the engine."""
    slot = engine.open(prompt)
    try:
        return engine.forward(slot, prompt.ids)
    finally:
        engine.close(slot)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("samples", [1_600, 8_001, 16_000, 24_159, 31_399, 31_400, 31_841, 32_000])
def test_features_carry_all_that_is_heard(family: str, samples: int) -> None:
    audio_encoder, wave = tiny_engine(family).audio, clip(2.0)[:samples]
    features = audio_encoder.features(wave)
    assert features.dtype == np.float32
    assert features.shape[0] == audio_encoder.mels == 128
    assert features.shape[1] <= audio_encoder.max_frames
    sent = unpack_features(pack_features(features), audio_encoder.mels, audio_encoder.max_frames)
    embeds = audio_encoder.embed_features(sent)
    assert len(embeds) == audio_encoder.token_count(samples) == audio_encoder.feature_tokens(features.shape[1])
    assert torch.equal(embeds, audio_encoder.embed(wave))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("samples", [1_600, 9_999, 31_400, 32_000])
@pytest.mark.parametrize("loudness", [1.0, 1e-3, 0.0])
def test_embeddings_are_those_of_the_family_s_own_processor(family: str, samples: int, loudness: float) -> None:
    """Quiet recordings and silence too: their padding is not cut off at the loudest minus 8."""
    wave = clip(2.0)[:samples] * np.float32(loudness)
    made = tiny_engine(family)
    ids = heard(made, samples)
    out = feature_extractor(family)(
        wave, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
    )
    media = {"input_features": out["input_features"], "feature_attention_mask": out["attention_mask"]}
    tensor = torch.tensor([ids])
    with torch.inference_mode():
        plain = tiny_model(family)(input_ids=tensor, attention_mask=torch.ones_like(tensor), **media).logits[0]
    rows = read(made, Prompt(ids, wave))
    torch.testing.assert_close(rows, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("samples", [8_001, 16_000, 24_159, 32_000])
def test_windows_in_one_batch_give_the_embeddings_of_one_after_another(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer positions than a window, whole windows, and a shorter one at the end."""
    audio_encoder, wave = tiny_engine("omni").audio, clip(2.0)[:samples]
    expected = audio_encoder.embed(wave)
    config = audio_encoder.tower.config
    monkeypatch.setattr(config, "_attn_implementation", config._attn_implementation)  # undone after the test
    batch_audio_windows(tiny_model("omni"), audio_encoder.tower)
    assert config._attn_implementation == WINDOWED_NAME
    torch.testing.assert_close(audio_encoder.embed(wave), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_with_features_is_read_as_one_with_the_recording(family: str) -> None:
    made, wave = tiny_engine(family), clip(1.3)
    ids = heard(made, len(wave))
    prompts = (Prompt(ids, wave), Prompt(ids, features=made.audio.features(wave)))
    whole, parts = (made.open(prompt) for prompt in prompts)
    rows = made.forward(whole, ids)
    assert torch.equal(made.forward(parts, ids), rows)
    made.truncate(parts, 4)  # inside the recording
    torch.testing.assert_close(made.forward(parts, ids[4:]), rows[4:], rtol=1e-4, atol=1e-4)
    made.close(whole)
    made.close(parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_withheld_recording_is_read_as_ordinary_tokens(family: str) -> None:
    made, wave = tiny_engine(family), clip(0.7)
    ids = heard(made, len(wave))
    without_audio = read(made, Prompt(ids))
    embeds = made.model.get_input_embeddings()(torch.tensor([ids]))
    with torch.inference_mode():
        plain = tiny_model(family)(inputs_embeds=embeds, attention_mask=torch.ones(1, len(ids)).long()).logits[0]
    torch.testing.assert_close(without_audio, plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(without_audio, read(made, Prompt(ids, wave)))


def test_a_prompt_has_a_recording_or_features_not_both() -> None:
    with pytest.raises(PromptError, match="not both"):
        Prompt((1,), clip(0.5), np.zeros((128, 50), np.float32))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.zeros((80, 60), np.float32), r"float32 \[128, frames\].*80, 60"),
        (np.zeros((128, 60), np.float64), "float64"),
        (np.zeros((1, 128, 60), np.float32), r"1, 128, 60"),
        (np.zeros((128, 1_100), np.float32), "1100 frames"),
        (np.zeros((128, 2), np.float32), "2 frames"),
        (np.zeros((128, 40), np.float32), "14 audio placeholders for"),
    ],
)
def test_features_that_do_not_belong_to_the_prompt_are_refused(family: str, features: np.ndarray, message: str) -> None:
    made = tiny_engine(family)
    audio_encoder = made.audio
    ids = (5, *[audio_encoder.placeholder] * 14, 6)
    with pytest.raises(PromptError, match=message):
        made.open(Prompt(ids, features=features))


def test_another_number_of_placeholders_is_refused_before_anything_is_computed() -> None:
    made, wave = tiny_engine("omni"), clip(1.0)
    with pytest.raises(PromptError, match="26 audio placeholders for 25 audio embeddings"):
        made.open(Prompt((*heard(made, len(wave)), made.audio.placeholder), wave))


def test_embeddings_are_freed_on_close() -> None:
    made, wave = tiny_engine("omni"), clip(1.0)
    slot = made.open(Prompt(heard(made, len(wave)), wave))
    made.forward(slot, heard(made, len(wave)), 1)
    embeds = weakref.ref(made._media[slot].embeds)
    assert embeds() is not None
    made.close(slot)
    gc.collect()
    assert embeds() is None


@pytest.mark.parametrize("samples", [1_600, 8_001, 16_000, 31_360, 31_399, 31_841, 32_000])
def test_the_whole_window_is_rebuilt_from_its_first_frames(samples: int) -> None:
    audio_encoder, wave = tiny_engine("qwen2-audio").audio, clip(2.0)[:samples]
    whole = feature_extractor("qwen2-audio")(wave, sampling_rate=16_000, padding="max_length", return_tensors="np")
    rebuilt = _fit_frames(audio_encoder.features(wave), audio_encoder.max_frames - audio_encoder._tail)
    np.testing.assert_array_equal(rebuilt, whole["input_features"][0])
