"""Conversion of a `generate` call's settings to Outrider's. Unsupported settings are refused by name.

transformers has turned its settings into logits processors and stopping criteria at this point. Reading those, and not
the settings, also covers processors of the caller. A processor that is not in `_CONVERTERS` is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as stopping

from outrider.config import GenerationSettings
from outrider.errors import SettingsError

Settings = dict[str, Any]  # fields of GenerationSettings
# Settings that change the loop itself, and the values with which they do not.
_NEUTRAL_VALUES: dict[str, tuple[int | None, ...]] = {
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
_QUANTIZED = "quantized"  # the only kind of cache that changes the model's output


@dataclass(frozen=True)
class ParsedSettings:
    """Settings of one call.

    settings: fields of `GenerationSettings`. criteria: stopping criteria to evaluate after each token.
    """

    settings: Settings
    eos_ids: tuple[int, ...]
    criteria: StoppingCriteriaList


def parse(
    config: GenerationConfig, processor_list: LogitsProcessorList, criteria: StoppingCriteriaList, prompt_length: int
) -> ParsedSettings:
    """Return the settings of a generation config, a list of processors and a list of stopping criteria.

    Raises:
        SettingsError: an unsupported setting that would change the output, or a value out of range.
    """
    check_config(config)
    ends = [criterion.eos_token_id for criterion in criteria if type(criterion) is stopping.EosTokenCriteria]
    eos = tuple(sorted({token for ids in ends for token in _ids(ids)}))
    sampled = bool(config.do_sample)
    settings = {"temperature": 1.0} if sampled else {}
    settings |= parse_processors(processor_list, prompt_length, eos, sampled=sampled)
    longest = [criterion.max_length for criterion in criteria if type(criterion) is stopping.MaxLengthCriteria]
    if not longest:
        raise SettingsError("generate sets no max_length: give max_new_tokens")
    max_new = max(1, min(longest) - prompt_length)  # generate too evaluates its criteria after a token only
    settings["max_new_tokens"] = max_new
    settings["min_new_tokens"] = min(settings.get("min_new_tokens", 0), max_new)
    handled = (stopping.MaxLengthCriteria, stopping.EosTokenCriteria)
    GenerationSettings.build(settings)
    others = [criterion for criterion in criteria if type(criterion) not in handled]
    return ParsedSettings(settings, eos, StoppingCriteriaList(others))


def check_config(config: GenerationConfig) -> None:
    """Refuse decoding modes other than greedy decoding and plain sampling, and unsupported outputs.

    Raises:
        SettingsError: the message names the setting.
    """
    for name, neutral in _NEUTRAL_VALUES.items():
        if getattr(config, name, None) not in neutral:
            raise SettingsError(
                f"{name}={getattr(config, name)}: Outrider decodes one sequence, greedily or by sampling"
            )
    if getattr(config, "cache_implementation", None) == _QUANTIZED:
        raise SettingsError("cache_implementation='quantized' changes the model's output: Outrider does not support it")
    if config.return_dict_in_generate:
        for name in _OUTPUTS:
            if getattr(config, name, None):
                raise SettingsError(f"{name}: not supported: Outrider returns the sequence alone")


def parse_processors(
    processor_list: LogitsProcessorList, prompt_length: int, eos: tuple[int, ...], *, sampled: bool
) -> Settings:
    """Return the settings of a list of logits processors.

    Raises:
        SettingsError: an unsupported processor, a second one of the same kind, or another order than Outrider's.
    """
    settings: Settings = {}
    rank = 0
    for processor in processor_list:
        name = type(processor).__name__
        if type(processor) not in _CONVERTERS:
            raise SettingsError(f"{name}: Outrider does not support this logits processor, and does not ignore it")
        _check_plain(processor, name, eos)
        order = _WARPER_ORDER.index(type(processor)) + 1 if type(processor) in _WARPER_ORDER else 0
        if order and not sampled:
            raise SettingsError(f"{name} needs do_sample=True: it has no effect on greedy decoding")
        if order < rank:
            raise SettingsError(f"{name} comes after {_WARPER_ORDER[rank - 1].__name__}: Outrider applies it first")
        rank = order
        if type(processor) is processors.SequenceBiasLogitsProcessor and "repetition_penalty" in settings:
            raise SettingsError(f"{name} comes after the repetition penalty: Outrider applies it first")
        for field, value in _CONVERTERS[type(processor)](processor, prompt_length).items():
            if field in settings and field != "min_new_tokens":
                raise SettingsError(f"{name} is there twice")
            settings[field] = max(value, settings.get(field, 0)) if field == "min_new_tokens" else value
    return settings


def _check_plain(processor: LogitsProcessor, name: str, eos: tuple[int, ...]) -> None:
    """Refuse options of a supported processor that only its own constructor can set."""
    if getattr(processor, "filter_value", -torch.inf) != -torch.inf or getattr(processor, "min_tokens_to_keep", 1) != 1:
        raise SettingsError(f"{name}: expected filter_value −inf and min_tokens_to_keep 1")
    ignored = getattr(processor, "prompt_ignore_length", None)
    if ignored is not None and bool(torch.as_tensor(ignored).any()):
        raise SettingsError(f"{name}: prompt_ignore_length is not supported: the penalty counts the whole prompt")
    if hasattr(processor, "eos_token_id") and _ids(processor.eos_token_id) != eos:
        raise SettingsError(f"{name}: its eos_token_id differ from those that end the output")


def _ids(ids: int | list[int] | torch.Tensor) -> tuple[int, ...]:
    """Return the token ids, sorted, without negative ones, which stand for "none"."""
    return tuple(sorted({int(token) for token in torch.as_tensor(ids).flatten().tolist() if token >= 0}))


def stop_strings(
    texts: str | list[str] | None, tokenizer: PreTrainedTokenizerBase | None, criteria: StoppingCriteriaList
) -> StoppingCriteriaList:
    """Return the criteria with transformers' own criterion for stop strings added, unless they have one.

    Raises:
        SettingsError: there are stop strings, but no tokenizer.
    """
    if texts is None or any(type(criterion) is stopping.StopStringCriteria for criterion in criteria):
        return criteria
    if tokenizer is None:
        raise SettingsError("stop_strings need a tokenizer: give it to for_transformers, or to the loop's own generate")
    return StoppingCriteriaList([*criteria, stopping.StopStringCriteria(tokenizer, texts)])


def _single_token_bias(processor: LogitsProcessor) -> Settings:
    """Return the biases of a sequence bias whose sequences are single tokens."""
    biases = dict(processor.sequence_bias)
    if any(len(sequence) != 1 for sequence in biases):
        raise SettingsError("sequence_bias: Outrider supports biases of single tokens, not of longer sequences")
    return {"logit_bias": tuple(sorted((int(token), float(bias)) for (token,), bias in biases.items()))}


Converter = Callable[[LogitsProcessor, int], Settings]

_WARPER_ORDER = [  # Outrider's order, which is that of generate
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
]
_CONVERTERS: dict[type, Converter] = {
    processors.SequenceBiasLogitsProcessor: lambda p, _: _single_token_bias(p),
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
