"""From what a user gives to the ids that both models read."""

from typing import Any

import numpy as np
import pytest

from outrider import Audio, ContextError, PromptError, load_engine
from outrider.prompts.chat import encode
from tests.support.tiny_text_models import engine


@pytest.fixture(scope="module")
def demo() -> object:
    return load_engine("demo:edge")


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(demo: object, prompt: object) -> None:
    with pytest.raises(PromptError, match="empty"):
        encode(demo, prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", [1.5], [True], ["1"], [-1], [10**6], "\ud800"])
def test_what_is_no_prompt_is_refused(demo: object, prompt: object) -> None:
    with pytest.raises(PromptError):
        encode(demo, prompt)  # type: ignore[arg-type]


def test_numpy_ids_are_ids(demo: object) -> None:
    assert encode(demo, list(np.array([5, 6, 7]))).ids == (5, 6, 7)


def test_messages_go_through_the_chat_template(demo: object) -> None:
    ids = encode(demo, [{"role": "user", "content": "hello"}]).ids
    text = demo.tokenizer.decode(list(ids))  # type: ignore[attr-defined]
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_messages_that_speak_of_a_recording_need_one(demo: object) -> None:
    content = [{"type": "audio", "audio": "a.wav"}, {"type": "text", "text": "What is this?"}]
    with pytest.raises(PromptError, match=r"give outrider.Audio"):
        encode(demo, [{"role": "user", "content": content}])


def test_a_recording_becomes_as_many_placeholders_as_the_model_makes_of_it(demo: object) -> None:
    wave = (0.1 * np.random.default_rng(0).standard_normal(32_000)).astype(np.float32)
    prompt = encode(demo, Audio(wave, task="concise", lang="zh"))
    encoder = demo.audio  # type: ignore[attr-defined]
    assert prompt.ids.count(encoder.placeholder) == encoder.token_count(32_000) == 50
    assert prompt.audio is not None


def test_audio_and_chat_need_a_model_that_takes_them() -> None:
    with pytest.raises(PromptError, match="takes no audio"):
        encode(engine("qwen2"), Audio(np.zeros(16_000, np.float32)))
    with pytest.raises(PromptError, match="tokenizer"):
        encode(engine("qwen2"), [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("prompt", ["x " * 1_000_000, [{"role": "user", "content": "x " * 1_000_000}], [5] * 3000])
def test_what_cannot_fit_is_refused_before_it_is_read(demo: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(demo.tokenizer.get_vocab(), key=len)
    assert encode(demo, longest * 50).ids, "what may fit is read"
    read: list[object] = []
    monkeypatch.setattr(type(demo.tokenizer), "__call__", lambda *given, **_: read.append(given))
    with pytest.raises(ContextError, match="holds 2048"):
        encode(demo, prompt)
    assert not read
