"""Integers of thousands of digits, which Python does not convert to text.

The errors in Python, on the command line and in the gateway are typed and short.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from outrider import SpeculativeDecoder, connect, local, prompt_lookup
from outrider.config import _COUNTS, GenerationSettings, Grammar
from outrider.decoding.gate_file import GateFile
from outrider.decoding.gate_parsing import gate
from outrider.decoding.loop_detection import LoopRule
from outrider.decoding.options import DecodingOptions
from outrider.errors import MAX_QUOTED, DataError, InputError, SettingsError, quote
from outrider.gateway.access import JSON, _check_headers
from outrider.gateway.errors import RequestError
from outrider.gateway.request_parsing import validate_body
from outrider.gateway.request_schema import ChatRequest
from outrider.netem.conditions import Conditions, parse_conditions
from outrider.planning.traces import Trace
from outrider.protocol.messages import pack_settings
from tests.support.calibration_requests import requests
from tests.support.commands import run_command
from tests.support.fakes import HashRows, ScriptedEngine

BIG = 10**5000
DIGITS, FEWER_DIGITS = "9" * 5000, "9" * 4200  # beyond Python's limit of 4300 digits, and within it
SHAPES = [BIG, -BIG, [BIG], (BIG,), {BIG: 1.0}, {1: BIG}, ((BIG, 1.0),), ((1, BIG),), {"a": BIG}, DIGITS]
LONGEST = 700  # characters of a message: a schema's reason with its place


def refused(call: Callable[[Any], object], value: Any) -> str | None:
    """The message with which a call refuses a value, None if it takes it. Errors of other types are raised."""
    try:
        call(value)
    except InputError as error:
        message = str(error)
    else:
        return None
    assert len(message) < LONGEST, message
    return message


def resolve(**options: Any) -> object:
    return DecodingOptions(**options).resolve(has_drafter=True, has_verifier=True, remote=True, uses_lookup=False)


def decoder() -> SpeculativeDecoder:
    engine = ScriptedEngine(HashRows(1, 50), 50)
    return SpeculativeDecoder(engine, local(engine))


@pytest.mark.parametrize("name", [each.name for each in fields(GenerationSettings)])
def test_every_setting(name: str) -> None:
    messages = [refused(lambda value: GenerationSettings.build({name: value}), value) for value in SHAPES]
    assert any(messages)


@pytest.mark.parametrize("name", [each.name for each in fields(DecodingOptions)])
def test_every_option(name: str) -> None:
    assert all(refused(lambda value: resolve(**{name: value}), value) for value in SHAPES)


@pytest.mark.parametrize(
    "call",
    [
        connect,
        gate,
        parse_conditions,
        lambda value: gate(f"entropy.{value}" if isinstance(value, str) else value),
        lambda value: Conditions(rtt=value),
        lambda value: prompt_lookup(min_ngram=value),
        lambda value: connect("grpc://127.0.0.1:1", deadline=value),
        lambda value: Grammar("regex", value if not isinstance(value, str) else ""),
        lambda value: decoder().generate([5, value] if isinstance(value, int) else [[BIG], 5]),
        lambda value: decoder().generate([5], cache_salt=value if not isinstance(value, str) else BIG),
    ],
)
def test_arguments_of_other_calls(call: Callable[[Any], object]) -> None:
    assert all(refused(call, value) for value in SHAPES)


def test_a_schema_with_such_a_number() -> None:
    with pytest.raises(SettingsError, match="the schema is not JSON"):
        Grammar.json_schema({"const": BIG})


@pytest.mark.parametrize("name", [*_COUNTS, "sentences"])
def test_a_count_is_one_that_the_protocol_carries(name: str) -> None:
    longest = {"max_new_tokens": 2**32 - 1, "temperature": 1.0, "repetition_penalty": 1.1}
    pack_settings(GenerationSettings(**{**longest, name: 2**32 - 1}))
    with pytest.raises(SettingsError, match=rf"^{name} is .*2\^32"):
        GenerationSettings(**{**longest, name: 2**32})


def test_a_loop_rule_and_a_gate_file() -> None:
    with pytest.raises(SettingsError, match="<integer of some 5000 digits>"):
        LoopRule(period=BIG)
    with pytest.raises(DataError, match="version <integer of some 5000 digits>"):
        GateFile.from_json({"version": BIG})


@pytest.mark.parametrize("value", [BIG, 10**400, 2**63], ids=["5001 digits", "401 digits", "64 bits"])
@pytest.mark.parametrize("name", ["prompt_tokens", "target", "draft", "media_bytes"])
def test_a_trace_holds_numbers_that_arithmetic_holds(name: str, value: int) -> None:
    row = requests(1)[0].to_json()
    row[name] = [value, *row[name][1:]] if isinstance(row[name], list) else value
    with pytest.raises(DataError, match=rf"{name}: expected whole numbers from 0 to 2\^63"):
        Trace.from_json(row)


def test_a_quotation_is_short() -> None:
    for value in (*SHAPES, "a" * 9999, list(range(9999)), Grammar("regex", "a" * 9999)):
        assert 0 < len(quote(value)) <= MAX_QUOTED
    assert quote(-7) == "-7"
    assert quote([1, -BIG]) == "[1, <integer of some 5000 digits>]"


# Command line -----------------------------------------------------------------------------------------------


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


GENERATE = ["generate", "--prompt-ids", "5"]
LINE = json.dumps(requests(1)[0].to_json() | {"prompt_tokens": "N"})
COMMANDS = {
    **{f"--{name}": [*GENERATE, f"--{name}", "N"] for name in ("k", "top-k", "seed", "sentences", "min-new-tokens")},
    "--prompt-ids": ["generate", "--prompt-ids", "N"],
    "--accept": [*GENERATE, "--accept", "rank:N"],
    "--gate": [*GENERATE, "--gate", "entropy:N"],
    "--loop-rule": [*GENERATE, "--loop-rule", "period=N"],
    "--edge": [*GENERATE, "--edge", "N"],
    "--edge lookup": [*GENERATE, "--edge", "lookup:N", "--cloud", "grpc://127.0.0.1:1"],
    "--cloud": [*GENERATE, "--cloud", "grpc://127.0.0.1:N"],
    "--cloud local": [*GENERATE, "--cloud", "local:N"],
    "sweep --k": ["sweep", "--k", "N"],
    "plan --net": ["plan", "--net", "rtt=Nms"],
    "cloud --listen": ["cloud", "demo", "--listen", "127.0.0.1:N"],
    "eval --edge-memory": ["eval", "demo", "--out", "run", "--edge-memory", "NGB"],
}
FILES = {
    "a gate": ([*GENERATE, "--gate", "calibrated:FILE"], '{"version": N}'),
    "a schema": ([*GENERATE, "--grammar", "json_schema:FILE"], '{"minProperties": N}'),
    "options of a schema": ([*GENERATE, "--grammar", "json_schema:FILE"], '{"x-guidance": N}'),
    "a schema in Lark": ([*GENERATE, "--grammar", "lark:FILE"], 'start: %json {"minProperties": N}'),
    "traces": (["plan", "--traces", "FILE"], LINE.replace('"N"', "N")),
    "a manifest": (["eval", "FILE", "--out", "run"], '{"id": "a", "prompt": N}'),
}


@pytest.mark.parametrize("digits", [DIGITS, FEWER_DIGITS], ids=["beyond", "within"])
@pytest.mark.parametrize("name", [*COMMANDS, *FILES])
def test_a_command_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, digits: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words, text = FILES.get(name, (COMMANDS.get(name, []), ""))
    file = written(tmp_path / "file", text.replace("N", digits))
    words = [file if word == "FILE" else word.replace("FILE", file) for word in words]
    assert run_command([word if file in word else word.replace("N", digits) for word in words]) == 2
    said = capsys.readouterr().err
    assert len(said) < LONGEST + 300, said
    assert "unexpected" not in said


# Gateway ----------------------------------------------------------------------------------------------------


def body(**fields: Any) -> bytes:
    given = {"model": "outrider", "messages": [{"role": "user", "content": "a"}], **fields}
    return json.dumps(given).encode()


@pytest.mark.parametrize("digits", [DIGITS, FEWER_DIGITS], ids=["beyond", "within"])
@pytest.mark.parametrize("fields", [{"seed": "N"}, {"logit_bias": {"5": "N"}}, {"n": ["N"]}, {"outrider": {"k": "N"}}])
def test_a_request_is_refused_in_few_words(fields: dict[str, Any], digits: str) -> None:
    with pytest.raises(RequestError) as caught:
        validate_body(ChatRequest, body(**fields).replace(b'"N"', digits.encode()))
    assert len(str(caught.value)) < LONGEST


def test_a_key_of_a_request_is_refused_in_few_words() -> None:
    with pytest.raises(RequestError) as caught:
        validate_body(ChatRequest, body(logit_bias={DIGITS: 1}))
    assert len(str(caught.value)) < LONGEST


def test_a_declared_length_of_many_digits_is_too_large() -> None:
    for length in ("101", DIGITS):
        headers = [(b"content-type", JSON.encode()), (b"content-length", length.encode())]
        with pytest.raises(RequestError, match="100 bytes") as caught:
            _check_headers(Request({"type": "http", "headers": headers}), 100, JSON)
        assert caught.value.status == 413
