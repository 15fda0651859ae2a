"""Trees of drafts against chains at equal numbers of verified tokens, on traces: rounds, and time at a round trip.

A round verifies N drafted tokens, which take equal bytes in either shape. A chain has N tokens. A tree has a chain (the
spine) and, at some positions of it, a branch: the drafter's second-best token and the drafter's continuation of it.

    margin      one branch, at the least sure position: smallest difference of the two best probabilities
    path        one branch, at the position whose second-best token is the most probable to be reached and right
    best-first  any number of branches: the N most probable nodes, by the drafter's probabilities
    oracle      one branch, at the first wrong token of the spine: an upper bound of every choice of one position

The assumptions favour trees. Probabilities are calibrated on the same traces that are replayed. The length of a single
branch is the best for each set of traces. Drafting costs one step per token, without the second-best tokens, which are
free. A verdict on a tree costs as much as on a chain, and the tree's structure takes no bytes.

    python -m benchmarks.trees bundled=A.jsonl coder=B.jsonl [--rtt-ms 100] [--verdict-ms 5.4]

Files are those of `benchmarks.tree_traces`. Synthetic traces have acceptance 0.6 to 0.9 and the hit rates of the files:
how often the second-best token is right where the best one is wrong. "uninformed" has the same probabilities at each
position. With "informed", the chance varies between positions and the drafter knows it. Prints two tables and one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import mul
from pathlib import Path
from typing import Any

from benchmarks.tree_traces import DEPTH, Pair, Place, TreeTrace, read
from outrider.netem.conditions import Conditions
from outrider.planning.costs import StepCosts
from outrider.planning.simulator import Setup, replay
from outrider.planning.traces import Trace
from outrider.sampling.sampler import Signals

SIZES = (2, 3, 4, 6, 8, 12, 16, 24)  # verified tokens per round
DRAFT_MS = (0.75, 10.0, 20.0, 40.0)
ALPHAS = (0.6, 0.7, 0.8, 0.9)
KINDS = ("uninformed", "informed")
TREES = ("margin", "path", "best-first", "oracle")
WORTH = 0.15  # median saving from which trees are built
BUCKETS = 10  # of the calibration
WRONG = 1

Policy = Callable[[TreeTrace, int, int], "Shape"]  # trace, first position, tokens to verify


@dataclass(frozen=True)
class Shape:
    """A draft. branches: length of the branch at a position, its second-best token included.

    A branch at the end of the spine stands in place of the spine's next token.
    """

    spine: int
    branches: dict[int, int]


# Replay -----------------------------------------------------------------------------------------------------------


def run_length(trace: TreeTrace, at: int, limit: int) -> int:
    """Return how many of the drafter's best tokens from `at` on are right, up to `limit`."""
    places = trace.places[at : at + limit]
    return next((n for n, place in enumerate(places) if not place.best_right), len(places))


def accepted(trace: TreeTrace, at: int, shape: Shape) -> int:
    """Return how many tokens of a draft from `at` on the target accepts."""
    right = run_length(trace, at, shape.spine)
    branch = shape.branches.get(right, 0)
    if not branch or not trace.places[at + right].second_right:
        return right
    return right + 1 + run_length(trace, at + right + 1, branch - 1)


def drafted_pairs(trace: TreeTrace, at: int, count: int) -> list[Pair]:
    """Return the drafter's two best probabilities along a chain of `count` tokens from `at` on, as drafted live."""
    right = run_length(trace, at, count)
    pairs = [place.pair for place in trace.places[at : at + right + 1]]
    astray = trace.places[at + right].astray if right < count else ()
    return [*pairs, *astray][:count]


def draft_sizes(trace: TreeTrace, size: int, policy: Policy) -> list[tuple[int, int]]:
    """Return the draft steps and the accepted tokens of each round. A draft never exceeds the rest of the output."""
    at, rounds = 0, []
    while at < len(trace.places):
        shape = policy(trace, at, min(size, len(trace.places) - at))
        rounds.append((shape.spine + sum(n - 1 for n in shape.branches.values()), accepted(trace, at, shape)))
        at += rounds[-1][1] + 1
    return rounds


# Shapes -----------------------------------------------------------------------------------------------------------


def chain(_trace: TreeTrace, _at: int, size: int) -> Shape:
    """Draft a chain."""
    return Shape(size, {})


def by_margin(trace: TreeTrace, at: int, spine: int) -> int:
    """Return the position with the smallest difference of the two best probabilities."""
    pairs = drafted_pairs(trace, at, spine)
    return min(range(spine), key=lambda n: pairs[n][0] - pairs[n][1])


def by_path(trace: TreeTrace, at: int, spine: int) -> int:
    """Return the position whose second-best token is the most probable to be reached and right."""
    pairs = drafted_pairs(trace, at, spine)
    reached = [1.0, *accumulate((best for best, _ in pairs), mul)]
    return max(range(spine), key=lambda n: reached[n] * pairs[n][1])


def by_oracle(trace: TreeTrace, at: int, spine: int) -> int:
    """Return the first wrong position, or the last one."""
    return min(run_length(trace, at, spine), spine - 1)


def one_branch(choose: Callable[[TreeTrace, int, int], int], length: int) -> Policy:
    """Return the policy of one branch. A draft of at most `length` tokens remains a chain."""

    def shape(trace: TreeTrace, at: int, size: int) -> Shape:
        spine = size - length
        return Shape(spine, {choose(trace, at, spine): length}) if spine > 0 else Shape(size, {})

    return shape


def best_first(acceptance: float) -> Policy:
    """Return the policy of the most probable nodes. acceptance: expected for each token of a branch's continuation."""

    def shape(trace: TreeTrace, at: int, size: int) -> Shape:
        pairs = drafted_pairs(trace, at, size)
        reached = [1.0, *accumulate((best for best, _ in pairs), mul)]
        nodes = [(reached[n + 1], -1) for n in range(size)]
        nodes += [(reached[n] * pairs[n][1] * acceptance**d, n) for n in range(size) for d in range(size)]
        chosen = [n for _, n in sorted(nodes, key=lambda node: (-node[0], node[1]))[:size]]
        return Shape(chosen.count(-1), {n: chosen.count(n) for n in set(chosen) - {-1}})

    return shape


# Traces -----------------------------------------------------------------------------------------------------------


def calibrate(traces: Seq[TreeTrace]) -> list[TreeTrace]:
    """Replace probabilities by the rate of right tokens in the bucket of similar probabilities."""
    best = _rates([(p.pair[0], p.best_right) for trace in traces for p in trace.places])
    second = _rates([(p.pair[1], p.second_right) for trace in traces for p in trace.places])

    def pair(raw: Pair) -> Pair:
        return best(raw[0]), second(raw[1])

    def place(old: Place) -> Place:
        return replace(old, pair=pair(old.pair), astray=tuple(map(pair, old.astray)))

    return [replace(trace, places=tuple(map(place, trace.places))) for trace in traces]


def _rates(seen: list[tuple[float, bool]]) -> Callable[[float], float]:
    """Return the function from a probability to the rate of its bucket. Buckets hold about equally many observations.

    Equal probabilities share a bucket.
    """
    ordered = sorted(probability for probability, _ in seen)
    limits = sorted({ordered[min((n + 1) * len(ordered) // BUCKETS, len(ordered) - 1)] for n in range(BUCKETS)})
    buckets: list[list[bool]] = [[] for _ in limits]
    for probability, right in seen:
        buckets[bisect_left(limits, probability)].append(right)
    rates = [statistics.fmean(bucket) for bucket in buckets]
    return lambda value: rates[min(bisect_left(limits, value), len(limits) - 1)]


def acceptance_rate(traces: Seq[TreeTrace]) -> float:
    """Return the share of positions at which the drafter's best token is right."""
    return statistics.fmean(place.best_right for trace in traces for place in trace.places)


def hit_rate(traces: Seq[TreeTrace]) -> float:
    """Return how often the second-best token is right where the best one is wrong."""
    return statistics.fmean(place.second_right for trace in traces for place in trace.places if not place.best_right)


def synthetic(kind: str, alpha: float, hit: float, seed: int, length: int = 128) -> TreeTrace:
    """Return a trace with acceptance `alpha` in the mean, and a second-best token that is right at rate `hit` else."""
    rng = random.Random(f"{kind} {alpha} {seed}")
    places = []
    for _ in range(length):
        (best, second), *astray = (_random_pair(kind, alpha, hit, rng) for _ in range(DEPTH + 1))
        draw = rng.random()
        right = draw < best
        places.append(Place(right, best <= draw < best + second, (best, second), () if right else tuple(astray)))
    return TreeTrace(str(seed), tuple(places))


def _random_pair(kind: str, alpha: float, hit: float, rng: random.Random) -> Pair:
    chance = alpha if kind == "uninformed" else rng.betavariate(2 * alpha, 2 * (1 - alpha))
    return chance, (1 - chance) * hit


# Comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """Times of a round, in seconds. fixed_s: round trip and verdict."""

    fixed_s: float
    draft_s: float

    def seconds(self, rounds: Seq[tuple[int, int]]) -> float:
        """Return the time of several rounds, each with its draft steps and accepted tokens."""
        return len(rounds) * self.fixed_s + sum(steps for steps, _ in rounds) * self.draft_s


def policies(name: str, traces: Seq[TreeTrace], size: int) -> Iterator[Policy]:
    """Yield the policies of a kind of tree. Those with one branch come with every length of it."""
    if name == "best-first":
        yield best_first(acceptance_rate(traces))
        return
    choose = {"margin": by_margin, "path": by_path, "oracle": by_oracle}[name]
    yield from (one_branch(choose, length) for length in range(1, size))


def best_tree(name: str, traces: Seq[TreeTrace], size: int) -> list[list[tuple[int, int]]]:
    """Return the rounds of each trace with the policy of this kind that needs the fewest."""
    found = ([draft_sizes(trace, size, policy) for trace in traces] for policy in policies(name, traces, size))
    return min(found, key=lambda outputs: sum(map(len, outputs)))


def compare(traces: Seq[TreeTrace], args: argparse.Namespace) -> dict[str, Any]:
    """Compare chains and trees of each size. Savings are medians over outputs, and "_all" is that of the sum."""
    traces = calibrate(traces)
    rows: dict[int, dict[str, Any]] = {}
    for size in SIZES:
        chains = [draft_sizes(trace, size, chain) for trace in traces]
        row: dict[str, Any] = {"rounds": statistics.fmean(map(len, chains))}
        row["chain_s"] = {ms: sum(_round(args, ms).seconds(rounds) for rounds in chains) for ms in DRAFT_MS}
        for name in TREES:
            trees = best_tree(name, traces, size)
            row[name] = _saving(chains, trees, len) | {
                str(ms): _saving(chains, trees, _round(args, ms).seconds) for ms in DRAFT_MS
            }
        rows[size] = row
    best = {ms: min(SIZES, key=lambda size: rows[size]["chain_s"][ms]) for ms in DRAFT_MS}
    found = {"outputs": len(traces), "acceptance": acceptance_rate(traces), "hit_rate": hit_rate(traces)}
    return found | {"sizes": rows, "best_size": best, "pipelined_saves": _pipelined(traces, rows, args)}


def _round(args: argparse.Namespace, draft_ms: float) -> Round:
    return Round((args.rtt_ms + args.verdict_ms) / 1e3, draft_ms / 1e3)


def _saving(
    chains: Seq[list[tuple[int, int]]], trees: Seq[list[tuple[int, int]]], cost: Callable[[Any], float]
) -> dict[str, Any]:
    pairs = [(cost(one), cost(other)) for one, other in zip(chains, trees, strict=True)]
    whole = 1 - sum(tree for _, tree in pairs) / sum(plain for plain, _ in pairs)
    return {"median": statistics.median(1 - tree / plain for plain, tree in pairs), "all": whole}


def to_trace(trace: TreeTrace) -> Trace:
    """Return the trace for the simulator. Position n's token is n + 2."""
    target = tuple(range(2, len(trace.places) + 2))
    draft = tuple(token if place.best_right else WRONG for token, place in zip(target, trace.places, strict=True))
    signals = tuple(Signals(0.0, best - second, 1 - best, 0.0) for best, second in (p.pair for p in trace.places))
    return Trace(trace.id, 1, target, draft, signals)


def _pipelined(traces: Seq[TreeTrace], rows: dict[int, dict[str, Any]], args: argparse.Namespace) -> dict[float, float]:
    """Return the time that the pipelined driver saves, with its best block length, against the best chain."""
    replayed, saved = list(map(to_trace, traces)), {}
    for ms in DRAFT_MS:
        costs = StepCosts(draft_s=ms / 1e3, verify_s=args.verdict_ms / 1e3)
        setups = [Setup(k=k, driver="pipelined", net=Conditions(rtt=args.rtt_ms / 1e3)) for k in (1, *SIZES)]
        times = [sum(o.total_s for o in replay(replayed, setup, costs, ends=frozenset())) for setup in setups]
        saved[ms] = 1 - min(times) / min(row["chain_s"][ms] for row in rows.values())
    return saved


def decide(compared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the median saving of time over traces and draft times, each at the best size of its chain.

    Each case takes the better of its trees, without the oracle.
    """
    cases = [
        max(found["sizes"][found["best_size"][ms]][name][str(ms)]["median"] for name in TREES if name != "oracle")
        for found in compared.values()
        for ms in DRAFT_MS
    ]
    median = statistics.median(cases)
    return {"cases": len(cases), "median": median, "largest": max(cases), "build": median >= WORTH}


def show(compared: dict[str, dict[str, Any]]) -> None:
    """Print the tables: rounds at each size, and time at the chain's best size."""
    print(f"{'':26s} {'rate':>5s} {'hit':>5s} {'size':>4s} {'rounds':>6s}  rounds saved, median (all)")
    for name, found in compared.items():
        for size, row in found["sizes"].items():
            saved = "  ".join(f"{tree} {_percent(row[tree])}" for tree in TREES)
            head = f"{name:26s} {found['acceptance']:5.3f} {found['hit_rate']:5.2f}"
            print(f"{head} {size:4d} {row['rounds']:6.1f}  {saved}")
    print(f"\n{'':26s} {'draft':>8s} {'size':>4s}  time saved, median (all)")
    for name, found in compared.items():
        for ms, size in found["best_size"].items():
            saved = "  ".join(f"{tree} {_percent(found['sizes'][size][tree][str(ms)])}" for tree in TREES)
            print(f"{name:26s} {ms:5g} ms {size:4d}  {saved}  pipelined chain {found['pipelined_saves'][ms]:.1%}")


def _percent(saving: dict[str, Any]) -> str:
    return f"{100 * saving['median']:5.1f} ({100 * saving['all']:5.1f}) %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--verdict-ms", type=float, default=5.4)
    parser.add_argument("--outputs", type=int, default=12, help="synthetic outputs of each kind")
    args = parser.parse_args()
    recorded = {name: read(Path(file)) for name, _, file in (each.partition("=") for each in args.traces)}
    hits = sorted({round(hit_rate(traces), 2) for traces in recorded.values()})
    made = {
        f"{kind} {alpha}, hit {hit}": [synthetic(kind, alpha, hit, seed) for seed in range(args.outputs)]
        for kind, alpha, hit in product(KINDS, ALPHAS, hits)
    }
    compared = {name: compare(traces, args) for name, traces in (recorded | made).items()}
    decision = decide(compared)
    show(compared)
    print(f"\nmedian saving of time at RTT {args.rtt_ms:g} ms: {decision['median']:.1%}, build: {decision['build']}")
    print(json.dumps({"benchmark": "trees", **vars(args), "decision": decision, "compared": compared}))


if __name__ == "__main__":
    main()
