"""Conditions: what is refused and with which words, and that text and value are each other's inverse."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import SettingsError
from outrider.netem.conditions import MAX_RATE, MAX_SECONDS, Conditions, parse_conditions

times = st.floats(0, MAX_SECONDS, exclude_min=True)
rates = st.none() | st.floats(1, MAX_RATE)


@st.composite
def any_conditions(draw: st.DrawFn) -> Conditions:
    rtt = draw(st.just(0.0) | times)
    every = draw(st.none() | times.filter(lambda t: t > 1e-300))
    return Conditions(
        rtt=rtt,
        jitter=draw(st.floats(0, rtt / 2)),
        up=draw(rates),
        down=draw(rates),
        stall_every=every,
        stall_for=None if every is None else draw(st.floats(0, every, exclude_min=True, exclude_max=True)),
        cut_after=draw(st.none() | times),
    )


@given(any_conditions())
def test_text_and_value_are_inverse(wanted: Conditions) -> None:
    assert parse_conditions(str(wanted)) == wanted


@given(times, st.floats(1, MAX_RATE))
def test_equal_bandwidths_are_written_once(rtt: float, bandwidth: float) -> None:
    wanted = Conditions(rtt=rtt, up=bandwidth, down=bandwidth)
    assert "bw=" in str(wanted)
    assert parse_conditions(str(wanted)) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("none", Conditions()),
        ("rtt=50ms", Conditions(rtt=0.05)),
        ("rtt=50ms,bw=2Mbit", Conditions(rtt=0.05, up=2e6, down=2e6)),
        (" RTT = 1.5 S , up=1mbit,down=8MBIT", Conditions(rtt=1.5, up=1e6, down=8e6)),
        ("rtt=800us,jitter=.4ms,up=56kbit", Conditions(rtt=0.0008, jitter=0.0004, up=56_000)),
        ("down=1Gbit,up=300bit", Conditions(up=300, down=1e9)),
        ("stall=5s:800ms,cut=10s", Conditions(stall_every=5, stall_for=0.8, cut_after=10)),
        ("rtt=0ms", Conditions()),
    ],
)
def test_conditions_are_parsed(text: str, wanted: Conditions) -> None:
    assert parse_conditions(text) == wanted


@pytest.mark.parametrize(
    "text",
    ["none", "rtt=50ms,jitter=5ms,bw=2Mbit,stall=5s:800ms,cut=10s", "rtt=1.5s,up=56kbit,down=1.5Gbit", "cut=1us"],
)
def test_writing_is_what_people_write(text: str) -> None:
    assert str(parse_conditions(text)) == text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "write KEY=VALUE"),
        ("rtt", "such as rtt=50ms"),
        ("rtt=50ms,", "write KEY=VALUE"),
        ("rtt=50ms,none", "write KEY=VALUE"),
        ("rrt=50ms", "unknown network condition 'rrt': expected any of rtt, jitter, bw, up, down, stall, cut"),
        ("rtt=50", r"a unit \(us, ms, s\), as in rtt=50ms"),
        ("rtt=50Mbit", r"a unit \(us, ms, s\)"),
        ("bw=2", r"a unit \(bit, kbit, Mbit, Gbit\), as in bw=2Mbit"),
        ("bw=2MB", r"a unit \(bit, kbit, Mbit, Gbit\)"),
        ("rtt=-5ms", "a number of 0 or more"),
        ("rtt=nanms", "a number of 0 or more"),
        ("rtt=infs", "a number of 0 or more"),
        ("rtt=1e3ms", "a number of 0 or more"),
        ("rtt=٥ms", "a number of 0 or more"),
        ("rtt=" + "9" * 400 + "s", "rtt is between 0 s and a day"),
        ("rtt=1ms,RTT=1ms", "'RTT=1ms' sets rtt a second"),
        ("bw=2Mbit,up=1Mbit", "'up=1Mbit' sets up a second"),
        ("bw=0bit", "between 1 bit/s and"),
        ("stall=5s", "write stall=EVERY:FOR, such as stall=5s:800ms"),
        ("stall=5s:1s:1s", "write stall=EVERY:FOR"),
        ("stall=1s:1s", "shorter than the time between stalls"),
        ("stall=1s:0s", "stall_for is more than 0 s"),
        ("cut=0s", "cut_after is more than 0 s"),
        ("rtt=10ms,jitter=6ms", "jitter is at most half of rtt"),
        ("jitter=1ms", "jitter is at most half of rtt"),
    ],
)
def test_refusals_say_what_would_be_right(text: str, part: str) -> None:
    with pytest.raises(SettingsError, match=part):
        parse_conditions(text)


@pytest.mark.parametrize(
    "value", [-1, float("nan"), float("inf"), -float("inf"), "1s", True, pytest.param(10**400, id="huge")]
)
@pytest.mark.parametrize("name", [field.name for field in fields(Conditions)])
def test_values_out_of_range(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        Conditions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [{"stall_every": 1.0}, {"stall_for": 1.0}])
def test_stalls_need_both_times(values: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="go together"):
        Conditions(**values)


@given(st.text(max_size=30) | st.from_regex(r"(rtt|bw|stall|cut)=[0-9.:a-zA-Z]*", fullmatch=True))
def test_any_text_is_parsed_or_is_a_settings_error(text: str) -> None:
    try:
        found = parse_conditions(text)
    except SettingsError:
        return
    assert parse_conditions(str(found)) == found
