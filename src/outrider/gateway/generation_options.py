"""Decoding options of a request, from its fields and the command line's defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Final

from outrider.config import GenerationSettings, Grammar
from outrider.decoding.gate_parsing import gate
from outrider.errors import SettingsError
from outrider.gateway.decoder_pool import RequestOptions, Settings
from outrider.gateway.errors import JsonObject, RequestError
from outrider.gateway.request_schema import (
    IGNORED,
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    OutriderOptions,
    Request,
    TextFormat,
)
from outrider.netem.conditions import Conditions, parse_conditions
from outrider.sampling.acceptance import parse_acceptance_rule

MAX_DELAY_S: Final = 10.0  # of a network that a request emulates
MIN_RATE: Final = 1000.0  # bit/s, likewise
NEUTRAL_FILTERS: Final = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # each at the value that keeps everything
OPTION_FIELDS: Final = tuple(each.name for each in fields(RequestOptions) if each.name in OutriderOptions.model_fields)
SETTINGS_FIELDS: Final = tuple(
    each.name
    for each in fields(GenerationSettings)
    if each.name in OutriderOptions.model_fields and each.name != "grammar"
)

_FIELD_NAMES: Final = {  # the request's field of each setting and option of the decoder
    **{name: f"outrider.{name}" for name in (*OPTION_FIELDS, *SETTINGS_FIELDS, "grammar")},
    **{name: name for name in ("temperature", "top_p", "seed", "stop", "logprobs", "logit_bias")},
    **{name: name for name in ("frequency_penalty", "presence_penalty")},
    "max_new_tokens": "max_tokens",
}
# Names without an underscore are also English words, and are names only as a message's first word.
_NAMES: Final = re.compile(
    rf"^(?:{'|'.join(_FIELD_NAMES)})\b|(?<![\w.'-])(?:{'|'.join(name for name in _FIELD_NAMES if '_' in name)})\b"
)


def build_settings(
    request: Request,
    requested: OutriderOptions,
    defaults: Settings,
    calls: Grammar | None = None,
    grammar_field: str | None = None,
) -> JsonObject:
    """Return every field of GenerationSettings. defaults: those of the command line.

    calls: the grammar of enforced tool calls. grammar_field: the field that holds the grammar, if the request has one.

    Raises:
        RequestError: a value is out of range, or contradicts another. The error names the field.
    """
    given = {name: value for name in SETTINGS_FIELDS if (value := getattr(requested, name)) is not None}
    given |= _build_grammar(request, requested, calls)
    names = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty")
    given |= {name: value for name in names if (value := getattr(request, name)) is not None}
    length = _length(request)
    if length is not None:
        given["max_new_tokens"] = length
    if request.stop is not None:
        stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        given["stop"] = tuple(text for text in stop if text)  # an empty one has no effect
    if request.logit_bias:
        given["logit_bias"] = _parse_biases(request.logit_bias)
    given["logprobs"] = _logprobs(request)
    settings = {**_compatible_defaults(defaults, given), **given}
    if not settings.get("temperature"):
        settings |= NEUTRAL_FILTERS  # clients send top_p beside the default temperature
    if settings.get("grammar") is not None and settings.get("ignore_eos"):
        name = grammar_field or "the grammar of the gateway's command line"
        message = f"{name} ends the answer with an end-of-sequence token: leave out outrider.ignore_eos"
        raise RequestError(message, param="outrider.ignore_eos", code="invalid_value")
    length_field = find_length_field(request)
    try:
        built = GenerationSettings.build(settings)
    except SettingsError as error:
        message = use_request_names(str(error), length_field, grammar_field)
        param = find_field(str(error), length_field, grammar_field)
        raise RequestError(message, param=param, code="invalid_value") from error
    return {each.name: getattr(built, each.name) for each in fields(built)}


def _parse_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Return the biases by token id.

    Raises:
        RequestError: two keys, such as "7" and "07", are the same token id.
    """
    parsed = {int(key): bias for key, bias in biases.items()}
    if len(parsed) < len(biases):
        raise RequestError("logit_bias: two keys name the same token", param="logit_bias", code="invalid_value")
    return parsed


def _logprobs(request: Request) -> int | None:
    """Return how many top log-probabilities to report in addition to each token's own, or None for no report.

    Raises:
        RequestError: top_logprobs without logprobs.
    """
    if not isinstance(request, ChatRequest):
        return getattr(request, "logprobs", None)
    if request.top_logprobs and not request.logprobs:
        raise RequestError(
            "top_logprobs needs logprobs: set logprobs to true", param="top_logprobs", code="invalid_value"
        )
    return request.top_logprobs or 0 if request.logprobs else None


def find_grammar_fields(request: Request) -> dict[str, str]:
    """Return the field that holds the grammar of the answer, under the key "", or an empty mapping."""
    found = list(_grammar_fields(request, request.outrider or OutriderOptions()))
    return {"": found[0]} if found else {}


def _grammar_fields(request: Request, requested: OutriderOptions) -> dict[str, Callable[[], Grammar]]:
    """Return the grammars of a request by their fields, each as the function that builds it."""
    found: dict[str, Callable[[], Grammar]] = {}
    response_format = getattr(request, "response_format", None)
    if isinstance(response_format, JsonSchemaFormat):
        found["response_format.json_schema.schema"] = partial(Grammar.json_schema, response_format.json_schema.schema_)
    elif isinstance(response_format, JsonObjectFormat):
        found["response_format"] = partial(Grammar, "json_object")
    if requested.regex is not None:
        found["outrider.regex"] = partial(Grammar, "regex", requested.regex)
    if requested.grammar is not None:
        found["outrider.grammar"] = partial(Grammar, "lark", requested.grammar)
    return found


def _build_grammar(request: Request, requested: OutriderOptions, calls: Grammar | None) -> JsonObject:
    """Return the field `grammar` of the settings, or {} if the request leaves it to the command line.

    Raises:
        RequestError: there are two grammars, or one is too long.
    """
    found = _grammar_fields(request, requested)
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(f"{first} and {second} both constrain the answer: give one", param=second)
    choice = getattr(request, "tool_choice", None) or "auto"
    if found and getattr(request, "tools", None) and choice != "none":
        first = next(iter(found))
        if choice != "auto" or not first.startswith("response_format"):
            raise RequestError(
                f"{first} cannot be combined with tools: only response_format can be, with tool_choice auto",
                param=first,
            )
    if calls is not None:
        return {"grammar": calls}
    for field, build in found.items():
        try:
            return {"grammar": build()}
        except SettingsError as error:
            raise RequestError(f"{field}: {error}", param=field, code="invalid_value") from error
    return {"grammar": None} if isinstance(getattr(request, "response_format", None), TextFormat) else {}


def build_notes(request: Request, settings: Settings) -> tuple[str, ...]:
    """Return notes on fields without effect, for the answer's warnings."""
    given = [name for name in IGNORED if getattr(request, name, None) is not None]
    unused = [f"{name} was not used: {IGNORED[name]}" for name in given]
    requested = request.outrider or OutriderOptions()
    filters = {"top_p": request.top_p, "outrider.top_k": requested.top_k, "outrider.min_p": requested.min_p}
    for name, value in filters.items():
        if value is not None and not settings["temperature"] and value != NEUTRAL_FILTERS[name.rpartition(".")[2]]:
            unused.append(f"{name} was not used: decoding at temperature 0 is greedy")
    if max(request.n or 1, getattr(request, "best_of", None) or 1) > 1 and not settings["temperature"]:
        unused.append("n: all choices are equal, because decoding at temperature 0 is greedy")
    return tuple(unused)


def count_choices(request: Request) -> tuple[int, int]:
    """Return the number of choices in the answer, and the number of generations from which they are chosen.

    Raises:
        RequestError: best_of is below n, or above n in a stream.
    """
    n = request.n or 1
    best_of = getattr(request, "best_of", None)
    candidates = n if best_of is None else int(best_of)
    if candidates < n:
        raise RequestError(
            f"best_of {candidates} is below n {n}: give n or more", param="best_of", code="invalid_value"
        )
    if request.stream and candidates > n:
        raise RequestError("best_of above n cannot be streamed: leave out stream or best_of", param="best_of")
    return n, candidates


def find_length_field(request: Request) -> str | None:
    """Return the field that limits the output."""
    names = ("max_completion_tokens", "max_tokens")
    return next((name for name in names if getattr(request, name, None) is not None), None)


def _length(request: Request) -> int | None:
    newer = getattr(request, "max_completion_tokens", None)
    if newer is not None and request.max_tokens is not None and newer != request.max_tokens:
        raise RequestError(
            f"max_completion_tokens {newer} and max_tokens {request.max_tokens} name the same limit: give one",
            param="max_tokens",
        )
    return newer if newer is not None else request.max_tokens


def _compatible_defaults(values: Settings, given: Settings) -> JsonObject:
    """Return the command line's settings, without those that contradict the request's."""
    kept = {"stop": (), **values}
    if given.get("temperature") == 0:
        kept |= NEUTRAL_FILTERS
    if given.get("grammar") is not None:
        kept["ignore_eos"] = False
    if "max_new_tokens" in given:
        kept["min_new_tokens"] = min(kept.get("min_new_tokens", 0), given["max_new_tokens"])
    return kept


def use_request_names(message: str, length_field: str | None, grammar_field: str | None = None) -> str:
    """Return a message of the decoder with the request's fields in place of the decoder's settings."""
    return _NAMES.sub(lambda found: _field(found[0], length_field, grammar_field), message)


def find_field(message: str, length_field: str | None, grammar_field: str | None = None) -> str | None:
    """Return the request's field of the setting that is the first word of a decoder's message, or None."""
    first = re.match(r"\w+", message)
    return _field(first[0], length_field, grammar_field) if first is not None and first[0] in _FIELD_NAMES else None


def _field(name: str, length_field: str | None, grammar_field: str | None) -> str:
    """Return the request's field of a setting or option of the decoder."""
    given = {"max_new_tokens": length_field, "grammar": grammar_field}.get(name)
    return given or _FIELD_NAMES[name]


def build_options(requested: OutriderOptions, default: RequestOptions) -> RequestOptions:
    """Return the decoding options: those of the command line, changed by the request.

    Raises:
        RequestError: an option is unknown, out of range, or not used by the mode. The error names the field.
    """
    given = {name: value for name in OPTION_FIELDS if (value := getattr(requested, name)) is not None}
    if "calibrated:" in given.get("gate", "") and given["gate"] != default.gate:
        raise RequestError(
            "a gate file is named on the gateway's command line (--gate calibrated:FILE), not in a request",
            param="outrider.gate",
        )
    validators: dict[str, Callable[[str], object]] = {
        "gate": gate,
        "accept": parse_acceptance_rule,
        "net": lambda text: None if text == "cut" else parse_conditions(text),
    }
    for name, validator in validators.items():
        if name in given and given[name] != getattr(default, name):
            try:
                validator(given[name])
            except SettingsError as error:
                raise RequestError(str(error), param=f"outrider.{name}", code="invalid_value") from error
    if "net" in given and given["net"] != "cut":
        net = parse_conditions(given["net"])
        if given["net"] != default.net:
            _check_net(net)
        given["net"] = str(net)  # one verifier for one network, however it is written
    options = replace(default, **given, watch=bool(requested.tokens))
    _check_used(options, given)
    return options


def _check_net(net: Conditions) -> None:
    """Refuse an emulated network that is slow enough to block a slot."""
    delays = {"rtt": net.rtt, "jitter": net.jitter, "stall": net.stall_for or 0.0}
    rates = {"up": net.up, "down": net.down}
    limit_s, limit_rate = f"at most {MAX_DELAY_S:g} s", f"at least {MIN_RATE:g} bit/s"
    slow = [(name, limit_s, f"{value:g} s") for name, value in delays.items() if value > MAX_DELAY_S]
    slow += [(name, limit_rate, f"{rate:g} bit/s") for name, rate in rates.items() if rate and rate < MIN_RATE]
    for name, limit, value in slow:
        message = f"outrider.net: {name} must be {limit} in a request, not {value}"
        raise RequestError(message, param="outrider.net", code="invalid_value")


def _check_used(options: RequestOptions, given: Mapping[str, object]) -> None:
    """Refuse options of the request that its mode does not use. Values without effect are accepted."""
    used, defaults = options.normalized(), RequestOptions()
    for name, value in given.items():
        if value != getattr(used, name) and value != getattr(defaults, name):
            mode = f"decoding {options.way}" + ("" if "way" in given else ", this gateway's default,")
            raise RequestError(
                f"outrider.{name}: {mode} does not use this option: leave it out", param=f"outrider.{name}"
            )
