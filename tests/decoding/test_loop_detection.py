"""Loops across blocks are found as soon as the rule says, and nothing else is called a loop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.loop_detection import MAX_PERIOD, LoopRule, parse_loop_rule
from outrider.errors import SettingsError

WINDOW, loop_period, tail_needed = LoopRule().window, LoopRule().find_period, LoopRule().tail_needed

FOUR = [38035, 15946, 3837, 78685]  # the seeds' trace: a 4-token phrase in 5-token blocks, none of which repeats
ABAB = [104432, 26381]


def first_found(tokens: list[int]) -> tuple[int, int] | None:
    """(how many tokens there were, the period) when a loop was first declared."""
    for n in range(1, len(tokens) + 1):
        if period := loop_period(tokens[:n]):
            return n, period
    return None


def by_definition(tokens: list[int]) -> int | None:
    for period in range(1, 33):
        need = max(8, 2 * period + 4)
        tail = tokens[len(tokens) - need :] if len(tokens) >= need else []
        if tail and all(tail[i] == tail[i - period] for i in range(period, need)):
            return period
    return None


def test_the_seeds_phrase_is_found_across_its_five_token_blocks() -> None:
    blocks = [[FOUR[(5 * b + i) % 4] for i in range(5)] for b in range(5)]
    assert blocks[0] == [38035, 15946, 3837, 78685, 38035]
    assert blocks[1] == [15946, 3837, 78685, 38035, 15946]
    assert [loop_period(block) for block in blocks] == [None] * 5  # a history of one block sees nothing
    output: list[int] = [1, 2, 3]
    found = []
    for block in blocks:
        output += block
        found.append(loop_period(output))
    assert found == [None, None, 4, 4, 4]
    assert first_found([1, 2, 3, *FOUR * 4]) == (3 + 12, 4)


def test_abab_needs_eight_tokens() -> None:
    assert first_found([7, *ABAB * 6]) == (1 + 8, 2)


@pytest.mark.parametrize("period", range(1, MAX_PERIOD + 1))
def test_every_period_at_its_first_token_and_not_before(period: int) -> None:
    loop = [100 + i % period for i in range(80)]
    need = {1: 8, 2: 8, 3: 10, 4: 12, 32: 68}.get(period, 2 * period + 4)
    assert tail_needed(period) == need
    assert first_found([1, 2, 3, *loop]) == (3 + need, period)


@pytest.mark.parametrize("period", [1, 2, 4, 7, 32])
def test_one_token_that_differs_is_no_loop(period: int) -> None:
    loop = [100 + i % period for i in range(tail_needed(period))]
    for at in range(len(loop)):
        near_miss = [1, 2, 3, *loop]
        near_miss[3 + at] = 99
        assert loop_period(near_miss) is None


def test_a_loop_that_has_ended_is_over() -> None:
    assert loop_period([*ABAB * 20, 5]) is None


def test_a_period_beyond_the_longest_is_not_sought() -> None:
    assert first_found(list(range(MAX_PERIOD + 1)) * 6) is None


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=WINDOW + 8))
def test_equal_to_the_definition(tokens: list[int]) -> None:
    assert loop_period(tokens) == by_definition(tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_what_loops_is_found_whatever_came_before(before: list[int], phrase: list[int]) -> None:
    period = loop_period(before + phrase * 20)
    assert period is not None
    assert period <= len(phrase)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10**6), unique=True, max_size=90))
def test_no_false_alarm_where_nothing_repeats(tokens: list[int]) -> None:
    assert loop_period(tokens) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=200))
def test_only_the_window_matters(tokens: list[int]) -> None:
    assert loop_period(tokens) == loop_period(tokens[-WINDOW:])


def test_a_rule_of_one_s_own() -> None:
    rule = parse_loop_rule("period=1,tail=3,extra=0")
    assert [rule.find_period(tokens) for tokens in ([5, 5], [4, 5, 5, 5], [5, 6, 5, 6, 5, 6])] == [None, 1, None]
    assert parse_loop_rule("tail=6").find_period([5, 5, 5, 5, 5]) is None
    assert parse_loop_rule("tail=6").find_period([5] * 6) == 1


@given(st.builds(LoopRule, st.integers(1, 6), st.integers(2, 9), st.integers(0, 4)), st.lists(st.integers(0, 2)))
def test_a_loop_of_any_rule_by_its_definition(rule: LoopRule, tokens: list[int]) -> None:
    def loops(period: int) -> bool:
        need = max(rule.tail, 2 * period + rule.extra)
        tail = tokens[len(tokens) - need :]
        return len(tokens) >= need and all(tail[i] == tail[i - period] for i in range(period, need))

    assert rule.find_period(tokens) == next((period for period in range(1, rule.period + 1) if loops(period)), None)
    assert parse_loop_rule(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "period",
        "period=",
        "period=0",
        "tail=1",
        "extra=-1",
        "period=2,period=3",
        "size=3",
        "period=1e3",
        "tail=9999",
    ],
)
def test_a_rule_that_cannot_be_is_named(text: str) -> None:
    with pytest.raises(SettingsError, match="loop_rule"):
        parse_loop_rule(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("period=3,period=4", "'period=3,period=4': period is given twice"),
        ("extra=1,tail=9,extra=1", "extra is given twice"),
        ("extra=9999999999999999", "extra is between 0 and 1024, not 9999999999999999"),
        (f"period={10**40}", f"period is between 1 and 1024, not {10**40}"),
    ],
)
def test_a_duplicate_and_a_number_beyond_the_range_are_named(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_loop_rule(text)
