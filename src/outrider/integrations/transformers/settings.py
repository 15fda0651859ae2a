"""What a `generate` call asks for, in our settings; what we do not do is refused by name.

transformers has turned its settings into logits processors and stopping criteria by now. Reading those, and not the
settings, also covers what a caller brings along: a processor that is not in `_CONVERTERS` is refused, whatever made it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as stopping

from outrider.config import GenerationSettings
from outrider.errors import SettingsError

_NEUTRAL_VALUES: dict[
    str, tuple[Any, ...]
] = {  # settings that change the loop itself, and the values that leave it alone
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_QUANTIZED = "quantized"  # the only kind of cache that changes what the model computes


@dataclass(frozen=True)
class ParsedSettings:
    """settings: fields of `GenerationSettings`. criteria: the stopping criteria that are asked after each token."""

    settings: dict[str, Any]
    eos_ids: tuple[int, ...]
    criteria: Any


def parse(config: Any, processor_list: Any, criteria: Any, prompt_length: int) -> ParsedSettings:
    """The settings behind a generation config, a list of processors and a list of stopping criteria.

    Raises:
        SettingsError: something that would change the output and that we do not do, or a value that we do not take.
    """
    check_config(config)
    eos = _eos(criteria)
    sampled = bool(config.do_sample)
    settings = {"temperature": 1.0} if sampled else {}
    settings |= parse_processors(processor_list, prompt_length, eos, sampled=sampled)
    longest = [criterion.max_length for criterion in criteria if type(criterion) is stopping.MaxLengthCriteria]
    if not longest:
        raise SettingsError("generate sets no max_length: give max_new_tokens")
    max_new = max(1, min(longest) - prompt_length)  # generate, too, asks its criteria after a token only
    settings["max_new_tokens"] = max_new
    settings["min_new_tokens"] = min(settings.get("min_new_tokens", 0), max_new)
    handled = (stopping.MaxLengthCriteria, stopping.EosTokenCriteria)
    GenerationSettings.build(settings)
    others = [criterion for criterion in criteria if type(criterion) not in handled]
    return ParsedSettings(settings, eos, stopping.StoppingCriteriaList(others))


def check_config(config: Any) -> None:
    """Refuse what is neither greedy decoding nor plain sampling, and outputs that are not there.

    Raises:
        SettingsError: naming the setting.
    """
    for name, neutral in _NEUTRAL_VALUES.items():
        if getattr(config, name, None) not in neutral:
            raise SettingsError(
                f"{name}={getattr(config, name)}: Outrider decodes one sequence, greedily or by sampling"
            )
    if getattr(config, "cache_implementation", None) == _QUANTIZED:
        raise SettingsError(
            "cache_implementation='quantized' changes what the model computes: Outrider keeps no such one"
        )
    if config.return_dict_in_generate:
        for name in _OUTPUTS:
            if getattr(config, name, None):
                raise SettingsError(f"{name}: Outrider returns the sequence alone")


def parse_processors(processor_list: Any, prompt_length: int, eos: tuple[int, ...], *, sampled: bool) -> dict[str, Any]:
    """The settings of a list of logits processors.

    Raises:
        SettingsError: a processor that we do not have, twice the same, or an order that means something else.
    """
    settings: dict[str, Any] = {}
    rank = 0
    for processor in processor_list:
        name = type(processor).__name__
        if type(processor) not in _CONVERTERS:
            raise SettingsError(f"{name}: Outrider does not have this logits processor, and will not leave it out")
        _check_plain(processor, name, eos)
        order = _WARPER_ORDER.index(type(processor)) + 1 if type(processor) in _WARPER_ORDER else 0
        if order and not sampled:
            raise SettingsError(f"{name} needs do_sample=True: greedy decoding has no use for it")
        if order < rank:
            raise SettingsError(f"{name} comes after {_WARPER_ORDER[rank - 1].__name__}: Outrider applies it before")
        rank = order
        for field, value in _CONVERTERS[type(processor)](processor, prompt_length).items():
            if field in settings and field != "min_new_tokens":
                raise SettingsError(f"{name} is there twice")
            settings[field] = max(value, settings.get(field, 0)) if field == "min_new_tokens" else value
    return settings


def _check_plain(processor: Any, name: str, eos: tuple[int, ...]) -> None:
    """Refuse options of a known processor that only its own constructor can set."""
    if getattr(processor, "filter_value", -torch.inf) != -torch.inf or getattr(processor, "min_tokens_to_keep", 1) != 1:
        raise SettingsError(f"{name}: filter_value and min_tokens_to_keep are −inf and 1 here")
    ignored = getattr(processor, "prompt_ignore_length", None)
    if ignored is not None and bool(torch.as_tensor(ignored).any()):
        raise SettingsError(f"{name}: prompt_ignore_length is not Outrider's: its penalty counts the whole prompt")
    if hasattr(processor, "eos_token_id") and _ids(processor.eos_token_id) != eos:
        raise SettingsError(f"{name}: its eos_token_id are not those that end the output")


def _eos(criteria: Any) -> tuple[int, ...]:
    found = [criterion.eos_token_id for criterion in criteria if type(criterion) is stopping.EosTokenCriteria]
    return tuple(sorted({token for ids in found for token in _ids(ids)}))


def _ids(ids: Any) -> tuple[int, ...]:
    """Token ids, sorted; negative ones stand for "none" and never match."""
    return tuple(sorted({int(token) for token in torch.as_tensor(ids).flatten().tolist() if token >= 0}))


def stop_strings(texts: Any, tokenizer: Any, criteria: Any) -> Any:
    """The list of criteria with transformers' own criterion for these texts, unless the caller brought one.

    Raises:
        SettingsError: there is no tokenizer.
    """
    if texts is None or any(type(criterion) is stopping.StopStringCriteria for criterion in criteria):
        return criteria
    if tokenizer is None:
        raise SettingsError("stop_strings need a tokenizer: give it to generate, or to for_transformers")
    return stopping.StoppingCriteriaList([*criteria, stopping.StopStringCriteria(tokenizer, texts)])


Converter = Callable[[Any, int], Mapping[str, Any]]

_WARPER_ORDER = [  # in our order, which is that of generate
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
]
_CONVERTERS: dict[type, Converter] = {
    processors.RepetitionPenaltyLogitsProcessor: lambda p, _: {"repetition_penalty": float(p.penalty)},
    processors.NoRepeatNGramLogitsProcessor: lambda p, _: {"no_repeat_ngram_size": int(p.ngram_size)},
    processors.MinLengthLogitsProcessor: lambda p, prompt: {"min_new_tokens": max(0, int(p.min_length) - prompt)},
    processors.MinNewTokensLengthLogitsProcessor: lambda p, prompt: {
        "min_new_tokens": max(0, int(p.prompt_length_to_skip) + int(p.min_new_tokens) - prompt)
    },
    processors.SuppressTokensLogitsProcessor: lambda p, _: {"suppress_tokens": _ids(p.suppress_tokens)},
    processors.TemperatureLogitsWarper: lambda p, _: {"temperature": float(p.temperature)},
    processors.TopKLogitsWarper: lambda p, _: {"top_k": int(p.top_k)},
    processors.TopPLogitsWarper: lambda p, _: {"top_p": float(p.top_p)},
    processors.MinPLogitsWarper: lambda p, _: {"min_p": float(p.min_p)},
}
