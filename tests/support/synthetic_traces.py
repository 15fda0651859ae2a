"""Random traces and step costs for the simulator, the planner and sweeps."""

from __future__ import annotations

import random

from outrider.netem.conditions import parse_conditions
from outrider.planning.costs import StepCosts
from outrider.planning.planner import Planner
from outrider.planning.simulator import Setup
from outrider.planning.traces import Trace
from outrider.sampling.sampler import Signals

EOS = 2
ENDS = frozenset({EOS})
COSTS = StepCosts(
    draft_s=0.004,
    verify_s=0.03,
    verify_per_token_s=0.001,
    draft_prefill_s=0.02,
    verify_prefill_s=0.1,
    per_round_overhead_s=0.002,
    signals_s=0.0005,
)


def trace(seed: int, length: int = 40, acceptance: float = 0.7, *, media: int = 0) -> Trace:
    """`length` tokens and the end. Unsure tokens are wrong more often, and a few of the wrong ones are an end."""
    rng = random.Random(seed)
    target = [*(rng.randrange(3, 200) for _ in range(length)), EOS]
    sure = [rng.random() for _ in target]
    draft = [t if s < acceptance else rng.choice((1, EOS, t)) for t, s in zip(target, sure, strict=True)]
    signals = tuple(Signals(s, 1 - s, s / 2, 3 * s) for s in sure)
    return Trace(f"t{seed}", 30, tuple(target), tuple(draft), signals, media)


TRACES = [trace(seed) for seed in range(12)]
GATES = ("entropy:0.4", "entropy:0.9")
NEAR = Planner(TRACES[:4], COSTS, Setup(net=parse_conditions("rtt=20ms")), GATES, (1, 4))
