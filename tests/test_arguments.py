"""Arguments of wrong types or values are refused by name, before a model runs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from outrider import (
    Audio,
    GenerationSettings,
    Grammar,
    SpeculativeDecoder,
    connect,
    for_transformers,
    gate,
    load_engine,
    local,
    prompt_lookup,
)
from outrider.errors import InputError, PromptError, SettingsError
from outrider.netem.conditions import Conditions
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


# Numbers of other libraries --------------------------------------------------------------------------------------


class Index:
    """A whole number of any other type."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


INTEGERS: tuple[Callable[[int], Any], ...] = (np.int64, np.uint8, np.array, torch.tensor, Index)
FLOATS: tuple[Callable[[float], Any], ...] = (np.float64, np.float32, np.float16, Fraction)
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 4, "min_new_tokens": 2, "top_k": 3, "seed": 5, "no_repeat_ngram_size": 2, "sentences": 1,
    "repetition_window": 8, "logprobs": 2, "suppress_tokens": [7, 9],
}  # fmt: skip
NUMBERS = {
    "temperature": 0.5, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
}  # fmt: skip


def converted(value: Any, kind: Callable[[Any], Any]) -> Any:
    return [kind(each) for each in value] if isinstance(value, list) else kind(value)


@pytest.mark.parametrize("kind", INTEGERS)
def test_settings_may_be_integers_of_any_type(kind: Callable[[int], Any]) -> None:
    others = {"temperature": 1, "repetition_penalty": 2}
    given = {name: converted(value, kind) for name, value in SETTINGS.items()}
    given |= {"logit_bias": [(kind(3), kind(1))], "temperature": kind(1), "repetition_penalty": kind(2)}
    expected = GenerationSettings.build({**SETTINGS, **others, "logit_bias": {3: 1}})
    for found in (
        GenerationSettings.build(given),
        GenerationSettings(
            **{**given, "suppress_tokens": tuple(given["suppress_tokens"]), "logit_bias": ((kind(3), kind(1)),)}
        ),
    ):
        assert found == expected
        assert json.dumps(asdict(found)) == json.dumps(asdict(expected))


@pytest.mark.parametrize("kind", FLOATS)
def test_settings_may_be_floats_of_any_type(kind: Callable[[float], Any]) -> None:
    given = {name: kind(value) for name, value in NUMBERS.items()}
    found = GenerationSettings.build({**given, "logit_bias": {3: kind(0.5)}})
    assert json.dumps(asdict(found)) == json.dumps(
        asdict(GenerationSettings.build({**NUMBERS, "logit_bias": {3: 0.5}}))
    )


@pytest.mark.parametrize("value", [2.0, np.float64(2), np.float32(2), Fraction(2), True, np.True_, torch.tensor(True)])
def test_neither_floats_nor_bools_are_integers(value: Any) -> None:
    for name in SETTINGS:
        with pytest.raises(SettingsError, match=name):
            GenerationSettings.build({name: [value] if name == "suppress_tokens" else value})
    with pytest.raises(SettingsError, match="logit_bias"):
        GenerationSettings.build({"logit_bias": {value: 1.0}})
    for name in ("k", "slots"):
        with pytest.raises(SettingsError, match=name):
            build(**{name: value})
    for name in ("min_ngram", "max_ngram"):
        with pytest.raises(SettingsError, match=name):
            prompt_lookup(**{name: value})
    with pytest.raises(PromptError, match="token id"):
        decoder().encode([value])
    with pytest.raises(PromptError, match="token ids"):
        decoder().decode([value])
    with pytest.raises(SettingsError, match="k is a whole number"):
        for_transformers(demo_edge(), k=value)


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), np.float64("nan"), np.float32("inf"), "1"])
def test_neither_bools_nor_texts_nor_nan_are_numbers(value: Any) -> None:
    for name in NUMBERS:
        with pytest.raises(SettingsError, match=name):
            GenerationSettings.build({name: value})
    with pytest.raises(SettingsError, match="logit_bias"):
        GenerationSettings.build({"logit_bias": {3: value}})
    for name in ("deadline", "patience"):
        with pytest.raises(SettingsError, match=name):
            remote(**{name: value})
    with pytest.raises(SettingsError, match="rtt"):
        Conditions(rtt=value)


@pytest.mark.parametrize("kind", INTEGERS)
def test_other_arguments_may_be_integers_of_any_type(kind: Callable[[int], Any]) -> None:
    made = build(k=kind(3), slots=kind(2))
    assert repr(made.options.k) == "3"
    assert repr(made.draft_length) == repr(build(k=3).draft_length)
    ids = [kind(token) for token in (70, 71, 72)]
    assert made.encode(ids).ids == (70, 71, 72)
    assert made.decode(ids) == made.decode([70, 71, 72])
    assert made.generate(ids, max_new_tokens=2).token_ids == made.generate([70, 71, 72], max_new_tokens=2).token_ids
    lookup = prompt_lookup(min_ngram=kind(2), max_ngram=kind(4))
    assert repr((lookup.min_ngram, lookup.max_ngram)) == "(2, 4)"
    for_transformers(demo_edge(), k=kind(3), seed=kind(1))
    with remote(deadline=kind(3), patience=kind(2)) as verifier:
        assert repr((verifier.deadline, verifier.retry_timeout)) == "(3, 2)"
    assert Conditions(rtt=kind(1)) == Conditions(rtt=1.0)


@pytest.mark.parametrize("kind", FLOATS)
def test_times_may_be_floats_of_any_type(kind: Callable[[float], Any]) -> None:
    with remote(deadline=kind(1.5), patience=kind(0.5)) as verifier:
        assert repr((verifier.deadline, verifier.retry_timeout)) == "(1.5, 0.5)"
    assert str(Conditions(rtt=kind(0.5))) == "rtt=500ms"
