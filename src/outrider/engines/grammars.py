"""Compilation of grammars for an engine's vocabulary, bounded in time, memory and length.

llguidance does not limit the depth of nested definitions, which can overflow the stack, or the time for long regular
expressions. A text of more than `UNCHECKED_BYTES` is therefore compiled in a child process first, with little stack,
time and memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

from outrider.config import Grammar
from outrider.decoding.detokenizer import SPECIAL_MARK, Tokenizer, get_detokenizer
from outrider.engines.base import Engine
from outrider.engines.lark import json_to_lark, schemas_in, to_lark
from outrider.engines.locking import get_lock
from outrider.engines.schema_parts import DEFINITIONS, Schema, subschemas
from outrider.errors import DecodingError, GrammarError, SettingsError
from outrider.sampling.grammar import CompiledGrammar, GrammarMask

if TYPE_CHECKING:  # imported with the first grammar
    from llguidance import LLMatcher, LLTokenizer

UNCHECKED_BYTES: Final = 4096
CHECK_SECONDS: Final = 20.0  # wall-clock time. The process limits its own processor time to 2 s.
MAX_PLACES: Final = 256  # parts of a schema that are compiled to find the one that fails
MAX_LEVELS: Final = 16  # of nesting, down to that part: each may take a child process
LIMITS: Final = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_items_in_row": 10_000,  # an object has four for each optional key
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# Token ids in a grammar of Lark, such as <[5]> and <[1-3,7]>.
TOKEN_IDS: Final = re.compile(r"<\[[^\]\n]*\]>")


def compile_grammar(grammar: Grammar, tokenizer: Tokenizer | None, eos_ids: tuple[int, ...]) -> CompiledGrammar:
    """Compile a grammar for a tokenizer's vocabulary. Both are cached.

    Raises:
        GrammarError: the grammar cannot be compiled within the limits. The error names the failing part of a schema.
        SettingsError: the model has no tokenizer whose tokens are bytes, or no end-of-sequence token.
    """
    if tokenizer is None:
        raise SettingsError("grammar needs a tokenizer, and the model came without one")
    if not eos_ids:
        raise SettingsError("grammar ends the output with an end-of-sequence token, and the model has none")
    return _compile(grammar, tokenizer, eos_ids)


@lru_cache(64)
def _compile(grammar: Grammar, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> CompiledGrammar:
    source = to_lark(grammar, tokenizer)
    vocabulary = prepare_vocabulary(tokenizer, eos_ids)
    failure = _first_failure([source], vocabulary)
    if failure is not None:
        raise _locate(grammar, failure[1], vocabulary)
    compiled = CompiledGrammar(lambda: _matcher(vocabulary, source), vocabulary.vocab_size, eos_ids)
    if reason := compiled.error:
        raise GrammarError(_describe(reason), "")
    try:
        GrammarMask(compiled).packed([])
    except DecodingError as error:
        raise GrammarError("no output matches it, or it is too complex", "") from error
    return compiled


def prepare(engine: Engine) -> None:
    """Prepare the vocabulary of an engine that supports grammars, so that no session waits for it."""
    if engine.tokenizer is not None and engine.eos_ids:
        with suppress(SettingsError):  # no support of grammars
            prepare_vocabulary(engine.tokenizer, engine.eos_ids)


def prepare_vocabulary(tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """Return a tokenizer's vocabulary for llguidance, which is cached.

    150,000 tokens take about a second, in which the interpreter lock is held.

    Raises:
        SettingsError: the tokenizer's tokens are not bytes.
    """
    with get_lock(tokenizer):
        return _vocabulary(tokenizer, eos_ids)


@lru_cache(8)
def _vocabulary(tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    tokens = get_detokenizer(tokenizer).vocabulary_bytes(max(tokenizer.get_vocab().values()) + 1)
    if tokens is None:
        raise SettingsError(
            "grammar needs a tokenizer whose tokens are bytes, such as those of Qwen, Llama and Mistral"
        )
    for token in eos_ids:  # an end token never counts as text
        tokens[token : token + 1] = [SPECIAL_MARK + str(token).encode()]
    return LLTokenizer(_Tokens(tokens, eos_ids[0]), eos_token=list(eos_ids))  # type: ignore[arg-type]


class _Tokens:
    """The vocabulary in llguidance's interface. `__call__` is not used, because nothing is forced."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes], eos_token_id: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token_id

    def __call__(self, text: object) -> list[int]:
        return []


def _matcher(vocabulary: LLTokenizer, source: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**LIMITS))  # type: ignore[arg-type]


# Errors -----------------------------------------------------------------------------------------------------


# llguidance's reasons, by a part of them, in the words of JSON Schema.
_REASONS: Final = {
    "Unable to determine if regex is empty": (
        "format, pattern and lengths of a text are too complex together: leave one out, or begin the pattern with ^ "
        "and replace each . by a character class"
    ),
    "Regex is empty": "no text matches its format, pattern and lengths together",
    "oneOf constraints": "oneOf is supported only if no value matches two of its schemas: use anyOf",
    "min/maxProperties only supported": (
        "minProperties and maxProperties are supported only if all keys of properties are required, or if there are no "
        "properties"
    ),
    "lookarounds not supported": "look-around and \\b are not supported",
    "recursion limit exceeded": "the schema is nested too deeply",
}


def _describe(reason: str) -> str:
    """Return llguidance's reason in one line, without its quotation of the grammar."""
    lines = reason.split("\n")
    line = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    line = line.partition("failed to compile JSON schema: ")[2] or line
    for begin, described in _REASONS.items():
        if begin in line:
            return described
    if (unsupported := re.fullmatch(r'Unimplemented keys: \["(.*)"\]', line)) is not None:
        return "not supported: " + unsupported[1].replace('", "', ", ")
    return line


def _locate(grammar: Grammar, reason: str, vocabulary: LLTokenizer) -> GrammarError:
    """Return the error, with the innermost part of a schema that fails by itself."""
    place, root, places_left = "", None, MAX_PLACES
    parts: Iterable[tuple[str, Schema]] = schemas_in(grammar)
    for _ in range(MAX_LEVELS):
        candidates = list(islice(parts, places_left))
        places_left -= len(candidates)
        if not candidates:
            break
        failure = _first_failure([_part_source(part, root or part) for _, part in candidates], vocabulary)
        if failure is None:
            break
        (name, part), reason = candidates[failure[0]], failure[1]
        place, root, parts = f"{place}.{name}".lstrip("."), root or part, subschemas(part)
    return GrammarError(reason, place)


def _part_source(part: Schema, root: Schema) -> str:
    """Return the grammar of a part of a schema, with the definitions to which it may refer."""
    return json_to_lark({**{key: root[key] for key in DEFINITIONS if key in root}, **part})


# Limits -----------------------------------------------------------------------------------------------------


def _first_failure(sources: list[str], vocabulary: LLTokenizer) -> tuple[int, str] | None:
    """Return the index of the first grammar that cannot be compiled, and the reason."""
    if max(map(len, sources)) > UNCHECKED_BYTES:
        return _check_in_child(sources)
    reasons = enumerate(_matcher(vocabulary, source).get_error() for source in sources)
    return next(((n, _describe(reason)) for n, reason in reasons if reason), None)


def _check_in_child(sources: list[str]) -> tuple[int, str] | None:
    """Do the same as `_first_failure` in a child process, over single bytes instead of a vocabulary."""
    command = [sys.executable, "-I", "-c", _CHILD]
    data = json.dumps([LIMITS, [TOKEN_IDS.sub("<[0]>", source) for source in sources]]).encode()
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 0, f"it takes more than {CHECK_SECONDS:g} s to compile"
    if done.returncode:
        return 0, "it is nested too deeply, or takes too much time or memory to compile"
    n, reason = json.loads(done.stdout)
    return (n, _describe(reason)) if reason else None


# Compiles the grammars of stdin, and prints the index and the error of the first that fails.
_CHILD: Final = """
import json, resource, sys, threading
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

class Bytes:
    is_tokenizer_wrapper, bos_token_id, eos_token_id, special_token_ids = True, None, 256, ()
    tokens = [bytes([n]) for n in range(256)] + [b"\\xff"]
    def __call__(self, text): return []

def compile_sources():
    vocabulary = LLTokenizer(Bytes(), eos_token=[256])
    for n, source in enumerate(sources):
        error = LLMatcher(vocabulary, source, log_level=0, limits=LLParserLimits(**limits)).get_error()
        if error:
            break
    print(json.dumps([n, error]))

limits, sources = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
threading.stack_size(2**20)
thread = threading.Thread(target=compile_sources)
thread.start()
thread.join()
"""
