"""The switch between speculative and plain decoding, in virtual time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.decoding.draft_length import AdaptiveDraftLength
from outrider.decoding.draft_source import DraftSource
from outrider.decoding.speculation_switch import (
    EXPLORATION,
    MAX_CREDIT,
    PLAIN_SAMPLES,
    Estimate,
    Share,
    SpeculationSwitch,
)
from tests.support.drafted import by_model

MODEL, LOOKUP = DraftSource.MODEL, DraftSource.LOOKUP

PROMPT, GENERATION = 50, 200  # tokens
WARM_UP, MEASURED = 600, 3000  # tokens


@dataclass(frozen=True)
class Costs:
    """Seconds of a draft, a verdict, each draft in it, and a token that the drafter reads. A plain token takes 1 s."""

    draft: float
    fixed: float
    slope: float
    read: float
    noise: float = 0.1

    def throughput(self, alpha: float, k: int) -> float:
        """Return the tokens per second with blocks of k tokens, or of plain decoding for 0."""
        if k == 0:
            return 1.0
        tokens = sum(alpha**n for n in range(k + 1))
        return 1.0 / ((self.fixed + (self.draft + self.slope) * k) / tokens + self.read * PROMPT / GENERATION)


@dataclass
class Simulation:
    """Generations by one policy. The drafter knows how likely each of its tokens is, on average `alpha`."""

    costs: Costs
    alpha: float
    seed: int = 0
    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    auto: AdaptiveDraftLength = field(default_factory=AdaptiveDraftLength)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def run(self, tokens: int) -> float:
        """Decode at least `tokens` and return the tokens per second."""
        start, count = self.seconds, self.tokens
        while self.tokens < count + tokens:
            self._generate()
        return (self.tokens - count) / (self.seconds - start)

    def _generate(self) -> None:
        controller, end = self.auto.controller, self.tokens + GENERATION
        controller.switch.begin_generation()
        unread, was_plain, is_first = PROMPT, False, True
        while self.tokens < end:
            block, chances, draft_s = self._draft(unread)
            unread = 0 if block else unread + 1
            if block:
                accepted = next((n for n, p in enumerate(chances) if self._rng.random() >= p), len(block))
                verdict_s = self._spend(self.costs.fixed + self.costs.slope * len(block))
                controller.decided(
                    block,
                    accepted,
                    drafted=by_model(len(block), draft_s),
                    seconds=None if is_first else verdict_s,
                )
                self.tokens += accepted + 1
            else:
                plain_s = self._spend(1.0)
                controller.decoded_plain(plain_s if was_plain else None)
                self.tokens += 1
            was_plain, is_first = not block, False

    def _draft(self, unread: int) -> tuple[list[float], list[float], float]:
        """Return the −log q of a block, its chances to be accepted, and the seconds of drafting it."""
        block: list[float] = []
        chances: list[float] = []
        seconds = 0.0
        while self.auto.tokens_to_draft(len(block), block, 0 if block else unread).number:
            if unread and not block:
                self.auto.controller.switch.read(unread, self._spend(self.costs.read * unread))
            each = self._spend(self.costs.draft)
            self.auto.controller.drafted(1, each)
            seconds += each
            chances.append(self._rng.betavariate(2 * self.alpha, 2 * (1 - self.alpha)))
            block.append(-math.log(max(chances[-1], 1e-9)))
        self.drafted += len(block)
        return block, chances, seconds

    def _spend(self, seconds: float) -> float:
        taken = seconds * math.exp(self._rng.gauss(0.0, self.costs.noise))
        self.seconds += taken
        return taken


@settings(max_examples=25, deadline=None)
@given(
    alpha=st.floats(0.05, 0.95),
    draft=st.floats(0.02, 0.6),
    fixed=st.floats(1.0, 1.5),
    slope=st.floats(0.0, 0.9),
    read=st.floats(0.0, 0.1),
    seed=st.integers(0, 9),
)
def test_auto_reaches_95_percent_of_the_best_of_plain_and_fixed_k(
    alpha: float, draft: float, fixed: float, slope: float, read: float, seed: int
) -> None:
    costs = Costs(draft, fixed, slope, read)
    simulation = Simulation(costs, alpha, seed)
    simulation.run(WARM_UP)
    best = max(costs.throughput(alpha, k) for k in range(9))
    assert simulation.run(MEASURED) >= 0.95 * best


AVX2 = Costs(draft=0.35, fixed=1.0, slope=0.85, read=0.09)  # a 0.5B and a 1.5B model in llama.cpp on two cores


def test_plain_decoding_where_verification_costs_more_than_it_saves() -> None:
    simulation = Simulation(AVX2, alpha=0.7)
    simulation.run(WARM_UP)
    before = simulation.drafted
    assert simulation.run(MEASURED) >= 0.97
    assert 0 < simulation.drafted - before < 0.1 * MEASURED, "probes are few, and do not end"


def test_without_the_switch_the_same_costs_lose_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculationSwitch, "should_speculate", lambda *_: True)
    simulation = Simulation(AVX2, alpha=0.7)
    simulation.run(WARM_UP)
    assert simulation.run(MEASURED) < 0.8


def test_speculation_returns_when_the_text_becomes_predictable() -> None:
    costs = Costs(draft=0.1, fixed=1.1, slope=0.2, read=0.01)
    simulation = Simulation(costs, alpha=0.1)
    simulation.run(2000)
    simulation.alpha = 0.9
    simulation.run(1000)
    assert simulation.run(1000) >= 0.95 * max(costs.throughput(0.9, k) for k in range(9))


# The loss is bounded ----------------------------------------------------------------------------------------------


@given(
    rounds=st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 8.0)), min_size=1, max_size=200),
    throughput=st.floats(0.1, 10.0),
)
def test_whatever_is_estimated_the_loss_is_a_share_of_the_time_and_a_constant(
    rounds: list[tuple[int, float]], throughput: float
) -> None:
    """Plain tokens take 1 s, and rounds up to 8 s. The estimate has nothing to do with the rounds."""
    switch = learnt(throughput)
    lost = plain = 0.0
    for tokens, seconds in rounds:
        estimate(switch, throughput, 1.0)
        while not switch.should_speculate(0) and plain < 1000:
            switch.decoded_plain(1.0)
            plain += 1.0
        if plain >= 1000:
            break
        switch.speculated({MODEL: Share(tokens, seconds)})
        lost += seconds - tokens
    assert lost <= EXPLORATION * plain + MAX_CREDIT + 8.0


def estimate(switch: SpeculationSwitch, throughput: float, round_tokens: float = 2.0, verdict_s: float = 1.0) -> None:
    """Update the switch with an estimate of the model's rounds."""
    switch.update_estimates({MODEL: Estimate(throughput, round_tokens)}, throughput, verdict_s)


@given(
    rounds=st.lists(
        st.tuples(st.sampled_from(DraftSource), st.integers(1, 9), st.floats(0.1, 8.0)), min_size=1, max_size=200
    ),
    throughputs=st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0)),
)
def test_two_sources_together_lose_no_more(
    rounds: list[tuple[DraftSource, int, float]], throughputs: tuple[float, float]
) -> None:
    """Each may be in debt, and they share the exploration. The time of one source is exploration of the other."""
    switch = SpeculationSwitch(DraftSource)
    estimates = {source: Estimate(rate, 2.0) for source, rate in zip(DraftSource, throughputs, strict=True)}
    lost = seconds = 0.0
    for source, tokens, taken in rounds:
        switch.update_estimates(estimates, max(*throughputs, 1.0), 1.0)
        while not switch.should_speculate(0, source) and seconds < 2000:
            switch.decoded_plain(1.0)
            seconds += 1.0
        if seconds >= 2000:
            break
        switch.speculated({source: Share(tokens, taken)})
        lost += taken - tokens
        seconds += taken
    assert lost <= EXPLORATION * seconds + 2 * (MAX_CREDIT + 8.0)


@pytest.mark.parametrize(("throughput", "pays"), [(1.2, True), (2.0, False)])
def test_a_source_must_not_slow_the_other_one(throughput: float, pays: bool) -> None:
    """Rounds of 2 tokens in 1.8 s beat plain decoding. At 2 tokens per second of both, 0.8 s are worth more than 1."""
    switch = SpeculationSwitch(DraftSource)
    estimates = {MODEL: Estimate(2.0 / 1.8, 2.0), LOOKUP: Estimate(4.0, 4.0)}
    for _ in range(2):
        switch.update_estimates(estimates, throughput, 1.0)
        while switch.needs_sample:
            switch.decoded_plain(1.0)
    assert switch.should_speculate(0, MODEL) is pays
    assert switch.should_speculate(0, LOOKUP)


def test_one_source_may_be_off_while_the_other_drafts() -> None:
    switch = SpeculationSwitch(DraftSource)
    for throughputs in ((0.5, 2.0), (2.0, 0.5)):
        estimates = {source: Estimate(rate, 2.0) for source, rate in zip((MODEL, LOOKUP), throughputs, strict=True)}
        for _ in range(2):
            switch.update_estimates(estimates, 2.0, 1.0)
            while switch.needs_sample:
                switch.decoded_plain(1.0)
        decisions = [switch.should_speculate(0, source) for source in (MODEL, LOOKUP)]
        assert decisions == [rate > 1.0 for rate in throughputs]


def test_the_time_of_one_source_lets_the_other_explore() -> None:
    switch = SpeculationSwitch(DraftSource)
    estimates = {MODEL: Estimate(0.5, 2.0), LOOKUP: Estimate(2.0, 2.0)}
    switch.update_estimates(estimates, 2.0, 1.0)
    for _ in range(PLAIN_SAMPLES):
        switch.decoded_plain(1.0)
    switch.update_estimates(estimates, 2.0, 1.0)
    assert not switch.should_speculate(0, MODEL)
    seconds = 0.0
    while not switch.should_speculate(0, MODEL) and seconds < 10_000:
        switch.speculated({LOOKUP: Share(2, 1.0)})
        if switch.needs_sample:
            switch.decoded_plain(1.0)
        seconds += 1.0
    price = switch.accounts[MODEL].round_loss
    assert price * 100 - 4 <= seconds <= price * 100


def learnt(throughput: float, plain: float = 1.0, credit: int = 0) -> SpeculationSwitch:
    """Return a switch after `credit` seconds of gains, and an estimate."""
    switch = SpeculationSwitch()
    estimate(switch, throughput)
    for _ in range(PLAIN_SAMPLES):
        switch.decoded_plain(plain)
    estimate(switch, throughput)
    switch.accounts[MODEL].budget = float(credit)
    return switch


def test_plain_tokens_are_timed_first() -> None:
    switch = SpeculationSwitch()
    assert switch.should_speculate(50)
    estimate(switch, 5.0, verdict_s=0.5)
    assert switch.needs_sample
    assert not switch.should_speculate(0)
    switch.decoded_plain(None)
    assert switch.needs_sample, "a token of unknown time is no sample"


def test_the_first_samples_wait_while_speculation_is_clearly_faster() -> None:
    """Four times as fast as a verdict. One plain token and two samples lose 0.75 s each, 1 % of 225 s."""
    switch, seconds = SpeculationSwitch(), 0.0
    while not switch.needs_sample:
        estimate(switch, 4.0)
        switch.speculated({MODEL: Share(4, 1.0)})
        seconds += 1.0
    assert seconds == 226.0


@pytest.mark.parametrize(("throughput", "pays"), [(1.01, True), (0.99, False)])
def test_the_faster_way_is_taken(throughput: float, pays: bool) -> None:
    switch = learnt(throughput)
    assert switch.accounts[MODEL].pays is switch.should_speculate(0) is pays


def test_a_probe_waits_until_the_budget_covers_its_round_and_its_reading() -> None:
    """A round of 2 tokens loses 2 s, and the drafter reads 10 tokens per second."""
    switch = learnt(0.5)
    switch.read(100, 10.0)
    switch.accounts[MODEL].budget = 2.0
    assert switch.should_speculate(0)
    assert not switch.should_speculate(1)
    switch.accounts[MODEL].budget = 2.0 + 2 * 5.0
    assert switch.should_speculate(50)


def test_a_long_prompt_is_read_only_if_the_generations_are_long_enough() -> None:
    """Speculation gains 0.5 s per token. Generations of 4 tokens do not gain the 100 s of reading, long ones do."""
    short, long = learnt(2.0), learnt(2.0)
    for switch, tokens in ((short, 4), (long, 400)):
        switch.read(1000, 100.0)
        for _ in range(60):
            switch.begin_generation()
            switch.speculated({MODEL: Share(tokens, tokens / 2)})
    assert not short.should_speculate(1000)
    assert long.should_speculate(1000)


def test_rounds_that_lose_end_speculation_though_it_seems_to_pay() -> None:
    switch = learnt(2.0)
    for _ in range(int(MAX_CREDIT)):
        assert switch.should_speculate(0)
        switch.speculated({MODEL: Share(1, 2.0)})
    switch.speculated({MODEL: Share(1, 2.0)})
    assert switch.accounts[MODEL].pays
    assert not switch.should_speculate(0)


def test_gains_are_kept_up_to_a_limit() -> None:
    switch = learnt(2.0)
    for _ in range(100):
        switch.speculated({MODEL: Share(4, 1.0)})
    assert switch.accounts[MODEL].budget == MAX_CREDIT


def test_the_time_of_a_plain_token_is_measured_again_while_speculation_pays() -> None:
    """A plain token loses 0.5 s. With 1 % of the time for it, three of them are due after 150 s."""
    switch = learnt(2.0)
    seconds = 0.0
    while not switch.needs_sample:
        switch.speculated({MODEL: Share(2, 1.0)})
        seconds += 1.0
        estimate(switch, 2.0)
    assert seconds == 150.0


def test_a_plain_token_of_unknown_time_does_not_put_off_the_next_sample() -> None:
    """Between drafts of prompt lookup there are single tokens without a match. Their times are never known."""
    switch = learnt(2.0)
    seconds = 0.0
    while not switch.needs_sample:
        switch.speculated({MODEL: Share(2, 1.0)})
        switch.decoded_plain(None)
        seconds += 1.0
        estimate(switch, 2.0)
    assert seconds == 150.0
