"""`--k auto` against every fixed k from 1 to 16, in virtual time: nothing is measured but the decisions.

The real decoder, lookahead and drivers run on scripted models whose costs advance a clock of their own: a draft takes
t_d, a verdict RTT + t_v·(1 + 0.02·k), both with 10 % of noise, and the first of each reads a prompt as well. What is
drafted wrong, and how sure the drafter was, is fixed per position beforehand, so that every k meets the same text:

    geometric   each token is accepted with chance α; the drafter's confidence says nothing about it
    calibrated  the chance varies around α from token to token, and the drafter knows it
    bursty      stretches of α 0.97 and 0.35 take turns; the drafter knows which, but is too sure of itself

`auto` starts knowing nothing, as a new SpeculativeDecoder does: what it learns on the way is in its figure. Prints the
ratio of its tokens per second to those of the best fixed k, and ends with one JSON line.

    python benchmarks/k_sweep.py [--tokens 256] [--generations 4] [--first-seed 0] [--details] [--live [--repeats 7]]

--live: the bundled pair in this process instead, auto and fixed k interleaved, medians over repeats.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, product
from typing import Any

from outrider.api import SpeculativeDecoder, local
from outrider.config import DriverName
from outrider.decoding.actions import Draft, Plan, Proposal, Verify
from outrider.decoding.decoder import Decoder
from outrider.decoding.draft_length import DraftLength, FixedDraftLength, parse_draft_length
from outrider.decoding.gate import Always, Signals
from outrider.decoding.stopping import StopRules
from outrider.engines.load import BUNDLED, load_engine
from outrider.engines.prefix_cache import unique_salt
from outrider.planning.virtual_time import Clock, InFlight, run_driver
from outrider.prompts.audio import Audio
from outrider.sampling.acceptance import Exact, Verdict

VERIFY_S = 0.05
SLOPE = 0.02
NOISE = 0.1
RATIOS = (2, 5, 10, 20)  # t_v / t_d
RTTS = (0.0, 0.02, 0.1)
FIXED = tuple(range(1, 17))
DRIVERS: tuple[DriverName, ...] = ("sequential", "pipelined")
WRONG = 1  # the token that is drafted where the drafter errs
ALPHAS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
PROFILES = (*(f"geometric:{alpha}" for alpha in ALPHAS), "calibrated:0.6", "calibrated:0.85", "bursty:20", "bursty:60")
LIVE = ("auto", 1, 2, 3, 5, 8, 12)


@dataclass(frozen=True)
class Place:
    """A position of the text: whether the drafter is right there, and how sure it is (−log q)."""

    right: bool
    logprob: float


@lru_cache(maxsize=64)
def text(profile: str, length: int, seed: int) -> tuple[Place, ...]:
    kind, _, value = profile.partition(":")
    rng = random.Random(f"{profile} {seed}")
    make = {"geometric": _geometric, "calibrated": _calibrated, "bursty": _bursty}[kind]
    return tuple(islice(make(float(value), rng), length))


def _geometric(alpha: float, rng: random.Random) -> Iterator[Place]:
    while True:
        yield Place(rng.random() < alpha, -math.log(rng.betavariate(4, 2)))


def _calibrated(alpha: float, rng: random.Random) -> Iterator[Place]:
    while True:
        chance = rng.betavariate(2 * alpha, 2 * (1 - alpha))
        yield Place(rng.random() < chance, -math.log(max(chance, 1e-6)))


def _bursty(length: float, rng: random.Random) -> Iterator[Place]:
    easy = True
    while True:
        chance = 0.97 if easy else 0.35
        logit = math.log(chance / (1 - chance)) + 1.0 + rng.gauss(0, 1)
        yield Place(rng.random() < chance, math.log1p(math.exp(-logit)))
        easy ^= rng.random() < 1 / length


@dataclass
class Costs:
    """A virtual clock, and what moves it."""

    step_s: float
    rtt_s: float
    clock: Clock = field(default_factory=Clock)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def noisy(self, seconds: float) -> float:
        return seconds * math.exp(self.rng.gauss(0, NOISE))


class SimulatedDrafter:
    """Position n's token is n + 2, or WRONG."""

    def __init__(self, places: tuple[Place, ...], costs: Costs) -> None:
        self._places, self._costs, self._first = places, costs, True

    def draft(self, ids: list[int], action: Draft) -> list[Proposal]:
        return [self._propose(len(ids) - 1 + n) for n in range(action.count)]

    def _propose(self, at: int) -> Proposal:
        self._costs.clock.spend(self._costs.noisy(self._costs.step_s) * (10 if self._first else 1))
        self._first = False
        place = self._places[at]
        return Proposal(at + 2 if place.right else WRONG, Signals(0.0, 0.0, 0.0, place.logprob))

    def rollback_to(self, length: int) -> None:
        """No cache to roll back."""


class ScriptedLink:
    """Verdicts after a round trip."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs

    def submit(self, request: Verify) -> InFlight:
        at = request.base_length - 1
        wrong = (n for n, token in enumerate(request.draft_ids) if token != at + n + 2)
        accepted = next(wrong, len(request.draft_ids))
        prompt = 3 * VERIFY_S if request.round == 1 else 0.0
        taken = VERIFY_S * (1 + SLOPE * len(request.draft_ids)) + self._costs.rtt_s
        arrives = self._costs.clock.now + self._costs.noisy(taken) + prompt
        return InFlight(self._costs.clock, arrives, Verdict(request.round, accepted, at + accepted + 2))


@dataclass(frozen=True)
class Case:
    profile: str
    ratio: float
    rtt_s: float
    driver: DriverName

    def __str__(self) -> str:
        return f"{self.profile:16s} t_v/t_d {self.ratio:4g}  RTT {1000 * self.rtt_s:4.0f} ms  {self.driver:10s}"


def rate(case: Case, plan_ahead: DraftLength, tokens: int, seeds: range) -> float:
    """Tokens per virtual second over some generations, one after another with the same lookahead."""
    costs = Costs(VERIFY_S / case.ratio, case.rtt_s)
    for seed in seeds:
        _generate(case, plan_ahead, tokens, costs, text(case.profile, tokens + 80, seed))
    return tokens * len(seeds) / costs.clock.now


def _generate(case: Case, plan_ahead: DraftLength, tokens: int, costs: Costs, places: tuple[Place, ...]) -> None:
    plan = Plan(StopRules(tokens, ()), Always(), Exact(), plan_ahead, has_verifier=True, on_loop="ignore")
    decoder, link = Decoder([0], plan), ScriptedLink(costs)
    for _ in run_driver(decoder, SimulatedDrafter(places, costs), link, costs.clock, case.driver):
        pass
    if decoder.sequence.generated != list(range(2, tokens + 2)):
        raise SystemExit(f"{case}: the output is not the target's")


@dataclass(frozen=True)
class Finding:
    case: Case
    auto: float
    fixed: dict[int, float]

    @property
    def best(self) -> int:
        return max(self.fixed, key=lambda k: self.fixed[k])

    @property
    def ratio(self) -> float:
        return self.auto / self.fixed[self.best]


def find(case: Case, tokens: int, seeds: range, lengths: tuple[int, ...] = FIXED) -> Finding:
    fixed = {k: rate(case, FixedDraftLength(k), tokens, seeds) for k in lengths}
    return Finding(case, rate(case, parse_draft_length("auto"), tokens, seeds), fixed)


def sweep(tokens: int, seeds: range, profiles: tuple[str, ...] = PROFILES) -> list[Finding]:
    cases = (Case(*each) for each in product(profiles, RATIOS, RTTS, DRIVERS))
    return [find(case, tokens, seeds) for case in cases]


def summary(findings: list[Finding]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for driver in DRIVERS:
        ratios = [found.ratio for found in findings if found.case.driver == driver]
        out[driver] = {
            "cases": len(ratios),
            "worst": round(min(ratios), 4),
            "median": round(statistics.median(ratios), 4),
            "below_0.95": sum(ratio < 0.95 for ratio in ratios),
        }
    return out


def show(findings: list[Finding], *, details: bool) -> None:
    for found in findings if details else sorted(findings, key=lambda found: found.ratio)[:10]:
        best = f"best k {found.best:2d} {found.fixed[found.best]:7.2f} tok/s"
        print(f"{found.case}  auto {found.auto:7.2f} tok/s  {best}  ratio {found.ratio:.3f}")
        if details:
            print("    fixed " + "  ".join(f"{k}: {value:.1f}" for k, value in found.fixed.items()))
    for profile, driver in product(dict.fromkeys(found.case.profile for found in findings), DRIVERS):
        ratios = [found.ratio for found in findings if (found.case.profile, found.case.driver) == (profile, driver)]
        print(f"{profile:16s} {driver:10s} worst {min(ratios):.3f}  median {statistics.median(ratios):.3f}")


# The bundled pair -------------------------------------------------------------------------------------------------


def live(repeats: int) -> dict[str, Any]:
    """Tokens per second of the bundled pair in this process, over every third clip: medians of interleaved turns."""
    draft, target = load_engine("demo:edge"), local(load_engine("demo:cloud"))
    decoders = {str(k): SpeculativeDecoder(draft, target, k=k) for k in LIVE}
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for turn in range(-1, repeats):
        for name in random.Random(turn).sample(list(decoders), len(decoders)):
            speed = _speed(decoders[name])
            if turn >= 0:  # the first one warms up
                speeds[name].append(speed)
    medians = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
    best = max((name for name in medians if name != "auto"), key=lambda name: medians[name])
    turns = [auto / fixed for auto, fixed in zip(speeds["auto"], speeds[best], strict=True)]
    print("\n".join(f"k {name:5s} {value:8.2f} tok/s" for name, value in medians.items()))
    return {"tokens_per_s": medians, "best": best, "ratio": round(statistics.median(turns), 4)}


def _speed(decoder: SpeculativeDecoder) -> float:
    clips = sorted((BUNDLED / "clips").glob("*.ogg"))[::3]
    results = [decoder.generate(Audio(clip), cache_salt=unique_salt(), max_new_tokens=128) for clip in clips]
    return sum(len(out.token_ids) for out in results) / sum(out.stats.total_s for out in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 256), ("generations", 4), ("first-seed", 0), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--live", action="store_true")
    options = parser.parse_args()
    if options.live:
        print(json.dumps({"benchmark": "k_sweep_live", "repeats": options.repeats, **live(options.repeats)}))
        return
    seeds = range(options.first_seed, options.first_seed + options.generations)
    findings = sweep(options.tokens, seeds)
    show(findings, details=options.details)
    setting = {"tokens": options.tokens, "generations": options.generations, "first_seed": options.first_seed}
    print(json.dumps({"benchmark": "k_sweep", **setting, **summary(findings)}))


if __name__ == "__main__":
    main()
