"""`outrider.prompt_lookup`: its arguments, its tokenizer, and the prompts that it encodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import (
    ModelError,
    PromptError,
    SettingsError,
    SpeculativeDecoder,
    VocabularyMismatch,
    load_engine,
    local,
    prompt_lookup,
)
from tests.support.fakes import FarVerifier
from tests.support.tiny_models import byte_tokenizer, clip, subword_tokenizer, tiny_engine, tiny_model


@pytest.mark.parametrize(
    "sizes", [(0, 4), (5, 4), (1, 257), (1.0, 4), (True, 4), ("1", 4), (-1, -1)], ids=lambda sizes: str(sizes)
)
def test_sizes_out_of_range_are_refused(sizes: tuple[Any, Any]) -> None:
    with pytest.raises(SettingsError, match="1 <= min_ngram <= max_ngram <= 256"):
        prompt_lookup(min_ngram=sizes[0], max_ngram=sizes[1])


def test_names_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    for name, match in (
        ("", "name is empty"),
        (str(tmp_path / "missing"), "no such tokenizer"),
        (str(tmp_path), "holds no tokenizer: expected one of tokenizer.json"),
        ("model.gguf", "cannot be loaded alone"),
    ):
        with pytest.raises(ModelError, match=match):
            prompt_lookup(name)
    with pytest.raises(SettingsError, match="a tokenizer is a name or one of transformers, not 7"):
        prompt_lookup(7)


def test_a_directory_needs_no_weights_and_names_its_ends(tmp_path: Path) -> None:
    subword_tokenizer().save_pretrained(tmp_path)
    for eos, wanted in ((None, ()), (3, (3,)), ([3, 7], (3, 7))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        lookup = prompt_lookup(tmp_path)
        assert lookup.eos_ids == wanted
        assert lookup.vocab_size == lookup.row_count == 96
        assert lookup.fingerprint == tiny_engine("qwen2", tokenizer=subword_tokenizer()).fingerprint
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ModelError, match=r"eos_token_id 'x' of its generation_config\.json is not a token id"):
        prompt_lookup(tmp_path)


def test_the_bundled_pair_s_tokenizer_has_a_name_and_audio_settings() -> None:
    lookup, engine = prompt_lookup("demo"), load_engine("demo:edge")
    assert lookup.name == "lookup:demo"
    assert lookup.captions_only
    assert lookup.audio is not None
    assert lookup.audio.placeholder == engine.audio.placeholder
    waveform = clip(1.234)
    assert lookup.audio.token_count(len(waveform)) == engine.audio.token_count(len(waveform))
    assert (lookup.audio.features(waveform) == engine.audio.features(waveform)).all()


def test_a_directory_without_a_feature_extractor_has_no_audio_settings(tmp_path: Path) -> None:
    subword_tokenizer().save_pretrained(tmp_path)
    tiny_model("qwen2").config.save_pretrained(tmp_path)
    lookup = prompt_lookup(tmp_path)
    assert lookup.audio is None
    assert not lookup.captions_only
    tiny_model("omni").config.save_pretrained(tmp_path)
    assert prompt_lookup(tmp_path).audio is None
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load the audio settings of"):
        prompt_lookup(tmp_path)


def test_another_tokenizer_than_the_target_s_is_refused() -> None:
    verifier = local(tiny_engine("qwen2", tokenizer=subword_tokenizer()))
    with pytest.raises(VocabularyMismatch, match="lookup"):
        SpeculativeDecoder(prompt_lookup(byte_tokenizer()), verifier)


def test_a_text_needs_a_tokenizer_on_the_edge() -> None:
    verifier = FarVerifier(local(tiny_engine("qwen2", tokenizer=subword_tokenizer())))
    with pytest.raises(PromptError, match="prompt lookup without a tokenizer takes token ids"):
        SpeculativeDecoder(prompt_lookup(), verifier).generate("the end")
    assert SpeculativeDecoder(prompt_lookup(), verifier).generate([44, 60], max_new_tokens=4).text is None
    named = SpeculativeDecoder(prompt_lookup(subword_tokenizer()), verifier)
    assert named.generate("the end", max_new_tokens=4).text
    from outrider import Audio

    with pytest.raises(PromptError, match=r"takes no audio: recordings need the target's config\.json"):
        named.check_audio_support()
    with pytest.raises(PromptError, match="takes no audio"):
        named.generate(Audio(clip(0.5)))


def test_the_verifier_s_tokenizer_encodes_in_this_process() -> None:
    decoder = SpeculativeDecoder(prompt_lookup(), local(tiny_engine("qwen2", tokenizer=subword_tokenizer())))
    assert decoder.generate("the end", max_new_tokens=4).text
    assert decoder.summary().startswith("edge lookup · cloud tiny qwen2")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gate": "never"}, "gate never needs confidence signals"),
        ({"gate": "entropy:1.5"}, "gate entropy:1.5 needs confidence signals, which prompt lookup does not provide"),
        ({"gate": "trigger:never"}, "gate trigger:never needs confidence signals"),
        ({"gate": "margin:0.2|logprob:2"}, r"gate margin:0.2\|logprob:2 needs confidence signals"),
        ({"on_cloud_loss": "edge-only"}, "on_cloud_loss 'edge-only' needs a draft model"),
    ],
)
def test_options_that_need_a_draft_model_are_refused(options: Any, match: str) -> None:
    verifier = FarVerifier(local(tiny_engine("qwen2")))
    with pytest.raises(SettingsError, match=match):
        SpeculativeDecoder(prompt_lookup(), verifier, **options)


def test_lookup_goes_with_an_engine() -> None:
    engine, verifier = tiny_engine("qwen2"), local(tiny_engine("qwen2"))
    for draft in (None, prompt_lookup()):
        with pytest.raises(SettingsError, match="lookup is for an edge engine as draft"):
            SpeculativeDecoder(draft, verifier, lookup=prompt_lookup())
    wrong: Any = "lookup"
    with pytest.raises(SettingsError, match=r"lookup is a prompt lookup from prompt_lookup\(…\), not str"):
        SpeculativeDecoder(engine, verifier, lookup=wrong)
    with pytest.raises(SettingsError, match=r"or prompt_lookup\(…\), not str"):
        SpeculativeDecoder(wrong, verifier)
    with pytest.raises(SettingsError, match="gate never needs confidence signals"):
        SpeculativeDecoder(engine, verifier, lookup=prompt_lookup(), gate="never")
    with pytest.raises(SettingsError, match="cannot decode edge-only"):
        SpeculativeDecoder(engine, lookup=prompt_lookup())
    both = SpeculativeDecoder(engine, verifier, lookup=prompt_lookup())
    assert both.summary().startswith("edge tiny qwen2 0 (float32, cpu) + lookup · cloud tiny qwen2 0")


def test_edge_only_is_refused() -> None:
    with pytest.raises(SettingsError, match="cannot decode edge-only: it copies earlier tokens"):
        SpeculativeDecoder(prompt_lookup())
