"""Settings are validated on construction, by name; nothing is corrected in silence."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from typing import Any

import pytest

from outrider.config import GenerationSettings, OnLoop, Scope, check_choice
from outrider.errors import InputError, SettingsError


def refused(message: str, **values: Any) -> None:
    with pytest.raises(SettingsError, match=message):
        GenerationSettings.build(values)


def test_the_default_is_greedy_and_without_filters() -> None:
    made = GenerationSettings()
    assert (made.temperature, made.top_k, made.top_p, made.min_p) == (0.0, 0, 1.0, 0.0)
    assert (made.repetition_penalty, made.no_repeat_ngram_size, made.stop, made.sentences) == (1.0, 0, (), None)
    assert GenerationSettings.build({}) == made


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GenerationSettings().seed = 3  # type: ignore[misc]


def test_an_unknown_key_is_named_with_those_that_exist() -> None:
    refused(
        r"unknown setting max_tokens, topk: expected any of max_new_tokens, .*suppress_tokens", topk=1, max_tokens=2
    )


def test_texts_and_ids_become_tuples() -> None:
    made = GenerationSettings.build({"stop": "###", "suppress_tokens": [3, 4]})
    assert (made.stop, made.suppress_tokens) == (("###",), (3, 4))
    assert GenerationSettings.build({"stop": ["a", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 4, "min_new_tokens": 4},
        {"seed": 2**64 - 1},
        {"temperature": 1, "top_k": 5, "top_p": 1, "min_p": 1.0},
        {"temperature": 0.7, "top_p": 1e-9},
        {"repetition_penalty": 0.5},
        {"sentences": 1},
    ],
)
def test_the_edges_of_the_ranges_are_allowed(values: dict[str, Any]) -> None:
    made = GenerationSettings.build(values)
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 2.0),
        ("max_new_tokens", "8"),
        ("max_new_tokens", True),
        ("max_new_tokens", None),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        pytest.param("temperature", 10**400, id="temperature-10^400"),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("no_repeat_ngram_size", -1),
        ("repetition_window", -1),
        ("repetition_window", 1.5),
        ("repetition_window", 64),
        ("sentences", 0),
        ("sentences", 1.5),
        ("sentences", True),
        ("suppress_tokens", (-1,)),
        ("suppress_tokens", (1.0,)),
        ("suppress_tokens", ("1",)),
        ("suppress_tokens", 7),
        ("frequency_penalty", 2.01),
        ("frequency_penalty", "1"),
        ("presence_penalty", -2.01),
        ("presence_penalty", float("nan")),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", [(5, 1.0), (5, 2.0)]),
        ("logit_bias", [5, 1.0]),
        ("logit_bias", [[5, 1.0, 2.0]]),
        ("logit_bias", 5),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("ignore_eos", "false"),
        ("ignore_eos", None),
    ],
)
def test_what_is_out_of_range_is_named(name: str, value: object) -> None:
    refused(name, **{name: value})


def test_biases_are_pairs_in_order_of_their_ids_whatever_they_were_given_as() -> None:
    made = GenerationSettings.build({"logit_bias": {7: 1.5, 3: -2}})
    assert made.logit_bias == ((3, -2), (7, 1.5))
    again = json.loads(json.dumps(asdict(made)))  # as in a gate file
    assert GenerationSettings.build({**again, "stop": ()}) == made


@pytest.mark.parametrize("value", ["", ("",), ("a", 3), (None,), b"x", 5])
def test_what_is_no_stop_string_is_refused(value: object) -> None:
    """An empty one would be found in any text."""
    refused("stop (string )?is a text", stop=value)


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)])
def test_greedy_decoding_would_ignore_a_filter_so_it_refuses_it(name: str, value: float) -> None:
    refused(f"{name} needs a temperature above 0", **{name: value})
    assert getattr(GenerationSettings.build({name: value, "temperature": 0.5}), name) == value


def test_all_filters_without_a_temperature_are_named() -> None:
    refused("top_k, top_p, min_p needs a temperature", top_k=5, top_p=0.9, min_p=0.1)


def test_a_settings_error_is_an_input_error() -> None:
    assert issubclass(SettingsError, InputError)


@pytest.mark.parametrize(("name", "choices", "good"), [("scope", Scope, "repair"), ("on_loop", OnLoop, "sample")])
def test_choices_name_what_would_be_right(name: str, choices: Any, good: str) -> None:
    check_choice(name, good, choices)
    with pytest.raises(SettingsError, match=rf"{name} 'both': expected one of .*{good}"):
        check_choice(name, "both", choices)
