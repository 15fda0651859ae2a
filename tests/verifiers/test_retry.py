"""How often, and how long in between, what fails is tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest

from outrider.errors import CloudRefused
from outrider.verifiers import retry as module
from outrider.verifiers.retry import INITIAL_BACKOFF, MAX_BACKOFF, Retryable, retry


@dataclass
class Time:
    """Goes on by what is slept, and by `takes` (s) with every attempt."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)
    attempts: int = 0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def failing(self, times: float, takes: float = 1e-3, after: float = 0.0) -> SimpleNamespace:
        async def attempt(*args: object) -> tuple[object, ...]:
            self.attempts += 1
            self.now += takes
            if self.attempts <= times:
                raise Retryable(f"reason {self.attempts}", after)
            return args

        return SimpleNamespace(attempt=attempt)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    found = Time()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(asyncio, "sleep", found.sleep)
    return found


def tried(time: Time, patience: float, times: float = 1e9, takes: float = 1e-3, after: float = 0.0) -> object:
    return asyncio.run(retry("a-cloud", patience, time.failing(times, takes, after).attempt, 1, "x"))


def test_a_success_is_not_repeated(time: Time) -> None:
    assert tried(time, 10.0, times=0) == (1, "x")
    assert (time.attempts, time.slept) == (1, [])


def test_failures_are_retried_until_success(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert tried(time, 10.0, times=3) == (1, "x")
    assert time.attempts == 4
    assert caplog.messages == [f"a-cloud: attempt {n} failed (reason {n})" for n in (1, 2, 3)]


def test_pauses_double_up_to_the_longest(time: Time) -> None:
    tried(time, 60.0, times=10)
    for n, pause in enumerate(time.slept):
        least = min(MAX_BACKOFF, INITIAL_BACKOFF * 2**n)
        assert least <= pause <= 1.25 * least
    assert time.slept[-1] >= MAX_BACKOFF


def test_a_long_patience_outlasts_any_number_of_attempts(time: Time) -> None:
    assert tried(time, 1e5, times=1200) == (1, "x")


def test_edges_do_not_come_back_in_step(time: Time) -> None:
    tried(time, 1000.0, times=40)
    longest = [pause for pause in time.slept if pause >= MAX_BACKOFF]
    assert len(set(longest)) == len(longest) > 30
    assert any(later < sooner for sooner, later in pairwise(longest))


@pytest.mark.parametrize("patience", [0.3, 1.0, 7.0])
def test_patience_ends_and_the_last_reason_is_told(time: Time, patience: float) -> None:
    with pytest.raises(Retryable) as caught:
        tried(time, patience)
    assert time.now == pytest.approx(100.0 + patience, abs=0.1)
    assert str(caught.value) == f"reason {time.attempts}"
    assert len(time.slept) == time.attempts - 1 >= 2


def test_it_waits_as_long_as_the_cloud_asks(time: Time) -> None:
    tried(time, 60.0, times=3, after=4.0)
    assert all(4.0 <= pause <= 5.0 for pause in time.slept)
    assert len(time.slept) == 3


def test_but_not_longer_than_patience(time: Time) -> None:
    with pytest.raises(Retryable, match="reason 2"):
        tried(time, 3.0, after=600.0)
    assert time.slept == [pytest.approx(3.0, abs=0.01)]


def test_patience_counts_from_the_first_failure(time: Time) -> None:
    """A cloud that stays silent for longer than patience is asked again all the same."""
    with pytest.raises(Retryable, match="reason 2"):
        tried(time, 3.0, takes=30.0)
    assert time.attempts == 2


def test_whatever_else_is_raised_goes_through_at_once(time: Time) -> None:
    async def attempt() -> None:
        time.attempts += 1
        raise CloudRefused("no")

    with pytest.raises(CloudRefused, match="no"):
        asyncio.run(retry("a-cloud", 10.0, attempt))
    assert (time.attempts, time.slept) == (1, [])
