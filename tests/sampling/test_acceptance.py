"""From drafts and the target's rows to a verdict; lossless rules keep the target's distribution, to the last draw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from outrider.errors import DecodingError, SettingsError
from outrider.sampling.acceptance import (
    AcceptanceRule,
    Exact,
    Margin,
    Rank,
    RejectionSampling,
    Typical,
    Verdict,
    count_disagreements,
    parse_acceptance_rule,
    verify_block,
    verify_sampled,
)
from outrider.sampling.logits_processors import LogitsProcessors
from outrider.sampling.policy import Policy
from outrider.sampling.sampler import Distribution, SampledRows, SamplingParams, Support, filter_logits

INF = math.inf
VOCAB = 4
PROMPT = [3, 3]


GREEDY = SamplingParams()


def policy(sampling: SamplingParams = GREEDY, vocab: int = VOCAB, **constraints: object) -> Policy:
    return Policy(LogitsProcessors(prompt_length=len(PROMPT), **constraints), sampling, vocab)  # type: ignore[arg-type]


def peaks(*best: int) -> Tensor:
    """Rows whose argmax is, in turn, each of `best`; every other token trails by 5."""
    return torch.stack([torch.where(torch.arange(VOCAB) == token, 5.0, 0.0) for token in best])


def verdict(drafts: list[int], rows: Tensor, accept: AcceptanceRule | None = None, **more: object) -> Verdict:
    chosen = more.pop("policy", policy())
    return verify_block(7, PROMPT + drafts, len(PROMPT), rows, chosen, accept or Exact(), **more)  # type: ignore[arg-type]


# Exact, greedy --------------------------------------------------------------------------------------------------

TARGET = (0, 1, 2, 1, 0, 2)  # what the target itself would say, five drafts and the bonus


@pytest.mark.parametrize("accepted", [0, 1, 2, 4])
def test_the_first_difference_ends_the_acceptance(accepted: int) -> None:
    drafts = list(TARGET[:5])
    drafts[accepted] = 3
    assert verdict(drafts, peaks(*TARGET)) == Verdict(7, accepted, TARGET[accepted])


def test_a_fully_accepted_block_earns_a_bonus() -> None:
    assert verdict(list(TARGET[:5]), peaks(*TARGET)) == Verdict(7, 5, TARGET[5])


def test_without_drafts_the_verdict_is_the_targets_token() -> None:
    for accept in (Exact(), RejectionSampling(), Rank(2), Margin(1.0), Typical(0.1)):
        assert verdict([], peaks(2), accept, q=()) == Verdict(7, 0, 2)


@pytest.mark.parametrize("accept", [Exact(), Rank(1), Margin(0.5), Typical(0.9)])
def test_rows_after_the_first_rejection_do_not_matter(accept: AcceptanceRule) -> None:
    drafts = [0, 1, 3, 1, 0]
    rows = peaks(*TARGET)
    garbage = rows.clone()
    garbage[3:] = torch.nan
    assert verdict(drafts, rows, accept) == verdict(drafts, garbage, accept) == Verdict(7, 2, 2)


def test_rows_are_constrained_by_their_own_prefix() -> None:
    """min_new_tokens 3: the EOS is banned at offsets 0 to 2 of the first block, allowed at 3."""
    eos = 0
    early = policy(min_new_tokens=3, eos_ids=(eos,))
    rows = peaks(*[eos] * 6) + torch.tensor([0.0, 1.0, 0.0, 0.0])  # second best: token 1
    assert verdict([1, 1, 1, eos, 1], rows, policy=early) == Verdict(7, 4, eos)
    assert verdict([1, 1, eos, eos, 1], rows, policy=early) == Verdict(7, 2, 1)


def test_earlier_drafts_of_the_block_count_for_the_n_gram_ban() -> None:
    rows = peaks(0, 1, 0, 1, 1) + torch.tensor([0.0, 0.0, 1.0, 0.0])  # second best: token 2
    assert verdict([0, 1, 0, 1], rows, policy=policy(no_repeat_ngram=2)) == Verdict(7, 3, 2)
    assert verdict([0, 1, 0, 1], rows) == Verdict(7, 4, 1)


# Exact, sampled -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.lists(st.floats(-3, 3, width=32), min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=5),
    st.data(),
)
def test_sampled_verdicts_are_the_draws_of_the_target_alone(
    seed: int, raw: list[list[float]], data: st.DataObject
) -> None:
    rows, sampled = torch.tensor(raw), SamplingParams(0.9, top_k=3, seed=seed)
    alone = [Distribution(row, sampled, len(PROMPT) + i).token for i, row in enumerate(rows)]
    k = len(raw) - 1
    drafts = [data.draw(st.sampled_from([alone[i], alone[i], 0])) for i in range(k)]
    agreed = next((i for i in range(k) if drafts[i] != alone[i]), k)
    assert verdict(drafts, rows, policy=policy(sampled)) == Verdict(7, agreed, alone[agreed])


# Residual -------------------------------------------------------------------------------------------------------

P = torch.tensor([0.6, 0.3, 0.1])
AFTER = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]])  # p of the second token, given the first
Q = torch.tensor([0.1, 0.2, 0.7])  # a drafter that thinks very differently
JOINT = (P[:, None] * AFTER).flatten()


def drafter_of(q: Tensor, reported: Tensor) -> Callable[[SamplingParams, int], tuple[int, Support]]:
    def draft(sampled: SamplingParams, position: int) -> tuple[int, Support]:
        token = filter_logits(q.log(), sampled).draw(sampled.seed, position)
        return token, filter_logits(reported.log(), sampled)

    return draft


def two_tokens(
    seed: int, draft: Callable[[SamplingParams, int], tuple[int, Support]], accept: AcceptanceRule
) -> tuple[int, int]:
    """Speculative decoding of two tokens with one draft a round: correction or bonus included."""
    sampled, out = SamplingParams(1.0, seed=seed), []
    while len(out) < 2:
        at = len(PROMPT) + len(out)
        token, q = draft(sampled, at)
        first = P if not out else AFTER[out[0]]
        rows = torch.stack([first, AFTER[token]]).log()
        found = verify_block(1, [*PROMPT, *out, token], at, rows, policy(sampled, vocab=3), accept, [q])
        out += [token] * found.accepted + [found.next_token]
    return out[0], out[1]


def fit(draft: Callable[[SamplingParams, int], tuple[int, Support]], accept: AcceptanceRule, size: int = 800) -> float:
    """The p-value of the joint distribution of the first two tokens against the target's own."""
    found = Counter(two_tokens(seed, draft, accept) for seed in range(size))
    expected = JOINT.double() / JOINT.double().sum() * size
    return chisquare([found[a, b] for a in range(3) for b in range(3)], expected.tolist()).pvalue


def test_residual_acceptance_keeps_the_targets_distribution() -> None:
    assert fit(drafter_of(Q, Q), RejectionSampling()) > 1e-4


@pytest.mark.parametrize(
    ("p", "q"), [((0.3, 0.6, 0.1), (0.5, 0.05, 0.45)), ((0.3, 0.65, 0.05), (0.02, 0.48, 0.5))], ids=["coin", "residue"]
)
def test_draft_coin_and_residue_are_independent(p: tuple[float, ...], q: tuple[float, ...]) -> None:
    """Where they shared the drafter's noise, the first pair would show it for the coin, the second for the residue."""
    size, found = 1_500, Counter()
    q_support = filter_logits(torch.tensor(q).log(), SamplingParams(1.0))
    for seed in range(size):
        at = Distribution(torch.tensor(p).log(), SamplingParams(1.0, seed=seed), 5)
        d = q_support.draw(seed, 5)
        found[
            d if RejectionSampling().accepts(at, d, q_support) else RejectionSampling().replacement_token(at, q_support)
        ] += 1
    assert chisquare([found[token] for token in range(3)], [share * size for share in p]).pvalue > 1e-3


def test_residual_acceptance_keeps_it_with_a_cut_q_that_was_drawn_from() -> None:
    def draft(sampled: SamplingParams, position: int) -> tuple[int, Support]:
        cut = filter_logits(Q.log(), sampled).top_k(2)
        return cut.draw(sampled.seed, position), cut

    assert fit(draft, RejectionSampling()) > 1e-4


def test_a_q_other_than_the_one_drawn_from_is_biased() -> None:
    """The classic bug, and proof that the two tests above would notice it."""
    assert fit(drafter_of(Q, torch.tensor([0.2, 0.3, 0.5])), RejectionSampling()) < 1e-8


def test_a_greedy_drafter_treated_as_sampled_is_biased() -> None:
    def draft(sampled: SamplingParams, position: int) -> tuple[int, Support]:
        return int(Q.argmax()), filter_logits(Q.log(), sampled)

    assert fit(draft, RejectionSampling()) < 1e-8


def test_exact_acceptance_keeps_the_distribution_too() -> None:
    assert fit(drafter_of(Q, Q), Exact()) > 1e-4


def test_residual_accepts_more_than_exact_and_as_much_as_theory_says() -> None:
    """docs/design/maths.md, "Rejection sampling": acceptance is 1 − TV(p, q)."""
    size, draft = 800, drafter_of(Q, Q)
    accepted = {}
    for accept in (RejectionSampling(), Exact()):
        accepted[str(accept)] = 0
        for seed in range(size):
            sampled = SamplingParams(1.0, seed=seed)
            token, q = draft(sampled, 2)
            p = Distribution(P.log(), sampled, 2)
            accepted[str(accept)] += accept.accepts(p, token, q)
    tv = float((P - Q).abs().sum() / 2)
    assert accepted["residual"] / size == pytest.approx(1 - tv, abs=0.06)
    assert accepted["residual"] > accepted["exact"]
    assert accepted["exact"] / size > (1 - tv) / (1 + tv) - 0.06


def test_a_draft_outside_the_targets_support_is_rejected() -> None:
    sampled = SamplingParams(1.0, top_k=2)
    q = filter_logits(Q.log(), SamplingParams(1.0))
    for seed in range(50):
        p = Distribution(P.log(), SamplingParams(1.0, top_k=2, seed=seed), 2)
        assert not RejectionSampling().accepts(p, 2, q)
        assert RejectionSampling().replacement_token(p, q) in (0, 1)
    assert filter_logits(P.log(), sampled).probability(2) == 0.0


def test_greedy_residual_is_greedy_exact() -> None:
    drafts, rows = [0, 1, 3], peaks(*TARGET[:4])
    q = [Support(torch.tensor([token]), torch.zeros(1)) for token in drafts]
    assert verdict(drafts, rows, RejectionSampling(), q=q) == Verdict(7, 2, 2)


def test_equal_p_and_q_leave_no_residue_but_a_token() -> None:
    p = Distribution(P.log(), SamplingParams(1.0, seed=3), 2)
    assert RejectionSampling().replacement_token(p, p.support) in (0, 1, 2)


@pytest.mark.parametrize("q", [None, [], [filter_logits(P.log(), SamplingParams(1.0))] * 2])
def test_residual_without_its_q_is_refused(q: list[Support] | None) -> None:
    with pytest.raises(SettingsError, match="the distribution that each draft was drawn from"):
        verdict([0], peaks(0, 1), RejectionSampling(), q=q)


# Tolerant rules -------------------------------------------------------------------------------------------------

ROW = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))


def tolerated(accept: AcceptanceRule, row: Tensor = ROW) -> set[int]:
    return {d for d in range(VOCAB) if verdict([d], row.repeat(2, 1), accept).accepted}


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (Rank(1), {0}),
        (Rank(2), {0, 1}),
        (Rank(20), {0, 1, 2, 3}),
        (Margin(0.0), {0}),
        (Margin(0.52), {0, 1}),  # log 0.5 − log 0.3 = 0.511
        (Margin(0.50), {0}),
        (Margin(1.21), {0, 1, 2}),  # log 0.5 − log 0.15 = 1.204
        (Typical(0.2), {0, 1, 2}),  # H = 1.142: √0.2·e^−H = 0.143
        (Typical(0.02), {0, 1, 2, 3}),  # min(0.02, 0.045)
        (Typical(0.25), {0, 1}),  # 0.160
    ],
)
def test_tokens_accepted_by_each_rule(accept: AcceptanceRule, expected: set[int]) -> None:
    assert tolerated(accept) == expected


def test_ties_share_a_rank() -> None:
    assert tolerated(Rank(1), torch.tensor([[1.0, 1.0, 0.0, 0.0]])) == {0, 1}


def test_margins_are_at_the_sampling_temperature() -> None:
    p = Distribution(torch.tensor([2.0, 1.0, -9.0]), SamplingParams(4.0), 2)
    assert Margin(0.3).accepts(p, 1, None)
    assert not Margin(0.2).accepts(p, 2, None)


@pytest.mark.parametrize("accept", [Rank(20), Margin(1e9), Typical(1e-9)])
def test_a_banned_token_is_never_tolerated(accept: AcceptanceRule) -> None:
    assert tolerated(accept) == {0, 1, 2, 3}
    banned = policy(banned_ids=(1,))
    assert verdict([1], ROW.repeat(2, 1), accept, policy=banned) == Verdict(7, 0, 0)
    assert verdict([1], torch.tensor([[0.0, -INF, 0.0, -INF]] * 2), accept).accepted == 0


@pytest.mark.parametrize("accept", [Rank(1), Margin(0.0), Typical(0.9)])
def test_the_targets_own_choice_always_stands(accept: AcceptanceRule) -> None:
    for seed in range(30):
        sampled = SamplingParams(1.0, seed=seed)
        own = Distribution(ROW[0], sampled, len(PROMPT)).token
        assert verdict([own], ROW.repeat(2, 1), accept, policy=policy(sampled)).accepted == 1


def test_a_rejected_draft_gives_way_to_the_targets_own_draw() -> None:
    seen = set()
    for seed in range(60):
        sampled = SamplingParams(3.0, seed=seed)
        own, following = (Distribution(ROW[0], sampled, len(PROMPT) + n).token for n in (0, 1))
        found = verdict([3], ROW.repeat(2, 1), Rank(1), policy=policy(sampled))
        assert (found.accepted, found.next_token) == ((1, following) if own == 3 else (0, own))
        seen.add(own == 3)
    assert seen == {True, False}


# Near-ties ------------------------------------------------------------------------------------------------------


def near_tied(*offsets: int) -> Tensor:
    rows = peaks(*TARGET)
    for offset in offsets:
        rows[offset, 3] = 4.9
    return rows


@pytest.mark.parametrize("offsets", [(), (0,), (1, 3), (5,), (0, 5)])
def test_near_ties_are_named_by_their_offset(offsets: tuple[int, ...]) -> None:
    assert verdict(list(TARGET[:5]), near_tied(*offsets), noise=0.2).near_ties == offsets
    assert verdict(list(TARGET[:5]), near_tied(*offsets), noise=0.05).near_ties == ()
    assert verdict(list(TARGET[:5]), near_tied(*offsets)).near_ties == ()


def test_a_near_tie_that_rejects_is_named_and_later_ones_are_not() -> None:
    drafts = [0, 1, 3, 1, 0]
    assert verdict(drafts, near_tied(1, 2, 4), noise=0.2) == Verdict(7, 2, 2, near_ties=(1, 2))


# From sampled tokens --------------------------------------------------------------------------------------------

columns = st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.05, 0.15, 3.0]), st.sampled_from([1.0, -2.0, math.nan]))


@given(st.lists(columns, min_size=1, max_size=7), st.data(), st.sampled_from([0.0, 0.1, 0.2]))
def test_verdicts_from_columns_are_those_from_sampled_tokens(
    rows: list[tuple[int, float, float]], data: st.DataObject, noise: float
) -> None:
    """Rows behind the first rejection do not matter, and a row without a token is an error where it is reached."""
    tokens, margins, scores = (list(column) for column in zip(*rows, strict=True))
    sampled = SampledRows(tokens, margins, scores)
    assert list(sampled[1:]) == [sampled[n] for n in range(1, len(rows))]
    drafts = data.draw(st.lists(st.integers(0, 2), min_size=len(rows) - 1, max_size=len(rows) - 1))
    chosen = policy(repetition_penalty=1.3)
    try:
        expected: object = verify_block(7, PROMPT + drafts, len(PROMPT), list(sampled), chosen, Exact(), noise=noise)
    except DecodingError as error:
        expected = str(error)
    try:
        found: object = verify_sampled(7, drafts, len(PROMPT), sampled, noise * chosen.noise_gain)
    except DecodingError as error:
        found = str(error)
    assert found == expected


# Audit ----------------------------------------------------------------------------------------------------------


def test_audit_counts_what_the_target_would_have_changed() -> None:
    skipped = [0, 3, 2, 3, 0]
    ids = PROMPT + skipped
    rows = peaks(*TARGET)
    assert count_disagreements(ids, 2, 7, rows, policy()) == 2
    assert count_disagreements(ids, 2, 5, rows, policy()) == 1
    assert count_disagreements(ids, 4, 7, rows[2:], policy()) == 1
    assert count_disagreements(ids, 7, 7, rows[5:], policy()) == 0


def test_audit_applies_constraints_at_each_tokens_own_prefix() -> None:
    ids = [*PROMPT, 0, 1, 0, 2]
    rows = peaks(0, 1, 0, 1) + torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert count_disagreements(ids, 2, 6, rows, policy(no_repeat_ngram=2)) == 0
    assert count_disagreements(ids, 2, 6, rows, policy()) == 1


# Text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["exact", "residual", "rank:20", "margin:0.5", "typical:0.09"])
def test_rules_print_as_they_are_written(spec: str) -> None:
    assert str(parse_acceptance_rule(spec)) == spec
    assert parse_acceptance_rule(str(parse_acceptance_rule(spec))) == parse_acceptance_rule(spec)


def test_acceptance_rules_are_parsed() -> None:
    assert (parse_acceptance_rule("exact"), parse_acceptance_rule("residual")) == (Exact(), RejectionSampling())
    assert (parse_acceptance_rule("rank:3"), parse_acceptance_rule("margin:0"), parse_acceptance_rule("typical:1")) == (
        Rank(3),
        Margin(0.0),
        Typical(1.0),
    )


@pytest.mark.parametrize("made", [Rank(1_000_000), Margin(0.123456789), Typical(1 / 3)])
def test_printing_keeps_every_digit(made: AcceptanceRule) -> None:
    assert parse_acceptance_rule(str(made)) == made


def test_only_exact_and_residual_are_lossless_and_only_residual_needs_q() -> None:
    rules = [parse_acceptance_rule(spec) for spec in ("exact", "residual", "rank:2", "margin:1", "typical:0.1")]
    assert [r.lossless for r in rules] == [True, True, False, False, False]
    assert [r.needs_q for r in rules] == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "expected exact, residual, rank:N, margin:D or typical:E"),
        ("greedy", "expected exact, residual"),
        ("Exact", "expected exact, residual"),
        ("exact:1", "exact takes no number"),
        ("residual:32", "residual takes no number"),
        ("rank", "rank needs a number, as in rank:20"),
        ("rank:", "rank needs a number"),
        ("rank:2.5", "rank needs a number"),
        ("rank:0", "out of range"),
        ("margin:x", "margin needs a number, as in margin:0.5"),
        ("margin:-1", "out of range"),
        ("margin:inf", "out of range"),
        ("margin:nan", "out of range"),
        ("typical", "typical needs a number, as in typical:0.09"),
        ("typical:0", "out of range"),
        ("typical:1.1", "out of range"),
        ("typical:nan", "out of range"),
    ],
)
def test_errors_say_what_would_be_right(spec: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_acceptance_rule(spec)


@pytest.mark.parametrize("spec", ["rank:2", "margin:5", "typical:0.01"])
def test_a_tolerant_rule_never_accepts_what_the_filters_exclude(spec: str) -> None:
    row = torch.tensor([1.0, 0.9, 0.8])
    assert parse_acceptance_rule(spec).accepts(Distribution(row, SamplingParams(temperature=1.0), 0), 1, None)
    assert not parse_acceptance_rule(spec).accepts(
        Distribution(row, SamplingParams(temperature=1.0, top_k=1), 0), 1, None
    )
