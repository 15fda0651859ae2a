"""The best N entries of a row settle its token, or say that they do not: they never guess."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.errors import DecodingError
from outrider.sampling.acceptance import AcceptanceRule, Exact, RejectionSampling, verify_block
from outrider.sampling.logits_processors import LogitsProcessors
from outrider.sampling.policy import Policy
from outrider.sampling.sampler import Distribution, SamplingParams, Support, filter_logits
from outrider.sampling.top_logprobs import NeedMoreLogprobs, TopLogprobs

INF = math.inf
GREEDY = SamplingParams()
PENALTIES = (0.5, 0.7, 0.9, 1.1, 1.5, 2.0)

samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0, 1.3, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 3, 5, 8, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.8, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@dataclass(frozen=True)
class Case:
    """logits: float32 [V]. count: N. extra: the token that is known beside the best N."""

    logits: Tensor
    policy: Policy
    ids: list[int]
    count: int
    extra: int

    @property
    def whole(self) -> Distribution:
        return self.policy.distribution(self.logits, self.ids, len(self.ids))

    def known(self, normalised: bool = False) -> Distribution:
        return distribution(part(self.logits, self.count, self.extra, normalised), self.policy, self.ids)


def random_row(size: int, seed: int, scale: float, step: float) -> Tensor:
    """float32 [size]; multiples of `step`, so that many are equal, or of nothing where it is 0."""
    row = np.random.default_rng(seed).normal(0.0, scale, size)
    return torch.from_numpy((np.round(row / step) * step if step else row).astype(np.float32))


@st.composite
def cases(draw: st.DrawFn, penalties: tuple[float, ...] = (1.0, 1.0, *PENALTIES), normalised: bool = False) -> Case:
    size = draw(st.integers(5, 60))
    tokens = st.integers(0, size - 1)
    row = random_row(
        size, draw(st.integers(0, 2**32)), draw(st.sampled_from([0.3, 2.0, 6.0])), draw(st.sampled_from([0, 0.1, 1.0]))
    )
    row = torch.log_softmax(row, -1) if normalised else row + draw(st.sampled_from([0.0, 5.0, -5.0]))
    ids = draw(st.lists(tokens, min_size=1, max_size=8))
    constraints = LogitsProcessors(
        draw(st.sampled_from(penalties)),
        draw(st.sampled_from([0, 0, 1, 2])),
        draw(st.sampled_from([0, 0, 3])),
        tuple(draw(st.lists(tokens, max_size=2))),
        tuple(draw(st.lists(tokens, max_size=5)) + row.topk(draw(st.integers(0, 4))).indices.tolist()),
        prompt_length=len(ids) - draw(st.integers(0, 1)),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -0.4, -2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0, -1.0])),
        logit_bias=tuple(
            draw(st.dictionaries(tokens, st.floats(-10, 10), max_size=draw(st.sampled_from([0, 4])))).items()
        ),
    )
    count = draw(st.integers(1, size + 2))
    return Case(row, Policy(constraints, draw(samplings), size), ids, count, draw(tokens))


def part(row: Tensor, count: int, extra: int | None = None, normalised: bool = False) -> TopLogprobs:
    """The best `count` entries, and one more."""
    best = torch.topk(row, min(count, len(row)))
    floor = float(best.values[-1]) if count < len(row) else -INF
    ids = best.indices
    if extra is not None and extra not in ids.tolist():
        ids = torch.cat([ids, torch.tensor([extra])])
    return TopLogprobs(ids.numpy(), row[ids].numpy(), floor, normalised)


def policy(sampling: SamplingParams = GREEDY, size: int = 60, **constraints: Any) -> Policy:
    return Policy(LogitsProcessors(**constraints), sampling, size)


def distribution(row: TopLogprobs, chosen: Policy, ids: list[int]) -> Distribution:
    found = chosen.distribution_at([row], 0, ids, len(ids))
    assert isinstance(found, Distribution)
    return found


def choice(found: Distribution) -> int | None:
    try:
        return found.token
    except DecodingError:
        return None


# Never a guess --------------------------------------------------------------------------------------------------


def same_or_uncovered(case: Case, normalised: bool = False) -> None:
    try:
        known = case.known(normalised)
    except NeedMoreLogprobs:
        assert case.count < len(case.logits)
        return
    whole = case.whole
    assert choice(known) == choice(whole)
    if choice(whole) is None:
        return
    assert known.support.ids.tolist() == whole.support.ids.tolist()
    torch.testing.assert_close(known.support.logp, whole.support.logp, rtol=0, atol=1e-5)
    if case.policy.sampling.greedy:
        assert known.top2_margin <= whole.top2_margin + 1e-5
    else:
        assert known.top2_margin == pytest.approx(whole.top2_margin, abs=1e-4)


@settings(max_examples=700)
@given(cases())
def test_the_same_as_the_whole_row_or_uncovered(case: Case) -> None:
    same_or_uncovered(case)


@settings(max_examples=350)
@given(cases((1.0,), normalised=True))
def test_the_same_for_log_probabilities(case: Case) -> None:
    same_or_uncovered(case, normalised=True)


def uncovered(row: list[float] | Tensor, count: int, chosen: Policy, ids: tuple[int, ...] = (), **kind: bool) -> bool:
    try:
        distribution(part(torch.as_tensor(row), count, **kind), chosen, list(ids))
    except NeedMoreLogprobs:
        return True
    return False


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(1.0, top_k=1), SamplingParams(1.0, top_p=0.1), SamplingParams(1.0, min_p=1.0)]
)
def test_a_tie_with_what_may_be_missing_is_uncovered(sampling: SamplingParams) -> None:
    row = [2.0, 2.0, 2.0, 1.0, 0.0]
    assert uncovered(row, 2, policy(sampling, 5))
    assert uncovered(row, 1, policy(sampling, 5))
    assert not uncovered(row, 5, policy(sampling, 5))


@pytest.mark.parametrize("temperature", [0.3, 0.6, 0.7, 0.9, 1.1, 1.3, 1.7])
@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.4}])
def test_no_rounding_lifts_an_entry_above_its_equals(temperature: float, options: dict[str, Any]) -> None:
    """Servers that compute in bfloat16 send many equal values; divided by a temperature, they are equal still."""
    for tied in np.arange(-8.0, 8.0, 0.3125):
        row = torch.tensor([tied + 0.125] + [tied] * 6, dtype=torch.float32)
        for count in (3, 5):
            assert uncovered(row, count, policy(SamplingParams(temperature, **options), 7))


@pytest.mark.parametrize("seed", range(5))
def test_of_equals_at_the_end_of_a_nucleus_the_same_stay(seed: int) -> None:
    """All of the nucleus is known here; a sort that is not stable may still take others of its equals."""
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    row = torch.cat([torch.full((30,), 2.0), torch.full((30,), -9.0)])[order]
    same_or_uncovered(Case(row, policy(SamplingParams(1.0, top_p=0.42, seed=seed)), [], 34, 0))


@pytest.mark.parametrize("penalty", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("floor", [1.0, 1.7, 3.3, -1.0, -2.3])
def test_a_missing_entry_that_a_penalty_lifts_to_a_tie_is_uncovered(penalty: float, floor: float) -> None:
    value, factor = np.float32(floor), np.float32(penalty)
    row = torch.from_numpy(np.array([value, value, value * factor if floor < 0 else value / factor]))
    chosen = policy(size=3, repetition_penalty=penalty)
    assert chosen.distribution(row, [0], 1).token == 0
    known = TopLogprobs(np.array([1, 2]), row[1:].numpy(), float(value))  # token 0 is missing, and was said before
    with pytest.raises(NeedMoreLogprobs):
        distribution(known, chosen, [0])


def test_a_missing_entry_counts_as_penalised_where_the_prefix_has_it() -> None:
    row = [3.0, 2.0, 1.9, 0.0]
    assert not uncovered(row, 2, policy(size=4))
    assert uncovered(row, 2, policy(size=4, repetition_penalty=0.6), (3,))  # a missing 2.0 would come to 3.33
    assert not uncovered(row, 2, policy(size=4, repetition_penalty=0.6))
    assert uncovered(row, 2, policy(size=4, repetition_penalty=1.6), (0,))  # the best one falls to 1.875
    assert not uncovered(row, 2, policy(size=4, repetition_penalty=1.2), (0,))
    low = [-1.0, -2.0, -2.1, -9.0]
    assert uncovered(low, 2, policy(size=4, repetition_penalty=0.4), (3,))  # a missing −2.0 would come to −0.8
    assert not uncovered(low, 2, policy(size=4, repetition_penalty=0.6), (3,))


def test_a_missing_entry_counts_with_its_own_bias() -> None:
    """The best three are tokens 0, 1 and 2: a missing token is at most 1.9 before its bias."""
    row = [3.0, 2.0, 1.9, 0.0, -0.1, -0.2]
    for bias, is_uncovered in ((-100.0, False), (1.0, False), (1.2, True), (100.0, True)):
        assert uncovered(row, 3, policy(size=6, logit_bias=((4, bias),))) == is_uncovered
    assert not uncovered(row, 6, policy(size=6, logit_bias=((4, 100.0),)))
    assert not uncovered(row, 3, policy(size=6, logit_bias=((4, 5.0),), banned_ids=(4,)))  # banned after all
    assert not uncovered(row, 3, policy(size=6, logit_bias=((0, -1.05),)))  # 1.95 and 2.0 are known
    assert uncovered(row, 3, policy(size=6, logit_bias=((0, -1.2), (1, -1.0))))


def test_a_missing_entry_counts_with_its_own_penalty() -> None:
    row = [3.0, 2.0, 1.9, 0.0, -0.1, -0.2]
    for penalties, is_uncovered in (({"frequency_penalty": -0.5}, False), ({"frequency_penalty": -0.6}, True)):
        assert uncovered(row, 3, policy(size=6, **penalties), (4, 4)) == is_uncovered
    assert uncovered(row, 3, policy(size=6, presence_penalty=-1.2), (4, 4))
    assert not uncovered(row, 3, policy(size=6, presence_penalty=-1.2, prompt_length=2), (4, 4))
    assert not uncovered(row, 3, policy(size=6, presence_penalty=2.0, frequency_penalty=2.0), (4, 5))


def test_log_probabilities_with_a_raised_entry_still_bound_a_nucleus() -> None:
    """Token 59 is missing with 2⁻⁵⁹ of the mass, or as much as token 11; a bias of 7 makes that 2⁻² or so."""
    chosen = policy(SamplingParams(1.0, top_p=0.7))
    assert not uncovered(HALVES, 12, chosen, normalised=True)
    raised = policy(SamplingParams(1.0, top_p=0.7), logit_bias=((59, 7.0),))
    assert uncovered(HALVES, 12, raised, normalised=True)
    assert not uncovered(HALVES, 24, raised, normalised=True)


def test_the_position_that_needs_more_is_told() -> None:
    rows = [part(random_row(9, seed, 2.0, 0), 2) for seed in (1, 2)] + [part(torch.zeros(9), 2)]
    drafts = [int(row.ids[0]) for row in rows[:2]]
    with pytest.raises(NeedMoreLogprobs) as lack:
        verify_block(1, [4, 4, 4, *drafts], 3, rows, policy(size=9), Exact())
    assert lack.value.position == 5


def test_bans_use_up_what_is_known() -> None:
    row = [5.0, 4.0, 3.0, 2.0, 1.0]
    assert uncovered(row, 2, policy(size=5, banned_ids=(0,)))
    assert not uncovered(row, 3, policy(size=5, banned_ids=(0,)))
    assert uncovered(row, 3, policy(size=5, min_new_tokens=1, eos_ids=(0, 1)))
    assert uncovered(row, 4, policy(SamplingParams(1.0, top_k=3), 5, banned_ids=(0,)))
    assert not uncovered(row, 4, policy(SamplingParams(1.0, top_k=2), 5, banned_ids=(0,)))


def test_padding_is_not_chosen_and_not_missed() -> None:
    """Ids from vocab_size on may be among the best, and are no tokens."""
    row = torch.tensor([1.0, 3.0, 2.0, 9.0, 8.0])
    assert distribution(part(row, 4), policy(size=3), []).token == 1
    with pytest.raises(NeedMoreLogprobs):
        distribution(part(row, 2), policy(size=3), [])


def test_where_all_is_known_and_banned_nothing_can_be_chosen() -> None:
    row = torch.tensor([1.0, 2.0])
    with pytest.raises(DecodingError):
        _ = distribution(part(row, 2), policy(size=2, banned_ids=(0, 1)), []).token


def test_a_whole_vocabulary_is_never_settled_by_a_part() -> None:
    assert uncovered(random_row(60, 1, 2.0, 0), 59, policy(SamplingParams(1.0)))


# Of use ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(cases(), st.integers(0, 9))
def test_all_entries_always_settle(case: Case, more: int) -> None:
    assert replace(case, count=len(case.logits) + more).known().logits.equal(case.whole.logits)


@settings(max_examples=150)
@given(st.integers(5, 60), st.integers(0, 2**32), st.sampled_from([0, 0.5]), st.integers(2, 70))
def test_two_entries_settle_a_greedy_choice(size: int, seed: int, step: float, count: int) -> None:
    row = random_row(size, seed, 2.0, step)
    first, second = row.topk(2).values
    assert uncovered(row, 2, policy(size=size)) == bool(first == second)
    if first > second:
        found = distribution(part(row, count), policy(size=size), [])
        assert found.top2_margin == pytest.approx(float(first - second), abs=1e-5)


@settings(max_examples=200)
@given(samplings, st.integers(0, 2**32), st.integers(1, 55), st.integers(1, 5))
def test_one_entry_more_settles_top_k(sampling: SamplingParams, seed: int, top_k: int, more: int) -> None:
    row = random_row(60, seed, 2.0, 0.01)
    best = row.topk(60).values
    if best[top_k - 1] > best[top_k]:
        sampling = replace(sampling, top_k=top_k, temperature=sampling.temperature or 0.8)
        assert not uncovered(row, top_k + more, policy(sampling))


HALVES = torch.log(0.5 ** torch.arange(1.0, 61.0))  # log-probabilities


@pytest.mark.parametrize("size", range(1, 7))
def test_a_nucleus_well_inside_what_is_known_is_settled(size: int) -> None:
    """Of 12 entries, 2⁻¹² of the mass is missing, or 48 × 2⁻¹² as far as logits tell."""
    row = HALVES[torch.randperm(60, generator=torch.Generator().manual_seed(size))]
    chosen = policy(SamplingParams(1.0, top_p=1.0 - 0.75 * 2.0 ** (1 - size)))
    assert len(filter_logits(row, chosen.sampling).ids) == size
    assert not uncovered(row, 12, chosen, normalised=True)
    assert uncovered(row, 12, chosen) == (size == 6)
    assert uncovered(row, size, chosen, normalised=True)


def test_a_known_entry_counts_as_known_whatever_its_id_but_padding_does_not() -> None:
    """One token of three is missing: with id 0 taken for missing as well, the mass beside the best would be doubled."""
    row, chosen = np.log(np.array([0.6, 0.2], np.float32)), policy(SamplingParams(1.0, top_p=0.55), size=3)
    known = TopLogprobs(np.array([0, 1]), row, float(row[-1]))
    assert distribution(known, chosen, []).support.ids.tolist() == [0]
    beyond = TopLogprobs(np.array([0, 1, -1, 3]), np.append(row, row[-1:].repeat(2)), float(row[-1]))
    assert distribution(beyond, chosen, []).support.ids.tolist() == [0]


@pytest.mark.parametrize(("temperature", "settled"), [(0.5, True), (0.8, True), (1.0, True), (2.0, False)])
def test_temperatures_up_to_one_keep_what_is_missing_small(temperature: float, settled: bool) -> None:
    chosen = policy(SamplingParams(temperature, top_p=0.9))
    assert uncovered(HALVES, 12, chosen, normalised=True) != settled


def test_min_p_is_settled_where_its_threshold_is_above_the_floor() -> None:
    row = torch.arange(60, 0, -1.0)
    chosen = policy(SamplingParams(1.0, min_p=math.exp(-4.5)))
    assert len(filter_logits(row, chosen.sampling).ids) == 5
    assert not uncovered(row, 6, chosen)
    assert uncovered(row, 5, chosen)


# Verdicts -------------------------------------------------------------------------------------------------------


JUDGED: list[tuple[AcceptanceRule, SamplingParams, dict[str, Any], int]] = [
    (Exact(), GREEDY, {}, 2),
    (Exact(), GREEDY, {"repetition_penalty": 1.3, "no_repeat_ngram": 2}, 8),
    (Exact(), GREEDY, {"repetition_penalty": 0.8, "banned_ids": (1, 2)}, 20),
    (Exact(), SamplingParams(0.8, top_k=6), {"min_new_tokens": 2, "eos_ids": (5,)}, 8),
    (Exact(), SamplingParams(0.7, top_p=0.8), {}, 24),
    (Exact(), SamplingParams(1.2, min_p=0.2), {}, 20),
    (RejectionSampling(), GREEDY, {}, 2),
    (RejectionSampling(), SamplingParams(0.9, top_k=8, top_p=0.9), {}, 10),
    (RejectionSampling(), SamplingParams(1.0, top_p=0.5), {}, 30),
]


@pytest.mark.parametrize(("accept", "sampling", "constraints", "count"), JUDGED)
def test_verdicts_are_those_of_whole_rows(
    accept: AcceptanceRule, sampling: SamplingParams, constraints: dict[str, Any], count: int
) -> None:
    size, k, settled, lengths = 40, 4, 0, set()
    for seed in range(40):
        rows = torch.stack([random_row(size, seed * 10 + i, 2.0, 0.001) for i in range(k + 1)])
        chosen = policy(replace(sampling, seed=seed), size, prompt_length=2, **constraints)
        ids, q = [3, 3], []
        for i in range(k):  # a drafter whose rows are a little off
            off = chosen.distribution(rows[i] + random_row(size, seed * 10 + i + 5000, 0.3, 0), ids, len(ids))
            q.append(Support(off.support.ids, off.support.logp))
            ids.append(off.token)
        normalised = not constraints
        known = torch.log_softmax(rows, -1) if normalised else rows
        parts = [part(row, count, normalised=normalised) for row in known]
        for noise in (0.0, 0.2) if normalised else (0.0,):
            expected = verify_block(1, ids, 2, known, chosen, accept, q, noise)
            lengths.add(expected.accepted)
            try:
                found = verify_block(1, ids, 2, parts, chosen, accept, q, noise)
            except NeedMoreLogprobs:
                continue
            assert found == expected
            settled += noise == 0.0
    assert settled >= 25
    assert {0, 4} <= lengths
