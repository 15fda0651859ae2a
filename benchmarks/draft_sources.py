"""`--k auto` with a draft model, with prompt lookup and with both, in virtual time.

The real decoder, driver and controller run on scripted sources whose costs advance a clock of their own: a plain token
takes 1 s, a verdict 1 s and `slope` seconds per draft, a token of the model `draft_s`, and `read_s` per token that it
has not read. Times have 10 % of noise. All three see the same texts. At each position a match begins with probability
`matched`, its token is right with probability `copied`, and the model's with `drafted` on average, which it knows for
each token. There are two kinds of texts:

    lasting     a match lasts until its next token is wrong, as n-grams do
    passing     a match is lost unless it is used at once, and lasts for one block

Prints the worst cases of tokens per second with both sources by the better one of the two alone, and of plain decoding,
and ends with one JSON line.

    python -m benchmarks.draft_sources [--generations 12] [--every 1] [--first-seed 0]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from outrider.decoding.actions import Draft, Plan, Proposal, Verify
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_length import parse_draft_length
from outrider.decoding.draft_source import DraftSource
from outrider.decoding.gate import Always, Signals
from outrider.decoding.stopping import StopRules
from outrider.edge.lookup_drafter import CombinedDrafter
from outrider.planning.virtual_time import Clock, InFlight, run_driver
from outrider.sampling.acceptance import Exact, Verdict

RIGHT, WRONG = 1, 2
PROMPT, GENERATION = 50, 200  # tokens
WARM_UP = 5  # generations
LOOKUP_S = 1e-6
NOISE = 0.1
SOURCES = {"model": (DraftSource.MODEL,), "lookup": (DraftSource.LOOKUP,), "both": tuple(DraftSource)}


@dataclass(frozen=True)
class Case:
    """Costs in seconds, of which a plain token takes one, and the shares of matches and of accepted tokens."""

    draft_s: float
    read_s: float
    slope: float
    matched: float
    copied: float
    drafted: float
    lasting: bool


GRID = tuple(
    Case(draft_s, read_s, *shares, lasting=lasting)
    for (draft_s, read_s), shares, lasting in product(
        ((0.02, 0.002), (0.1, 0.01), (0.3, 0.03), (0.7, 0.07), (1.5, 0.1)),
        product((0.02, 0.2, 0.85), (0.1, 0.3, 0.5), (0.3, 0.6, 0.9), (0.3, 0.6, 0.9)),
        (True, False),
    )
)


@dataclass(frozen=True)
class Position:
    """The match length at a position, 0 without a match, whether each source is right, and the model's −log q."""

    match_length: int
    copy_right: bool
    draft_right: bool
    logprob: float


def text(case: Case, seed: int) -> list[Position]:
    """Return the positions of a prompt, its output, and the drafts beyond."""
    rng, positions = random.Random(seed), [Position(0, False, False, 0.0)]
    for _ in range(PROMPT + GENERATION + 64):
        begins, last = rng.random() < case.matched, positions[-1]
        length = rng.choice((1, 2, 3)) if begins else 0
        if case.lasting and last.match_length and last.copy_right:
            length = last.match_length + 1
        chance = rng.betavariate(2 * case.drafted, 2 * (1 - case.drafted))
        copy_right, draft_right = rng.random() < case.copied, rng.random() < chance
        positions.append(Position(length, copy_right, draft_right, -math.log(max(chance, 1e-9))))
    return positions


@dataclass
class Simulation:
    """A drafter with these sources, and a verifier."""

    case: Case
    sources: Collection[DraftSource]
    first_seed: int = 0
    clock: Clock = field(default_factory=Clock)
    drafts: dict[DraftSource, int] = field(default_factory=lambda: dict.fromkeys(DraftSource, 0))

    def __post_init__(self) -> None:
        self._rng, self._seed = random.Random(self.first_seed), self.first_seed
        self.auto = parse_draft_length("auto", self.sources)
        self.text: list[Position] = []

    def run(self, generations: int) -> float:
        """Return the tokens per second."""
        start = self.clock.now
        for _ in range(generations):
            self._seed += 1
            self.text = text(self.case, self._seed)
            plan = Plan(StopRules(GENERATION, ()), Always(), Exact(), self.auto, has_verifier=True, on_loop="ignore")
            for _event in run_driver(Decoder([RIGHT] * PROMPT, plan), self._drafter(), self, self.clock):
                pass
        return generations * GENERATION / (self.clock.now - start)

    def _drafter(self) -> Any:
        drafters: dict[DraftSource, Any] = {DraftSource.MODEL: Model(self), DraftSource.LOOKUP: Lookup(self)}
        if len(self.sources) == 1:
            return drafters[next(iter(self.sources))]
        controller, (model, lookup) = self.auto.controller, drafters.values()
        assert controller is not None
        return CombinedDrafter(model, lookup, controller.prefers_lookup, per_token=False)

    def spend(self, seconds: float) -> None:
        self.clock.spend(self._noisy(seconds))

    def submit(self, request: Verify) -> InFlight:
        drafts = request.draft_ids
        accepted = drafts.index(WRONG) if WRONG in drafts else len(drafts)
        arrives = self.clock.now + self._noisy(1.0 + self.case.slope * len(drafts))
        return InFlight(self.clock, arrives, Verdict(request.round, accepted, RIGHT))

    def _noisy(self, seconds: float) -> float:
        return seconds * math.exp(self._rng.gauss(0.0, NOISE))


class Model:
    """A draft model with a KV cache."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._cached = simulation, 0

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        assert not action.lookup_only
        simulation, case = self._simulation, self._simulation.case
        simulation.spend(case.draft_s + case.read_s * max(len(ids) - 1 - self._cached, 0))
        simulation.drafts[DraftSource.MODEL] += 1
        self._cached, position = len(ids), simulation.text[len(ids)]
        return [Proposal(RIGHT if position.draft_right else WRONG, Signals(0.0, 0.0, 0.0, position.logprob))]

    def rollback_to(self, length: int) -> None:
        self._cached = min(self._cached, length - 1)


class Lookup:
    """Prompt lookup. After a wrong draft there is no match."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._copied_to, self._length = 0, 0

    def match_length(self, ids: list[int]) -> int:
        if ids[-1] == WRONG:
            return 0
        if not self._simulation.case.lasting and self._copied_to == len(ids):
            return self._length + 1
        return self._simulation.text[len(ids)].match_length

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        self._simulation.spend(LOOKUP_S)
        if not (length := self.match_length(ids)):
            return []
        self._copied_to, self._length = len(ids) + 1, length
        self._simulation.drafts[DraftSource.LOOKUP] += 1
        return [Proposal(RIGHT if self._simulation.text[len(ids)].copy_right else WRONG, match_length=length)]

    def rollback_to(self, length: int) -> None:
        """The positions are fixed."""


def rates(case: Case, generations: int, first_seed: int = 0) -> dict[str, float]:
    """Return the tokens per second with each source alone and with both, after a warm-up."""
    found = {}
    for name, sources in SOURCES.items():
        simulation = Simulation(case, sources, first_seed)
        simulation.run(WARM_UP)
        found[name] = simulation.run(generations)
    return found


def summary(findings: list[tuple[Case, dict[str, float]]]) -> dict[str, Any]:
    """Return the ratios of both sources to the better one of the two alone, and to plain decoding."""
    ratios = [found["both"] / max(found["model"], found["lookup"]) for _, found in findings]
    return {
        "cases": len(ratios),
        "worst": round(min(ratios), 4),
        "median": round(statistics.median(ratios), 4),
        "best": round(max(ratios), 4),
        "below_0.95": sum(ratio < 0.95 for ratio in ratios),
        "worst_by_plain": {name: round(min(found[name] for _, found in findings), 4) for name in SOURCES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("generations", 12), ("every", 1), ("first-seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    findings = [(case, rates(case, options.generations, options.first_seed)) for case in GRID[:: options.every]]
    findings.sort(key=lambda each: each[1]["both"] / max(each[1]["model"], each[1]["lookup"]))
    for case, found in findings[:10]:
        print(case, {name: round(rate, 3) for name, rate in found.items()})
    kinds = {
        "lasting" if lasting else "passing": summary([each for each in findings if each[0].lasting is lasting])
        for lasting in (True, False)
    }
    print(json.dumps({"benchmark": "draft_sources", **vars(options), **kinds}))


if __name__ == "__main__":
    main()
