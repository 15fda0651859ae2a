"""What a request is understood to ask for, and what is refused by name."""

from __future__ import annotations

import base64
import io
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import soundfile
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

import outrider
from outrider.errors import AudioError, ContextError
from outrider.gateway.completion_schema import CompletionRequest
from outrider.gateway.decoder_pool import RequestOptions
from outrider.gateway.defaults import Defaults
from outrider.gateway.error_params import attach_param
from outrider.gateway.errors import RequestError
from outrider.gateway.recordings import decode_recording
from outrider.gateway.request_parsing import ParsedRequest, parse_request, validate_body
from outrider.gateway.request_schema import IGNORED, UNSUPPORTED, ChatRequest, Request
from outrider.prompts.audio import Audio, quantize
from outrider.prompts.audio import read as read_audio

CLIP = Path(outrider.__file__).parent / "demo" / "clips" / "en-1.ogg"
TEXT = {"type": "text", "text": "x"}
HEARS = Defaults(audio_seconds=30.0)
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(defaults: Defaults = Defaults(), **fields: Any) -> ParsedRequest:  # noqa: B008
    body = {"model": "outrider", "messages": [{"role": "user", "content": "hello"}], **fields}
    return parse_request(validate_body(ChatRequest, json.dumps(body).encode()), defaults)


def completion(**fields: Any) -> ParsedRequest:
    body = {"model": "outrider", "prompt": "hello", **fields}
    return parse_request(validate_body(CompletionRequest, json.dumps(body).encode()), Defaults())


def recording(kind: str = "ogg", data: str | None = None, **more: Any) -> dict[str, Any]:
    sound = data if data is not None else base64.b64encode(CLIP.read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": sound, "format": kind, **more}}


def said(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def wave(seconds: float, rate: int = 16_000, channels: int = 1, kind: str = "WAV", **more: Any) -> str:
    file = io.BytesIO()
    soundfile.write(file, np.zeros((int(seconds * rate), channels), np.float32), rate, format=kind, **more)
    return base64.b64encode(file.getvalue()).decode()


# What is done -----------------------------------------------------------------------------------------------


def test_openai_s_fields_become_our_settings() -> None:
    found = chat(max_tokens=9, temperature=0.5, top_p=0.9, seed=2**64 - 1, stop=["a", "b"], logit_bias={"5": -100})
    penalised = chat(frequency_penalty=-2, presence_penalty=0.5, logit_bias={"7": 1.5, "3": -2})
    wanted = {"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 2**64 - 1, "stop": ("a", "b")}
    assert found.settings.items() >= {**wanted, "logit_bias": ((5, -100.0),)}.items()
    wanted = {"frequency_penalty": -2.0, "presence_penalty": 0.5, "logit_bias": ((3, -2.0), (7, 1.5))}
    assert penalised.settings.items() >= wanted.items()
    assert found.stop == ("a", "b")
    assert chat(max_completion_tokens=7, max_tokens=7, stop="x").settings.items() >= {"max_new_tokens": 7}.items()


def test_our_own_fields_become_settings_and_a_choice() -> None:
    options = {"way": "speculative", "k": "auto", "net": "bw=2Mbit,rtt=50ms", "gate": "entropy:1", "tokens": True}
    found = chat(outrider={**options, "min_new_tokens": 3, "ignore_eos": True})
    assert found.options == RequestOptions(
        way="speculative", k="auto", net="rtt=50ms,bw=2Mbit", gate="entropy:1", watch=True
    )
    assert found.settings.items() >= {"min_new_tokens": 3, "ignore_eos": True}.items()


def test_what_is_left_out_is_as_the_command_line_said() -> None:
    defaults = Defaults(
        RequestOptions(k=3, net="rtt=5ms"), {"temperature": 0.7, "top_p": 0.8, "stop": ("x",), "seed": 4}
    )
    found = chat(defaults)
    assert (found.options.k, found.options.net, found.stop) == (3, "rtt=5ms", ("x",))
    assert found.settings.items() >= {"temperature": 0.7, "top_p": 0.8, "seed": 4}.items()


def test_the_command_line_gives_way_to_a_request_that_it_contradicts() -> None:
    defaults = Defaults(settings={"temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_new_tokens": 50})
    found = chat(defaults, temperature=0, max_tokens=10)
    assert found.settings.items() >= {"top_p": 1.0, "top_k": 0, "min_new_tokens": 10}.items()


def test_a_conversation_is_handed_to_the_template() -> None:
    found = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        ]
    )
    assert found.prompt == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize(("given", "taken"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_a_completion_takes_a_text_or_ids_alone_or_in_a_list(given: Any, taken: Any) -> None:
    assert completion(prompt=given).prompt == taken


def test_log_probabilities_are_counted_as_openai_counts_them() -> None:
    assert chat().settings["logprobs"] is chat(logprobs=False, top_logprobs=0).settings["logprobs"] is None
    assert chat(logprobs=True).settings["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=20).settings["logprobs"] == 20
    assert completion().settings["logprobs"] is None
    assert [completion(logprobs=n).settings["logprobs"] for n in (0, 5)] == [0, 5]


def test_choices_have_seeds_of_their_own() -> None:
    found = chat(n=3, seed=2**64 - 2, temperature=1.0)
    assert (found.n, found.candidates, found.notes) == (3, 3, ())
    assert [found.choice_settings(index)["seed"] for index in range(3)] == [2**64 - 2, 2**64 - 1, 0]
    assert {**found.choice_settings(2), "seed": found.settings["seed"]} == found.settings
    assert chat(n=3).notes == ("n: all choices are equal, because decoding at temperature 0 is greedy",)


def test_best_of_is_chosen_by_log_probabilities_that_are_not_reported() -> None:
    found = completion(n=2, best_of=5, temperature=1.0)
    assert (found.n, found.candidates, found.logprobs, found.settings["logprobs"]) == (2, 5, False, 0)
    found = completion(best_of=2, logprobs=4)
    assert (found.n, found.candidates, found.logprobs, found.settings["logprobs"]) == (1, 2, True, 4)
    assert completion(n=2, best_of=2, stream=True).candidates == 2
    for fields in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        with pytest.raises(RequestError) as refused:
            completion(**fields)
        assert refused.value.param == "best_of"


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]]])
def test_a_completion_takes_several_prompts(prompts: Any) -> None:
    found = completion(prompt=prompts)
    assert list(found.prompts) == prompts
    assert len(found.prompt_bytes) == 2


def test_too_many_generations_are_refused() -> None:
    assert len(completion(prompt=["a"] * 128).prompts) == 128
    for fields in ({"prompt": ["a"] * 129}, {"prompt": ["a"] * 65, "n": 2, "temperature": 1}):
        with pytest.raises(RequestError) as refused:
            completion(**fields)
        assert refused.value.param == "prompt"
    with pytest.raises(RequestError, match="empty") as refused:
        completion(prompt=["a", ""])
    assert refused.value.param == "prompt.1"


def test_values_that_ask_for_nothing_are_taken() -> None:
    nothing = {"n": 1, "frequency_penalty": 0.0, "presence_penalty": 0, "logprobs": False, "tools": [], "store": False}
    nothing |= {"tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "logit_bias": {}}
    assert chat(**nothing, service_tier="auto").settings == chat().settings


def test_ignored_fields_are_reported() -> None:
    assert chat(user="me", metadata={"a": "b"}).notes == (
        "user was not used: the gateway stores nothing about users",
        "metadata was not used: the gateway stores nothing",
    )


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"top_p": 0.9}, "top_p was not used: decoding at temperature 0"),
        ({"top_p": 0.9, "temperature": 0}, "top_p was not used: decoding at temperature 0"),
        ({"outrider": {"top_k": 40, "min_p": 0.1}}, "outrider.top_k was not used"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls was not used: there are no tools"),
        ({"parallel_tool_calls": False, "tools": []}, "parallel_tool_calls was not used"),
        ({"reasoning_effort": "medium"}, "reasoning_effort was not used"),
        ({"store": True}, "store was not used"),
    ],
)
def test_what_clients_send_unasked_is_taken_with_a_warning(fields: dict[str, Any], note: str) -> None:
    found = chat(**fields)
    assert found.notes[0].startswith(note)
    assert found.settings == chat().settings


def test_a_filter_that_is_used_has_no_warning() -> None:
    found = chat(top_p=0.9, temperature=0.5)
    assert (found.notes, found.settings["top_p"]) == ((), 0.9)
    assert chat(Defaults(settings={"temperature": 0.7}), top_p=0.9).notes == ()
    assert chat(top_p=1.0).notes == ()


@pytest.mark.parametrize("stop", ["", [], [""], None])
def test_an_empty_stop_asks_for_nothing(stop: Any) -> None:
    assert chat(stop=stop).stop == ()
    assert chat(stop=["", "x"]).stop == ("x",)


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": False}])
@pytest.mark.parametrize("ask", [chat, completion])
def test_options_of_a_stream_need_a_stream(ask: Any, options: dict[str, Any], stream: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="stream to true") as refused:
        ask(stream_options=options, **stream)
    assert refused.value.param == "stream_options"
    assert ask(stream_options=options, stream=True).stream
    assert not ask(stream_options=None, **stream).stream


def test_a_seed_at_temperature_0_is_taken() -> None:
    assert chat(seed=5, temperature=0).notes == ()
    assert chat(seed=5).settings["seed"] == 5


# Recordings -------------------------------------------------------------------------------------------------


def test_a_recording_is_heard_with_its_task_or_with_a_question() -> None:
    captioned = chat(HEARS, messages=said(recording()), outrider={"task": "concise", "lang": "zh"}).prompt
    asks = chat(HEARS, messages=said({"type": "text", "text": "Who?"}, recording())).prompt
    assert isinstance(captioned, Audio)
    assert isinstance(asks, Audio)
    assert (captioned.task, captioned.lang, captioned.instruction) == ("concise", "zh", None)
    assert asks.instruction == "Who?"
    wave, rate = soundfile.read(CLIP, dtype="float32", always_2d=True)
    assert captioned.sampling_rate == rate
    assert np.array_equal(captioned.source, quantize(wave[:, 0]))  # type: ignore[arg-type]


def test_what_is_missing_of_a_recording_reaches_the_answer() -> None:
    half = base64.b64decode(wave(2.0))[:32_000]
    found = chat(HEARS, messages=said(recording("wav", base64.b64encode(half).decode()))).prompt
    assert isinstance(found, Audio)
    assert "1.00 s of its 2.00 s are missing" in read_audio(found).warnings[0]


def test_channels_are_mixed_without_all_of_them_in_memory() -> None:
    wave = np.random.default_rng(1).uniform(-0.5, 0.5, (200_000, 32)).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, wave, 16_000, format="WAV", subtype="PCM_U8")
    data = base64.b64encode(file.getvalue()).decode()
    tracemalloc.start()
    found = decode_recording(data, "wav", 30.0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.allclose(found.waveform, wave.mean(axis=1), atol=0.01)
    assert most < wave.nbytes, "the file itself, the mean, and one block"


@pytest.mark.parametrize(
    ("kind", "written"), [("wav", "WAV"), ("flac", "FLAC"), ("mp3", "MP3"), ("ogg", "OGG"), ("aiff", "AIFF")]
)
def test_every_format_that_is_named_is_read(kind: str, written: str) -> None:
    assert abs(decode_recording(wave(0.5, kind=written), kind, 30.0).seconds - 0.5) < 0.15


@pytest.mark.parametrize(
    ("data", "kind", "error"),
    [
        ("not base64!", "wav", "not base64"),
        ("", "wav", "empty"),
        (base64.b64encode(b"nothing").decode(), "wav", "not readable audio"),
        (wave(0.5), "flac", "format is flac, but the data is wav"),
        (wave(31), "wav", "lasts more than 30 s"),
        (wave(29.9, rate=48_000, channels=40, kind="WAV", subtype="PCM_U8"), "wav", "over all channels"),
    ],
)  # fmt: skip
def test_what_is_no_recording_is_refused(data: str, kind: str, error: str) -> None:
    with pytest.raises((RequestError, AudioError), match=error):
        decode_recording(data, kind, 30.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "system", "content": "x"}, *said(recording())]}, "messages"),
        ({"messages": said(recording(), TEXT, recording())}, "messages.0.content.2"),
        ({"messages": said(recording(), TEXT), "outrider": {"task": "concise"}}, "outrider.task"),
        ({"messages": said(recording(), TEXT), "outrider": {"lang": "en"}}, "outrider.lang"),
        ({"messages": [{"role": "user", "content": "x"}], "outrider": {"task": "concise"}}, "outrider.task"),
    ],
)  # fmt: skip
def test_what_the_prompt_of_a_recording_has_no_room_for_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(HEARS, **fields)
    assert refused.value.param == param


BIG = "A" * 2_400_000


@pytest.mark.parametrize(
    "head", ["data:audio/wav;base64,", "data:audio/x-wav;codecs=1;base64,", "DATA:video/webm;base64,"]
)
def test_the_data_url_of_a_recording_is_taken(head: str) -> None:
    found = chat(HEARS, messages=said(recording("wav", head + wave(20.0)))).prompt
    assert isinstance(found, Audio)


@pytest.mark.parametrize("space", ["\n", "\r\n", " ", "\t\x0b\x0c"])
def test_white_space_in_base64_is_skipped(space: str) -> None:
    data = space.join(base64.encodebytes(base64.b64decode(wave(0.5))).decode().split("\n"))
    assert decode_recording(data, "wav", 30.0).seconds == 0.5
    head = "data:audio/wav;base64,"
    assert isinstance(chat(HEARS, messages=said(recording("wav", head + data))).prompt, Audio)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("data:audio/wav;base64," + BIG, "not readable audio"),
        ("data:image/png;base64," + BIG, "a data URL of image/png"),
        ("data:audio/wav," + BIG, "without ;base64"),
        ("data:" + BIG, "without ;base64"),
        ("_-" + BIG, "URL-safe"),
        (BIG + "!", "not base64"),
        (BIG + " ", "not readable audio"),
        (BIG + "\u00a0", "not base64"),
    ],
)
def test_a_large_recording_that_is_none_is_refused_for_what_it_is(data: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        chat(HEARS, messages=said(TEXT, recording("wav", data)))
    assert refused.value.param == "messages.0.content.1.input_audio.data"
    assert refused.value.status == 400


def test_the_wrong_format_names_the_part() -> None:
    with pytest.raises(RequestError) as refused:
        chat(HEARS, messages=said(TEXT, recording("wav")))
    assert refused.value.param == "messages.0.content.1.input_audio.format"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_length_limit_that_is_too_large_is_named_as_it_was_given(name: str) -> None:
    message = "a prompt of 9 tokens and max_new_tokens 4000 make 4009: the edge holds 1024"
    error = attach_param(ContextError(message), chat(**{name: 4000}))
    assert (error.param, error.code) == (name, "context_length_exceeded")
    assert f"{name} 4000" in str(error)
    error = attach_param(ContextError(message), chat())
    assert error.param == "messages", "the command line's limit is not the client's to blame"
    error = attach_param(ContextError("a prompt of 3000 tokens: demo holds 2048"), chat(max_tokens=5))
    assert error.param == "messages"


@pytest.mark.parametrize("net", ["rtt=3600s", "rtt=20s,jitter=10s", "stall=60s:30s", "bw=1bit", "rtt=5ms,up=10bit"])
def test_a_network_that_would_hold_a_slot_for_long_is_refused(net: str) -> None:
    with pytest.raises(RequestError, match="in a request") as refused:
        chat(outrider={"net": net})
    assert refused.value.param == "outrider.net"
    assert chat(Defaults(RequestOptions(net=net)), outrider={"net": net}).options.net, (
        "the command line's own may be named"
    )


def test_a_setting_that_stands_in_outrider_is_pointed_at() -> None:
    with pytest.raises(RequestError, match=r"use outrider\.top_k"):
        chat(top_k=5)


def test_audio_for_a_text_model_is_refused() -> None:
    with pytest.raises(RequestError, match="takes no audio"):
        chat(messages=said(recording()))


# Refusals ---------------------------------------------------------------------------------------------------

DIFFERENT: dict[str, Any] = {  # a value that asks for what is not done
    "functions": [{"name": "f"}], "function_call": {"name": "f"},
    "modalities": ["text", "audio"], "audio": {"voice": "x"}, "prediction": {"type": "content", "content": "x"},
    "verbosity": "low", "web_search_options": {}, "moderation": {},
    "service_tier": "flex", "suffix": "x", "prompt_cache_options": {}, "prompt_cache_retention": "24h",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(DIFFERENT))
def test_what_is_not_done_is_refused_with_what_it_would_need(name: str) -> None:
    ask = completion if name == "suffix" else chat
    with pytest.raises(RequestError, match=f"{name}.*not supported") as refused:
        ask(**{name: DIFFERENT[name]})
    assert str(refused.value.param).split(".")[0] == name
    assert UNSUPPORTED[name] in str(refused.value)


def test_every_field_of_openai_s_api_is_done_refused_or_told_as_not_used() -> None:
    done = {"messages", "model", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed"}
    done |= {"stop", "stream", "stream_options", "frequency_penalty", "presence_penalty", "logit_bias", *IGNORED}
    done |= {
        "logprobs",
        "top_logprobs",
        "response_format",
        "n",
        "best_of",
        "echo",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }
    theirs = set(chat_create_params.CompletionCreateParamsBase.__annotations__)
    theirs |= set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert theirs - done - set(DIFFERENT) == set()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_k": 5}, "top_k"),
        ({"outrider": {"speed": 3}}, "outrider.speed"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0.colour"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.0.name"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "1"}}]}
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"messages": said({"type": "image_url", "image_url": {"url": "x"}})}, "messages.0.content.0"),
        ({"messages": said({"type": "text", "text": 5})}, "messages.0.content.0.text"),
        ({"messages": said(recording(extra=1))}, "messages.0.content.0.input_audio.extra"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 5}, "top_p"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logprobs": 3}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 21}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop": ["a", 5]}, "stop.1"),
        ({"messages": said({"type": "text", "text": "x", "cache_control": {}})}, "messages.0.content.0.cache_control"),
        ({"messages": said({**TEXT, "text": "x"}, {"type": "text"})}, "messages.0.content.1.text"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "messages.1.content"),
        ({"outrider": {"k": 65}}, "outrider.k"),
        ({"outrider": {"gate": "entropy"}}, "outrider.gate"),
        ({"outrider": {"gate": "calibrated:/etc/passwd"}}, "outrider.gate"),
        ({"outrider": {"way": "edge-only", "gate": "entropy:1"}}, "outrider.gate"),
        ({"outrider": {"way": "edge-only", "net": "rtt=5ms"}}, "outrider.net"),
        ({"outrider": {"way": "edge-only", "privacy": "tokens"}}, "outrider.privacy"),
        ({"outrider": {"way": "edge-only", "on_loop": "escalate"}}, "outrider.on_loop"),
        ({"outrider": {"way": "cloud-only", "k": 4}}, "outrider.k"),
        ({"outrider": {"way": "cloud-only", "driver": "pipelined"}}, "outrider.driver"),
        ({"outrider": {"way": "cloud-only", "on_cloud_loss": "edge-only"}}, "outrider.on_cloud_loss"),
        ({"outrider": {"accept": "luck"}}, "outrider.accept"),
        ({"outrider": {"net": "rtt=fast"}}, "outrider.net"),
        ({"outrider": {"min_new_tokens": 500}}, "outrider.min_new_tokens"),
        ({"outrider": {"provisional": True}}, "outrider.provisional"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128 items"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": {}}, "prompt", "valid string: a prompt is a text, token ids"),
        ({"prompt": 5}, "prompt", "valid string: a prompt is a text, token ids"),
        ({"prompt": ["a", [1]]}, "prompt.1", "valid string: a prompt is a text, token ids"),
        ({"prompt": ["a", 1]}, "prompt.1", "valid string: a prompt is a text, token ids"),
        ({"prompt": [[1], "a"]}, "prompt.1", "valid list: a prompt is a text, token ids"),
        ({"prompt": [1, "a"]}, "prompt.1", "valid integer: a prompt is a text, token ids"),
        ({"prompt": [1, [2]]}, "prompt.1", "valid integer: a prompt is a text, token ids"),
        ({"prompt": [[1], [2, "a"]]}, "prompt.1.1", "valid integer: a prompt is a text, token ids"),
        ({"prompt": [None]}, "prompt.0", "valid integer: a prompt is a text, token ids"),
        ({"prompt": [[1], [-1]]}, "prompt.1.0", "greater than or equal to 0"),
        ({"prompt": [[1], []]}, "prompt.1", "at least 1 item"),
        ({"outrider": {"k": "AUTO"}}, "outrider.k", "1 to 64, or auto"),
        ({"outrider": {"k": True}}, "outrider.k", "1 to 64, or auto"),
    ],
)
def test_of_a_field_with_several_forms_the_one_that_was_meant_is_spoken_of(
    fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        completion(**fields)
    assert refused.value.param == param


def tool_call(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{**CALL, **fields}]}]}


@pytest.mark.parametrize("kind", ["custom", "web_search", "allowed_tools", "functions", 5, None])
@pytest.mark.parametrize("more", [{}, {"custom": {"name": "f"}}, {"function": {"name": "f", "x": 1}}])
def test_a_wrong_type_is_the_error_whatever_else_its_object_holds(kind: Any, more: dict[str, Any]) -> None:
    wrong = {"type": kind, **more}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tools": [TOOL, {**TOOL, **wrong}]}, "tools.1.type"),
        ({"tools": [TOOL], "tool_choice": wrong}, "tool_choice.type"),
        (tool_call(**wrong), "messages.0.tool_calls.0.type"),
    ]
    for fields, param in cases:
        with pytest.raises(RequestError, match="expected function, the only supported type") as refused:
            chat(**fields)
        assert refused.value.param == param


def test_what_is_no_recording_is_named_without_our_objects() -> None:
    with pytest.raises(RequestError, match="Format not recognised") as refused:
        chat(HEARS, messages=[{"role": "user", "content": [recording("wav", "aGVsbG8=")]}])
    assert refused.value.param == "messages.0.content.0.input_audio.data"
    assert "0x" not in str(refused.value)


def test_a_contradiction_of_the_default_mode_names_the_default() -> None:
    with pytest.raises(RequestError, match="this gateway's default"):
        chat(Defaults(RequestOptions("edge-only")), outrider={"gate": "entropy:1"})


def test_the_gate_file_of_the_command_line_may_be_named_again() -> None:
    defaults = Defaults(RequestOptions(gate="calibrated:mine.json"))
    assert chat(defaults, outrider={"gate": "calibrated:mine.json"}).options == defaults.options


@pytest.mark.parametrize("spec", ["{}", "trigger:{}", "trigger:trigger:{}", "entropy:1|{}", "trigger:entropy:1|{}"])
def test_no_other_file_is_opened_for_a_gate(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret.json"
    file.write_text("[]")
    read_text = Path.read_text

    def watched(path: Path, *args: Any, **more: Any) -> str:
        assert path != file, "it was opened"
        return read_text(path, *args, **more)

    monkeypatch.setattr(Path, "read_text", watched)
    with pytest.raises(RequestError, match="on the gateway's command line"):
        chat(
            Defaults(RequestOptions(gate="calibrated:mine.json")), outrider={"gate": spec.format(f"calibrated:{file}")}
        )


@pytest.mark.parametrize("way", ["edge-only", "cloud-only"])
def test_values_that_a_way_does_not_use_are_taken_where_they_ask_for_nothing(way: str) -> None:
    nothing = {"gate": "always", "accept": "exact", "scope": "block", "driver": "sequential", "net": "none"}
    defaults = Defaults(RequestOptions(gate="entropy:1", net="rtt=5ms", driver="pipelined", on_loop="escalate"))
    found = chat(defaults, outrider={"way": way, **nothing, "privacy": "audio", "tokens": True}).options
    assert found.normalized() == RequestOptions(way, on_loop=found.normalized().on_loop, watch=way == "edge-only")  # type: ignore[arg-type]
    assert chat(defaults, outrider={"way": way}).options.way == way, "the command line's own give way"


def test_another_model_is_not_found() -> None:
    with pytest.raises(RequestError) as refused:
        chat(model="gpt-4o")
    assert (refused.value.status, refused.value.code, refused.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff",
        b"[" * 100_000,
        b'{"seed":' + b"1" * 5000 + b"}",
        b'{"temperature":NaN}',
        b'{"model":"outrider","messages":[{"role":"user","content":"\\ud800"}]}',
    ],
)
def test_a_body_of_another_shape_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        validate_body(ChatRequest, body)
    assert refused.value.status == 400


MANY = 150_000
BAD: dict[str, tuple[type[Request], Any]] = {
    "ids": (CompletionRequest, {"prompt": [-1] * MANY}),
    "lists of ids": (CompletionRequest, {"prompt": [[-1] * MANY]}),
    "messages": (ChatRequest, {"messages": [-1] * MANY}),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [-1] * MANY}]}),
    "stops": (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "stop": [-1] * MANY}),
    "tools": (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": [-1] * MANY}),
    "keys": (ChatRequest, {f"{n}": 0 for n in range(MANY // 5)}),
    "inner keys": (ChatRequest, {"messages": [{f"{n}": 0 for n in range(MANY // 5)}]}),
    "biases": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "x"}], "logit_bias": {f"{n}": 0 for n in range(MANY // 5)}},
    ),
    "metadata": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "x"}], "metadata": {f"{n}": 0 for n in range(MANY // 5)}},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_body_with_many_faults_is_refused_for_one_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, fields = BAD[name]
    body = json.dumps({"model": "outrider", **fields}, separators=(",", ":")).encode()
    counts, found = [], pydantic.ValidationError.errors

    class Refused(Exception):
        pass

    def refused(error: pydantic.ValidationError, *_: Any) -> Refused:
        counts.append(len(found(error)))
        return Refused()

    started = time.thread_time()  # processor time: load leaves it alone
    with pytest.raises(RequestError):
        validate_body(kind, body)
    assert time.thread_time() - started < 1.0, "an error per fault takes many seconds"
    monkeypatch.setattr("outrider.gateway.request_parsing.to_request_error", refused)
    with pytest.raises(Refused):
        validate_body(kind, body)
    assert counts[0] <= 6, "one; and one for each form that a field may have, or that is missing"


def test_only_a_recording_may_be_long() -> None:
    long = "x" * 2**21
    for fields in ({"messages": [{"role": "user", "content": long}]}, {"messages": said(recording()), "user": long}):
        with pytest.raises(RequestError, match="beside a recording") as refused:
            chat(HEARS, **fields)
        assert refused.value.status == 413
    tune = np.random.default_rng(1).uniform(-1, 1, 29 * 48_000)
    file = io.BytesIO()
    soundfile.write(file, tune, 48_000, format="WAV")
    assert chat(HEARS, messages=said(recording("wav", base64.b64encode(file.getvalue()).decode())))


def test_a_refusal_repeats_no_text() -> None:
    with pytest.raises(RequestError) as refused:
        chat(messages=[{"role": "user", "content": {"secret words": 5}}])
    assert "secret" not in str(refused.value)


BODY = {"model": "outrider", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("field", ["store", "logprobs"])
@pytest.mark.parametrize("value", [0, 0.0, "", []])
def test_values_that_equal_false_are_not_taken_as_false(field: str, value: object) -> None:
    with pytest.raises(RequestError) as refused:
        validate_body(ChatRequest, json.dumps({**BODY, field: value}).encode())
    assert refused.value.param == field
    validate_body(ChatRequest, json.dumps({**BODY, field: False}).encode())
