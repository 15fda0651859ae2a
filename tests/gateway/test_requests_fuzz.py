"""Hostile requests for a few seconds; `python -m tests.fuzz.requests` goes on for longer."""

from __future__ import annotations

from tests.fuzz.requests import ask, check, fuzz

FOUND: list[int] = []  # seeds that once broke an invariant


def test_hostile_requests_do_no_harm() -> None:
    assert fuzz(15, seed=1)


def test_what_was_found_stays_fixed() -> None:
    import random

    from tests.support.scripted_gateway import serving

    with serving() as running:
        for seed in FOUND:
            check(ask(int(running.url.rpartition(":")[2]), random.Random(seed)))
