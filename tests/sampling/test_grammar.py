"""Masks of a grammar: exactly the tokens whose bytes continue the output, whatever was asked for before."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import GenerationSettings, Grammar
from outrider.engines.grammars import LIMITS, compile_grammar, prepare_vocabulary
from outrider.errors import DecodingError, SettingsError
from outrider.sampling.grammar import CompiledGrammar, GrammarMask
from outrider.sampling.policy import Policy
from outrider.sampling.top_logprobs import NeedMoreLogprobs, TopLogprobs
from tests.support.tokenizers import byte_fallback, byte_level, ids_of

EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["true", "tr社", "é"]}, "n": {"type": "integer", "minimum": -3, "maximum": 12}},
    "required": ["name"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar.json_schema(SCHEMA),
    Grammar("json_object"),
    Grammar("regex", r"(the )+[a-c]{2,4}社?"),
    Grammar("lark", 'start: one ("\\n" one)*\none: "<call>\\n" %json {"const":"ok"} "\\n</call>"'),
    Grammar("lark", 'start: "the" " " <[2]> | sum\nsum: NUMBER "+" sum | NUMBER\nNUMBER: /[0-9]+/'),
)
TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}


@lru_cache
def compiled(grammar: Grammar, kind: str) -> CompiledGrammar:
    return compile_grammar(grammar, TOKENIZERS[kind](), (EOS,))


def allowed(grammar: CompiledGrammar, output: list[int]) -> set[int]:
    """What a new mask says of an output."""
    return set(np.flatnonzero(GrammarMask(grammar).allowed(output)).tolist())


def by_trial(grammar: CompiledGrammar, output: list[int]) -> set[int]:
    """The tokens that a new matcher consumes after an output, one by one."""
    matcher = grammar.copy_matcher()
    assert matcher.try_consume_tokens(output) == len(output)
    accepts = {EOS} if matcher.is_accepting() else set()
    return accepts | {n for n in range(grammar.vocab_size) if n != EOS and matcher.validate_tokens([n])}


cases = st.tuples(st.sampled_from(GRAMMARS), st.sampled_from(sorted(TOKENIZERS)))


@given(cases, st.data())
def test_a_mask_holds_what_a_matcher_consumes_and_does_not_depend_on_the_way_there(
    case: tuple[Grammar, str], data: st.DataObject
) -> None:
    grammar = compiled(*case)
    mask, output = GrammarMask(grammar), []
    for _ in range(12):
        there = set(np.flatnonzero(mask.allowed(output)).tolist())
        assert there == allowed(grammar, output) == by_trial(grammar, output) != set()
        assert {token for token in range(grammar.vocab_size + 100) if mask.allows(output, token)} == there
        texts = sorted(there - {EOS})
        if not texts or data.draw(st.integers(0, 3)) == 0:
            output = output[: data.draw(st.integers(0, len(output)))]
        else:
            output = [*output, data.draw(st.sampled_from(texts))]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_output_ends_where_the_grammar_does_and_nowhere_else(kind: str) -> None:
    grammar = compiled(Grammar("regex", "(the)+"), kind)
    one = ids_of("the", TOKENIZERS[kind]())
    assert EOS not in allowed(grammar, one[:2])
    assert EOS in allowed(grammar, one)
    assert len(allowed(grammar, one)) > 1  # it may go on
    assert allowed(compiled(Grammar("regex", "the"), kind), one) == {EOS}


@pytest.mark.parametrize("tail", [[], [5], [EOS], [300_000]])
def test_after_an_eos_there_is_eos_alone(tail: list[int]) -> None:
    grammar = compiled(Grammar("regex", "(the)+"), "byte level")
    output = [*ids_of("the", byte_level()), EOS, *tail]
    assert allowed(grammar, output) == {EOS}


def test_of_several_eos_the_first_alone_is_allowed_where_nothing_else_is() -> None:
    """A verdict on the end of an output then needs no row of logits."""
    one = ids_of("the", byte_level())
    ends, goes_on = (compile_grammar(Grammar("regex", text), byte_level(), (2, 0, 1)) for text in ("the", "(the)+"))
    assert allowed(ends, one) == allowed(ends, [*one, 0]) == {2}
    assert {0, 1, 2} < allowed(goes_on, one)


def test_a_mask_is_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's row is masked twice: to find a single allowed token, and in the logits."""
    mask, unpack, calls = GrammarMask(compiled(GRAMMARS[1], "byte level")), np.unpackbits, []
    monkeypatch.setattr(np, "unpackbits", lambda *args, **options: calls.append(args) or unpack(*args, **options))
    one = ids_of("{", byte_level())
    assert mask.allows([], one[0])
    assert calls == []
    first = mask.allowed([])
    assert first is mask.allowed([])
    assert not np.array_equal(first, mask.allowed(one))
    assert np.array_equal(first, mask.allowed([]))
    assert len(calls) == 3


@pytest.mark.parametrize("wrong", [ids_of("x", byte_level())[0], 0, 300_000])
def test_nothing_follows_a_token_that_is_not_allowed(wrong: int) -> None:
    grammar = compiled(Grammar("regex", "(the)+"), "byte level")
    one = ids_of("the", byte_level())
    mask = GrammarMask(grammar)
    assert not mask.allowed([*one, wrong, *one]).any()
    assert set(np.flatnonzero(mask.allowed(one)).tolist()) == allowed(grammar, one)  # and the mask is as good as new


def test_a_vocabulary_that_cannot_go_on_is_an_error_and_not_an_end() -> None:
    lark = compile_grammar(Grammar("regex", "the"), byte_level(), (EOS,))
    vocabulary = prepare_vocabulary(byte_level(), (EOS,))

    def matcher() -> object:
        from llguidance import LLMatcher

        return LLMatcher(vocabulary, '%llguidance {"no_forcing": true}\nstart: <[900]>', log_level=0)

    with pytest.raises((DecodingError, ValueError), match="no token can follow 0 tokens"):
        GrammarMask(CompiledGrammar(matcher, lark.vocab_size, (EOS,))).allowed([])  # type: ignore[arg-type]


def test_a_grammar_that_is_too_complex_is_an_error_and_not_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, "max_items_in_row", 2_000)
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1_200)}}
    grammar = compile_grammar(Grammar.json_schema(schema), byte_level(), (EOS,))
    with pytest.raises(DecodingError, match=r"no token can follow 1 tokens: .*items"):
        GrammarMask(grammar).allowed(ids_of("{", byte_level()))


# The policy -------------------------------------------------------------------------------------------------

V = len(byte_level().get_vocab())
PROMPT = [7, 8, 9]


def policy(grammar: Grammar, vocab_size: int = V, **options: object) -> Policy:
    values = {"max_new_tokens": 64, "grammar": grammar, **options}
    return Policy.build(
        GenerationSettings.build(values), (EOS,), vocab_size, len(PROMPT), compiled(grammar, "byte level")
    )


def test_a_policy_chooses_the_best_allowed_token_and_leaves_the_row_alone() -> None:
    row = torch.randn(V + 5, generator=torch.Generator().manual_seed(1))
    before = row.clone()
    there = allowed(compiled(GRAMMARS[0], "byte level"), [])
    chosen = policy(GRAMMARS[0]).distribution(row, PROMPT, len(PROMPT)).token
    assert chosen == max(there, key=lambda token: float(row[token]))
    assert chosen != int(row[:V].argmax())
    assert torch.equal(row, before)


def test_a_vocabulary_that_is_larger_or_smaller_than_the_tokenizer_s_is_masked_too() -> None:
    there = allowed(compiled(GRAMMARS[0], "byte level"), [])
    wide = policy(GRAMMARS[0], V + 100).distribution(torch.zeros(V + 100), PROMPT, len(PROMPT)).logits
    assert set(torch.nonzero(wide > -torch.inf).flatten().tolist()) == there
    narrow = policy(GRAMMARS[0], 200).distribution(torch.zeros(V), PROMPT, len(PROMPT)).logits
    assert set(torch.nonzero(narrow > -torch.inf).flatten().tolist()) == {n for n in there if n < 200}


@pytest.mark.parametrize("options", [{"min_new_tokens": 9}, {"suppress_tokens": (EOS,)}])
def test_a_grammar_whose_tokens_are_all_banned_is_an_error(options: dict[str, object]) -> None:
    chain = policy(Grammar("regex", "the"), **options)
    ids = [*PROMPT, *ids_of("the", byte_level())]
    with pytest.raises(
        DecodingError, match=f"at position {len(ids)}: min_new_tokens, .* ban every token that the grammar allows"
    ):
        chain.distribution(torch.zeros(V), ids, len(ids))


def test_a_policy_without_the_compiled_grammar_is_refused() -> None:
    with pytest.raises(SettingsError, match="needs a tokenizer"):
        Policy.build(GenerationSettings(grammar=GRAMMARS[1]), (EOS,), V, 3)


# Partial rows -----------------------------------------------------------------------------------------------


@given(
    st.sampled_from(GRAMMARS),
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 5, 20, 100, V]),
    st.sampled_from([{}, {"temperature": 0.7, "top_k": 3}, {"temperature": 0.7, "top_p": 0.6}]),
    st.booleans(),
)
def test_a_partial_row_gives_the_complete_row_s_token_or_asks_for_more(
    grammar: Grammar, seed: int, count: int, options: dict[str, object], normalised: bool
) -> None:
    row = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3
    if normalised:
        row = torch.log_softmax(row, -1)
    chain = policy(grammar, **options)
    best = torch.topk(row, count)
    missing = -np.inf if count == V else float(best.values[-1])
    known = TopLogprobs(best.indices.numpy(), best.values.numpy(), missing, normalised)
    expected = chain.distribution(row, PROMPT, len(PROMPT)).token
    try:
        chosen = chain.distribution_at([known], 0, PROMPT, len(PROMPT)).token
    except NeedMoreLogprobs:
        assert count < V
        return
    assert chosen == expected


def test_a_single_allowed_token_needs_no_rows() -> None:
    ids = [*PROMPT, *ids_of("the", byte_level())]
    for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "top_k": 4}):
        nothing = TopLogprobs(np.array([9]), np.array([0.0], dtype=np.float32), 0.0, True)
        chain = policy(Grammar("regex", "the"), **options)
        assert chain.distribution_at([nothing], 0, ids, len(ids)).token == EOS


def test_no_allowed_entry_asks_for_more() -> None:
    nothing = TopLogprobs(np.array([9]), np.array([0.0], dtype=np.float32), -1.0, True)
    with pytest.raises(NeedMoreLogprobs):
        policy(Grammar("regex", "(ab|cd)+")).distribution_at([nothing], 0, PROMPT, len(PROMPT))


def test_all_allowed_entries_are_enough() -> None:
    grammar = Grammar("regex", "(ab|cd)+")
    there = sorted(allowed(compiled(grammar, "byte level"), []))
    known = TopLogprobs(np.array(there), np.linspace(-3, -2, len(there), dtype=np.float32), -1.0, True)
    for options in ({}, {"temperature": 1.0}):
        assert policy(grammar, **options).distribution_at([known], 0, PROMPT, len(PROMPT)).token in there
