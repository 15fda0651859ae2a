"""Unmodified clients against a gateway with the bundled pair: models, answers, streams, errors, cancellation."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx2
import pytest
import soundfile

from tests.clients.conftest import Pair, auth
from tests.clients.processes import RunningClient
from tests.support.gateway_process import CLIPS

pytestmark = pytest.mark.clients

PROMPT = "Describe the voice"
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Any:
    """The answer over plain HTTP."""
    return ask(pair, PROMPT)


@pytest.fixture(scope="module")
def sound() -> str:
    """A bundled recording as WAV in base64."""
    samples, rate = soundfile.read(CLIPS / "en-2.ogg")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def expected_of_sound(pair: Pair, sound: str, expected: Any) -> Any:
    """The answer to the recording over plain HTTP."""
    part = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
    answer = ask(pair, [{"type": "text", "text": PROMPT}, part])
    assert answer["text"] != expected["text"]
    return answer


def ask(pair: Pair, content: Any) -> Any:
    """Return the text and the usage of an answer, as drivers report them."""
    body = {"model": "outrider", "messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS}
    answer = httpx2.post(f"{pair.url}/v1/chat/completions", json=body, headers=auth(), timeout=None).json()
    usage = [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
    return {"text": answer["choices"][0]["message"]["content"], "usage": usage}


def test_the_models_are_listed(client: RunningClient, pair: Pair) -> None:
    assert client.do("models", **pair.task) == ["outrider"]


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_an_answer_has_the_text_and_the_usage_of_the_api(
    client: RunningClient, pair: Pair, expected: Any, way: str
) -> None:
    assert client.do(way, **pair.task, prompt=PROMPT, max_tokens=MAX_TOKENS) == expected


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_a_recording_is_answered(
    client: RunningClient, pair: Pair, sound: str, expected_of_sound: Any, way: str
) -> None:
    if client.name == "open-webui":
        pytest.skip("Open WebUI sends no recordings to chats")
    answer = client.do(way, **pair.task, prompt=PROMPT, max_tokens=MAX_TOKENS, sound=sound)
    assert answer == expected_of_sound


@pytest.mark.parametrize("way", ["chat", "stream"])
@pytest.mark.parametrize(("kind", "status"), [("unknown_model", 404), ("too_long", 400), ("bad_key", 401)])
def test_an_error_is_the_client_s_own(client: RunningClient, pair: Pair, kind: str, status: int, way: str) -> None:
    wrong = {
        "unknown_model": {"model": "nonesuch"},
        "too_long": {"prompt": "word " * 5000},
        "bad_key": {"key": "not-the-key-of-this-gateway"},
    }
    error = client.do(way, **{**pair.task, "prompt": PROMPT, **wrong[kind]})["error"]
    assert error["classes"][0].rpartition(".")[2] == getattr(client.errors, kind)
    assert (error["status"] or status) == status
    words = {"unknown_model": "no such model: 'nonesuch'", "too_long": "maximum context length", "bad_key": "API key"}
    assert words[kind] in error["message"]


def test_a_cancelled_stream_frees_its_slot(client: RunningClient, pair: Pair) -> None:
    pair.check_cancellation(client, PROMPT)
