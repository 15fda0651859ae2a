"""Simulated against live: how far planning/simulator.py is from what a run takes.

The bundled pair, the target in a process of its own behind an emulated network. Traces are recorded once, the steps'
costs measured over a plain link; then every setting (gate × driver × network) decodes the same clips, interleaved, and
costs are measured again between turns, as the machine is not the same all the time. A setting's live time is the sum
over clips of the medians over turns; its error is the simulated sum divided by that, less 1. Ends with one JSON line.

--alpha: the drafter's token is replaced by its second choice at a share 1 − α of the positions.

    python -m benchmarks.simulation [--turns 5] [--clips 4] [--k 5] [--nets rtt=20ms rtt=50ms,bw=2Mbit]
        [--gates always …] [--alpha 1.0]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from benchmarks.remote import captions
from benchmarks.synthetic_drafter import corrupt_engine
from outrider import SpeculativeDecoder, connect, load_engine
from outrider.cli.subprocess_cloud import cloud_process
from outrider.config import DriverName, GenerationSettings
from outrider.decoding.result import Stats
from outrider.engines.prefix_cache import unique_salt
from outrider.netem.conditions import Conditions, parse_conditions
from outrider.planning.costs import StepCosts, median_costs
from outrider.planning.gate_candidates import thresholds
from outrider.planning.simulator import Outcome, Setup, replay
from outrider.planning.timing import measure_costs
from outrider.planning.trace_recorder import record
from outrider.planning.traces import Trace

DRIVERS: tuple[DriverName, ...] = ("sequential", "pipelined")
TOKENS = 128


@dataclass
class Live:
    """A setting and its runs: one Stats of each clip and turn."""

    setup: Setup
    decode: Callable[[Any], Stats]
    runs: list[list[Stats]]

    def __str__(self) -> str:
        setup = self.setup
        if setup.mode != "speculative":
            return f"{setup.mode:10s} {'':14s} {setup.net}"
        return f"{setup.driver:10s} {setup.gate!s:14s} {setup.net}"

    def seconds(self, name: str) -> float:
        """Over clips, of the medians over turns."""
        return sum(statistics.median(getattr(s, name) for s in clip) for clip in zip(*self.runs, strict=True))


@contextmanager
def deployed(args: argparse.Namespace) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The drafter, and a verifier behind each network; "none" is the plain link."""
    with ExitStack() as stack:
        address = stack.enter_context(cloud_process("demo:cloud"))
        verifiers: dict[str, Any] = {}
        for net in ("none", *args.nets):
            verifiers[net] = connect(f"grpc://{address}", net=net, deadline=300.0)
            stack.callback(verifiers[net].disconnect)
        yield load_engine("demo:edge"), verifiers


def settings(args: argparse.Namespace, traces: list[Trace]) -> list[Setup]:
    """Return exact with k fixed and "auto", the gates, cloud-only, and edge-only unless the drafter is corrupted.

    Default gates: "always", two that skip and one that triggers.
    """
    tight, loose = map(str, thresholds(traces, cloud_shares=(0.4, 0.1)))
    nets = [parse_conditions(net) for net in args.nets]
    gates = args.gates or ("always", tight, loose, f"trigger:{loose}")
    found = [
        Setup(gate=gate, k=args.k, driver=driver, net=net, max_new_tokens=TOKENS)
        for net, driver, gate in product(nets, DRIVERS, gates)
    ]
    found += [Setup(k="auto", driver=driver, net=nets[0], max_new_tokens=TOKENS) for driver in DRIVERS]
    found += [Setup(mode="cloud-only", net=net, max_new_tokens=TOKENS) for net in nets]
    return found if args.alpha < 1 else [*found, Setup(mode="edge-only", net=Conditions(), max_new_tokens=TOKENS)]


def decoding(setup: Setup, edge: Any, verifiers: dict[str, Any]) -> Callable[[Any], Stats]:
    """A prompt's run, live."""
    if setup.mode == "cloud-only":
        decoder = SpeculativeDecoder(None, verifiers[str(setup.net)], reader=edge, on_loop="ignore")
    elif setup.mode == "edge-only":
        decoder = SpeculativeDecoder(edge, on_loop="ignore")
    else:
        net = verifiers[str(setup.net)]
        decoder = SpeculativeDecoder(edge, net, gate=setup.gate, k=setup.k, driver=setup.driver)
    return lambda prompt: decoder.generate(prompt, cache_salt=unique_salt(), max_new_tokens=TOKENS).stats


def same(live: Live, simulated: list[Outcome]) -> bool:
    """Whether the counters of tokens agree; those of the sequential driver do not depend on time."""
    counters = ("rounds", "escalated", "accepted", "cloud_tokens", "edge_tokens")
    pairs = zip(live.runs[-1], simulated, strict=True)
    return all(getattr(one, name) == getattr(other, name) for one, other in pairs for name in counters)


def report(live: Live, traces: list[Trace], costs: StepCosts) -> dict[str, Any]:
    simulated = replay(traces, live.setup, costs)
    row: dict[str, Any] = {"setting": str(live), "k": live.setup.k, "same": same(live, simulated)}
    for name in ("total_s", "ttft_s"):
        row[f"live_{name}"] = live.seconds(name)
        row[f"simulated_{name}"] = sum(getattr(outcome, name) for outcome in simulated)
    for name in ("bytes_up", "bytes_down"):
        real = live.seconds(name)
        row[f"{name}_error"] = sum(getattr(outcome, name) for outcome in simulated) / real - 1 if real else 0.0
    row["error"] = row["simulated_total_s"] / row["live_total_s"] - 1
    shown = f"{row['live_total_s']:7.3f} s live, {row['simulated_total_s']:7.3f} s simulated, {row['error']:+6.1%}"
    print(f"k {live.setup.k!s:4s} {live!s:50s} {shown}{others(row)}")
    return row


def others(row: dict[str, Any]) -> str:
    first = row["simulated_ttft_s"] / row["live_ttft_s"] - 1
    told = f"; TTFT {first:+6.1%}, bytes up {row['bytes_up_error']:+.1%} down {row['bytes_down_error']:+.1%}"
    return told if row["same"] else f"{told}; other counters"


def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], StepCosts]:
    prompts = captions()[:: max(1, 12 // args.clips)][: args.clips]
    with deployed(args) as (edge, verifiers):
        corrupt_engine(edge, args.alpha)
        plain, wanted = verifiers["none"], GenerationSettings(max_new_tokens=TOKENS)
        traces = list(record(edge, plain, prompts, wanted))
        lives = [Live(setup, decoding(setup, edge, verifiers), []) for setup in settings(args, traces)]
        measured: list[StepCosts] = []
        for turn in range(args.turns):
            for n, live in enumerate(random.Random(turn).sample(lives, len(lives))):
                if n % 4 == 0:
                    clip = prompts[len(measured) % len(prompts)]
                    measured.append(measure_costs(edge, plain, [clip], wanted, repeats=1))
                live.runs.append([live.decode(prompt) for prompt in prompts])
        costs = median_costs(measured)
        return [report(live, traces, costs) for live in lives], costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clips", type=int, default=4)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--nets", nargs="+", default=["rtt=20ms", "rtt=50ms,bw=2Mbit"])
    parser.add_argument("--gates", nargs="+")
    parser.add_argument("--alpha", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the cloud process has the other core
    rows, costs = run(args)
    errors = sorted(abs(row["error"]) for row in rows)
    within = sum(error <= 0.1 for error in errors)
    print({name: f"{1e3 * value:.2f} ms" for name, value in vars(costs).items()})
    print(
        f"|error| median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}; {within} of {len(errors)} within 10 %"
    )
    print(json.dumps({"benchmark": "simulation", **vars(args), "costs": vars(costs), "runs": rows}))


if __name__ == "__main__":
    main()
