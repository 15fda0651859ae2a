"""Sampled decoding: the target's own draws (exact), or its distribution (residual), whatever drafts.

Exact mode shares its randomness, so it can be tested token for token: for one seed, the tokens are those that the
target alone would draw. Frequencies are tested too, over many seeds, against probabilities worked out from the
scripted logits by hand; the critical values are for one false alarm in 10,000, and seeds are fixed, so a test that
passes once passes always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider import Result, SpeculativeDecoder, local
from tests.support.fakes import HashRows, OracleEngine, Rows, ScriptedEngine, blend, plain
from tests.support.tiny_models import VOCAB, tiny_engine

V = 40
PROMPT = (3, 1, 4, 1, 5)
TARGET = HashRows(1, V)
FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 1.0, "no_repeat_ngram_size": 2, "min_new_tokens": 12},
)
GATES = ("always", "trigger:never", "trigger:entropy:1.5", "trigger:logprob:2")


def engine(rows: Rows, vocab_size: int = V, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(rows, vocab_size, **options)


def drafters() -> dict[str, Rows]:
    stranger = HashRows(2, V)
    return {
        "perfect": TARGET,
        "close": blend(TARGET, stranger, 0.2),
        "far": blend(TARGET, stranger, 0.6),
        "other": stranger,
    }


@pytest.mark.parametrize("options", FILTERS, ids=lambda options: "-".join(options))
def test_one_seed_gives_the_targets_own_draws(options: dict[str, Any]) -> None:
    """Whatever the drafter, the block length and the time of verification; and cloud-only; and edge-only."""
    eos = (7, 11)
    options = {"max_new_tokens": 20, **options}
    target = engine(TARGET, eos_ids=eos)
    for seed in (0, 2**63 + 5):
        wanted = plain(TARGET, PROMPT, V, eos=eos, seed=seed, **options)
        for (name, rows), (k, gate) in product(drafters().items(), zip((1, 4, "auto", 3), GATES, strict=True)):
            decoder = SpeculativeDecoder(engine(rows), local(target), k=k, gate=gate)
            result = decoder.generate(list(PROMPT), seed=seed, **options)
            assert result.token_ids == wanted, (name, k, gate)
            assert result.guarantee == "exact"
        cloud = SpeculativeDecoder(None, local(target)).generate(list(PROMPT), seed=seed, **options)
        edge = SpeculativeDecoder(target, on_loop="ignore").generate(list(PROMPT), seed=seed, **options)
        assert cloud.token_ids == edge.token_ids == wanted
    assert not target.open_slots


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**64 - 1),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=12),
    options=st.sampled_from(FILTERS),
    errors=st.sets(st.integers(0, 19)),
    k=st.sampled_from((1, 2, 3, 5, 8, "auto")),
    gate=st.sampled_from(GATES),
)
def test_any_seed_prompt_and_drafter(
    seed: int, prompt: list[int], options: dict[str, Any], errors: set[int], k: int | str, gate: str
) -> None:
    options = {"max_new_tokens": 20, "seed": seed, **options}
    wanted = plain(TARGET, prompt, V, **options)
    drafter = OracleEngine(len(prompt), wanted, V, errors)
    result = SpeculativeDecoder(drafter, local(engine(TARGET)), k=k, gate=gate).generate(prompt, **options)
    assert result.token_ids == wanted


@pytest.mark.parametrize("options", [o for o in FILTERS if {"top_k", "top_p", "min_p"} & set(o)], ids="-".join)
def test_filters_hold_on_every_row_of_a_block(options: dict[str, Any]) -> None:
    """Accepted, corrected or bonus: each token is one that transformers' own warpers leave at its position."""
    options = {name: value for name, value in options.items() if name != "repetition_penalty"}
    warpers = LogitsProcessorList([TemperatureLogitsWarper(options["temperature"])])
    if "top_k" in options:
        warpers.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        warpers.append(MinPLogitsWarper(options["min_p"]))
    close = blend(TARGET, HashRows(2, V), 0.2)
    for accept, seed in product(("exact", "residual"), range(6)):
        decoder = SpeculativeDecoder(engine(close), local(engine(TARGET)), k=3, accept=accept)
        result = decoder.generate(list(PROMPT), seed=seed, max_new_tokens=20, **options)
        assert len(set(result.sources)) == 3, "all three kinds must occur"
        for n, token in enumerate(result.token_ids):
            prefix = (*PROMPT, *result.token_ids[:n])
            left = warpers(torch.tensor([prefix]), TARGET(prefix)[None].clone())[0]
            assert left[token] > -torch.inf


def test_a_drafter_that_knows_the_draws_is_accepted_whole() -> None:
    """Shared noise: equal distributions draw equal tokens, so that temperature costs no acceptance."""
    decoder = SpeculativeDecoder(engine(TARGET), local(engine(TARGET)), k=4)
    assert decoder.generate(list(PROMPT), temperature=1.5, max_new_tokens=40).stats.acceptance_rate == 1.0


def test_transformers_models_draw_alike_too() -> None:
    verifier = local(tiny_engine("qwen2"))
    options = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 20, "repetition_penalty": 1.1}
    outputs = set()
    for seed in range(2):
        alone = SpeculativeDecoder(None, verifier).generate([17, 30], seed=seed, **options)
        for drift, k, gate in ((0.0, 5, "always"), (0.05, 3, "trigger:entropy:2")):
            decoder = SpeculativeDecoder(tiny_engine("qwen2", drift=drift), verifier, k=k, gate=gate)
            assert decoder.generate([17, 30], seed=seed, **options).token_ids == alone.token_ids
        outputs.add(tuple(alone.token_ids))
    assert len(outputs) == 2
    assert all(0 <= token < VOCAB for output in outputs for token in output)


def test_seeds_differ() -> None:
    decoder = SpeculativeDecoder(engine(blend(TARGET, HashRows(2, V), 0.3)), local(engine(TARGET)), k=3)
    outputs = {
        tuple(decoder.generate(list(PROMPT), temperature=1.0, max_new_tokens=12, seed=seed).token_ids)
        for seed in [*range(60), 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    }
    assert len(outputs) == 64


@pytest.mark.parametrize("accept", ["exact", "residual"])
def test_a_seed_is_not_changed_by_other_sessions_on_the_same_engine(accept: str) -> None:
    """Streams in lock-step on one drafter and one target, each with its own seed and settings."""
    draft, verifier = engine(blend(TARGET, HashRows(2, V), 0.4)), local(engine(TARGET))
    decoder = SpeculativeDecoder(draft, verifier, k=3, accept=accept)
    requests = [
        {"temperature": temperature, "seed": seed, "max_new_tokens": 15 + seed}
        for seed, temperature in enumerate((1.0, 0.7, 1.0, 1.5))
    ]
    alone = [decoder.generate([*PROMPT, n], **request) for n, request in enumerate(requests)]
    streams = [decoder.stream([*PROMPT, n], **request) for n, request in enumerate(requests)]
    together: dict[int, Result] = {}
    while len(together) < len(streams):
        for n, stream in enumerate(streams):
            if n not in together:
                try:
                    next(stream)
                except StopIteration as end:
                    together[n] = end.value
    assert [together[n].token_ids for n in range(4)] == [result.token_ids for result in alone]
    assert not draft.open_slots


# Frequencies ----------------------------------------------------------------------------------------------------

SEEDS = 1000
POSITIONS = 3
SMALL = HashRows(24, 3, spread=0.6)
SMALL_OTHER = HashRows(6, 3, spread=1.0)


def exact_probabilities(constrain: Callable[[tuple[int, ...], torch.Tensor], torch.Tensor], temperature: float) -> dict:
    """P(output) for all 3^POSITIONS outputs after prompt (0,), from the scripted logits."""
    table = {}
    for output in product(range(3), repeat=POSITIONS):
        p, prefix = 1.0, (0,)
        for token in output:
            p *= float(torch.softmax(constrain(prefix, SMALL(prefix)) / temperature, -1)[token])
            prefix = (*prefix, token)
        table[output] = p
    return table


def assert_frequencies(counts: Counter, table: dict) -> None:
    """Pearson's chi-square over the whole outputs, so over every position and its dependence on those before."""
    total = sum(counts.values())
    assert not set(counts) - {output for output, p in table.items() if p > 0}, "an impossible output"
    cells = [(counts[output], total * p) for output, p in table.items() if p > 0]
    assert min(wanted for _, wanted in cells) > 4, "too few seeds for the test to mean anything"
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    assert statistic < chi2.ppf(1 - 1e-4, len(cells) - 1)


def sample(draft: Rows | None, accept: str, k: int, gate: str = "always", **options: Any) -> Counter:
    verifier = local(engine(SMALL, 3))
    decoder = SpeculativeDecoder(engine(draft, 3) if draft else None, verifier, k=k, accept=accept, gate=gate)
    options = {"temperature": 1.0, "max_new_tokens": POSITIONS, **options}
    return Counter(tuple(decoder.generate([0], seed=seed, **options).token_ids) for seed in range(SEEDS))


@pytest.mark.parametrize(
    ("accept", "k", "gate"),
    [
        ("exact", 2, "always"),
        ("residual", 2, "always"),
        ("residual", 1, "trigger:never"),
    ],
)
def test_frequencies_are_the_targets(accept: str, k: int, gate: str) -> None:
    counts = sample(SMALL_OTHER, accept, k, gate)
    assert_frequencies(counts, exact_probabilities(lambda prefix, row: row, 1.0))


@pytest.mark.parametrize("accept", ["exact", "residual"])
def test_frequencies_with_constraints_and_temperature(accept: str) -> None:
    """The penalty depends on what was generated before: rows of a block must see its own earlier drafts."""

    def constrain(prefix: tuple[int, ...], row: torch.Tensor) -> torch.Tensor:
        seen = torch.tensor([token in prefix for token in range(3)])
        return torch.where(seen, torch.where(row < 0, row * 1.3, row / 1.3), row)

    counts = sample(SMALL_OTHER, accept, 2, temperature=1.4, repetition_penalty=1.3)
    assert_frequencies(counts, exact_probabilities(constrain, 1.4))


def test_the_frequency_test_can_fail() -> None:
    """The drafter's own frequencies are not the target's, and 1,000 seeds are enough to see it."""
    decoder = SpeculativeDecoder(engine(SMALL_OTHER, 3), on_loop="ignore")
    counts = Counter(
        tuple(decoder.generate([0], seed=seed, temperature=1.0, max_new_tokens=POSITIONS).token_ids)
        for seed in range(SEEDS)
    )
    with pytest.raises(AssertionError):
        assert_frequencies(counts, exact_probabilities(lambda prefix, row: row, 1.0))


def test_residual_accepts_as_often_as_the_distributions_overlap() -> None:
    """docs/design/maths.md, "Rejection sampling": acceptance 1 − TV(p, q), here at the first position and k = 1."""
    p, q = (torch.softmax(rows((0,)), -1) for rows in (SMALL, SMALL_OTHER))
    overlap = float(torch.minimum(p, q).sum())
    decoder = SpeculativeDecoder(engine(SMALL_OTHER, 3), local(engine(SMALL, 3)), k=1, accept="residual")
    accepted = sum(
        decoder.generate([0], seed=seed, temperature=1.0, max_new_tokens=1).stats.accepted for seed in range(SEEDS)
    )
    assert abs(accepted / SEEDS - overlap) < 4 * (overlap * (1 - overlap) / SEEDS) ** 0.5


def test_exact_accepts_at_least_what_shared_noise_promises() -> None:
    """docs/design/maths.md, "Shared randomness": at least (1 − TV)/(1 + TV), well above Σ p·q."""
    p, q = (torch.softmax(rows((0,)), -1) for rows in (SMALL, SMALL_OTHER))
    tv = 0.5 * float((p - q).abs().sum())
    decoder = SpeculativeDecoder(engine(SMALL_OTHER, 3), local(engine(SMALL, 3)), k=1)
    accepted = sum(
        decoder.generate([0], seed=seed, temperature=1.0, max_new_tokens=1).stats.accepted for seed in range(SEEDS)
    )
    assert accepted / SEEDS > (1 - tv) / (1 + tv) - 4 * (0.25 / SEEDS) ** 0.5
