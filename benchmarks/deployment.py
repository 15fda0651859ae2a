"""Requirements of a fleet of edges, computed by the cost model. Nothing is measured here.

Prints the tables of docs/deploy.md: what one edge waits for a token, alone on a verifier, and how many sessions, GPUs,
bytes and dollars a number of edges takes. Every assumption is an option. Last comes one JSON line.

    python -m benchmarks.deployment [--edges 1000000] [--active 0.01] [--k 5] [--acceptance 0.8] [--prompt 500] …
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.costmodel import (
    Network,
    RoundBytes,
    ServerLoadModel,
    Speculation,
    Workload,
    dollars_per_million,
    servers_for,
    traffic_bytes_per_s,
)
from benchmarks.roofline import Gpu, Host, Server, Target
from outrider.errors import OutriderError

SHAPES = {  # Qwen2.5's; GPUs for one copy; tokens of a prompt that are read at once
    "7B": (
        Target.of_shape(
            layers=28, hidden=3584, heads=28, kv_heads=4, head=128, feed_forward=18_944, vocabulary=152_064
        ),
        1,
        256,  # outrider cloud
    ),
    "72B": (
        Target.of_shape(
            layers=80, hidden=8192, heads=64, kv_heads=8, head=128, feed_forward=29_568, vocabulary=152_064
        ),
        4,
        2048,  # vLLM
    ),
}
# benchmarks.cloud_batches less benchmarks.gpu_engine, in docs/performance.md
HOST = Host(batch_s=0.4e-3, request_s=0.06e-3)
VERIFY_FIXED, VERIFY_DRAFT, VERDICT = 19, 3, 48  # bytes: benchmarks.wire; 34 up with k = 5
PACKET, SEAL = 52, 22  # TCP/IPv4 headers with timestamps; a TLS 1.3 record
DATA = PACKET + SEAL
ROUND = RoundBytes(VERIFY_FIXED + DATA + PACKET, VERIFY_DRAFT, VERDICT + DATA + PACKET)  # each packet acknowledged
STREAMED = RoundBytes(PACKET, 0, VERDICT + DATA)  # cloud-only: a message down per token


@dataclass(frozen=True)
class Waiting:
    """Seconds per token of one edge alone; breakeven_s: RTT up to which k drafts beat cloud-only."""

    target: str
    draft_s: float
    rtt_s: float
    cloud_only_s: float
    sequential_s: float
    best_k: int
    best_s: float
    pipelined_s: float
    breakeven_s: float


@dataclass(frozen=True)
class Fleet:
    """One way of serving the edges. sessions: on one replica, within the limit. The rest is as in SteadyState."""

    target: str
    way: str
    sessions: int
    bound: str
    batch: float
    busy: float
    duty: float
    prefill: float
    gpus: int
    up_bit_per_s: float
    down_bit_per_s: float
    dollars: float


def network(args: argparse.Namespace, rtt_ms: float) -> Network:
    return Network(rtt_ms / 1e3, args.up * 1e6 / 8, args.down * 1e6 / 8)


def server(args: argparse.Namespace, name: str) -> Server:
    target, gpus, _ = SHAPES[name]
    gpu = Gpu(args.memory * 1e9, args.bandwidth * 1e12, args.tflops * 1e12)
    return Server(target, gpu, gpus, HOST)


def work(args: argparse.Namespace, name: str) -> Workload:
    return Workload(args.prompt, args.reply, SHAPES[name][2])


def speculation(args: argparse.Namespace, name: str, draft_ms: float, rtt_ms: float) -> Speculation:
    """On a server that has nothing else to do."""
    context, idle = work(args, name).mean_context, server(args, name)
    return Speculation(
        args.acceptance, draft_ms / 1e3, lambda k: idle.batch_s(1, k + 1, context), network(args, rtt_ms), ROUND
    )


def waiting(args: argparse.Namespace) -> Iterator[Waiting]:
    for name, draft_ms, rtt_ms in product(args.targets, args.draft, args.rtts):
        one = speculation(args, name, draft_ms, rtt_ms)
        best, alone = one.best_k(), one.verify_s(0)
        yield Waiting(
            name,
            draft_ms / 1e3,
            rtt_ms / 1e3,
            alone,
            one.sequential_s(args.k),
            best,
            one.sequential_s(best),
            one.pipelined_s(args.k),
            one.breakeven_rtt_s(args.k, alone),
        )


def fleets(args: argparse.Namespace) -> Iterator[Fleet]:
    for name in args.targets:
        yield fleet(
            args, name, "cloud-only", ServerLoadModel(server(args, name), work(args, name), 0.0, 0, 0.0), STREAMED
        )
        for draft_ms in args.draft:
            one = speculation(args, name, draft_ms, args.rtt)
            away = one.round_s(args.k) - one.verify_s(args.k)
            model = ServerLoadModel(server(args, name), work(args, name), args.acceptance, args.k, away)
            yield fleet(args, name, f"verifying, {draft_ms:g} ms a draft", model, ROUND)


def fleet(args: argparse.Namespace, name: str, way: str, model: ServerLoadModel, size: RoundBytes) -> Fleet:
    max_sessions, slots = model.max_sessions(args.limit / 1e3), model.server.slots(model.work.context)
    if max_sessions == 0:
        return Fleet(name, way, 0, "memory" if slots == 0 else "latency", 0, 0, 0, 0, 0, 0, 0, math.nan)
    load, gpus = model.steady_state(max_sessions), model.server.gpus
    up, down = traffic_bytes_per_s(model, size, load.token_s)
    active = args.edges * args.active
    return Fleet(
        name,
        way,
        max_sessions,
        "memory" if max_sessions == slots else "latency",
        load.batch,
        load.busy,
        load.duty,
        load.prefill,
        gpus * servers_for(args.edges, args.active, max_sessions, args.spare),
        8 * up * active,
        8 * down * active,
        dollars_per_million(args.price, gpus, load.tokens_per_s * (1 - args.spare)),
    )


# Printing ---------------------------------------------------------------------------------------------------------


def table(heads: str, rows: list[list[str]]) -> None:
    names = heads.split(" | ")
    for cells in (names, ["---"] * len(names), *rows):
        print("| " + " | ".join(cells) + " |")
    print()


def show_waiting(found: list[Waiting], k: int) -> None:
    heads = "target | ms a draft | RTT | cloud-only | k = {} | best k | pipelined | k = {} is faster up to RTT"
    rows = []
    for row in found:
        times = (row.draft_s, row.rtt_s, row.cloud_only_s, row.sequential_s)
        draft, rtt, cloud, sequential = (f"{1e3 * value:.1f}".removesuffix(".0") for value in times)
        best, upto = f"{1e3 * row.best_s:.1f} ({row.best_k})", f"{1e3 * row.breakeven_s:.0f}"
        pays = upto if row.breakeven_s > 0 else "never"
        rows.append([row.target, draft, rtt, cloud, sequential, best, f"{1e3 * row.pipelined_s:.1f}", pays])
    table(heads.format(k, k), rows)


def show_fleets(found: list[Fleet]) -> None:
    heads = "target | way | sessions a copy | bound by | in a step | duty | prompts | GPUs"
    heads += " | Gbit/s up | down | $ per M tokens"
    rows = []
    for row in found:
        if row.sessions == 0:
            rows.append([row.target, row.way, "0", row.bound, *["–"] * 7])
            continue
        share = [f"{row.batch:.0f}", f"{100 * row.duty:.0f} %", f"{100 * row.prefill:.0f} %"]
        traffic = [f"{row.up_bit_per_s / 1e9:.2f}", f"{row.down_bit_per_s / 1e9:.2f}"]
        numbers = [f"{row.sessions:,}", row.bound, *share, f"{row.gpus:,}", *traffic, f"{row.dollars:.2f}"]
        rows.append([row.target, row.way, *numbers])
    table(heads, rows)


def plain(row: Waiting | Fleet) -> dict[str, Any]:
    """As JSON has it: four digits, and null for what is not a number."""
    values = vars(row).items()
    return {
        name: (None if math.isnan(value) else float(f"{value:.4g}")) if isinstance(value, float) else value
        for name, value in values
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: list[tuple[str, type, float, str]] = [
        ("edges", int, 1_000_000, "edges in all"),
        ("active", float, 0.01, "share of them that generates at a moment"),
        ("k", int, 5, "drafts in a block"),
        ("acceptance", float, 0.8, "α"),
        ("rtt", float, 50, "of the fleet, ms"),
        ("limit", float, 60, "mean ms per token that are allowed"),
        ("prompt", int, 500, "tokens"),
        ("reply", int, 250, "tokens"),
        ("up", float, 10, "an edge's uplink, Mbit/s"),
        ("down", float, 50, "its downlink, Mbit/s"),
        ("spare", float, 0.3, "share of every copy kept free for peaks and failures"),
        ("price", float, 3.0, "dollars per GPU and hour"),
        ("memory", float, 80, "of a GPU, GB"),
        ("bandwidth", float, 3.0, "of its memory, TB/s"),
        ("tflops", float, 989, "its dense bfloat16 peak"),
    ]
    for name, kind, default, about in numbers:
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{about} [{default:g}]")
    parser.add_argument("--rtts", type=float, nargs="+", default=[10, 50, 150], help="of the first table, ms")
    parser.add_argument("--draft", type=float, nargs="+", default=[21.5, 5], help="ms per drafted token")
    parser.add_argument("--targets", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        alone, served = list(waiting(args)), list(fleets(args))
    except OutriderError as error:
        raise SystemExit(f"benchmarks.deployment: {error}") from error
    show_waiting(alone, args.k)
    show_fleets(served)
    results = {"waiting": [plain(row) for row in alone], "fleet": [plain(row) for row in served]}
    print(json.dumps({"benchmark": "deployment", **vars(args), **results}))


if __name__ == "__main__":
    main()
