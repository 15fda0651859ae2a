"""Sequential and pipelined speculation against cloud-only streaming, by round trip, in virtual time.

The decoder and the drivers are those of a live run. The costs are those of full-size models in docs/performance.md,
Qwen2.5's sizes 7B in the cloud and 0.5B on the edge. Each draft is right with probability α at every position.
Speculation takes its best fixed k of each cell. Prints four tables in Markdown and one JSON line:

    1. tokens per second of a reply, without the reading of the prompt
    2. milliseconds to the first final token, with it
    3. the round trip up to which speculation is faster than streaming, by the cloud's time per streamed token
    4. tokens per second at limited bandwidths

    python -m benchmarks.round_trip [--rtts 20 50 100 200] [--drafts 0.75 10 20 40] [--alphas 0.6 0.7 0.8 0.9]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from benchmarks.deployment import SHAPES, table
from benchmarks.roofline import Gpu, Server
from outrider.config import DriverName
from outrider.netem.conditions import Conditions, parse_conditions
from outrider.planning.costs import StepCosts
from outrider.planning.simulator import Setup, Summary, replay, summarise
from outrider.planning.traces import Trace
from outrider.sampling.sampler import Signals

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
DRIVERS: tuple[DriverName, ...] = ("sequential", "pipelined")
OUTPUTS, TOKENS, PROMPT = 4, 256, 200
WRONG = 1
STREAM_MS, VERDICT_MS = 4.6, 5.4  # one session on an H200: docs/performance.md
PER_DRAFT_MS = 0.03  # 6 tokens against 1 in a forward of the 7B
OVERHEAD_MS = 0.9  # of a round over loopback: docs/log.md
VERDICT_RATIO = VERDICT_MS / STREAM_MS
GPU = Gpu(141e9, 4.3e12, 989e12)  # H200
PREFILL_STEPS = 73  # draft steps that a prompt of 200 takes: llama.cpp on a CPU, docs/performance.md
GPU_DRAFT_MS = 1.0  # faster drafters run on a GPU, where a prompt of 200 takes about one step
BREAKEVEN_ALPHAS = (0.6, 0.8, 0.9)
STREAMS = (4.6, 7.8, 15.0, 30.0, 60.0)
BANDWIDTHS = ("none", "bw=1Mbit", "bw=256kbit", "bw=64kbit", "bw=32kbit")
BREAKEVEN_LENGTHS = (1, 2, 4, 8, 16, 24)
MAX_RTT_MS, STEPS = 512.0, 8


@dataclass(frozen=True)
class Cell:
    """Tokens per second of one driver with its best k."""

    rate: float
    k: int


@lru_cache
def traces(alpha: float) -> tuple[Trace, ...]:
    """Return outputs whose share of right drafts is `alpha`, in random order."""
    found = []
    for seed in range(OUTPUTS):
        right = [n < round(alpha * TOKENS) for n in range(TOKENS)]
        random.Random(f"{alpha} {seed}").shuffle(right)
        target = tuple(range(2, TOKENS + 2))
        draft = tuple(token if ok else WRONG for token, ok in zip(target, right, strict=True))
        found.append(Trace(str(seed), PROMPT, target, draft, (Signals(0.0, 0.0, 0.0, 0.0),) * TOKENS))
    return tuple(found)


def step_costs(draft_ms: float, stream_ms: float = STREAM_MS) -> StepCosts:
    """Return the costs of a pair without the reading of prompts. A verdict takes 5.4/4.6 of a streamed token."""
    return StepCosts(
        draft_s=draft_ms / 1e3,
        verify_s=(VERDICT_RATIO * stream_ms - 6 * PER_DRAFT_MS) / 1e3,
        verify_per_token_s=PER_DRAFT_MS / 1e3,
        per_round_overhead_s=OVERHEAD_MS / 1e3,
        stream_s=stream_ms / 1e3,
    )


def with_prompt(costs: StepCosts) -> StepCosts:
    """Add the reading of a prompt: measured steps on a CPU edge, and the roofline's estimate on GPUs."""
    shape, gpus, chunk = SHAPES["7B"]
    read_s = Server(shape, GPU, gpus).prefill_s(PROMPT, chunk)
    steps = 1 if costs.draft_s < GPU_DRAFT_MS / 1e3 else PREFILL_STEPS
    return replace(costs, draft_prefill_s=steps * costs.draft_s, verify_prefill_s=read_s)


def run(alpha: float, costs: StepCosts, setup: Setup, outputs: int = OUTPUTS) -> Summary:
    """Simulate the outputs of an acceptance rate."""
    return summarise(replay(traces(alpha)[:outputs], setup, costs, ends=frozenset()))


def speculate(alpha: float, costs: StepCosts, net: Conditions, driver: DriverName) -> Cell:
    """Return the best fixed k and its tokens per second."""
    rates = {k: 1 / run(alpha, costs, Setup(k=k, driver=driver, net=net)).token_s for k in LENGTHS}
    best = max(rates, key=lambda k: rates[k])
    return Cell(rates[best], best)


def stream(costs: StepCosts, net: Conditions) -> Summary:
    """Simulate cloud-only streaming."""
    return run(1.0, costs, Setup(mode="cloud-only", net=net))


def breakeven_ms(alpha: float, draft_ms: float, stream_ms: float) -> float | None:
    """Return the round trip up to which speculation with the better driver is faster, or None if it never is."""
    costs = step_costs(draft_ms, stream_ms)

    def pays(rtt_ms: float) -> bool:
        net = Conditions(rtt=rtt_ms / 1e3)
        limit = stream(costs, net).token_s
        setups = (Setup(k=k, driver=driver, net=net) for driver, k in product(DRIVERS[::-1], BREAKEVEN_LENGTHS))
        return any(run(alpha, costs, setup, outputs=1).token_s < limit for setup in setups)

    return bisect(pays, MAX_RTT_MS)


def bisect(holds: Callable[[float], bool], high: float) -> float | None:
    """Return the largest value up to which `holds` is true, or None. It is true below a limit and false above it."""
    if not holds(0.0):
        return None
    low = 0.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# Tables -----------------------------------------------------------------------------------------------------------


def rates(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield tokens per second of each cell. "cloud_only" does not depend on acceptance or drafts."""
    for alpha, rtt, draft in product(args.alphas, args.rtts, args.drafts):
        costs, net = step_costs(draft), Conditions(rtt=rtt / 1e3)
        cells = {driver: vars(speculate(alpha, costs, net, driver)) for driver in DRIVERS}
        yield {"alpha": alpha, "rtt_ms": rtt, "draft_ms": draft, "cloud_only": 1 / stream(costs, net).token_s} | cells


def first_tokens(args: argparse.Namespace, alpha: float, k: int) -> Iterator[dict[str, Any]]:
    """Yield milliseconds to the first token. Both drivers wait for the first verdict in the same way."""
    for rtt, draft in product(args.rtts, args.drafts):
        costs, net = with_prompt(step_costs(draft)), Conditions(rtt=rtt / 1e3)
        times = {"cloud_only": stream(costs, net).ttft_s, "speculative": run(alpha, costs, Setup(k=k, net=net)).ttft_s}
        yield {"rtt_ms": rtt, "draft_ms": draft} | {name: 1e3 * seconds for name, seconds in times.items()}


def breakevens(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the round trips up to which speculation is faster."""
    for stream_ms, draft, alpha in product(STREAMS, args.drafts, BREAKEVEN_ALPHAS):
        found = breakeven_ms(alpha, draft, stream_ms)
        yield {"stream_ms": stream_ms, "draft_ms": draft, "alpha": alpha, "rtt_ms": found}


def bandwidths(args: argparse.Namespace, alpha: float, rtt: float) -> Iterator[dict[str, Any]]:
    """Yield tokens per second at each bandwidth."""
    for text, draft in product(BANDWIDTHS, args.drafts):
        costs, net = step_costs(draft), replace(parse_conditions(text), rtt=rtt / 1e3)
        cells = {driver: vars(speculate(alpha, costs, net, driver)) for driver in DRIVERS}
        yield {"net": text, "draft_ms": draft, "cloud_only": 1 / stream(costs, net).token_s} | cells


def show_rates(rows: Seq[dict[str, Any]], args: argparse.Namespace) -> None:
    heads = ["α", "RTT", "cloud-only", *(f"{draft:g} ms a draft" for draft in args.drafts)]
    body = []
    for alpha, rtt in product(args.alphas, args.rtts):
        cells = [row for row in rows if (row["alpha"], row["rtt_ms"]) == (alpha, rtt)]
        body.append([f"{alpha:g}", f"{rtt:g}", f"{cells[0]['cloud_only']:.0f}", *map(_both, cells)])
    table(" | ".join(heads), body)


def show_bandwidths(rows: Seq[dict[str, Any]], args: argparse.Namespace) -> None:
    heads = ["bandwidth", "cloud-only", *(f"{draft:g} ms a draft" for draft in args.drafts)]
    body = []
    for net in BANDWIDTHS:
        cells = [row for row in rows if row["net"] == net]
        body.append([net.removeprefix("bw="), f"{cells[0]['cloud_only']:.0f}", *map(_both, cells)])
    table(" | ".join(heads), body)


def _both(row: dict[str, Any]) -> str:
    return " / ".join(f"{row[driver]['rate']:.1f} ({row[driver]['k']})" for driver in DRIVERS)


def show_first(rows: Seq[dict[str, Any]], args: argparse.Namespace) -> None:
    heads = ["RTT", "cloud-only", *(f"{draft:g} ms a draft" for draft in args.drafts)]
    body = []
    for rtt in args.rtts:
        cells = [row for row in rows if row["rtt_ms"] == rtt]
        times = (cells[0]["cloud_only"], *(cell["speculative"] for cell in cells))
        body.append([f"{rtt:g}", *(f"{ms:,.0f}" for ms in times)])
    table(" | ".join(heads), body)


def show_breakevens(rows: Seq[dict[str, Any]], args: argparse.Namespace) -> None:
    heads = ["ms per streamed token", *(f"{draft:g} ms a draft" for draft in args.drafts)]
    body = []
    for stream_ms in STREAMS:
        line = [f"{stream_ms:g}"]
        for draft in args.drafts:
            cells = [row["rtt_ms"] for row in rows if (row["stream_ms"], row["draft_ms"]) == (stream_ms, draft)]
            line.append(" / ".join("–" if rtt is None else f"{rtt:.0f}" for rtt in cells))
        body.append(line)
    table(" | ".join(heads), body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtts", type=float, nargs="+", default=[20.0, 50.0, 100.0, 200.0], help="in ms")
    parser.add_argument(
        "--drafts", type=float, nargs="+", default=[0.75, 10.0, 20.0, 40.0], help="ms per drafted token"
    )
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--alpha", type=float, default=0.8, help="of the tables of first tokens and bandwidths")
    parser.add_argument("--rtt", type=float, default=50.0, help="of the table of bandwidths, in ms")
    parser.add_argument("--k", type=int, default=5, help="of the table of first tokens")
    args = parser.parse_args()
    found = {"rates": list(rates(args)), "first_tokens": list(first_tokens(args, args.alpha, args.k))}
    show_rates(found["rates"], args)
    show_first(found["first_tokens"], args)
    found["breakevens"] = list(breakevens(args))
    show_breakevens(found["breakevens"], args)
    found["bandwidths"] = list(bandwidths(args, args.alpha, args.rtt))
    show_bandwidths(found["bandwidths"], args)
    print(json.dumps({"benchmark": "round_trip", **vars(args), **found}))


if __name__ == "__main__":
    main()
