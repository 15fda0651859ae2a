"""Ranking of the decoding modes for a pair, a network and a goal, by simulation of each mode.

Speculation across a network is often slower than cloud-only decoding. A cloud-only stream takes one round trip in all,
speculation takes one per round (docs/design/maths.md, "Cloud capacity"). Speculation saves the cloud's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

from outrider.config import DriverName
from outrider.decoding.gate import Always, Gate
from outrider.decoding.risk_estimate import MISS_PROBABILITY, upper_bound
from outrider.errors import SettingsError, quote
from outrider.planning.costs import StepCosts
from outrider.planning.simulator import Setup, Summary, end_tokens, replay, summarise
from outrider.planning.traces import Trace
from outrider.planning.validation import share

Aim = Literal["latency", "cloud", "quality", "privacy"]
BLOCK_LENGTHS: tuple[int, ...] = (1, 2, 3, 5, 8, 12)
DRIVERS: tuple[DriverName, ...] = ("sequential", "pipelined")
MAX_RTT_S = 2.0  # the longest round trip for which a break-even is searched
PRECISION = 1e-3  # seconds, of a break-even

OBJECTIVES: dict[Aim, Callable[[Summary], tuple[float, ...]]] = {
    "latency": lambda found: (found.total_s, found.cloud_s),
    "cloud": lambda found: (found.cloud_s, found.total_s),
    "quality": lambda found: (found.cloud_share, found.cloud_s, found.total_s),
    "privacy": lambda found: (1.0 - found.at_home, found.bytes_up, found.total_s),
}


@dataclass(frozen=True)
class Goal:
    """The quantity to minimise, within a budget of changed tokens.

    aim: "latency" (seconds per output), "cloud" (the cloud's seconds), "quality" (share of tokens that the cloud
    decides) or "privacy" (outputs that use the cloud at all, then bytes sent). budget: the largest share of tokens that
    may differ from the target's, by default 0, and 1 for "privacy".
    """

    aim: Aim = "latency"
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.aim not in OBJECTIVES:
            raise SettingsError(f"a goal is {', '.join(OBJECTIVES)}, not {quote(self.aim)}")
        share(budget=self.limit)

    @property
    def limit(self) -> float:
        """Return the budget, or its default."""
        if self.budget is not None:
            return self.budget
        return 1.0 if self.aim == "privacy" else 0.0

    def worth(self, found: Summary) -> tuple[float, ...]:
        """Return the sort key of a result. Smaller is better."""
        return OBJECTIVES[self.aim](found)


@dataclass(frozen=True)
class Option:
    """A decoding mode with its best setup. allowed: it keeps the budget (see `_allowed`).

    behind: its cost under the goal divided by that of the best option, infinite if the best costs nothing.
    breakeven_rtt_s: the round trip below which it is faster than cloud-only decoding, all else equal. It is 0 if there
    is none, infinite if it is faster up to MAX_RTT_S, and None for cloud-only itself.
    """

    name: str
    setup: Setup
    summary: Summary
    allowed: bool
    behind: float = 1.0
    breakeven_rtt_s: float | None = None


@dataclass(frozen=True)
class PlainDecoding:
    """Plain decoding of the target, compared with exact speculation at its fastest k, in seconds per token."""

    token_s: float
    speculative_token_s: float
    k: int | str
    driver: DriverName

    @property
    def is_faster(self) -> bool:
        """True if speculation is slower at every k."""
        return self.token_s < self.speculative_token_s


@dataclass(frozen=True)
class Ranking:
    """Options, the best first. Those beyond the budget come last."""

    goal: Goal
    options: tuple[Option, ...]
    plain: PlainDecoding

    @property
    def best(self) -> Option:
        """Return the first option."""
        return self.options[0]

    def named(self, name: str) -> Option:
        """Return an option by its name. Raises KeyError."""
        found = {option.name: option for option in self.options}
        return found[name]


class Planner:
    """Ranks the decoding modes of a pair. Results of simulations are cached.

    base: network, load and length. gates, ks: the gates and draft lengths to try.

    Raises:
        DataError: no traces.
        SettingsError: an invalid gate or k.
    """

    def __init__(
        self,
        traces: Seq[Trace],
        costs: StepCosts,
        base: Setup | None = None,
        gates: Seq[str | Gate] = (),
        ks: Seq[int | str] = BLOCK_LENGTHS,
    ) -> None:
        self._traces, self._costs, self._base = tuple(traces), costs, base or Setup()
        self._gates, self._ks, self._ends = gates, ks, end_tokens(traces)
        self._cache: dict[Setup, Summary] = {}
        self._setups = list(self._modes())

    def rank(self, goal: Goal) -> Ranking:
        """Rank edge-only, cloud-only, and speculation with each driver and gate, each with its best k."""
        found = [self._option(name, setups, goal) for name, setups in self._setups]
        found.sort(key=lambda option: (not option.allowed, goal.worth(option.summary)))
        lead = goal.worth(found[0].summary)[0]
        options = (
            replace(
                option,
                behind=_cost_ratio(goal.worth(option.summary)[0], lead),
                breakeven_rtt_s=self.breakeven_rtt_s(option.setup),
            )
            for option in found
        )
        return Ranking(goal, tuple(options), self._plain_decoding())

    def _plain_decoding(self) -> PlainDecoding:
        plain = self.simulate(replace(self._base, mode="cloud-only"))
        setups = [setup for driver in DRIVERS for setup in self._speculative(Always(), driver)]
        best = min(setups, key=lambda setup: self.simulate(setup).token_s)
        return PlainDecoding(plain.token_s, self.simulate(best).token_s, best.k, best.driver)

    def simulate(self, setup: Setup) -> Summary:
        """Return the summary of a setup over all traces."""
        if setup not in self._cache:
            self._cache[setup] = summarise(replay(self._traces, setup, self._costs, ends=self._ends))
        return self._cache[setup]

    def breakeven_rtt_s(self, setup: Setup) -> float | None:
        """Return the round trip up to which a setup is faster than cloud-only, as `Option` describes."""
        if setup.mode == "cloud-only":
            return None
        if self._delay_vs_cloud(setup, 0.0) >= 0.0:
            return 0.0
        if self._delay_vs_cloud(setup, MAX_RTT_S) < 0.0:
            return math.inf
        return find_root(lambda rtt_s: self._delay_vs_cloud(setup, rtt_s), 0.0, MAX_RTT_S)

    def _delay_vs_cloud(self, setup: Setup, rtt_s: float) -> float:
        """Return the additional seconds per output, compared with cloud-only."""
        net = replace(setup.net, rtt=rtt_s)
        cloud_only = replace(self._base, mode="cloud-only", net=net)
        return self.simulate(replace(setup, net=net)).total_s - self.simulate(cloud_only).total_s

    def _modes(self) -> Iterator[tuple[str, list[Setup]]]:
        base = self._base
        yield "edge-only", [replace(base, mode="edge-only")]
        yield "cloud-only", [replace(base, mode="cloud-only")]
        for driver in DRIVERS:
            yield f"exact {driver}", self._speculative(Always(), driver)
        for gate in self._gates:
            for driver in DRIVERS:
                yield f"{gate} {driver}", self._speculative(gate, driver)

    def _speculative(self, gate: str | Gate, driver: DriverName) -> list[Setup]:
        return [replace(self._base, mode="speculative", gate=gate, driver=driver, k=k) for k in self._ks]

    def _option(self, name: str, setups: list[Setup], goal: Goal) -> Option:
        """Return a mode with the best of its setups."""
        tried = [(setup, self.simulate(setup)) for setup in setups]
        options = [Option(name, setup, found, _allowed(setup, found, goal.limit)) for setup, found in tried]
        return min(options, key=lambda option: (not option.allowed, goal.worth(option.summary)))


def _allowed(setup: Setup, found: Summary, limit: float) -> bool:
    """Return whether a setup keeps the budget: it changed nothing, or its share plus two standard errors is within it.

    A budget of 0 admits exact setups only. Without any verdict, few traces are weak evidence, so that a bound for any
    number of outputs must be within the budget.
    """
    exact = setup.mode == "cloud-only" or (setup.mode == "speculative" and setup.parsed_gate.exact)
    if exact or limit == 0.0:
        return exact
    if found.at_home == 1.0:
        return upper_bound(found.disagreement, found.outputs, MISS_PROBABILITY / 2) <= limit
    return found.disagreement == 0.0 or found.disagreement_high <= limit


def find_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the root of a function that is below 0 at `low` and not at `high`, to PRECISION.

    Steps alternate between the chord (regula falsi) and bisection. Two suffice for a nearly linear function, and no
    function takes more than twice the steps of bisection.
    """
    under, over, chord = function(low), function(high), True
    while high - low > PRECISION:
        middle = (low + high) / 2
        if chord:
            middle = low + (high - low) * under / (under - over)
            middle = min(max(middle, low + PRECISION / 2), high - PRECISION / 2)
        value, chord = function(middle), not chord
        low, under, high, over = (middle, value, high, over) if value < 0.0 else (low, under, middle, value)
    return low


def _cost_ratio(value: float, lead: float) -> float:
    if lead == 0.0:
        return 1.0 if value == 0.0 else math.inf
    return value / lead
