"""Choosing for many rows at once: the tokens that the policy chooses row by row, the scores of transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import GenerationSettings
from outrider.decoding.gate import compute_signals
from outrider.errors import DecodingError
from outrider.sampling.batched_sampler import (
    RowContext,
    batched_signals,
    process_logits,
    row_context,
    sample_batch,
    to_sampled_tokens,
    to_signals,
)
from outrider.sampling.policy import Policy

V, PADDED = 17, 20


def policy(prompt_length: int, **values: object) -> Policy:
    return Policy.build(GenerationSettings.build(values), (3, 19), V, prompt_length)


def context(policies: list[Policy], prefixes: list[list[int]]) -> RowContext:
    entries = torch.tensor([row_context(p, len(ids)) for p, ids in zip(policies, prefixes, strict=True)])
    longest = max(map(len, prefixes)) + 3
    stale = np.random.default_rng(0).integers(0, PADDED, (len(prefixes), longest))  # what a roll-back left behind
    history = torch.from_numpy(stale)
    for row, ids in enumerate(prefixes):
        history[row, : len(ids)] = torch.tensor(ids)
    return RowContext(entries[:, 0], entries[:, 1], entries[:, 2], history.to(torch.int32))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Policy], list[list[int]], torch.Tensor]:
    prefixes = draw(st.lists(st.lists(st.integers(0, PADDED - 1), min_size=1, max_size=24), min_size=1, max_size=4))
    values: dict[str, object] = {
        "repetition_penalty": (penalty := draw(st.sampled_from([1.0, 1.3, 0.7]))),
        "repetition_window": draw(st.sampled_from([0, 1, 3, 8, 64])) if penalty != 1.0 else 0,
        "no_repeat_ngram_size": draw(st.integers(0, 4)),
        "min_new_tokens": draw(st.integers(0, 8)),
        "suppress_tokens": draw(st.lists(st.integers(0, 6), max_size=2)),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.5, -0.3, 1.9])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.7, -2.0])),
        "logit_bias": draw(st.dictionaries(st.integers(0, PADDED), st.floats(-100, 100), max_size=3)),
    }
    if draw(st.booleans()):
        values["temperature"] = draw(st.sampled_from([0.3, 1.0, 2.0]))
        values["top_k"] = draw(st.sampled_from([0, 1, 5]))
        values["top_p"] = draw(st.sampled_from([1.0, 0.8]))
        values["min_p"] = draw(st.sampled_from([0.0, 0.1]))
    seeds = [draw(st.integers(0, 2**64 - 1)) for _ in prefixes]
    policies = [
        policy(draw(st.integers(1, len(ids))), seed=seed, **values) for ids, seed in zip(prefixes, seeds, strict=True)
    ]
    rows = np.random.default_rng(draw(st.integers(0, 2**32))).normal(scale=2.0, size=(len(prefixes), PADDED))
    return policies, prefixes, torch.from_numpy(rows).float()


@given(cases())
@settings(max_examples=400, deadline=None)
def test_the_choices_of_the_policy(case: tuple[list[Policy], list[list[int]], torch.Tensor]) -> None:
    policies, prefixes, rows = case
    before = rows.clone()
    kind = policies[0].batch_key
    assert all(other.batch_key == kind for other in policies)  # seeds and prompts do not keep rows apart
    chosen = sample_batch(rows, kind, context(policies, prefixes)).tolist()
    assert torch.equal(rows, before)
    for got, own, ids, row in zip(chosen, policies, prefixes, rows, strict=True):
        expected = own.distribution(row, ids, len(ids))
        if not (expected.logits > -torch.inf).any():
            with pytest.raises(DecodingError, match=f"position {len(ids)}"):
                to_sampled_tokens([got])[0].validated(len(ids))
            continue
        pick = to_sampled_tokens([got])[0].validated(len(ids))
        assert pick.token == expected.token
        assert (
            math.isclose(pick.top2_margin, expected.top2_margin, rel_tol=1e-4, abs_tol=1e-4)
            or pick.top2_margin == expected.top2_margin
        )


@given(
    st.lists(st.integers(0, V - 1), min_size=1, max_size=40),
    st.sampled_from([1.0, 1.2, 0.8, 2.0]),
    st.integers(0, 5),
    st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_the_scores_of_transformers_processors(ids: list[int], penalty: float, ngram: int, seed: int) -> None:
    row = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, PADDED))).float()
    expected = row[:, :V]
    if penalty != 1.0:
        expected = tf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), expected)
    if ngram:
        expected = tf.NoRepeatNGramLogitsProcessor(ngram)(torch.tensor([ids]), expected)
    own = policy(1, repetition_penalty=penalty, no_repeat_ngram_size=ngram)
    got = process_logits(row, own.batch_key, context([own], [ids]))
    assert torch.allclose(got, expected, rtol=1e-6, atol=0)


def test_each_draft_of_a_block_counts_for_those_behind_it() -> None:
    """One session's rows differ in length only; the history is the same for all."""
    ids = [1, 2, 1, 2, 1]
    own = policy(1, no_repeat_ngram_size=2)
    rows = torch.zeros(3, PADDED)
    rows[:, 2], rows[:, 1], rows[:, 7] = 3.0, 2.0, 1.0
    prefixes = [ids[:2], ids[:3], ids[:4]]
    chosen = sample_batch(rows, own.batch_key, context([own] * 3, prefixes))[:, 0].tolist()
    assert chosen == [2, 1, 2]  # after 1 2: free; after 1 2 1: 2 is banned; after 1 2 1 2: 1 is banned


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, PADDED - 1))
def test_the_signals_of_the_gate(seed: int, temperature: float, token: int) -> None:
    row = torch.from_numpy(np.random.default_rng(seed).normal(scale=3, size=(1, PADDED))).float()
    got = to_signals(batched_signals(row, torch.tensor([[token]]), temperature)[0].tolist())
    expected = compute_signals(row[0], token, temperature)
    for name in ("entropy", "margin", "maxprob", "logprob"):
        assert math.isclose(getattr(got, name), getattr(expected, name), rel_tol=1e-4, abs_tol=1e-5)


def test_nan_and_nothing_left_are_named() -> None:
    own = policy(1)
    rows = torch.zeros(2, V)
    rows[0, 4] = torch.nan
    rows[1] = -torch.inf
    chosen = sample_batch(rows, own.batch_key, context([own] * 2, [[1], [1]])).tolist()
    for row in chosen:
        with pytest.raises(DecodingError, match="position 1"):
            to_sampled_tokens([row])[0].validated(1)
