"""Settings: frozen and validated on construction. Unknown keys raise an error, and no value is corrected silently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from outrider.errors import SettingsError, quote
from outrider.numeric import as_integer, as_number, is_integer, is_number

OnLoop = Literal["escalate", "sample", "stop", "ignore"]
Scope = Literal["block", "repair"]
DriverName = Literal["sequential", "pipelined"]
DecodingMode = Literal["speculative", "edge-only", "cloud-only"]
OnCloudLoss = Literal["fail", "edge-only", "wait"]
Privacy = Literal["tokens", "features", "audio"]
Loss = Literal["outputs", "tokens"]  # the unit of a risk budget
GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]

DEFAULT_K = 5  # tokens per block
PER_REQUEST_SETTING = "seed"  # the setting that each request chooses, and to which no gate is calibrated
REPORT_SETTING = "logprobs"  # the only setting without influence on the output
MAX_TOP_LOGPROBS = 20  # the limit of OpenAI's API
SEED_LIMIT = 2**64
COUNT_LIMIT = 2**32  # the protocol's counts have 32 bits
MAX_ADDITIVE_PENALTY, MAX_LOGIT_BIAS = 2.0, 100.0  # the limits of OpenAI's API
_ADDITIVE_PENALTIES = ("frequency_penalty", "presence_penalty")
_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "seed", "no_repeat_ngram_size", "repetition_window")
_COUNTS = tuple(name for name in _INTEGERS if name != PER_REQUEST_SETTING)
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", *_ADDITIVE_PENALTIES)
MAX_GRAMMAR_BYTES = 2**16


@dataclass(frozen=True)
class Grammar:
    """A grammar that constrains the output. The mask of allowed tokens depends on the output's tokens alone.

    kind: json_object (any JSON object), json_schema (JSON that matches a schema), regex (a whole match), or lark (a
    context-free grammar in llguidance's variant of Lark). text: the schema as JSON, the expression, or the grammar,
    empty for json_object.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        check_choice("grammar kind", self.kind, GrammarKind)
        _require(isinstance(self.text, str), f"grammar text is a text, not {quote(self.text)}")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise SettingsError("grammar text holds half a surrogate pair") from None
        _require(size <= MAX_GRAMMAR_BYTES, f"grammar of {size} bytes: at most {MAX_GRAMMAR_BYTES}")
        if self.kind == "json_object":
            _require(not self.text, "grammar kind json_object takes no text")
        else:
            _require(bool(self.text), f"grammar kind {self.kind} needs a text")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """Return the grammar of a JSON schema. Keys of an object are written in the order of `properties`."""
        check_type("schema", schema, (Mapping, bool), "a mapping, True or False")
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingsError(f"grammar: the schema is not JSON: {error}") from error


@dataclass(frozen=True)
class GenerationSettings:
    """Decoding settings, shared by drafter, verifier and baselines.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 keep all tokens. no_repeat_ngram_size 0 is off. stop strings stay
    in the text. sentences ends the output after that many complete sentences, but not before min_new_tokens.
    suppress_tokens are never emitted. repetition_window is the number of last tokens that repetition_penalty covers,
    for example 64 or 128. With 0 it covers the whole prefix, as in transformers. frequency_penalty is subtracted from a
    token's logit once for each of its occurrences in the output, presence_penalty once if it occurs there. logit_bias
    holds pairs of a token id and a number that is added to its logit, and may be given as a mapping. logprobs requests
    the log-probability of each token, and of that many of the most probable ones. It does not change the output.
    grammar constrains the output, which then ends where the grammar does, unless max_new_tokens, a stop string or a
    loop ends it earlier.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    stop: tuple[str, ...] = ()
    sentences: int | None = None
    ignore_eos: bool = False
    suppress_tokens: tuple[int, ...] = ()
    repetition_window: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _convert_numbers(field.name, getattr(self, field.name)))
        for name in _INTEGERS:
            _require(is_integer(getattr(self, name)), f"{name} is a whole number, not {quote(getattr(self, name))}")
        for name in _COUNTS:
            _require(getattr(self, name) < COUNT_LIMIT, f"{name} is below 2^32, not {quote(getattr(self, name))}")
        for name in _NUMBERS:
            _require(is_number(getattr(self, name)), f"{name} is a finite number, not {quote(getattr(self, name))}")
        _require(self.max_new_tokens >= 1, "max_new_tokens is 1 or more")
        _require(0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens is between 0 and max_new_tokens")
        _require(self.temperature >= 0, f"temperature is 0 (greedy) or more, not {self.temperature}")
        _require(self.top_k >= 0, "top_k is 0 (off) or more")
        _require(0 < self.top_p <= 1, f"top_p is above 0 and at most 1, not {self.top_p}")
        _require(0 <= self.min_p <= 1, "min_p is between 0 and 1")
        _require(0 <= self.seed < SEED_LIMIT, "seed is between 0 and 2^64 − 1")
        penalty = self.repetition_penalty
        _require(0.01 <= penalty <= 100, f"repetition_penalty is between 0.01 and 100 (1 is off), not {penalty}")
        for name in _ADDITIVE_PENALTIES:
            within = abs(getattr(self, name)) <= MAX_ADDITIVE_PENALTY
            _require(within, f"{name} is between -2 and 2 (0 is off), not {getattr(self, name)}")
        _require(self.no_repeat_ngram_size >= 0, "no_repeat_ngram_size is 0 (off) or more")
        _require(self.repetition_window >= 0, "repetition_window is 0 (the whole prefix) or more")
        _require(
            not self.repetition_window or penalty != 1, "repetition_window needs a repetition_penalty other than 1"
        )
        good = self.sentences is None or (is_integer(self.sentences) and 1 <= self.sentences < COUNT_LIMIT)
        _require(good, "sentences is a whole number from 1 to 2^32 − 1")
        good = self.logprobs is None or (is_integer(self.logprobs) and 0 <= self.logprobs <= MAX_TOP_LOGPROBS)
        _require(good, f"logprobs is a whole number from 0 to {MAX_TOP_LOGPROBS}, not {quote(self.logprobs)}")
        good = self.grammar is None or isinstance(self.grammar, Grammar)
        _require(good, f"grammar is a Grammar, not {quote(self.grammar)}")
        _require(self.grammar is None or not self.ignore_eos, "grammar ends the output with EOS: leave out ignore_eos")
        self._check_texts()

    def _check_texts(self) -> None:
        _require(isinstance(self.stop, tuple), f"stop is a text or a list of texts, not {quote(self.stop)}")
        _require(isinstance(self.suppress_tokens, tuple), "suppress_tokens is a list of token ids")
        _require(isinstance(self.ignore_eos, bool), f"ignore_eos is True or False, not {quote(self.ignore_eos)}")
        _require(all(isinstance(text, str) and text for text in self.stop), "a stop string is a text that is not empty")
        _require(all(is_integer(t) and t >= 0 for t in self.suppress_tokens), "suppress_tokens are token ids")
        _check_logit_bias(self.logit_bias)
        if self.temperature == 0:
            used = [name for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if getattr(self, name) != off]
            _require(not used, f"{', '.join(used)} needs a temperature above 0: greedy decoding would ignore it")

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> GenerationSettings:
        """Build settings from keyword arguments.

        Raises:
            SettingsError: a name is unknown (the message lists the known ones), or a value is out of range.
        """
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(names))
        _require(not unknown, f"unknown setting {', '.join(unknown)}: expected any of {', '.join(names)}")
        return cls(**{name: _convert(name, value) for name, value in values.items()})


def _check_logit_bias(pairs: Any) -> None:
    is_pairs = isinstance(pairs, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    _require(is_pairs, f"logit_bias is a mapping from token ids to numbers, not {quote(pairs)}")
    _require(all(is_integer(token) and token >= 0 for token, _ in pairs), "logit_bias: its keys are token ids")
    _require(len(dict(pairs)) == len(pairs), "logit_bias: a token id occurs twice")
    for token, bias in pairs:
        within = is_number(bias) and abs(bias) <= MAX_LOGIT_BIAS
        _require(within, f"logit_bias: the bias of token {quote(token)} is between -100 and 100, not {quote(bias)}")


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise SettingsError unless `value` is one of a Literal's members."""
    options = get_args(choices)
    _require(value in options, f"{name} {quote(value)}: expected one of {', '.join(options)}")


def check_type(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise SettingsError unless `value` is of this type. expected: the type in words."""
    _require(isinstance(value, kind), f"{name} is {expected}, not {quote(value)}")


def _convert(name: str, value: Any) -> Any:
    """Convert lists to tuples, a single stop string to a tuple, biases to sorted pairs, and a mapping to a grammar."""
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "logit_bias" and isinstance(value, (Mapping, list, tuple)):
        pairs = value.items() if isinstance(value, Mapping) else value
        pairs = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs)
        is_sortable = all(isinstance(pair, tuple) and pair and is_integer(as_integer(pair[0])) for pair in pairs)
        return tuple(sorted(pairs, key=lambda pair: int(pair[0]))) if is_sortable else pairs
    if name == "grammar" and isinstance(value, Mapping):
        unknown = sorted(set(value) - {"kind", "text"})
        _require("kind" in value and not unknown, f"grammar has the keys kind and text, not {quote(list(value))}")
        return Grammar(**value)
    return tuple(value) if name in ("stop", "suppress_tokens") and isinstance(value, list) else value


def _convert_numbers(name: str, value: Any) -> Any:
    """Convert the numbers of other libraries in a setting to Python's own."""
    if name in (*_INTEGERS, "sentences", "logprobs"):
        return as_integer(value)
    if name in _NUMBERS:
        return as_number(value)
    if name == "suppress_tokens" and isinstance(value, tuple):
        return tuple(map(as_integer, value))
    if name == "logit_bias" and isinstance(value, tuple):
        return tuple(tuple(map(as_number, pair)) if isinstance(pair, tuple) else pair for pair in value)
    return value


def format_number(value: float) -> str:
    """Format a number without a trailing `.0`, with all digits that are needed to parse the same number again."""
    return repr(value).removesuffix(".0")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingsError(message)
