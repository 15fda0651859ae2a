"""What audits say of a running gate: simulated gates of known risk, whose estimates and intervals must hold it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import GenerationSettings, Loss
from outrider.decoding.gate_file import GateFile
from outrider.decoding.risk_estimate import (
    MIN_RESULTS,
    AuditTrail,
    OutputLength,
    Risk,
    RiskEstimator,
    Span,
    lower_bound,
    upper_bound,
)
from outrider.sampling.acceptance import Verdict
from tests.support import adversaries

RUNS, MOST_MISSES = 200, 14  # 7 %
BLOCK, LIMIT = 5, 60

# A gate of known risk -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """Escalates a share of blocks; of those it would skip a share is wrong, and of hard requests a larger one. Behind a
    wrong token that stays, blocks are wrong more often, and the output has another length than the target's."""

    escalates: float
    wrong: float
    audit: float

    def run(self, rng: random.Random) -> tuple[AuditTrail, float, float]:
        """What verdicts showed of one request, and its true losses: of outputs, and of tokens."""
        trail, left, known, at = AuditTrail(), None, 0, 0
        length, hard = BLOCK * rng.randint(3, 11), rng.choice((0.2, 0.5, 2.3))
        target = length
        while at < length:
            drawn = rng.random() < self.wrong * hard * (3 if left is not None else 1)
            wrong = at + rng.randrange(BLOCK) if drawn else None
            escalates, audit = rng.random() < self.escalates, rng.random() < self.audit
            if escalates or audit:
                end = length if audit and not escalates and at + BLOCK >= length else None
                accepted = BLOCK if wrong is None else wrong - at
                disagreed = int(left is not None and left >= known)
                trail.record_verdict(
                    Verdict(1, accepted, 0, audited=at - known, disagreed=disagreed), at, at - known, end
                )
                known = at + BLOCK
            elif wrong is not None and left is None:
                left = wrong
                length = BLOCK * rng.randint(at // BLOCK + 1, LIMIT // BLOCK)
            at += BLOCK
        trail.close(known, OutputLength(length, LIMIT, ends_at_limit=False))
        return trail, float(left is not None), 0.0 if left is None else 1 - left / target

    def audits(self, results: int, loss: Loss, rng: random.Random) -> RiskEstimator:
        audits = RiskEstimator(0.1, loss)
        for _ in range(results):
            audits.add(self.run(rng)[0], 0, 0)
        return audits


@cache
def risks(gate: Gate) -> dict[Loss, float]:
    rng = random.Random(1)
    losses = [gate.run(rng)[1:] for _ in range(40_000)]
    outputs, tokens = (math.fsum(column) / len(losses) for column in zip(*losses, strict=True))
    return {"outputs": outputs, "tokens": tokens}


GATES = [
    Gate(escalates=0.0, wrong=0.01, audit=0.05),  # outputs that the cloud never sees but for audits
    Gate(escalates=0.2, wrong=0.005, audit=0.05),
    Gate(escalates=0.2, wrong=0.1, audit=0.05),
    Gate(escalates=0.6, wrong=0.05, audit=0.3),
    Gate(escalates=0.1, wrong=0.0, audit=0.1),
]


@pytest.mark.parametrize("loss", ["outputs", "tokens"])
@pytest.mark.parametrize("gate", GATES)
def test_the_interval_holds_the_risk(gate: Gate, loss: Loss) -> None:
    rng, risk = random.Random(2), risks(gate)[loss]
    found = [gate.audits(80, loss, rng).risk for _ in range(RUNS)]
    assert sum(not each.low <= risk <= each.high for each in found) <= MOST_MISSES
    assert all(each.low <= each.estimate <= each.high for each in found if each.estimate is not None)


@pytest.mark.parametrize("gate", GATES)
def test_the_estimate_of_outputs_is_right_on_average(gate: Gate) -> None:
    rng, risk = random.Random(3), risks(gate)["outputs"]
    found = [gate.audits(400, "outputs", rng).risk.estimate for _ in range(60)]
    known = [estimate for estimate in found if estimate is not None]
    assert len(known) > 55
    mean = math.fsum(known) / len(known)
    spread = math.sqrt(math.fsum((estimate - mean) ** 2 for estimate in known) / len(known) / len(known))
    assert abs(mean - risk) <= 4 * spread + 0.004


def test_many_results_leave_a_narrow_interval() -> None:
    gate = Gate(escalates=0.2, wrong=0.1, audit=0.3)
    found = gate.audits(4000, "outputs", random.Random(4)).risk
    assert found.high - found.low < 0.12
    assert found.results == 4000


# The arithmetic -----------------------------------------------------------------------------------------------------


def trail(
    first_difference: Span | None = None, ends: tuple[Span | None, ...] = (), unseen: int | None = None, **more: bool
) -> AuditTrail:
    return AuditTrail(first_difference, list(ends), unseen, output=OutputLength(20, 40, ends_at_limit=False), **more)


def risk_of(*trails: AuditTrail, loss: Loss = "outputs", budget: float = 0.02) -> Risk:
    audits = RiskEstimator(budget, loss)
    for each in trails:
        audits.add(each, 2, 1)
    return audits.risk


def test_unseen_ends_count_as_audited_ends_do() -> None:
    wrong, right = trail(ends=(Span(9, 9),)), trail(ends=(None,))
    found = risk_of(wrong, right, trail(unseen=10), trail(unseen=12), trail(first_difference=Span(1, 4)), trail())
    assert found.estimate == pytest.approx((1 + 2 * 1 / 2) / 6)
    assert (found.results, found.audited, found.disagreed) == (6, 12, 6)


def test_without_an_audited_end_there_is_no_estimate_of_unseen_ones() -> None:
    assert risk_of() == Risk(0.02, "outputs", 0, 0, None)
    found = risk_of(trail(unseen=10), trail())
    assert found.estimate is None
    assert found.high > 0.99
    assert risk_of(trail(), trail()).estimate == 0.0


def test_what_a_verifier_did_not_compare_may_be_anything() -> None:
    found = risk_of(*[trail(unseen=3, has_gap=True)] * 50, *[trail(ends=(None,))] * 50)
    assert found.high > 0.5


def test_tokens_count_by_what_lies_behind_the_first_difference() -> None:
    sure = AuditTrail(Span(10, 10), output=OutputLength(40, 40, ends_at_limit=True))
    assert risk_of(sure, loss="tokens").estimate == pytest.approx(30 / 40)
    assert risk_of(trail(first_difference=Span(5, 9)), loss="tokens").estimate == pytest.approx(13 / 20)
    assert OutputLength(20, 40, ends_at_limit=False).losses(Span(5, 9), "tokens") == pytest.approx(
        (1 / 10, 13 / 20, 35 / 40)
    )


def test_a_trail_knows_where_its_output_left_the_targets() -> None:
    found = AuditTrail()
    found.record_verdict(Verdict(1, 5, 0), base=0, skipped=0, end=None)
    found.record_verdict(Verdict(2, 2, 0, audited=5), base=11, skipped=5, end=16)
    assert (found.first_difference, found.ends) == (None, [Span(13, 13)])  # the audit repaired it
    found.record_verdict(Verdict(3, 5, 0, audited=4, disagreed=2), base=18, skipped=4, end=23)
    assert (found.first_difference, found.ends[1:]) == (Span(14, 17), [Span(14, 17)])
    found.record_verdict(Verdict(4, 0, 0, audited=4, disagreed=1), base=28, skipped=4, end=33)
    assert len(found.ends) == 2, "it has left already"


def test_what_an_audit_corrects_behind_the_end_is_no_difference() -> None:
    found = AuditTrail()
    found.record_verdict(Verdict(1, 3, 0), base=0, skipped=0, end=3)
    assert found.ends == [None]


def test_a_verifier_that_compares_nothing_leaves_everything_open() -> None:
    found = AuditTrail()
    found.record_verdict(Verdict(1, 5, 0), base=5, skipped=5, end=10)
    found.close(11, OutputLength(11, 40, ends_at_limit=False))
    assert (found.has_gap, found.unseen, found.ends, found.first_difference) == (True, 0, [], None)


# Warnings -----------------------------------------------------------------------------------------------------------


def warnings(share: float, results: int, budget: float) -> list[str]:
    audits = RiskEstimator(budget, "outputs")
    for n in range(results):
        audits.add(trail(first_difference=Span(3, 3)) if n < share * results else trail(), 0, 0)
    return audits.warnings()


def test_a_warning_names_estimate_bound_and_budget() -> None:
    assert warnings(0.1, 100, budget=0.09) == []
    (warning,) = warnings(0.3, 100, budget=0.1)
    assert "audits put the risk at 30 % of outputs, at no less than 1" in warning
    assert "above the budget of 10 % (30 of 100 results were seen to differ)" in warning


def test_few_results_show_nothing_however_bad() -> None:
    assert warnings(1.0, MIN_RESULTS - 1, budget=0.02) == []
    assert warnings(1.0, MIN_RESULTS, budget=0.02) != []


# Bounds -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.data())
def test_bounds_hold_for_coins(count: int, data: st.DataObject) -> None:
    heads = data.draw(st.integers(0, count))
    low, high = lower_bound(heads / count, count, 0.025), upper_bound(heads / count, count, 0.025)
    assert 0 <= low <= heads / count <= high <= 1
    assert _at_least(heads, count, low) <= 0.025 + 1e-9
    assert _at_least(count - heads, count, 1 - high) <= 0.025 + 1e-9


def _at_least(heads: int, count: int, p: float) -> float:
    if heads == 0:
        return 0.0
    return math.fsum(math.comb(count, n) * p**n * (1 - p) ** (count - n) for n in range(heads, count + 1))


def test_the_bounds_of_nothing_seen() -> None:
    assert lower_bound(0.0, 100, 0.05) == 0.0
    assert upper_bound(0.0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))


def test_a_share_that_rounding_puts_above_one_counts_as_one() -> None:
    assert upper_bound(1.0 + 1e-12, 3, 0.05) == 1.0
    assert lower_bound(1.0 + 1e-12, 3, 0.05) == lower_bound(1.0, 3, 0.05)


# The decoder's trail ------------------------------------------------------------------------------------------------


def gate_file(gate: str, audit: float) -> GateFile:
    someone, given = adversaries.SOMEONE, GenerationSettings(max_new_tokens=adversaries.LIMIT)
    return GateFile(gate, 0.1, "outputs", adversaries.K, 99, 0.0, 0.5, audit, someone, someone, given)


@pytest.mark.parametrize("name", ["drifting", "ends too early", "misses the end", "loops of its own", "sure for long"])
@pytest.mark.parametrize("scope", ["block", "repair"])
def test_the_decoders_trail_is_true(name: str, scope: str) -> None:
    """What was seen to differ does, from that place on; what was seen whole, and not to differ, does not."""
    seen = ends = 0
    for seed in range(120):
        pair = adversaries.PAIRS[name](seed)
        target = adversaries.trace(pair).target
        ran = adversaries.live(pair, adversaries.gate_of(gate_file("entropy:0.8", 0.3)), scope=scope)
        same = next((n for n, (a, b) in enumerate(zip(ran.ids, target, strict=False)) if a != b), None)
        ends += len(ran.trail.ends)
        if ran.trail.first_difference is not None:
            seen += 1
            assert same is not None
            assert ran.trail.first_difference.first <= same <= ran.trail.first_difference.last
        elif ran.trail.unseen is None:
            assert ran.ids == target
        elif same is not None:
            assert ran.trail.unseen <= same
    assert ends > 5
    assert (seen > 0) is (scope == "block" and name != "ends too early")
