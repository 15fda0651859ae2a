"""A gateway without an edge model: the cloud's tokenizer encodes prompts, and the cloud decodes alone."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any

import httpx2
import openai
import pytest
from pydantic import TypeAdapter

from outrider import Grammar, SpeculativeDecoder, local, prompt_lookup
from outrider.cli.edge import Serving, run_edge
from outrider.cli.options import Models, Network, Pair, Speculation
from outrider.errors import CloudLost, ModelError, SettingsError
from outrider.gateway import response_schema
from outrider.gateway.app import build_overview
from outrider.gateway.decoder_pool import DecoderPool, RequestOptions
from outrider.gateway.defaults import Defaults
from outrider.prompts.chat import encode
from tests.support import tool_templates
from tests.support.cloud_server import Served, serving
from tests.support.gateway_pair import demo_cloud
from tests.support.gateway_process import audio_request, running_gateway
from tests.support.processes import wait_until
from tests.support.tiny_models import byte_tokenizer, tiny_engine

EOS = 3
MESSAGES: Any = [{"role": "user", "content": "The bird sings, and"}]
LENGTH = 24


@pytest.fixture(scope="module")
def engine() -> Any:
    tokenizer = deepcopy(byte_tokenizer())
    tokenizer.chat_template = tool_templates.HERMES
    return tiny_engine("qwen2", 3, vocab=len(tokenizer), tokenizer=tokenizer, eos=(EOS,))


@pytest.fixture(scope="module")
def served(engine: Any) -> Iterator[Served]:
    with serving(engine, max_length=512) as running:
        yield running


@pytest.fixture(scope="module")
def url(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with running_gateway("--edge", "none", "--cloud", f"grpc://{served.address}") as (found, _):
            yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


def expected(engine: Any, prompt: Any = MESSAGES, **settings: Any) -> Any:
    decoder = SpeculativeDecoder(None, local(engine))
    return decoder.generate(prompt, **{"max_new_tokens": LENGTH, **settings})


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "outrider", "messages": MESSAGES, "max_tokens": LENGTH, **fields})


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "seed": 5}),
    ({"frequency_penalty": 1.0, "logit_bias": {"70": 5}}, {"frequency_penalty": 1.0, "logit_bias": {70: 5}}),
    ({"extra_body": {"outrider": {"regex": "[a-z ]{1,9}!"}}}, {"grammar": Grammar("regex", "[a-z ]{1,9}!")}),
    ({"response_format": {"type": "json_object"}}, {"grammar": Grammar("json_object")}),
    ({"extra_body": {"outrider": {"way": "cloud-only", "repetition_penalty": 1.3}}}, {"repetition_penalty": 1.3}),
]


@pytest.mark.network
@pytest.mark.parametrize(("fields", "settings"), SETTINGS)
def test_answers_equal_those_of_the_cloud_alone(
    client: openai.OpenAI, engine: Any, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    result = expected(engine, **settings)
    reply = create(client, **fields)
    assert reply.choices[0].message.content == result.text
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (
        result.prompt_tokens, len(result.token_ids))  # fmt: skip
    assert reply.outrider["guarantee"] == "exact"
    chunks = list(create(client, **fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == result.text
    assert chunks[-1].usage.total_tokens == reply.usage.total_tokens


@pytest.mark.network
def test_tool_calls_have_the_syntax_of_the_cloud_s_template(client: openai.OpenAI) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": {**city, "additionalProperties": False}}
    reply = create(
        client, tools=[{"type": "function", "function": function}], tool_choice="required", max_tokens=80,
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')


@pytest.mark.network
def test_completions_and_tokenize_need_no_edge_model(client: openai.OpenAI, url: str, engine: Any) -> None:
    result = expected(engine, "Hello")
    reply: Any = client.completions.create(model="outrider", prompt="Hello", max_tokens=LENGTH, logprobs=1)
    assert reply.choices[0].text == result.text
    assert len(reply.choices[0].logprobs.tokens) == len(result.token_ids)
    tokenized = httpx2.post(f"{url}/tokenize", json={"messages": MESSAGES}).json()
    assert tokenized["tokens"] == list(encode(engine, MESSAGES).ids)
    assert tokenized["max_model_len"] == 512
    overview = httpx2.get(f"{url}/v1/outrider").json()
    assert (overview["edge"], overview["drafter"]) == ("none", "none")
    assert overview["cloud"].startswith(engine.name)
    assert overview["defaults"]["way"] == "cloud-only"
    assert {"gate", "k", "accept", "scope", "driver"}.isdisjoint(overview["defaults"])
    TypeAdapter(response_schema.Overview).validate_python(overview)


@pytest.mark.network
def test_health_reports_another_model_in_the_cloud(
    client: openai.OpenAI, url: str, served: Served, engine: Any
) -> None:
    create(client)
    for other, status in ((tiny_engine("qwen2", 4, vocab=300), "degraded"), (engine, "ok")):
        served.service.engine = other
        served.restart()
        health = wait_until(
            lambda status=status: (found := httpx2.get(f"{url}/health").json())["status"] == status and found
        )
        assert ("another model" in str(health["reason"])) == (status == "degraded")
        if status == "degraded":
            with pytest.raises(openai.InternalServerError):
                create(client)
    create(client)


@pytest.mark.network
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"way": "speculative"}, "outrider.way"),
        ({"way": "edge-only"}, "outrider.way"),
        ({"gate": "entropy:1"}, "outrider.gate"),
        ({"k": 3}, "outrider.k"),
        ({"driver": "pipelined"}, "outrider.driver"),
        ({"on_cloud_loss": "edge-only"}, "outrider.on_cloud_loss"),
    ],
)
def test_what_needs_an_edge_is_refused(client: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, extra_body={"outrider": options})
    assert refused.value.param == param


@pytest.mark.network
def test_a_recording_is_refused(url: str) -> None:
    reply = httpx2.post(f"{url}/v1/chat/completions", json=audio_request("en-1.ogg"))
    assert reply.status_code == 400
    assert "without an edge model" in reply.json()["error"]["message"]


GRPC = Models("none", "grpc://127.0.0.1:1")


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        (Pair(Models("none", "none")), "there is no model"),
        (Pair(Models("none", "vllm://127.0.0.1:1")), "--edge none: vllm sends no tokenizer"),
        (Pair(Models("none", "sglang://127.0.0.1:1")), "--edge none: sglang sends no tokenizer"),
        (Pair(GRPC, speculation=Speculation(gate="entropy:1")), "needs a drafter"),
        (Pair(GRPC, network=Network(driver="pipelined")), "needs a drafter"),
    ],
)
def test_command_lines_that_contradict_edge_none_are_refused(pair: Pair, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        run_edge("127.0.0.1:0", pair, Serving())
    with pytest.raises(SettingsError, match="--target-tokenizer is for an edge model"):
        run_edge("127.0.0.1:0", Pair(GRPC), Serving(), target_tokenizer="x")


@pytest.mark.network
def test_a_cloud_that_is_away_or_cannot_serve_texts_alone_ends_the_start() -> None:
    network = Network(patience=0.2)
    with pytest.raises(CloudLost):
        run_edge("127.0.0.1:0", Pair(GRPC, network=network), Serving())
    with serving(tiny_engine("qwen2")) as bare, pytest.raises(ModelError, match="came without a tokenizer"):
        run_edge("127.0.0.1:0", Pair(Models("none", f"grpc://{bare.address}")), Serving())
    with serving(demo_cloud()) as audio, pytest.raises(ModelError, match="only captions recordings: give --edge MODEL"):
        run_edge("127.0.0.1:0", Pair(Models("none", f"grpc://{audio.address}")), Serving())


@pytest.mark.parametrize(
    ("way", "missing"),
    [
        ("speculative", set()),
        ("cloud-only", {"gate", "k", "accept", "scope", "driver"}),
        ("edge-only", {"gate", "accept", "scope", "driver", "on_cloud_loss", "privacy", "net"}),
    ],
)
def test_the_overview_lists_the_defaults_that_apply(way: Any, missing: set[str]) -> None:
    listed = build_overview(Defaults(RequestOptions(way)), "a cloud", 8)["defaults"]
    assert {each.name for each in fields(RequestOptions)} - listed.keys() == missing
    assert listed["way"] == way


def test_a_pool_without_a_drafter_decodes_cloud_only() -> None:
    pool = DecoderPool(prompt_lookup(byte_tokenizer()), lambda _: None, drafts=False)  # type: ignore[arg-type,return-value]
    assert pool.drafter == "none"
    for way in ("speculative", "edge-only"):
        with pytest.raises(SettingsError, match=f"way '{way}' needs a drafter"):
            pool.decoder(RequestOptions(way))  # type: ignore[arg-type]
