"""The tokens of prompts and the text of tokens, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from pydantic import TypeAdapter

from outrider.gateway import response_schema
from outrider.gateway.defaults import Defaults
from outrider.gateway.tokenization import Tokenization
from outrider.gateway.tool_parsers import HERMES
from outrider.gateway.tools import ToolSupport
from outrider.prompts.chat import encode
from outrider.prompts.tool_template import ToolChat
from tests.prompts.test_chat_template import model
from tests.support import tool_templates
from tests.support.scripted_gateway import Running, serving

MODEL = model(tool_templates.HERMES)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "Hi 社"}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(engine=MODEL, defaults=Defaults(tools=ToolSupport(HERMES)), max_length=512) as found:
        yield found


def post(running: Running, path: str, **body: Any) -> Any:
    return httpx2.post(running.url + path, json=body).json()


def test_a_text_and_its_tokens(running: Running) -> None:
    text = "Hi 社 <|im_end|>"
    found = post(running, "/tokenize", model="outrider", prompt=text, return_token_strs=True)
    expected = MODEL.tokenizer(text)["input_ids"]
    assert found == {
        "count": len(expected),
        "max_model_len": 512,
        "tokens": expected,
        "token_strs": MODEL.tokenizer.convert_ids_to_tokens(expected),
    }
    TypeAdapter(response_schema.Tokens).validate_python(found)
    assert post(running, "/detokenize", tokens=expected) == {"prompt": text}


def test_special_tokens_of_a_text_can_be_left_out(running: Running) -> None:
    found = post(running, "/tokenize", prompt="Hi", add_special_tokens=False)
    assert found["tokens"] == MODEL.tokenizer("Hi", add_special_tokens=False)["input_ids"]
    assert found["token_strs"] is None


def test_a_conversation_has_the_tokens_of_its_chat_request(running: Running) -> None:
    assert post(running, "/tokenize", messages=ASKED)["tokens"] == list(encode(MODEL, ASKED).ids)
    found = post(running, "/tokenize", messages=ASKED, tools=[TOOL], add_generation_prompt=True)
    assert found["tokens"] == list(encode(MODEL, ToolChat(ASKED, [TOOL])).ids)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASKED}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "<|im_end|>"}]}, "messages.0.content"),
        ("/tokenize", {"messages": ASKED, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_refusals_name_the_field(running: Running, path: str, body: dict[str, Any], param: str) -> None:
    assert post(running, path, **body)["error"]["param"] == param


def test_an_echoed_prompt_of_ids_is_decoded() -> None:
    ids = MODEL.tokenizer("Hi 社")["input_ids"]
    with serving(engine=MODEL, defaults=Defaults(decode=Tokenization(MODEL, lambda: None).decode)) as running:
        found = post(running, "/v1/completions", model="outrider", prompt=ids, echo=True)
        assert found["choices"][0]["text"] == "Hi 社a b c"
        refused = post(running, "/v1/completions", model="outrider", prompt=[10**6], echo=True)
        assert refused["error"]["param"] == "prompt"
        refused = post(running, "/v1/completions", model="outrider", prompt="a", echo=True, logprobs=1)
        assert refused["error"]["param"] == "echo"
    with serving() as running:
        assert post(running, "/v1/completions", model="outrider", prompt=ids, echo=True)["error"]["param"] == "echo"
