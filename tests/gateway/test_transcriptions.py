"""Transcriptions: the unmodified openai client sends a file and gets the pair's caption."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from pydantic import TypeAdapter

from outrider import Audio, SpeculativeDecoder, load_engine, local
from outrider.gateway import response_schema
from outrider.gateway.access import Access
from outrider.gateway.defaults import Defaults
from outrider.serving.tokens import Tokens
from tests.support.gateway_process import CLIPS, running_gateway
from tests.support.scripted_gateway import Running, Script, result_of, serving, spoken

HEARS = Defaults(audio_seconds=30.0)
SCRIPT = Script(spoken("a", " b"), result_of("a b", 2))
CLIP = CLIPS / "en-1.ogg"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(SCRIPT, defaults=HEARS) as found:
        yield found


def create(running: Running, **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        ask: dict[str, Any] = {"model": "outrider", "file": CLIP, **fields}
        found = client.audio.transcriptions.create(**ask)
        return list(found) if fields.get("stream") else found


def test_a_transcription_is_json_by_default(running: Running) -> None:
    found = create(running)
    assert found.text == "a b"
    assert found.usage.total_tokens == 9
    TypeAdapter(response_schema.Transcription).validate_python(found.to_dict())
    prompt = running.scheduler.asked[-1][1]
    assert isinstance(prompt, Audio)
    assert (prompt.task, prompt.lang, prompt.instruction) == ("default", "en", None)


def test_text_and_verbose_json(running: Running) -> None:
    assert create(running, response_format="text").strip() == "a b"
    found = create(running, response_format="verbose_json", language="zh")
    assert (found.text, found.language) == ("a b", "zh")
    assert 1 < found.duration < 30
    TypeAdapter(response_schema.Transcription).validate_python(found.to_dict())
    assert running.scheduler.asked[-1][1].lang == "zh"


def test_fields_reach_the_generation(running: Running) -> None:
    options = json.dumps({"task": "concise", "gate": "never"})
    create(running, temperature=0.5, extra_body={"outrider": options})
    _, prompt, settings, decoding = running.scheduler.asked[-1]
    assert (prompt.task, settings["temperature"], decoding.gate) == ("concise", 0.5, "never")
    create(running, prompt="Who speaks?")
    assert running.scheduler.asked[-1][1].instruction == "Who speaks?"
    create(running, prompt="", language="zh", extra_body={"outrider": '{"lang": "zh"}'})
    prompt = running.scheduler.asked[-1][1]
    assert (prompt.instruction, prompt.lang) == (None, "zh")
    create(running, stream=True, response_format="json")


def test_a_stream_ends_with_the_whole_text(running: Running) -> None:
    events = create(running, stream=True)
    assert "".join(each.delta for each in events if each.type == "transcript.text.delta") == "a b"
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", "a b")


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": "srt"}, "response_format", "no times"),
        ({"response_format": "diarized_json"}, "response_format", "no times"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities[]", "no times"),
        ({"include": ["logprobs"]}, "include[]", "log-probabilities"),
        ({"chunking_strategy": "auto"}, "chunking_strategy", "as a whole"),
        ({"language": "fr"}, "language", "'en' or 'zh'"),
        ({"temperature": -1}, "temperature", "greater"),
        ({"file": ("a.wav", b"no sound")}, "file", "recording"),
        ({"file": ("a.wav", b"")}, "file", "empty"),
        ({"prompt": "Who?", "language": "zh"}, "prompt", "replaces"),
        ({"extra_body": {"speed": "2"}}, "speed", "no such field"),
        ({"extra_body": {"outrider": "{}]"}}, "outrider", "not valid JSON"),
        ({"language": "en", "extra_body": {"outrider": '{"lang": "zh"}'}}, "outrider.lang", "contradict"),
        ({"language": "zh", "extra_body": {"outrider": '{"lang": "en"}'}}, "outrider.lang", "contradict"),
        ({"prompt": "Who?", "extra_body": {"outrider": '{"lang": "en"}'}}, "prompt", "replaces"),
        ({"prompt": "Who?", "extra_body": {"outrider": '{"task": "default"}'}}, "prompt", "replaces"),
        ({"stream": True, "response_format": "text"}, "stream", "response_format text"),
        ({"stream": True, "response_format": "verbose_json"}, "stream", "response_format verbose_json"),
        ({"extra_body": {"outrider": '{"task": "long"}'}}, "outrider.task", "expected|Input"),
    ],
)
def test_what_does_not_map_is_refused_by_name(
    running: Running, fields: dict[str, Any], param: str | None, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        create(running, **fields)
    assert refused.value.param == param


def test_a_missing_file_and_another_model_are_refused(running: Running) -> None:
    with pytest.raises(openai.NotFoundError):
        create(running, model="whisper-1")
    reply = httpx2.post(f"{running.url}/v1/audio/transcriptions", data={"model": "outrider"}, files={"x": b"1"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x")
    for text in ("hello", ""):
        form = {"model": (None, "outrider"), "file": (None, text)}
        reply = httpx2.post(f"{running.url}/v1/audio/transcriptions", files=form)
        expected = "file: expected an uploaded file, not a text"
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "file")
        assert reply.json()["error"]["message"].startswith(expected)
    reply = httpx2.post(f"{running.url}/v1/audio/transcriptions", files={"model": (None, "outrider")})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "file")
    reply = httpx2.post(f"{running.url}/v1/audio/transcriptions", json={"model": "outrider"})
    assert reply.status_code == 415


def test_a_model_without_audio_is_refused() -> None:
    with serving(SCRIPT) as running, pytest.raises(openai.BadRequestError, match="takes no audio"):
        create(running)


def test_the_limit_of_bodies_holds() -> None:
    with serving(SCRIPT, Access(max_body=1000), HEARS) as running, pytest.raises(openai.APIStatusError) as refused:
        create(running)
    assert refused.value.status_code == 413


def test_a_page_of_another_site_cannot_send_forms_without_a_key(tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("me a-key-that-is-long-enough\n")
    (tmp_path / "keys").chmod(0o600)

    def status(access: Access, **headers: str) -> int:
        with serving(SCRIPT, access, HEARS) as running:
            form: Any = {"data": {"model": "outrider"}, "files": {"file": ("a.ogg", CLIP.read_bytes())}}
            headers = {key: value.format(url=running.url) for key, value in headers.items()}
            return httpx2.post(f"{running.url}/v1/audio/transcriptions", headers=headers, **form).status_code

    assert status(Access()) == 200
    assert status(Access(), origin="{url}") == 200
    assert status(Access(), origin="https://example.org") == 403
    assert status(Access(), origin="null") == 403
    assert status(Access(origins=frozenset({"https://example.org"})), origin="https://example.org") == 200
    keys = Access(Tokens.load(tmp_path / "keys"))
    key = "Bearer a-key-that-is-long-enough"
    assert status(keys, origin="https://example.org", authorization=key) == 200


@pytest.mark.network
def test_the_bundled_pair_s_caption_is_that_of_python() -> None:
    expected = SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud"))).generate(
        Audio(CLIPS / "zh-2.ogg", lang="zh")
    )
    with running_gateway() as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        found: Any = client.audio.transcriptions.create(model="outrider", file=CLIPS / "zh-2.ogg", language="zh")
    assert found.text == expected.text
    assert found.outrider["guarantee"] == "exact"
