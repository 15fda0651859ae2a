"""The Python entry point: what it refuses, and when."""

from typing import Any

import numpy as np
import pytest

from outrider import Audio, PromptError, SettingsError, SpeculativeDecoder, connect, gate, load_engine, local
from tests.support.tiny_models import subword_tokenizer, tiny_engine
from tests.support.tiny_text_models import engine


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"draft": "demo"},
        {"draft": 5},
        {"verifier": "demo"},
        {"verifier": "engine"},
        {"draft": "engine", "accept": 3},
        {"draft": "engine", "gate": 5},
        {"draft": "engine", "k": 1.5},
        {"draft": "engine", "scope": "word"},
        {"draft": "engine", "on_loop": "panic"},
        {"draft": "engine", "accept": "rank:20"},
        {"draft": "engine", "gate": "entropy:1"},
    ],
)
def test_what_makes_no_decoder_is_refused_with_a_typed_error(arguments: dict[str, object]) -> None:
    made = {name: engine("qwen2") if value == "engine" else value for name, value in arguments.items()}
    with pytest.raises(SettingsError):
        SpeculativeDecoder(**made)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: local("demo"), lambda: local(None), lambda: connect(None), lambda: gate(5)])
def test_helpers_refuse_what_they_cannot_use(make: object) -> None:
    with pytest.raises(SettingsError):
        make()  # type: ignore[operator]


def test_stream_raises_before_it_is_read() -> None:
    decoder = SpeculativeDecoder(engine("qwen2"))
    with pytest.raises(SettingsError):
        decoder.stream([1, 2], temperature=-1)


def test_a_text_model_is_refused_for_recordings_before_any_work() -> None:
    edge = load_engine("demo:edge")
    text_only = load_engine("demo:cloud")
    text_only._family.audio = None
    decoder = SpeculativeDecoder(edge, local(text_only))
    with pytest.raises(PromptError, match="cannot verify drafts about a recording"):
        decoder.generate(Audio(np.zeros(16_000, np.float32)))


def test_an_output_chosen_by_a_gate_and_accepted_by_the_residual_rule_is_not_exact() -> None:
    pair = (engine("qwen2", 0), local(engine("qwen2", 0)))
    always = SpeculativeDecoder(*pair, accept="residual")
    skipping = SpeculativeDecoder(*pair, accept="residual", gate="logprob:0")
    settings = {"max_new_tokens": 6, "temperature": 1.0}
    assert always.generate([1, 2, 3], **settings).guarantee == "exact"
    assert skipping.generate([1, 2, 3], **settings).guarantee == "best-effort"


def test_the_stream_ends_with_the_result_and_its_pieces_make_its_text() -> None:
    decoder = SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud")))
    stream = decoder.stream("你好", max_new_tokens=12)
    texts: list[str] = []
    while True:
        try:
            event = next(stream)
        except StopIteration as end:
            result = end.value
            break
        if event.kind == "revised":
            del texts[event.index :]
        texts[event.index : event.index + 1] = [event.text]
    assert "".join(texts[: len(result.token_ids)]) == result.text


def test_the_seconds_of_a_result_say_what_they_went_on() -> None:
    """In this process no network is waited for, and the reading of the prompt is told apart on both sides."""
    small = engine("qwen2")
    stats = (
        SpeculativeDecoder(small, local(engine("qwen2")), k=3)
        .generate([3, 4, 5], max_new_tokens=12, ignore_eos=True)
        .stats
    )
    assert 0 < stats.prefill_s < stats.draft_s < stats.total_s
    assert 0 < stats.verify_prefill_s < stats.verify_s <= stats.wait_s < stats.total_s
    alone = SpeculativeDecoder(small, None).generate([3, 4, 5], max_new_tokens=12, ignore_eos=True).stats
    assert (0 < alone.prefill_s < alone.draft_s, alone.verify_s) == (True, 0.0)


@pytest.mark.parametrize("prompt", ["Hello", [{"role": "user", "content": "Hello"}]])
def test_a_text_for_a_model_that_only_captions_is_warned_about(prompt: Any) -> None:
    decoder = SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud")))
    (warning,) = decoder.generate(prompt, max_new_tokens=4).warnings
    assert "only writes captions of recordings" in warning
    with pytest.raises(PromptError, match="only writes captions"):
        decoder.check_accepts_text()


def test_ids_and_recordings_for_such_a_model_and_text_for_others_are_not() -> None:
    decoder = SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud")))
    noise = (0.1 * np.random.default_rng(0).standard_normal(16_000)).astype(np.float32)
    for prompt in ([5, 6, 7], Audio(noise)):
        assert decoder.generate(prompt, max_new_tokens=4).warnings == []
    other = SpeculativeDecoder(tiny_engine("qwen2", tokenizer=subword_tokenizer()))
    other.check_accepts_text()
    assert other.generate("Hello", max_new_tokens=4).warnings == []


def test_a_placeholder_of_a_recording_that_does_not_come_is_refused_in_every_prompt() -> None:
    decoder = SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud")))
    noise = np.ones(16_000, np.float32)
    prompts = ("a<|AUDIO|>b", [{"role": "user", "content": "<|AUDIO|>"}], Audio(noise, instruction="<|AUDIO|> again"))
    for prompt in prompts:
        with pytest.raises(PromptError, match=r"<\|AUDIO\|>"):
            decoder.generate(prompt, max_new_tokens=4)
