"""Structured output: do all answers match, are they the target's own under the mask, and what does a mask cost?

    python benchmarks/structured_output.py [--every 1] [--tokens 160]
    python benchmarks/structured_output.py --model DIRECTORY

The first form decodes 200 schemas of the kinds of the public JSON-Schema test suite and 50 of tool calls with the
bundled pair, greedy and sampled, with k 1, 5 and 8. Each output is compared with that of the target alone under that
mask, and validated if it is complete. The second form measures a mask per token over a model's own vocabulary, and the
model's forward pass. Each prints one JSON line at its end, and exits 1 on a difference or an invalid answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from typing import Any

import jsonschema_rs

from benchmarks.schemas import Schema, of_kinds, of_tools
from outrider.api import SpeculativeDecoder, local
from outrider.config import GenerationSettings, Grammar
from outrider.decoding.result import Result
from outrider.engines.base import CachedSequence, Engine, Prompt
from outrider.engines.grammars import compile_grammar, prepare_vocabulary
from outrider.engines.load import load_engine
from outrider.engines.vocabulary import tokenize
from outrider.sampling.policy import Policy

KS = (1, 5, 8)
FORWARDS = 16  # timed
PROMPT = [33, 44, 55]
WAYS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0})
COMPACT = {"x-guidance": {"whitespace_pattern": r"\x20"}}  # the bundled pair likes white space more than values

RECORD: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "n": {"type": "number"},
        "place": {
            "type": "object",
            "properties": {
                "zip": {"type": "string", "pattern": r"^\d{5}$"},
                "at": {"type": "string", "format": "date-time"},
            },
            "required": ["zip", "at"],
        },
    },
    "required": ["name", "tags", "n", "place"],
}
ANSWER = {
    "name": "A longer name, with some words in it",
    "tags": ["one", "two and three", "four"],
    "n": 12.5,
    "place": {"zip": "12345", "at": "2026-11-29T10:00:00Z"},
}


def check_schema(pair: tuple[Engine, Engine], schema: Schema, n: int, length: int, counts: Counter[str]) -> None:
    """Count the outcomes of one schema over all ways and block lengths."""
    edge, cloud = pair
    for way in WAYS:
        options = {"max_new_tokens": length, "grammar": Grammar.json_schema(schema | COMPACT), **way, "seed": n}
        alone = SpeculativeDecoder(None, local(cloud)).generate(PROMPT, **options)
        for k in KS:
            result = SpeculativeDecoder(edge, local(cloud), k=k).generate(PROMPT, **options)
            counts["runs"] += 1
            counts["equal"] += result.token_ids == alone.token_ids
            counts["complete"] += result.finish_reason == "eos"
            counts["valid"] += result.finish_reason == "eos" and is_valid(result, schema)


def is_valid(result: Result, schema: Schema) -> bool:
    """Return whether an output parses and matches its schema."""
    try:
        return jsonschema_rs.is_valid(schema, json.loads(result.text or ""), validate_formats=True)
    except ValueError:
        return False


def check_all(every: int, length: int) -> dict[str, Any]:
    """Run every nth schema. Return the counts."""
    counts: Counter[str] = Counter()
    pair = load_engine("demo:edge"), load_engine("demo:cloud")
    for n, schema in list(enumerate([*of_kinds(), *of_tools()]))[::every]:
        before = Counter(counts)
        check_schema(pair, schema, n, length, counts)
        found = counts - before
        if len({found["runs"], found["equal"]}) > 1 or found["complete"] != found["valid"] or not found["complete"]:
            print(n, dict(found), json.dumps(schema, ensure_ascii=False)[:200], flush=True)
        counts["schemas"] += 1
    return dict(counts)


def measure(directory: str, repeats: int = 5) -> dict[str, Any]:
    """Return the milliseconds of a mask per token, of the choice without one, and of a forward pass of one token."""
    engine = load_engine(directory)
    started = time.perf_counter()
    prepare_vocabulary(engine.tokenizer, engine.eos_ids)
    vocabulary_s, started = time.perf_counter() - started, time.perf_counter()
    grammar = Grammar.json_schema(RECORD)
    compile_grammar(grammar, engine.tokenizer, engine.eos_ids)
    compile_s = time.perf_counter() - started
    ids = tokenize(engine.tokenizer, json.dumps(ANSWER))
    rows, forward_ms = _forward(engine, ids)
    plain, masked = (min(_choose(engine, rows, ids, each) for _ in range(repeats)) for each in (None, grammar))
    return {
        "model": engine.name,
        "vocabulary": engine.vocab_size,
        "vocabulary_s": round(vocabulary_s, 3),
        "compile_ms": round(1e3 * compile_s, 2),
        "tokens": len(ids),
        "forward_ms": round(forward_ms, 2),
        "choice_ms": round(plain, 3),
        "masked_choice_ms": round(masked, 3),
        "overhead": round((masked - plain) / (forward_ms + plain), 4),
    }


def _forward(engine: Engine, ids: list[int]) -> tuple[list[Any], float]:
    """Return the rows before the first tokens of `ids`, and the median milliseconds of a forward pass of one token."""
    sequence, rows, seconds = CachedSequence(engine, Prompt((engine.eos_ids[0],)), "benchmark"), [], []
    for n in range(min(len(ids), FORWARDS)):
        started = time.perf_counter()
        rows.append(sequence.extend([engine.eos_ids[0], *ids[:n]], 1)[0])
        seconds.append(time.perf_counter() - started)
    sequence.close()
    return rows, 1e3 * statistics.median(seconds)


def _choose(engine: Engine, rows: list[Any], ids: list[int], grammar: Grammar | None) -> float:
    """Return the mean milliseconds of the choice of a token. The rows repeat: their values do not change the time."""
    compiled = None if grammar is None else compile_grammar(grammar, engine.tokenizer, engine.eos_ids)
    settings = GenerationSettings(grammar=grammar)
    policy = Policy.build(settings, engine.eos_ids, engine.vocab_size, 0, compiled)
    started = time.perf_counter()
    for n in range(len(ids)):
        _ = policy.distribution(rows[n % len(rows)], ids, n).token
    return 1e3 * (time.perf_counter() - started) / len(ids)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="measure a mask on this model's vocabulary")
    parser.add_argument("--every", type=int, default=1, help="take every nth schema")
    parser.add_argument("--tokens", type=int, default=160, help="of an output, at most")
    args = parser.parse_args()
    report = measure(args.model) if args.model else check_all(args.every, args.tokens)
    print(json.dumps(report))
    good = report.get("runs") == report.get("equal") and report.get("complete") == report.get("valid")
    return 0 if args.model or good else 1


if __name__ == "__main__":
    sys.exit(main())
