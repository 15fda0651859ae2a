"""Arguments of wrong types or values are refused by name, before a model runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from outrider import Audio, Grammar, SpeculativeDecoder, connect, gate, load_engine, local, prompt_lookup
from outrider.errors import InputError, PromptError, SettingsError
from tests.support.gateway_pair import demo_cloud, demo_edge
from tests.support.gateway_process import CLIPS

CLIP = CLIPS / "en-1.ogg"
WRONG: tuple[Any, ...] = (5, 1.5, b"x", [], {}, object())
NOT_NONE = (*WRONG, None)


@cache
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(demo_edge(), local(demo_cloud()))


def build(**more: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(**{"draft": demo_edge(), "verifier": local(demo_cloud()), **more})


def remote(**more: Any) -> Any:
    return connect(**{"target": "grpc://127.0.0.1:1", **more})


# Every parameter of the public functions, with values of other types. None is wrong where it is not the default.
CASES: dict[str, tuple[Callable[..., Any], Any, dict[str, tuple[Any, ...]]]] = {
    "SpeculativeDecoder": (
        build,
        SpeculativeDecoder.__init__,
        {
            "draft": WRONG,
            "verifier": WRONG,
            "lookup": WRONG,
            "gate": NOT_NONE,
            "k": (1.5, 0, 65, "x", None, [], True),
            "accept": NOT_NONE,
            "scope": NOT_NONE,
            "on_loop": WRONG,
            "loop_rule": NOT_NONE,
            "driver": NOT_NONE,
            "on_cloud_loss": WRONG,
            "privacy": NOT_NONE,
            "watch": (5, 0, "x", None, []),
            "reader": ("x", *WRONG),
            "lazy": (5, 0, "x", None, []),
            "slots": (0, 1.5, "x", None, [], True),
        },
    ),
    "generate": (
        lambda **given: decoder().generate(**{"prompt": "a", "max_new_tokens": 1, **given}),
        SpeculativeDecoder.generate,
        {"prompt": (5, None, range(3), b"x", {}, object(), iter([1])), "cache_salt": NOT_NONE},
    ),
    "generate of a batch": (
        lambda **given: decoder().generate(**{"prompt": ["a", "b"], "max_new_tokens": 1, **given}),
        SpeculativeDecoder.generate,
        {"prompt": (["a", 5], ["a", None], [["a"]], [["a"], ["b"]], ["a", ["b"]]), "cache_salt": NOT_NONE},
    ),
    "stream": (
        lambda **given: decoder().stream(**{"prompt": "a", **given}),
        SpeculativeDecoder.stream,
        {"prompt": (5, None, range(3), ["a"]), "cancellation": ("x", *WRONG), "cache_salt": NOT_NONE},
    ),
    "astream": (
        lambda **given: decoder().astream(**{"prompt": "a", **given}),
        SpeculativeDecoder.astream,
        {"prompt": (), "cache_salt": NOT_NONE},  # a wrong prompt is an error of the iteration
    ),
    "chat": (
        lambda **given: decoder().chat(**given),
        SpeculativeDecoder.chat,
        {"system": WRONG, "messages": (5, None, "x", [5], {}), "cache_salt": NOT_NONE},
    ),
    "encode": (
        lambda **given: decoder().encode(**given),
        SpeculativeDecoder.encode,
        {"prompt": (5, None, range(3), b"x", {}, [1.5], [-1], ["x"])},
    ),
    "decode": (
        lambda **given: decoder().decode(**given),
        SpeculativeDecoder.decode,
        {"ids": (5, None, "x", ["x"], [1.5], [-1], [True], {})},
    ),
    "share_state_with": (
        lambda **given: decoder().share_state_with(**given),
        SpeculativeDecoder.share_state_with,
        {"other": NOT_NONE},
    ),
    "Audio": (
        lambda **given: decoder().encode(Audio(**{"source": CLIP, **given})),
        Audio.__init__,
        {
            "source": (5, None, b"x", []),
            "task": ("x", *NOT_NONE),
            "lang": ("x", *NOT_NONE),
            "sampling_rate": ("x", 8000, None, 1.5),  # of a file, which has its own
            "instruction": (5, "", b"x", []),
            "warnings": (5, "x", None, [5]),
        },
    ),
    "local": (local, local, {"engine": ("x", *NOT_NONE)}),
    "gate": (gate, gate, {"spec": NOT_NONE}),
    "load_engine": (
        lambda **given: load_engine(**{"model": "demo:edge", **given}),
        load_engine,
        {"model": ("", *NOT_NONE), "tokenizer": (), "extractor": (), "dtype": NOT_NONE, "device": NOT_NONE,
         "quantization": ("", "int3", 5, b"x", []), "kv_cache_dtype": ("", "fp4", 5, None, b"x", [])},
    ),
    "prompt_lookup": (
        prompt_lookup,
        prompt_lookup,
        {"tokenizer": WRONG, "min_ngram": ("x", 0, None, 1.5), "max_ngram": ("x", 0, None, 1.5)},
    ),
    "Grammar": (lambda **given: Grammar(**{"kind": "regex", "text": "a", **given}), Grammar.__init__,
                {"kind": ("x", *NOT_NONE), "text": ("", *NOT_NONE)}),
    "Grammar.json_schema": (Grammar.json_schema, Grammar.json_schema, {"schema": (5, None, "x", b"x", [])}),
}  # fmt: skip
CONNECTION = {
    "token": WRONG, "token_file": WRONG, "tls": (5, 0, "x", None), "ca": WRONG, "cert": WRONG, "key": WRONG,
    "net": ("x", *WRONG), "deadline": ("x", 0, None, True), "patience": ("x", -1, None), "target": ("x", *NOT_NONE),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_all_parameters_are_listed(name: str) -> None:
    _, function, values = CASES[name]
    parameters = inspect.signature(function).parameters.values()
    plain = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - {"self"}
    assert set(values) == plain


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [(name, each, value) for name, (_, _, values) in CASES.items() for each in values for value in values[each]],
    ids=lambda value: value if isinstance(value, str) and value else type(value).__name__,
)
def test_a_wrong_argument_is_refused_by_name(name: str, parameter: str, value: Any) -> None:
    word = {"source": "recording", "spec": "gate", "engine": "engine"}
    with pytest.raises(InputError) as refused:
        CASES[name][0](**{parameter: value})
    message = str(refused.value).replace("token id", "prompt: token id")  # an item of a prompt
    assert word.get(parameter, parameter) in message


@pytest.mark.parametrize(("parameter", "value"), [(name, value) for name in CONNECTION for value in CONNECTION[name]])
def test_a_wrong_option_of_a_connection_is_refused_by_name(parameter: str, value: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        remote(**{parameter: value})
    assert {"target": "cloud"}.get(parameter, parameter) in str(refused.value)


@pytest.mark.parametrize("options", [{"task": "concise"}, {"lang": "zh"}])
def test_an_instruction_replaces_task_and_language(options: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="instruction replaces task and lang"):
        Audio(CLIP, instruction="Who speaks?", **options)


def test_a_conversation_has_one_system_prompt() -> None:
    with pytest.raises(PromptError, match="system"):
        decoder().chat("a", messages=[{"role": "system", "content": "b"}])
    assert len(decoder().chat("a", messages=[]).messages) == 1
