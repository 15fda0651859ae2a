"""Structured output: every complete output matches its schema, and is the target's own under the same mask."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

from benchmarks.schemas import of_kinds, of_tools
from outrider import Result, SpeculativeDecoder, local, prompt_lookup
from outrider.config import Grammar
from outrider.decoding.actions import Verify
from outrider.engines.grammars import compile_grammar
from outrider.errors import DecodingError, SettingsError
from outrider.sampling.acceptance import Verdict
from outrider.sampling.grammar import GrammarMask
from outrider.verifiers.local import LocalVerifier
from tests.support.gateway_pair import demo_cloud, demo_edge

COMPACT = {"x-guidance": {"whitespace_pattern": r"\x20"}}  # the bundled pair likes white space more than values
SCHEMAS = [{**schema, **COMPACT} for schema in (*of_kinds(), *of_tools())]
PROMPT = [33, 44, 55]
LENGTH = 120
SAMPLED = {"temperature": 1.3, "seed": 7}


class Masked(LogitsProcessor):
    """The mask as transformers' own `generate` applies it, from a new matcher at every position."""

    def __init__(self, grammar: Grammar, engine: Any) -> None:
        self.grammar = compile_grammar(grammar, engine.tokenizer, engine.eos_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher, output = self.grammar.copy_matcher(), input_ids[0, len(PROMPT) :].tolist()
        assert matcher.try_consume_tokens(output) == len(output)
        there = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8)
        if set(torch.nonzero(there).flatten().tolist()) <= set(self.grammar.eos_ids):
            there[list(self.grammar.eos_ids[1:])] = 0
        return scores.masked_fill(there[: scores.shape[-1]][None] == 0, -torch.inf)


@lru_cache(512)
def alone(grammar: Grammar, length: int = LENGTH) -> list[int]:
    """What the target's own `generate` says under the mask."""
    engine = demo_cloud()
    ids = engine.model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=length,
        do_sample=False,
        logits_processor=[Masked(grammar, engine)],
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
    )
    return ids[0, len(PROMPT) :].tolist()


def run(grammar: Grammar, k: int = 5, *, alone: bool = False, **options: Any) -> Result:
    draft = None if alone else demo_edge()
    decoder = SpeculativeDecoder(draft, local(demo_cloud()), **({} if alone else {"k": k}))
    return decoder.generate(PROMPT, **{"max_new_tokens": LENGTH, "grammar": grammar, **options})


def check(result: Result, schema: Any) -> None:
    """A complete output matches its schema."""
    assert result.finish_reason in ("eos", "length")
    if result.finish_reason == "eos":
        jsonschema_rs.validate(schema, json.loads(result.text), validate_formats=True)


@pytest.mark.parametrize("n", range(0, len(SCHEMAS), 12))
def test_greedy_outputs_are_those_of_transformers_under_the_mask(n: int) -> None:
    grammar, k = Grammar.json_schema(SCHEMAS[n]), (1, 5, 8)[n % 3]
    result = run(grammar, k)
    assert result.token_ids == alone(grammar)
    assert result.guarantee == "exact"
    check(result, SCHEMAS[n])


@settings(max_examples=12)
@given(st.sampled_from(SCHEMAS), st.sampled_from([1, 5, 8]), st.integers(0, 2**32))
def test_sampled_outputs_are_the_target_s_and_match_their_schema(schema: Any, k: int, seed: int) -> None:
    grammar, options = Grammar.json_schema(schema), {**SAMPLED, "seed": seed}
    result = run(grammar, k, **options)
    assert result.token_ids == run(grammar, alone=True, **options).token_ids
    check(result, schema)


@pytest.mark.parametrize("options", [{"accept": "residual"}, {"accept": "rank:5"}, {"gate": "entropy:2"}])
def test_lossy_and_other_rules_stay_within_the_grammar(options: dict[str, Any]) -> None:
    decoder = SpeculativeDecoder(demo_edge(), local(demo_cloud()), **options)
    for seed in range(4):
        schema = SCHEMAS[16 + seed]
        result = decoder.generate(
            PROMPT, max_new_tokens=LENGTH, grammar=Grammar.json_schema(schema), temperature=1.0, seed=seed
        )
        assert result.finish_reason == "eos"
        check(result, schema)


def test_the_edge_alone_stays_within_the_grammar() -> None:
    result = SpeculativeDecoder(demo_edge()).generate(
        PROMPT, max_new_tokens=40, grammar=Grammar("regex", "(yes|no)[!?]")
    )
    assert result.text in ("yes!", "yes?", "no!", "no?")


class Watched(LocalVerifier):
    """A verifier that keeps the requests."""

    requests: list[Verify]

    def verify(self, session: int, request: Verify) -> Verdict:
        self.requests = [*getattr(self, "requests", []), request]
        return super().verify(session, request)


@pytest.mark.parametrize("source", ["model", "lookup", "model+lookup"])
def test_drafts_are_only_what_the_grammar_allows(source: str) -> None:
    """Each draft is allowed after those before it, also where the target then chooses another one."""
    verifier, grammar = Watched(demo_cloud()), Grammar.json_schema(SCHEMAS[16])
    lookup = prompt_lookup(demo_cloud().tokenizer, min_ngram=1)
    sources: dict[str, Any] = {"model": (demo_edge(), None), "lookup": (lookup, None)}
    draft, beside = sources.get(source, (demo_edge(), lookup))
    decoder = SpeculativeDecoder(draft, verifier, lookup=beside, k=8)
    result = decoder.generate(PROMPT, max_new_tokens=LENGTH, grammar=grammar)
    assert result.token_ids == run(grammar, alone=True).token_ids
    mask = GrammarMask(compile_grammar(grammar, demo_edge().tokenizer, demo_edge().eos_ids))
    assert result.stats.drafted
    assert result.stats.accepted < result.stats.drafted or source == "lookup"
    for request in verifier.requests:
        output = result.token_ids[: request.base_length - len(PROMPT)]
        for draft in request.draft_ids:
            assert mask.allowed(output)[draft]
            output = [*output, draft]


def test_a_limit_cuts_an_output_as_ever() -> None:
    result = run(Grammar.json_schema({"type": "array", "items": {"type": "string"}, "minItems": 50}), max_new_tokens=9)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 9)


def test_a_grammar_ends_only_with_eos_so_a_longer_minimum_is_an_error() -> None:
    with pytest.raises(DecodingError, match="min_new_tokens"):
        run(Grammar("regex", "ok"), min_new_tokens=50)


DEAD_END = Grammar(
    "regex", r"[a-z ]{3,30}\."
)  # with no_repeat_ngram_size 1, no token may be able to follow a wrong draft


@pytest.mark.parametrize("source", ["model", "lookup", "model+lookup"])
@settings(max_examples=15)
@given(st.lists(st.integers(300, 1000), min_size=1, max_size=6), st.integers(2, 8), st.integers(0, 2**32))
def test_a_dead_end_of_the_drafts_does_not_change_the_output(source: str, prompt: list[int], k: int, seed: int) -> None:
    lookup = prompt_lookup(demo_cloud().tokenizer)
    draft = lookup if source == "lookup" else demo_edge()
    decoder = SpeculativeDecoder(draft, local(demo_cloud()), lookup=lookup if source == "model+lookup" else None, k=k)
    options = {"max_new_tokens": 40, "no_repeat_ngram_size": 1, "grammar": DEAD_END, **SAMPLED, "seed": seed}
    assert tokens_or_error(decoder, prompt, options) == tokens_or_error(
        SpeculativeDecoder(None, local(demo_cloud())), prompt, options
    )


def tokens_or_error(decoder: SpeculativeDecoder, prompt: list[int], options: dict[str, Any]) -> list[int] | type:
    """Return the output's tokens, or DecodingError if no token can follow."""
    try:
        return decoder.generate(prompt, **options).token_ids
    except DecodingError:
        return DecodingError


def test_a_drafter_in_a_dead_end_ends_its_block() -> None:
    options = {"max_new_tokens": 60, "no_repeat_ngram_size": 1, "frequency_penalty": 2.0, "grammar": DEAD_END}
    result = SpeculativeDecoder(demo_edge(), local(demo_cloud()), k=8).generate([397, 530, 585], **options)
    assert (result.finish_reason, result.guarantee) == ("eos", "exact")


def test_a_dead_end_after_a_stop_string_is_no_error() -> None:
    options = {"grammar": Grammar("regex", "aa"), "no_repeat_ngram_size": 1}
    with pytest.raises(DecodingError):
        SpeculativeDecoder(demo_edge(), k=5).generate(PROMPT, **options)
    result = SpeculativeDecoder(demo_edge(), k=5).generate(PROMPT, stop=["a"], **options)
    assert (result.text, result.finish_reason) == ("a", "stop")


def test_a_dead_end_of_the_edge_alone_is_an_error() -> None:
    with pytest.raises(DecodingError, match="every token that the grammar allows"):
        SpeculativeDecoder(demo_edge()).generate(PROMPT, grammar=Grammar("regex", "ok"), min_new_tokens=50)


def test_a_model_without_a_tokenizer_is_refused() -> None:
    engine = demo_cloud()
    tokenizer, engine.tokenizer = engine.tokenizer, None
    try:
        with pytest.raises(SettingsError, match="grammar needs a tokenizer"):
            run(Grammar("regex", "ok"), alone=True)
    finally:
        engine.tokenizer = tokenizer


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_penalties_biases_and_log_probabilities_go_with_a_grammar(sampling: dict[str, Any]) -> None:
    schema = SCHEMAS[3]
    options = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "logit_bias": {40: 2.0, 41: -4.0}, **sampling}
    result = run(Grammar.json_schema(schema), logprobs=2, **options)
    wanted = run(Grammar.json_schema(schema), alone=True, logprobs=2, **options)
    assert result.token_ids == wanted.token_ids
    check(result, schema)
    assert len(result.logprobs) == len(result.token_ids)
    for ours, theirs in zip(result.logprobs, wanted.logprobs, strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [each.logprob for each in ours.top] == pytest.approx([each.logprob for each in theirs.top], abs=1e-4)
