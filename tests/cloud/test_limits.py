"""Limits, the token bucket, and sizes as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cloud.limits import MIN_MESSAGE_BYTES, Limits, RateLimiter
from outrider.errors import SettingsError
from outrider.serving.sizes import MIB, parse_bytes

WHOLE = ("max_sessions", "max_sessions_per_identity", "max_prompt_tokens", "max_message_bytes", "burst")
BYTES = ("max_media_bytes", "max_media_total")
TIMES = ("max_rate", "idle_seconds")


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


def test_the_defaults_are_valid_and_frozen() -> None:
    limits = Limits()
    with pytest.raises(AttributeError):
        limits.burst = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", WHOLE + BYTES)
@pytest.mark.parametrize("value", [-1, 1.5, True, "8", math.nan])
def test_counts_are_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WHOLE)
def test_counts_are_one_or_more(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Limits(**{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [0, -1.0, True, "8", math.nan, math.inf, 10**400])
def test_times_and_rates_are_finite_and_above_zero(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_sessions", "max_media_bytes", "idle_seconds"])
def test_only_what_may_be_unlimited_may_be_none(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Limits(**{name: None})  # type: ignore[arg-type]
    assert Limits(max_prompt_tokens=None, max_rate=None) == Limits()


def test_a_message_holds_a_prompt_and_media_comes_in_several() -> None:
    Limits(max_media_bytes=MIB, max_message_bytes=MIN_MESSAGE_BYTES)
    with pytest.raises(SettingsError, match=f"give at least {MIN_MESSAGE_BYTES}"):
        Limits(max_message_bytes=MIN_MESSAGE_BYTES - 1)


def test_an_identity_that_is_not_alone_leaves_half_of_the_room_for_media() -> None:
    limits = Limits(max_media_bytes=6, max_media_total=10)
    assert limits.media_share(named=False) == 10
    assert limits.media_share(named=True) == 6
    assert Limits(max_media_bytes=1, max_media_total=10).media_share(named=True) == 5


def test_all_sessions_media_is_no_less_than_ones() -> None:
    with pytest.raises(SettingsError, match="max_media_total"):
        Limits(max_media_bytes=MIB, max_media_total=MIB - 1)


def test_no_media_at_all_may_be_asked_for() -> None:
    assert Limits(max_media_bytes=0, max_media_total=0).max_media_bytes == 0


def test_a_message_is_no_larger_than_grpc_takes() -> None:
    Limits(max_message_bytes=2**31 - 1)
    with pytest.raises(SettingsError, match="max_message_bytes"):
        Limits(max_message_bytes=2**31)


def test_a_burst_goes_and_the_next_waits_for_the_rate() -> None:
    clock = Clock()
    limiter = RateLimiter(rate=10, burst=3, clock=clock)
    assert [limiter.acquire("lab") for _ in range(3)] == [0, 0, 0]
    assert limiter.acquire("lab") == pytest.approx(0.1)
    assert limiter.acquire("lab") == pytest.approx(0.1)  # a refused request uses nothing up
    clock.now += 0.1
    assert limiter.acquire("lab") == 0
    assert limiter.acquire("lab") > 0


def test_a_pause_gives_back_no_more_than_the_burst() -> None:
    clock = Clock()
    limiter = RateLimiter(rate=10, burst=2, clock=clock)
    limiter.acquire("lab")
    clock.now += 1000
    assert [limiter.acquire("lab") > 0 for _ in range(3)] == [False, False, True]


def test_identities_do_not_share_a_bucket() -> None:
    limiter = RateLimiter(rate=1, burst=1, clock=Clock())
    assert limiter.acquire("one") == limiter.acquire("two") == 0
    assert limiter.acquire("one") > 0


def test_without_a_rate_everything_goes_and_nothing_is_remembered() -> None:
    limiter = RateLimiter(None, 1)
    assert not any(limiter.acquire("lab") for _ in range(100))
    assert len(limiter) == 0


def test_full_buckets_are_forgotten() -> None:
    clock = Clock()
    limiter = RateLimiter(rate=1, burst=5, clock=clock)
    for number in range(10_000):
        limiter.acquire(f"visitor {number}")
        clock.now += 0.5
    assert len(limiter) <= 5 / 0.5 + 1


def test_a_busy_identity_does_not_keep_the_others_remembered() -> None:
    clock = Clock()
    limiter = RateLimiter(rate=1, burst=5, clock=clock)
    for number in range(1000):
        limiter.acquire("busy"), limiter.acquire(f"visitor {number}")
        clock.now += 0.5
    assert len(limiter) <= 2 * 5 / 0.5


def test_a_full_bucket_that_is_still_remembered_holds_no_more_than_the_burst() -> None:
    clock = Clock()
    limiter = RateLimiter(rate=1, burst=10, clock=clock)
    assert not any(limiter.acquire("busy") for _ in range(10))  # full again at 10 s, and in front
    limiter.acquire("lab")
    clock.now += 9
    assert [limiter.acquire("lab") for _ in range(12)] == pytest.approx([*[0] * 10, 1, 1])


def test_a_bucket_that_is_not_full_is_not_forgotten() -> None:
    """Otherwise a caller would get a new burst for waiting a moment."""
    clock = Clock()
    limiter = RateLimiter(rate=1, burst=2, clock=clock)
    limiter.acquire("lab"), limiter.acquire("lab")
    clock.now += 0.9
    assert limiter.acquire("other") == 0
    assert limiter.acquire("lab") == pytest.approx(0.1)


@given(
    rate=st.floats(0.01, 1000),
    burst=st.integers(1, 60),
    gaps=st.lists(st.floats(0, 5), max_size=80),
)
def test_no_window_gets_more_than_burst_and_rate(rate: float, burst: int, gaps: list[float]) -> None:
    """And whoever waits as long as was said may go."""
    clock, went = Clock(), []
    limiter = RateLimiter(rate, burst, clock)
    for gap in gaps:
        clock.now += gap
        if wait := limiter.acquire("lab"):
            clock.now += wait
            assert limiter.acquire("lab") == 0
        went.append(clock.now)
    for i, start in enumerate(went):
        for j in range(i, len(went)):
            assert j - i + 1 <= burst + rate * (went[j] - start + 1e-5) + 1e-6


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (math.nan, 1), (math.inf, 1), (1, 0), (1, 1.5)])
def test_a_limiter_checks_its_settings(rate: float, burst: int) -> None:
    with pytest.raises(SettingsError, match=r"max_rate|burst"):
        RateLimiter(rate, burst)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("7B", 7),
        ("800kB", 800_000),
        ("3MB", 3_000_000),
        ("2GB", 2 * 10**9),
        ("1TB", 10**12),
        ("4KiB", 4096),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2**31),
        ("1TiB", 2**40),
        (" 8 MiB ", 8 * MIB),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1.5GiB", "8M", "8m", "8mb", "8Mib", "1e6", "٣", "8  MiB", "8MiB/s", "9" * 5000, "0x10"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match="512MiB"):
        parse_bytes(text)
