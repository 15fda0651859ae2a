"""Signals equal a float64 reference; policies escalate in the right direction; text and gate convert both ways."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.gate import (
    SIGNAL_NAMES,
    Always,
    AnyOf,
    Decision,
    Never,
    Signals,
    Threshold,
    Trigger,
    compute_signals,
)
from outrider.decoding.gate_parsing import gate
from outrider.errors import SettingsError

INF = math.inf


def token(entropy: float = 0.0, margin: float = 1.0, maxprob: float = 0.0, logprob: float = 0.0) -> Signals:
    return Signals(entropy, margin, maxprob, logprob)


def reference(row: list[float], chosen: int, temperature: float) -> Signals:
    scores = np.array(row, dtype=np.float64) / (temperature or 1.0)
    logq = scores - scores.max() - math.log(np.exp(scores - scores.max()).sum())
    q = np.exp(logq)
    first, second = sorted([*q, 0.0], reverse=True)[:2]
    entropy = -sum(p * math.log(p) for p in q if p > 0)
    return Signals(entropy, first - second, 1 - first, -logq[chosen])


# Signals --------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(-15, 15, width=32) | st.just(-INF), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    st.data(),
)
def test_signals_equal_the_reference(row: list[float], temperature: float, data: st.DataObject) -> None:
    finite = [i for i, x in enumerate(row) if math.isfinite(x)]
    if not finite:
        return
    chosen = data.draw(st.sampled_from(finite))
    found, expected = compute_signals(torch.tensor(row), chosen, temperature), reference(row, chosen, temperature)
    for name in SIGNAL_NAMES:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4, abs=2e-5), name


def test_signals_of_a_row_as_long_as_a_real_one() -> None:
    row = torch.randn(151_936, generator=torch.Generator().manual_seed(0)) * 3
    found, expected = compute_signals(row, 77, 0.7), reference(row.tolist(), 77, 0.7)
    for name in SIGNAL_NAMES:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-3, abs=1e-4), name


def test_the_drawn_token_matters_to_logprob_only() -> None:
    row = torch.tensor([2.0, 1.0, 0.0])
    one, other = compute_signals(row, 0, 1.0), compute_signals(row, 2, 1.0)
    assert (one.entropy, one.margin, one.maxprob) == (other.entropy, other.margin, other.maxprob)
    assert other.logprob - one.logprob == pytest.approx(2.0)


def test_the_two_extremes() -> None:
    sure = compute_signals(torch.tensor([50.0, 0.0, 0.0, 0.0]), 0, 0.0)
    assert (sure.entropy, sure.margin, sure.maxprob, sure.logprob) == pytest.approx((0.0, 1.0, 0.0, 0.0), abs=1e-6)
    unsure = compute_signals(torch.zeros(4), 0, 0.0)
    assert (unsure.entropy, unsure.margin) == pytest.approx((math.log(4), 0.0))
    assert (unsure.maxprob, unsure.logprob) == pytest.approx((0.75, math.log(4)))


# Policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["entropy", "maxprob", "logprob"])
def test_above_the_threshold_is_unsure(name: str) -> None:
    rule = Threshold(name, 0.5)  # type: ignore[arg-type]
    assert rule.decide([token(**{name: 0.6})]).escalate
    assert not rule.decide([token(**{name: 0.4})]).escalate
    assert not rule.decide([token(**{name: 0.5})]).escalate


def test_margin_is_unsure_below() -> None:
    rule = Threshold("margin", 0.5)
    assert rule.decide([token(margin=0.4)]).escalate
    assert not rule.decide([token(margin=0.6)]).escalate
    assert not rule.decide([token(margin=0.5)]).escalate


def test_the_least_sure_token_speaks_for_the_block() -> None:
    assert Threshold("entropy", 1.0).decide([token(entropy=e) for e in (0.1, 1.2, 0.1)]).escalate
    assert Threshold("margin", 0.5).decide([token(margin=m) for m in (0.9, 0.3, 0.9)]).escalate
    assert not Threshold("entropy", 1.0).decide([token(entropy=e) for e in (0.9, 0.9, 0.9)]).escalate


def test_the_mean_levels_out() -> None:
    block = [token(entropy=e, margin=m) for e, m in ((0.1, 0.9), (1.2, 0.3), (0.2, 0.9))]
    assert not Threshold("entropy", 1.0, mean=True).decide(block).escalate
    assert Threshold("entropy", 0.4, mean=True).decide(block).escalate
    assert not Threshold("margin", 0.5, mean=True).decide(block).escalate
    assert Threshold("margin", 0.75, mean=True).decide(block).escalate


@pytest.mark.parametrize("name", SIGNAL_NAMES)
@pytest.mark.parametrize("mean", [False, True])
def test_a_block_without_signals_is_not_sure(name: str, mean: bool) -> None:
    assert Threshold(name, 0.5, mean).decide([]).escalate  # type: ignore[arg-type]


def test_reasons_name_signal_value_and_limit() -> None:
    assert Threshold("entropy", 1.5).decide([token(entropy=2.0)]) == Decision(True, "entropy 2 > 1.5")
    assert Threshold("margin", 0.25).decide([token(margin=0.75)]) == Decision(False, "margin 0.75 >= 0.25")
    assert gate("entropy:1|logprob:2").decide([token(logprob=3.0)]) == Decision(True, "logprob 3 > 2")


@pytest.mark.parametrize(
    ("entropy", "logprob", "escalate"), [(0.0, 0.0, False), (2.0, 0.0, True), (0.0, 3.0, True), (2.0, 3.0, True)]
)
def test_any_of(entropy: float, logprob: float, escalate: bool) -> None:
    block = [token(), token(entropy=entropy, logprob=logprob), token()]
    assert gate("entropy:1.5|logprob:2").decide(block).escalate is escalate


def test_always_and_never() -> None:
    assert Always().decide([]) == Decision(True, "always")
    assert Never().decide([token(entropy=99.0)]) == Decision(False, "never")


def test_a_trigger_decides_as_its_inner_gate_and_stays_exact() -> None:
    for spec in ("entropy:1", "never", "entropy:1|margin:0.2"):
        inner, trigger = gate(spec), gate(f"trigger:{spec}")
        assert (inner.exact, trigger.exact) == (False, True)
        assert trigger.needs_signals == inner.needs_signals
        for block in ([token()], [token(entropy=2.0)]):
            assert trigger.decide(block) == inner.decide(block)


def test_who_needs_signals_and_who_is_exact() -> None:
    assert [(g.needs_signals, g.exact) for g in (Always(), Never(), gate("entropy:1"))] == [
        (False, True),
        (False, False),
        (True, False),
    ]
    assert gate("margin:1|entropy:1").needs_signals


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("name", SIGNAL_NAMES)
def test_a_block_is_judged_by_its_value(name: str, mean: bool) -> None:
    rule = Threshold(name, 0.5, mean)  # type: ignore[arg-type]
    for numbers in ((0.1, 0.8), (0.6, 0.7), (0.1, 0.2)):
        block = [token(**{name: number}) for number in numbers]
        value = sum(numbers) / 2 if mean else (min if name == "margin" else max)(numbers)
        assert rule.value(block) == value
        assert rule.decide(block).escalate == (value < 0.5 if name == "margin" else value > 0.5)


# Text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("always", Always()),
        ("never", Never()),
        ("entropy:1.5", Threshold("entropy", 1.5)),
        ("entropy.max:1.5", Threshold("entropy", 1.5)),
        ("margin.mean:0.3", Threshold("margin", 0.3, mean=True)),
        ("maxprob:0", Threshold("maxprob", 0.0)),
        ("entropy:1.5|logprob:2", AnyOf((Threshold("entropy", 1.5), Threshold("logprob", 2.0)))),
        (" entropy:1.5 | logprob:2 ", AnyOf((Threshold("entropy", 1.5), Threshold("logprob", 2.0)))),
        ("trigger:entropy:1.5", Trigger(Threshold("entropy", 1.5))),
        ("trigger:entropy:1|margin:2", Trigger(AnyOf((Threshold("entropy", 1.0), Threshold("margin", 2.0))))),
    ],
)
def test_parsing(spec: str, expected: object) -> None:
    assert gate(spec) == expected


limits = st.floats(0, 1e6, allow_subnormal=False)
thresholds = st.builds(Threshold, st.sampled_from(SIGNAL_NAMES), limits, st.booleans())
singles = st.one_of(thresholds, st.just(Always()), st.just(Never()))
gates = st.one_of(singles, st.lists(thresholds, min_size=2, max_size=3).map(lambda parts: AnyOf(tuple(parts))))


@settings(max_examples=100, deadline=None)
@given(gates, st.booleans())
def test_printing_and_parsing_again_changes_nothing(inner: object, wrapped: bool) -> None:
    made = Trigger(inner) if wrapped else inner  # type: ignore[arg-type]
    assert gate(str(made)) == made


@pytest.mark.parametrize("spec", ["entropy:1.5", "margin.mean:0.25", "entropy:1|logprob:2", "trigger:never", "always"])
def test_what_people_write_is_printed_as_they_wrote_it(spec: str) -> None:
    assert str(gate(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "expected always, never, or SIGNAL:THRESHOLD"),
        ("sometimes", "expected always, never"),
        ("Entropy:1", "SIGNAL one of entropy, margin, maxprob, logprob"),
        ("entropy.median:1", "expected always, never"),
        ("always:1", "expected always, never"),
        ("trigger:", "expected always, never"),
        ("entropy:1|", "expected always, never"),
        ("entropy:1|never", "stand alone"),
        ("always|never", "stand alone"),
        ("trigger:trigger:never", "given twice"),
        ("entropy:1|calibrated:gate.json", "calibrated:FILE alone"),
        ("trigger:calibrated:/nobody/reads/this", "skips no block"),
        ("trigger:trigger:calibrated:/nobody/reads/this", "given twice"),
        ("trigger:entropy:1|calibrated:/nobody/reads/this", "calibrated:FILE alone"),
        ("calibrated:", "names no file; write for example calibrated:gate.json"),
        ("entropy", "'' is not a number; write for example entropy:1.5"),
        ("entropy:", "'' is not a number"),
        ("entropy:high", "'high' is not a number"),
        ("entropy:-0.1", "a threshold is a finite number, 0 or more"),
        ("entropy:inf", "finite"),
        ("margin:nan", "finite"),
    ],
)
def test_errors_say_what_would_be_right(spec: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        gate(spec)
