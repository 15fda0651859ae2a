"""How many tokens to draft next."""

from __future__ import annotations

import math

import pytest

from outrider.core.gate import Signals
from outrider.core.lookahead import AUTO_CAP, MAX_K, ConfidenceStop, FixedK, lookahead
from outrider.errors import SettingsError


def sure(*probabilities: float) -> list[Signals]:
    return [Signals(0.0, 0.0, 0.0, -math.log(p)) for p in probabilities]


@pytest.mark.parametrize("drafted", [0, 1, 4, 5])
def test_fixed_k_asks_for_what_is_missing(drafted: int) -> None:
    assert FixedK(5).more(drafted, []) == 5 - drafted


@pytest.mark.parametrize(
    ("probabilities", "more"),
    [((), 1), ((0.9,), 1), ((0.9, 0.7), 1), ((0.9, 0.5), 0), ((0.5, 0.9), 0), ((0.51,), 1), ((0.49,), 0)],
)
def test_the_product_of_the_chances_decides(probabilities: tuple[float, ...], more: int) -> None:
    assert ConfidenceStop(cap=8, floor=0.5).more(len(probabilities), sure(*probabilities)) == more


def test_the_cap_bounds_a_sure_drafter() -> None:
    stop = ConfidenceStop(cap=3, floor=0.1)
    assert [stop.more(n, sure(*[1.0] * n)) for n in range(5)] == [1, 1, 1, 0, 0]


def test_an_impossible_token_ends_the_block() -> None:
    assert ConfidenceStop().more(1, [Signals(0.0, 0.0, 0.0, math.inf)]) == 0


def test_the_two_ways() -> None:
    assert lookahead(7) == FixedK(7)
    assert not lookahead(7).needs_signals
    auto = lookahead("auto")
    assert auto.needs_signals
    assert auto.more(AUTO_CAP - 1, []) == 1
    assert auto.more(AUTO_CAP, []) == 0


@pytest.mark.parametrize("k", [0, -1, MAX_K + 1, "5", "Auto", 2.0, True, None])
def test_other_values_are_refused(k: object) -> None:
    with pytest.raises(SettingsError, match="k is a whole number from 1 to 64, or 'auto'"):
        lookahead(k)  # type: ignore[arg-type]
