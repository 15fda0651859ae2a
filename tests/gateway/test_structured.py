"""Structured output through the gateway, with the bundled pair and a cloud of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from outrider import SpeculativeDecoder, local
from outrider.config import Grammar
from outrider.engines.grammars import compile_grammar
from outrider.errors import GrammarError
from outrider.gateway.completion_schema import CompletionRequest
from outrider.gateway.defaults import Defaults
from outrider.gateway.error_params import attach_param
from outrider.gateway.errors import RequestError
from outrider.gateway.request_parsing import parse_request, validate_body
from outrider.gateway.request_schema import ChatRequest
from tests.support.gateway_pair import demo_cloud, demo_edge
from tests.support.gateway_process import running_gateway

CHAT: dict[str, Any] = {"model": "outrider", "messages": [{"role": "user", "content": "hi"}]}
PAIR = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}


def parsed(**fields: Any) -> Any:
    return parse_request(validate_body(ChatRequest, json.dumps({**CHAT, **fields}).encode()), Defaults())


def format_of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "expected", "field"),
    [
        ({}, None, None),
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object"), "response_format"),
        (
            {"response_format": format_of(PAIR, strict=True, description="d")},
            Grammar.json_schema(PAIR),
            "response_format.json_schema.schema",
        ),
        ({"outrider": {"regex": "a+"}}, Grammar("regex", "a+"), "outrider.regex"),
        ({"outrider": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"'), "outrider.grammar"),
    ],
)
def test_a_request_s_grammar(fields: dict[str, Any], expected: Grammar | None, field: str | None) -> None:
    request = parsed(**fields)
    assert request.settings["grammar"] == expected
    assert request.grammar_fields == ({} if field is None else {"": field})


def test_a_completion_takes_a_regular_expression() -> None:
    body = json.dumps({"model": "outrider", "prompt": "hi", "outrider": {"regex": "a"}}).encode()
    assert parse_request(validate_body(CompletionRequest, body), Defaults()).settings["grammar"] == Grammar(
        "regex", "a"
    )


def test_the_command_line_s_grammar_yields_to_the_request_s() -> None:
    defaults = Defaults(settings={"grammar": Grammar("regex", "a"), "ignore_eos": False})

    def grammar(**fields: Any) -> Grammar | None:
        body = json.dumps({**CHAT, **fields}).encode()
        return parse_request(validate_body(ChatRequest, body), defaults).settings["grammar"]  # type: ignore[no-any-return]

    assert grammar() == Grammar("regex", "a")
    assert grammar(response_format={"type": "text"}) is None
    assert grammar(response_format={"type": "json_object"}) == Grammar("json_object")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "expected the type text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"response_format": format_of(5)}, "response_format.json_schema.schema", "expected an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
         "response_format.json_schema.name", "is missing"),
        ({"response_format": format_of({"x": "y" * 70_000})}, "response_format.json_schema.schema", "at most 65536"),
        ({"response_format": format_of({}), "outrider": {"regex": "a"}}, "outrider.regex", "give one"),
        ({"outrider": {"regex": "a", "grammar": "b"}}, "outrider.grammar", "give one"),
        ({"outrider": {"regex": ""}}, "outrider.regex", "at least 1"),
        ({"outrider": {"regex": "a", "ignore_eos": True}}, "outrider.ignore_eos", "outrider.regex ends"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        parsed(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": format_of({"properties": {"a": {"if": {}}}})},
         "response_format.json_schema.schema.properties.a"),
        ({"response_format": format_of({"type": "foo"})}, "response_format.json_schema.schema"),
        ({"outrider": {"regex": "("}}, "outrider.regex"),
        ({"outrider": {"grammar": "start: x"}}, "outrider.grammar"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_compiled_is_refused_with_the_place(fields: dict[str, Any], param: str) -> None:
    try:
        request = parsed(**fields)
        compile_grammar(request.settings["grammar"], demo_edge().tokenizer, demo_edge().eos_ids)
    except RequestError as error:
        refused = error
    except GrammarError as error:
        refused = attach_param(error, request)
    assert refused.param == param
    assert str(refused).startswith(f"{param}: ")
    assert refused.status == 400


# A gateway with a cloud of its own --------------------------------------------------------------------------

STATION = {
    "type": "object",
    "properties": {"kind": {"enum": ["rain", "snow"]}, "mm": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "mm"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running_gateway() as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{**CHAT, "max_tokens": 200, **fields})


@pytest.mark.network
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_an_answer_matches_its_schema_and_is_python_s(client: openai.OpenAI, temperature: float) -> None:
    decoder = SpeculativeDecoder(demo_edge(), local(demo_cloud()))
    expected = decoder.generate(
        CHAT["messages"], max_new_tokens=200, temperature=temperature, seed=5, grammar=Grammar.json_schema(STATION)
    )
    options = {"response_format": format_of(STATION), "temperature": temperature, "seed": 5}
    answer = create(client, **options).choices[0]
    assert answer.message.content == expected.text
    assert answer.finish_reason == "stop"
    jsonschema_rs.validate(STATION, json.loads(answer.message.content))
    chunks = [chunk.choices[0] for chunk in create(client, **options, stream=True) if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in chunks) == expected.text


@pytest.mark.network
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_compiled_has_status_400(client: openai.OpenAI, stream: bool) -> None:
    place = "response_format.json_schema.schema.properties.a"
    with pytest.raises(openai.BadRequestError, match="not supported: if") as refused:
        create(client, response_format=format_of({"properties": {"a": {"if": {}}}}), stream=stream)
    assert refused.value.param == place
    bomb = {"$defs": {str(n): {"properties": {"a": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(900)}}
    with pytest.raises(openai.BadRequestError, match="too much time or memory"):
        create(client, response_format=format_of({**bomb, "$ref": "#/$defs/0"}))
    assert create(client, extra_body={"outrider": {"regex": "ok"}}).choices[0].message.content == "ok"


@pytest.mark.network
@pytest.mark.parametrize("way", ["speculative", "edge-only", "cloud-only"])
def test_an_answer_without_a_token_to_choose_has_status_400(client: openai.OpenAI, way: str) -> None:
    with pytest.raises(openai.BadRequestError, match=r"outrider\.min_new_tokens bans every token") as refused:
        create(client, extra_body={"outrider": {"regex": "ok", "min_new_tokens": 50, "way": way}})
    assert refused.value.param == "outrider.min_new_tokens"


@pytest.mark.network
def test_the_cloud_alone_compiles_the_grammar_too(client: openai.OpenAI) -> None:
    answer = create(client, extra_body={"outrider": {"regex": "(yes|no)!", "way": "cloud-only"}}).choices[0]
    assert answer.message.content in ("yes!", "no!")
    answer = create(client, extra_body={"outrider": {"regex": "(yes|no)!", "way": "edge-only"}}).choices[0]
    assert answer.message.content in ("yes!", "no!")
