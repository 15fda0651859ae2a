"""The `param` of an error is the request's own field, also if the decoder raises the error."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from copy import copy
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from outrider.engines.grammars import compile_grammar
from outrider.errors import DecodingError, SettingsError
from outrider.gateway.defaults import Defaults
from outrider.gateway.tools import find_tool_support
from outrider.prompts.chat import encode
from tests.prompts.test_chat_template import model
from tests.support import tool_templates
from tests.support.gateway_pair import demo_edge
from tests.support.gateway_process import CLIPS
from tests.support.scripted_gateway import Running, serving

CONTROL = "a <|im_end|> b"
SOUND = {"data": base64.b64encode((CLIPS / "en-1.ogg").read_bytes()).decode(), "format": "ogg"}
USER = {"role": "user", "content": "hi"}


def tool(name: str, description: str = "", **parameters: Any) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": {"type": "object", **parameters}}
    return {"type": "function", "function": function}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00001", "content": text}


def texts(*parts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": part} for part in parts]


class Reader:
    """Encodes prompts and compiles grammars as a decoder does, in place of the scheduler's start."""

    def __init__(self, running: Running, engine: Any) -> None:
        self._start, self._engine = running.scheduler.start, engine
        running.scheduler.start = self.start  # type: ignore[method-assign]
        self.error: Exception | None = None

    async def start(self, client: str, prompt: Any, settings: dict[str, Any], *more: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        encode(self._engine, prompt)
        if settings["grammar"] is not None:
            compile_grammar(settings["grammar"], self._engine.tokenizer, self._engine.eos_ids)
        return await self._start(client, prompt, settings, *more, **options)


def read_by(engine: Any, defaults: Defaults) -> Iterator[tuple[Running, Reader]]:
    with serving(defaults=defaults, engine=engine) as running:
        yield running, Reader(running, engine)


@pytest.fixture(scope="module")
def texts_only() -> Iterator[tuple[Running, Reader]]:
    engine = model(tool_templates.HERMES)
    engine.eos_ids = (engine.tokenizer.eos_token_id,)  # type: ignore[attr-defined]
    yield from read_by(engine, Defaults(tools=find_tool_support(engine.name, engine.tokenizer)))


@pytest.fixture(scope="module")
def hearing() -> Iterator[tuple[Running, Reader]]:
    yield from read_by(demo_edge(), Defaults(audio_seconds=30.0))


def refused(running: Running, path: str, **how: Any) -> dict[str, Any]:
    reply = httpx2.post(f"{running.url}/{path}", **how)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]  # type: ignore[no-any-return]


def chat(running: Running, **fields: Any) -> dict[str, Any]:
    body = {"model": "outrider", "messages": [USER], **fields}
    return refused(running, "v1/chat/completions", json=body)


def respond(running: Running, **fields: Any) -> dict[str, Any]:
    return refused(running, "v1/responses", json={"model": "outrider", "input": "hi", **fields})


def transcribe(running: Running, **fields: Any) -> dict[str, Any]:
    files = {"file": ("a.ogg", (CLIPS / "en-1.ogg").read_bytes())}
    return refused(running, "v1/audio/transcriptions", data={"model": "outrider", **fields}, files=files)


HISTORY = [USER, {"role": "assistant", "tool_calls": [call('{"a": 1}')]}, result("x"), USER]


def within(at: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    return [*HISTORY[:at], message, *HISTORY[at + 1 :]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": CONTROL}]}, "messages.0.content"),
        ({"messages": [{"role": "system", "content": CONTROL}, USER]}, "messages.0.content"),
        ({"messages": [USER, {"role": "assistant", "content": CONTROL}, USER]}, "messages.1.content"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": texts("a", CONTROL)}]},
         "messages.2.content"),
        ({"messages": [{"role": "user", "content": texts("a <|im_", "end|>")}, USER]}, None),  # a line break between
        ({"messages": within(1, {"role": "assistant", "tool_calls": [call(json.dumps({"a": {"b": [CONTROL]}}))]})},
         "messages.1.tool_calls.0.function.arguments"),
        ({"messages": within(1, {"role": "assistant", "tool_calls": [call(json.dumps({CONTROL: 1}))]})},
         "messages.1.tool_calls.0.function.arguments"),
        ({"messages": within(2, result(CONTROL))}, "messages.2.content"),
        ({"tools": [tool("f"), tool("g", CONTROL)]}, "tools.1.function.description"),
        ({"tools": [tool("f", properties={"a": {"description": CONTROL}})]},
         "tools.0.function.parameters.properties.a.description"),
        ({"tools": [tool("f", properties={CONTROL: {}})]}, "tools.0.function.parameters.properties"),
        ({"tools": [tool("f", enum=[CONTROL])]}, "tools.0.function.parameters.enum.0"),
        ({"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [call("{}")]}]},
         "messages.1.tool_calls.0.id"),
    ],
)  # fmt: skip
def test_a_chat_s_text_that_the_template_refuses(
    texts_only: tuple[Running, Reader], fields: dict[str, Any], param: str | None
) -> None:
    if param is None:
        reply = httpx2.post(f"{texts_only[0].url}/v1/chat/completions", json={"model": "outrider", **fields})
        assert reply.status_code == 200
    else:
        assert chat(texts_only[0], **fields)["param"] == param
        tokenized = {name: value for name, value in fields.items() if name in ("messages", "tools")}
        assert refused(texts_only[0], "tokenize", json={"messages": [USER], **tokenized})["param"] == param


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
    {"type": "function_call", "call_id": "call00001", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "call00002", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call00001", "output": "x"},
    {"type": "function_call_output", "call_id": "call00002", "output": "x"},
]


def item(at: int, **fields: Any) -> list[dict[str, Any]]:
    return [*ITEMS[:at], {**ITEMS[at], **fields}, *ITEMS[at + 1 :]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"instructions": CONTROL}, "instructions"),
        ({"input": CONTROL}, "input"),
        ({"instructions": "x", "input": CONTROL}, "input"),
        ({"input": item(0, content=CONTROL)}, "input.0.content"),
        ({"instructions": "x", "input": item(1, content=texts(CONTROL, kind="output_text"))}, "input.1.content"),
        ({"input": item(2, arguments=json.dumps({"a": CONTROL}))}, "input.2.arguments"),
        ({"input": item(3, arguments=json.dumps({"a": CONTROL}))}, "input.3.arguments"),
        ({"input": item(2, arguments="[]")}, "input.2.arguments"),
        ({"instructions": "x", "input": item(3, arguments="{")}, "input.3.arguments"),
        ({"input": item(4, output=CONTROL)}, "input.4.output"),
        ({"input": item(5, output=texts("a", CONTROL, kind="input_text"))}, "input.5.output"),
        ({"tools": [{"type": "function", "name": "f", "description": CONTROL}]}, "tools.0.description"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"properties": {"a": {"enum": [CONTROL]}}}}]},
         "tools.0.parameters.properties.a.enum.0"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools.0.parameters"),
    ],
)  # fmt: skip
def test_an_item_s_text_that_the_template_refuses(
    texts_only: tuple[Running, Reader], fields: dict[str, Any], param: str
) -> None:
    error = respond(texts_only[0], **fields)
    assert error["param"] == param
    assert "messages" not in error["message"]
    assert "tool_calls" not in error["message"]


def test_a_question_about_a_recording(hearing: tuple[Running, Reader]) -> None:
    running, _ = hearing
    parts = [*texts("What?", CONTROL), {"type": "input_audio", "input_audio": SOUND}]
    assert chat(running, messages=[{"role": "user", "content": parts}])["param"] == "messages.0.content"
    parts = [*texts(CONTROL, kind="input_text"), {"type": "input_audio", "input_audio": SOUND}]
    assert respond(running, input=[{"role": "user", "content": parts}])["param"] == "input.0.content"
    assert transcribe(running, prompt=CONTROL)["param"] == "prompt"
    assert transcribe(running, prompt=CONTROL, outrider='{"k": 3}')["param"] == "prompt"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ("{}]", "outrider"),
        ("", "outrider"),
        ("[]", "outrider"),
        ("5", "outrider"),
        ('{"x": 1}', "outrider.x"),
        ('{"k": 100}', "outrider.k"),
        ('{"task": 5}', "outrider.task"),
        ('{"lang": "fr"}', "outrider.lang"),
        ('{"provisional": true}', "outrider.provisional"),
        ('{"tokens": true}', "outrider.tokens"),
        ('{"min_new_tokens": 100000}', "outrider.min_new_tokens"),
        ('{"regex": "("}', "outrider.regex"),
    ],
)
def test_the_options_of_a_transcription(hearing: tuple[Running, Reader], options: str, param: str) -> None:
    error = transcribe(hearing[0], outrider=options)
    assert error["param"] == param
    assert error["message"].startswith(param) or "outrider" in error["message"] or "min_new" in error["message"]
    assert "the body" not in error["message"]


BAD = {"properties": {"a": {"if": {}}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([tool("f"), tool("g", **BAD), tool("h")], "required", "tools.1.function.parameters.properties.a"),
        ([tool("f", **BAD)], "required", "tools.0.function.parameters.properties.a"),
        ([tool("f"), tool("g", **BAD)], {"type": "function", "function": {"name": "g"}},
         "tools.1.function.parameters.properties.a"),
        ([tool("f"), tool("g", **{"if": {}})], "required", "tools.1.function.parameters"),
    ],
)  # fmt: skip
def test_a_tool_s_schema(
    texts_only: tuple[Running, Reader], tools: list[Any], choice: Any, param: str, stream: bool
) -> None:
    error = chat(texts_only[0], tools=tools, tool_choice=choice, stream=stream)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_a_tool_s_schema_in_responses(texts_only: tuple[Running, Reader]) -> None:
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in (("f", {}), ("g", BAD))]
    error = respond(texts_only[0], tools=tools, tool_choice="required")
    assert error["param"] == "tools.1.parameters.properties.a"
    assert error["message"].startswith("tools.1.parameters.properties.a: ")


GRAMMARS: dict[str, dict[str, Any]] = {
    "outrider.regex": {"outrider": {"regex": "a+"}},
    "outrider.grammar": {"outrider": {"grammar": 'start: "a"'}},
    "response_format": {"response_format": {"type": "json_object"}},
    "response_format.json_schema.schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    },
    "tools.0.function.parameters": {"tools": [tool("f")], "tool_choice": "required"},
    "tools": {"tools": [tool("f"), tool("g")], "tool_choice": "required"},
}


def with_options(fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**fields, "outrider": {**fields.get("outrider", {}), **options}}


@pytest.mark.parametrize("field", GRAMMARS)
def test_a_grammar_together_with_ignore_eos(texts_only: tuple[Running, Reader], field: str) -> None:
    error = chat(texts_only[0], **with_options(GRAMMARS[field], ignore_eos=True))
    assert error["param"] == "outrider.ignore_eos"
    assert error["message"].startswith(f"{field} ")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"outrider": {"min_new_tokens": 3}}, "outrider.min_new_tokens"),
        ({"outrider": {"no_repeat_ngram_size": 2}}, "outrider.no_repeat_ngram_size"),
        ({"outrider": {"min_new_tokens": 3, "no_repeat_ngram_size": 2}}, "outrider.min_new_tokens"),
        ({}, "field"),
    ],
)
@pytest.mark.parametrize("field", GRAMMARS)
@pytest.mark.parametrize("stream", [False, True])
def test_settings_that_ban_all_that_a_grammar_allows(
    texts_only: tuple[Running, Reader], field: str, options: dict[str, Any], param: str, stream: bool
) -> None:
    running, reader = texts_only
    fields = with_options(GRAMMARS[field], **options.get("outrider", {}))
    reader.error = DecodingError(
        "no token can be chosen at position 9: min_new_tokens, suppress_tokens or no_repeat_ngram_size ban every token "
        "that the grammar allows"
    )
    try:
        error = chat(running, **fields, stream=stream)
    finally:
        reader.error = None
    assert error["param"] == (field if param == "field" else param)
    assert error["code"] == "nothing_to_choose"


@pytest.mark.parametrize(
    ("message", "fields", "param"),
    [
        ("grammar needs a tokenizer, and the model came without one", GRAMMARS["outrider.regex"], "outrider.regex"),
        ("grammar needs a tokenizer, and the model came without one", GRAMMARS["response_format"], "response_format"),
        ("logprobs 20: the server sends 20 entries of a row", {"logprobs": True, "top_logprobs": 20}, "logprobs"),
        ("top_k 50: the server sends 20 entries of a row", {"outrider": {"top_k": 50}, "temperature": 1},
         "outrider.top_k"),
        ("logit_bias: ids go up to 99", {"logit_bias": {"100": 1}}, "logit_bias"),
        ("stop needs a tokenizer, and the model came without one", {"stop": "x"}, "stop"),
        ("sentences needs a tokenizer, and the model came without one", {"outrider": {"sentences": 1}},
         "outrider.sentences"),
        ("the server's model and its tokens differ", {}, None),
        ("temperature 1 without top_k samples from the whole vocabulary", {"temperature": 1}, "temperature"),
        ("way 'edge-only' needs a draft model, and this gateway drafts with lookup", {}, "outrider.way"),
    ],
)  # fmt: skip
def test_a_setting_that_the_models_refuse(
    texts_only: tuple[Running, Reader], message: str, fields: dict[str, Any], param: str | None
) -> None:
    running, reader = texts_only
    reader.error = SettingsError(message)
    try:
        error = chat(running, **fields)
    finally:
        reader.error = None
    assert error["param"] == param


@pytest.mark.parametrize(("prompt", "param"), [([[1], [9999]], "prompt.1"), ([9999], "prompt"), ([[9999]], "prompt.0")])
def test_one_of_several_prompts(texts_only: tuple[Running, Reader], prompt: Any, param: str) -> None:
    error = refused(texts_only[0], "v1/completions", json={"model": "outrider", "prompt": prompt})
    assert error["param"] == param


def test_a_recording_that_a_model_refuses(hearing: tuple[Running, Reader]) -> None:
    running, reader = hearing
    engine = reader._engine
    reader._engine = replace_audio(engine)
    try:
        parts = [*texts("What?"), {"type": "input_audio", "input_audio": SOUND}]
        error = chat(running, messages=[{"role": "user", "content": parts}])
        assert error["param"] == "messages.0.content.1.input_audio"
        parts = [{"type": "input_text", "text": "What?"}, parts[1]]
        error = respond(running, input=[{"role": "user", "content": parts}])
        assert error["param"] == "input.0.content.1.input_audio"
        assert transcribe(running)["param"] == "file"
    finally:
        reader._engine = engine


def replace_audio(engine: Any) -> Any:
    """The engine with a shorter window for recordings."""

    class Short:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

    short = Short()
    short.audio = copy(engine.audio)  # type: ignore[attr-defined]
    short.audio._extractor = SimpleNamespace(n_samples=8000)  # type: ignore[attr-defined]
    return short
