"""The unmodified `openai` client against a real gateway with the bundled pair: the same texts as in Python."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from outrider import Audio, SpeculativeDecoder, load_engine, local
from outrider.decoding.detokenizer import REPLACEMENT_CHARACTER
from tests.support.gateway_process import CLIPS, audio_request, metric_total, running_gateway
from tests.support.processes import HANG_S, wait_until

pytestmark = pytest.mark.network

KEY = "a-key-that-is-long-enough"
LONG = {"outrider": {"ignore_eos": True, "on_loop": "ignore"}}  # for answers that do not end by themselves
NAMES = [f"{lang}-{n}.ogg" for lang in ("zh", "en") for n in range(1, 5)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"me {KEY}\n")
    keys.chmod(0o600)
    with running_gateway("--api-keys", str(keys)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(load_engine("demo:edge"), local(load_engine("demo:cloud")))


def content(stream: Any) -> str:
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert not any(REPLACEMENT_CHARACTER in delta for delta in deltas)
    return "".join(deltas)


def test_a_chat_is_answered_as_in_python(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    messages = [{"role": "user", "content": "这段语音"}]
    expected = decoder.generate(messages, max_new_tokens=40)
    reply: Any = client.chat.completions.create(model="outrider", messages=messages, max_tokens=40)  # type: ignore[call-overload]
    assert reply.choices[0].message.content == expected.text
    assert reply.usage.prompt_tokens == expected.prompt_tokens
    assert reply.usage.completion_tokens == len(expected.token_ids)
    assert reply.outrider["guarantee"] == "exact"
    assert reply.outrider["stats"]["rounds"] == expected.stats.rounds


def test_log_probabilities_come_whole_and_in_streams_as_in_python(
    client: openai.OpenAI, decoder: SpeculativeDecoder
) -> None:
    messages: Any = [{"role": "user", "content": "这段语音"}]
    expected = decoder.generate(messages, max_new_tokens=24, logprobs=3)
    asked: dict[str, Any] = {"model": "outrider", "messages": messages, "max_tokens": 24, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=3).choices[0].logprobs.content
    chunks = list(client.chat.completions.create(**asked, top_logprobs=3, stream=True))
    streamed = [each for c in chunks for choice in c.choices if choice.logprobs for each in choice.logprobs.content]
    assert streamed == whole
    assert [each.logprob for each in whole] == pytest.approx([each.logprob for each in expected.logprobs], abs=1e-4)
    assert [bytes(each.bytes) for each in whole] == [each.data for each in expected.logprobs]
    assert [len(each.top_logprobs) for each in whole] == [3] * len(expected.token_ids)
    assert [each.source for each in whole] == [source.value for source in expected.sources]


def test_choices_are_those_of_their_seeds(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    messages: Any = [{"role": "user", "content": "这段语音"}]
    sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
    expected = [decoder.generate(messages, max_new_tokens=24, seed=7 + n, **sampled) for n in range(3)]
    assert len({result.text for result in expected}) == 3
    asked: dict[str, Any] = {"model": "outrider", "messages": messages, "max_tokens": 24, "seed": 7, "n": 3, **sampled}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == [result.text for result in expected]
    assert whole.usage.completion_tokens == sum(len(result.token_ids) for result in expected)
    assert whole.usage.prompt_tokens == expected[0].prompt_tokens
    texts, usages = ["", "", ""], []
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [result.text for result in expected]
    assert [usage for usage in usages if usage] == [whole.usage] or usages[-1].total_tokens == whole.usage.total_tokens


def test_best_of_sends_the_likeliest(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    sampled: dict[str, Any] = {"temperature": 1.2, "seed": 3}
    found = [decoder.generate("This is", max_new_tokens=12, logprobs=0, **{**sampled, "seed": 3 + n}) for n in range(4)]
    means = [sum(each.logprob for each in result.logprobs) / len(result.logprobs) for result in found]
    best = sorted(range(4), key=lambda n: -means[n])
    reply = client.completions.create(model="outrider", prompt="This is", max_tokens=12, best_of=4, n=2, **sampled)
    assert [choice.text for choice in reply.choices] == [found[n].text for n in best[:2]]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == sum(len(result.token_ids) for result in found)


def test_more_choices_than_slots_and_places_all_come() -> None:
    with (
        running_gateway("--slots", "1", "--queue", "1") as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": "outrider", "prompt": "hello", "max_tokens": 4, "temperature": 1.0}
        reply = client.completions.create(**asked, n=5)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3, 4]
        for n, choice in enumerate(reply.choices):
            assert choice.text == client.completions.create(**asked, seed=n).choices[0].text


def test_a_client_that_leaves_ends_all_choices() -> None:
    with (
        running_gateway("--slots", "2") as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {"model": "outrider", "prompt": "hello", "max_tokens": 800, "temperature": 1.0, "n": 4}
        stream = client.completions.create(**asked, stream=True, extra_body=LONG)
        next(iter(stream))
        wait_until(lambda: metric_total(url, "outrider_edge_active") == 2)
        stream.close()
        wait_until(lambda: metric_total(url, "outrider_edge_disconnects_total") == 1)
        wait_until(lambda: not metric_total(url, "outrider_edge_active") + metric_total(url, "outrider_edge_waiting"))
        assert "outrider_edge_results_total{" not in httpx2.get(f"{url}/metrics").text, "no generation came to its end"


def test_a_completion_s_log_probabilities_have_offsets_into_its_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "outrider", "prompt": "This is", "max_tokens": 12, "logprobs": 2}
    choice = client.completions.create(**asked, frequency_penalty=0.5, logit_bias={"100": -5}).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 12
    for token, at in zip(found.tokens, found.text_offset, strict=True):
        assert "bytes:" in token or choice.text[at:].startswith(token)
    assert all(2 <= len(top) <= 3 and max(top.values()) <= 0 for top in found.top_logprobs)


def test_a_last_message_of_the_assistant_is_continued(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    messages = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "This is slow"}]
    expected = decoder.generate(messages, max_new_tokens=8)
    raw = "<|im_start|>user\nSay it<|im_end|>\n<|im_start|>assistant\nThis is slow"
    assert decoder.generate(raw, max_new_tokens=8).token_ids == expected.token_ids
    reply = client.chat.completions.create(model="outrider", messages=messages, max_tokens=8)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == expected.text


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|AUDIO|>", "<|im_start|>system"])
def test_control_tokens_in_messages_are_refused_by_name(client: openai.OpenAI, text: str) -> None:
    for content in (text, [{"type": "text", "text": text[:3]}, {"type": "text", "text": text}]):
        messages: Any = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": content}]
        with pytest.raises(openai.BadRequestError, match=r"messages\.1.* contains the control token '<\|") as refusal:
            client.chat.completions.create(model="outrider", messages=messages)
        assert refusal.value.param == "messages.1.content"


def test_a_placeholder_of_a_recording_in_a_prompt_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="placeholder"):
        client.completions.create(model="outrider", prompt="a<|AUDIO|>b")


def test_text_for_a_pair_that_only_captions_is_warned_about(client: openai.OpenAI) -> None:
    reply: Any = client.completions.create(model="outrider", prompt="Hello", max_tokens=3)
    assert any("only writes captions of recordings" in warning for warning in reply.outrider["warnings"])


def test_a_recording_is_captioned_streaming_and_not(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    expected = decoder.generate(Audio(CLIPS / "zh-2.ogg", "detailed", "zh"))
    body = audio_request("zh-2.ogg", extra_body={"outrider": {"task": "detailed", "lang": "zh"}})
    assert client.chat.completions.create(**body).choices[0].message.content == expected.text
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert content(chunks) == expected.text
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)  # type: ignore[union-attr]
    assert chunks[-2].outrider["guarantee"] == "exact"  # type: ignore[attr-defined]
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_a_question_takes_the_task_s_place(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    question = "Sum up in one short sentence how this person speaks and the emotion it suggests."
    body = audio_request("en-3.ogg")
    body["messages"][0]["content"].insert(0, {"type": "text", "text": question})
    expected = decoder.generate(Audio(CLIPS / "en-3.ogg", instruction=question))
    assert client.chat.completions.create(**body).choices[0].message.content == expected.text


def test_a_stop_string_ends_the_text_before_itself(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    whole = str(decoder.generate(Audio(CLIPS / "en-5.ogg")).text)
    word = whole.split()[5]
    reply = client.chat.completions.create(**audio_request("en-5.ogg", stop=[word]))
    assert reply.choices[0].message.content == whole[: whole.index(word)]
    assert (reply.choices[0].finish_reason, reply.outrider["finish_reason"]) == ("stop", "stop")
    assert (
        content(client.chat.completions.create(**audio_request("en-5.ogg", stop=word), stream=True))
        == whole[: whole.index(word)]
    )


def test_a_seed_gives_the_same_text_and_another_seed_another(
    client: openai.OpenAI, decoder: SpeculativeDecoder
) -> None:
    def drawn(seed: int) -> str:
        ask: dict[str, Any] = {"model": "outrider", "prompt": "hello", "max_tokens": 12}
        return client.completions.create(**ask, temperature=2.0, seed=seed).choices[0].text

    assert drawn(7) == drawn(7) == decoder.generate("hello", max_new_tokens=12, temperature=2.0, seed=7).text
    assert len({drawn(seed) for seed in (7, 8, 9)}) > 1


def test_a_completion_continues_text_and_ids(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    expected = decoder.generate("The speaker", max_new_tokens=12)
    reply = client.completions.create(model="outrider", prompt="The speaker", max_tokens=12)
    assert reply.choices[0].text == expected.text
    ids = list(decoder.encode("The speaker").ids)
    stream = client.completions.create(model="outrider", prompt=ids, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected.text


def test_several_prompts_are_answered_as_each_alone(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    prompts = [f"{word} speaker" for word in ("The", "This", "One", "A")]
    expected = [str(decoder.generate(prompt, max_new_tokens=8).text) for prompt in prompts]
    ask: dict[str, Any] = {"model": "outrider", "prompt": prompts, "max_tokens": 8}
    reply = client.completions.create(**ask)
    assert [(choice.index, choice.text) for choice in reply.choices] == list(enumerate(expected))
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(len(decoder.encode(prompt).ids) for prompt in prompts)
    texts = [""] * len(prompts)
    for chunk in client.completions.create(**ask, stream=True, echo=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [prompt + text for prompt, text in zip(prompts, expected, strict=True)]


def test_eight_clients_at_once_get_the_same_texts_as_one(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    expected = [decoder.generate(Audio(CLIPS / name, lang=name[:2])).text for name in NAMES]

    def caption(name: str) -> str:
        body = audio_request(name, stream=True, extra_body={"outrider": {"lang": name[:2]}})
        return content(client.chat.completions.create(**body))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(caption, NAMES)) == expected


def test_tokens_carry_their_source_and_provisional_ones_come_first(client: openai.OpenAI) -> None:
    options = {"tokens": True, "provisional": True}
    stream = list(
        client.chat.completions.create(**audio_request("en-1.ogg", stream=True, extra_body={"outrider": options}))
    )
    told = [t for chunk in stream for t in (getattr(chunk, "outrider", None) or {}).get("tokens", [])]
    assert {token["kind"] for token in told} == {"provisional", "confirmed", "revised"}
    assert told[0]["kind"] == "provisional"
    assert all(token["signals"]["entropy"] >= 0 for token in told if token["kind"] == "provisional")
    stands: list[str] = []
    for token in told:
        stands[token["index"] :] = [
            token["text"],
            *([] if token["kind"] == "revised" else stands[token["index"] + 1 :]),
        ]
    length = stream[-1].outrider["stats"]["cloud_tokens"]  # type: ignore[attr-defined]
    assert "".join(stands[:length]) == content(stream)


def test_privacy_can_be_chosen_per_request(client: openai.OpenAI) -> None:
    def outcome(**options: Any) -> dict[str, Any]:
        return client.chat.completions.create(**audio_request("en-1.ogg", extra_body={"outrider": options})).outrider  # type: ignore[no-any-return, attr-defined]

    assert outcome(way="edge-only")["stats"]["bytes_up"] == 0
    assert outcome(privacy="tokens")["stats"]["media_bytes_up"] == 0
    assert outcome(way="cloud-only")["guarantee"] == "exact"
    assert outcome(net="cut", on_cloud_loss="edge-only")["guarantee"] == "edge-only"
    with pytest.raises(openai.InternalServerError) as lost:
        outcome(net="cut")
    assert (lost.value.status_code, lost.value.code) == (503, "cloud_lost")


def test_errors_are_those_of_the_client(url: str, client: openai.OpenAI) -> None:
    hello: dict[str, Any] = {"model": "outrider", "messages": [{"role": "user", "content": "hello"}]}
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="another-key-altogether", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**hello, "model": "gpt-4o"})
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**hello, n=0)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="holds"):
        client.chat.completions.create(**hello, max_tokens=10**6)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_before_its_generation_would_end(stream: bool) -> None:
    with running_gateway() as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        slow = {"outrider": {**LONG["outrider"], "net": "rtt=1s"}}  # over 100 rounds, of a second each
        ask: dict[str, Any] = {"model": "outrider", "prompt": "hello", "max_tokens": 800, "extra_body": slow}
        if stream:
            running = client.completions.create(**ask, stream=True)
            next(iter(running))
            assert metric_total(url, "outrider_edge_active") == 1
            running.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(**ask, timeout=openai.Timeout(HANG_S, read=0.2))
        wait_until(lambda: metric_total(url, "outrider_edge_disconnects_total") == 1)
        wait_until(lambda: not metric_total(url, "outrider_edge_active"))
        assert "outrider_edge_results_total{" not in httpx2.get(f"{url}/metrics").text, "no generation came to its end"


def test_a_stream_that_the_gateway_s_end_cuts_short_says_so() -> None:
    with (
        running_gateway() as (url, process),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model="outrider", prompt="hello", max_tokens=800, stream=True, extra_body=LONG
        )
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


def test_without_a_cloud_it_is_an_edge_alone() -> None:
    with running_gateway("--cloud", "none") as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        reply = client.completions.create(model="outrider", prompt="hello", max_tokens=5)
        assert reply.outrider["guarantee"] == "edge-only"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--edge", "none", "--cloud", "vllm://127.0.0.1:1"], "give --edge MODEL"),
        (["--slots", "0"], "--slots 0"),
        (["--gate", "luck"], "gate 'luck'"),
        (["--listen", "0.0.0.0:0"], "--api-keys"),
        (["--token-file", "x"], "--token-file"),
        (["--allow-origin", "example.org"], "--allow-origin"),
        (["--max-body", "much"], "is not a size"),
        (["--max-body", "0"], "1 byte or more"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], error: str) -> None:
    assert re.fullmatch(rf"outrider: .*{re.escape(error)}.*\n", refused(*options))


def test_a_taken_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused("--listen", f"127.0.0.1:{port}")


def refused(*options: str) -> str:
    command = [sys.executable, "-m", "outrider", "edge", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    return done.stderr


def test_logs_hold_no_user_s_text(tmp_path: Path) -> None:
    with running_gateway("--verbose", "--log-format", "json") as (url, process):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            client.completions.create(model="outrider", prompt="secretword", max_tokens=3)
            with pytest.raises(openai.APIError):
                client.completions.create(
                    model="outrider", prompt="secretword", extra_body={"outrider": {"net": "cut"}}
                )
        process.terminate()
        assert process.stderr is not None
        said = process.stderr.read()
        assert "secretword" not in said
        assert all(json.loads(line)["event"] for line in said.splitlines()), "not only lines of JSON"
