"""Does `outrider plan` name the way of decoding that is then the fastest?

The bundled pair, the target in a process of its own behind an emulated network. Traces and costs are taken once, as the
command takes them. Then, for each network, every way that the plan ranks (cloud-only, exact speculation and a gate,
each with either driver and the k that the plan gives it) decodes the same clips live, all of them interleaved in random
order. A way's live time is the sum over clips of the medians over turns. Prints, for each network, whom the plan chose,
who was the fastest, and how much slower the choice was. Ends with one JSON line.

    python -m benchmarks.plan_live [--turns 5] [--clips 3] [--gate entropy:0.3] [--budget 0.1] [--nets rtt=5ms …]
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import combinations
from typing import Any

import torch

from benchmarks.remote import captions
from benchmarks.simulation import TOKENS, Live, decoding, deployed
from outrider.config import GenerationSettings
from outrider.netem.conditions import parse_conditions
from outrider.planning.costs import StepCosts
from outrider.planning.planner import Goal, Option, Planner, Ranking
from outrider.planning.simulator import Setup
from outrider.planning.timing import measure_costs
from outrider.planning.trace_recorder import record
from outrider.planning.traces import Trace

NETS = (
    *("rtt=1ms", "rtt=3ms", "rtt=6ms", "rtt=10ms", "rtt=20ms", "rtt=40ms", "rtt=80ms", "rtt=150ms"),
    *("rtt=20ms,bw=1Mbit", "rtt=60ms,bw=256kbit"),
)


def plan(traces: list[Trace], costs: StepCosts, net: str, args: argparse.Namespace) -> Ranking:
    base = Setup(net=parse_conditions(net), max_new_tokens=TOKENS)
    return Planner(traces, costs, base, gates=[args.gate]).rank(Goal("latency", args.budget))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = captions()[:: max(1, 12 // args.clips)][: args.clips]
    with deployed(args) as (edge, verifiers):
        plain, wanted = verifiers["none"], GenerationSettings(max_new_tokens=TOKENS)
        costs = measure_costs(edge, plain, prompts, wanted)
        traces = list(record(edge, plain, prompts, wanted))
        rankings = {net: plan(traces, costs, net, args) for net in args.nets}
        lives = {
            (net, option.name): Live(option.setup, decoding(option.setup, edge, verifiers), [])
            for net, ranking in rankings.items()
            for option in allowed(ranking)
        }
        for turn in range(args.turns):
            for live in random.Random(turn).sample(list(lives.values()), len(lives)):
                live.runs.append([live.decode(prompt) for prompt in prompts])
    return [row(net, ranking, lives) for net, ranking in rankings.items()]


def allowed(ranking: Ranking) -> list[Option]:
    """What keeps within the budget and asks the cloud; the edge alone is no question of the network."""
    return [option for option in ranking.options if option.allowed and option.setup.mode != "edge-only"]


def row(net: str, ranking: Ranking, lives: dict[tuple[str, str], Live]) -> dict[str, Any]:
    options = allowed(ranking)
    seconds = {option.name: lives[net, option.name].seconds("total_s") for option in options}
    fastest = min(seconds, key=lambda name: seconds[name])
    chosen = options[0]
    return {
        "net": net,
        "chosen": chosen.name,
        "fastest": fastest,
        "right": chosen.name == fastest,
        "behind": seconds[chosen.name] / seconds[fastest] - 1,
        "ways": {
            option.name: {"k": option.setup.k, "planned_s": option.summary.total_s, "live_s": seconds[option.name]}
            for option in options
        },
    }


def ordered(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of ways that the plan has in the right order, and all pairs."""
    pairs = [pair for found in rows for pair in combinations(found["ways"].values(), 2)]
    right = sum((a["planned_s"] < b["planned_s"]) == (a["live_s"] < b["live_s"]) for a, b in pairs)
    return right, len(pairs)


def show(rows: list[dict[str, Any]], clips: int) -> None:
    for found in rows:
        ways = ", ".join(
            f"{name} {1e3 * way['live_s'] / clips:.0f} ({1e3 * way['planned_s']:.0f})"
            for name, way in found["ways"].items()
        )
        sign = "right" if found["right"] else f"{found['fastest']} was {found['behind']:.1%} faster"
        print(f"{found['net']:22s} plan: {found['chosen']:28s} {sign}\n{'':22s} ms live (planned): {ways}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clips", type=int, default=3)
    parser.add_argument("--gate", default="entropy:0.3")
    parser.add_argument("--budget", type=float, default=0.1)
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    args = parser.parse_args()
    torch.set_num_threads(1)  # the cloud process has the other core
    rows = run(args)
    show(rows, args.clips)
    right = sum(found["right"] for found in rows)
    print(f"the plan's choice was the fastest in {right} of {len(rows)} networks")
    in_order, pairs = ordered(rows)
    print(f"{in_order} of {pairs} pairs of ways are in the right order")
    print(json.dumps({"benchmark": "plan_live", **vars(args), "right": right, "in_order": in_order, "rows": rows}))


if __name__ == "__main__":
    main()
