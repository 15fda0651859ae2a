"""`outrider plan` and `outrider sweep`: simulate a pair with other gates, networks and goals."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Group, Parameter

from outrider.cli.options import Measurement, Whole, check_limit, parse_block_length
from outrider.config import DEFAULT_K, GenerationSettings
from outrider.errors import SettingsError
from outrider.files import check_writable, write_file

if TYPE_CHECKING:
    from outrider.decoding.gate import Gate
    from outrider.netem.conditions import Conditions
    from outrider.planning.costs import StepCosts
    from outrider.planning.planner import Goal, Option, PlainDecoding, Ranking
    from outrider.planning.simulator import Summary
    from outrider.planning.sweep import Row
    from outrider.planning.traces import Trace

PAIR = Group("Measurements", sort_key=0)
Drivers = Literal["sequential", "pipelined"]
REFERENCE = "cloud-only"
CHANGED = "changed: outputs that differ from the cloud's, and the share of tokens that the cloud would have replaced"

NO_BUDGET = (
    "no --budget: only settings that are exact are recommended; --budget 0.05 allows 5 % of the tokens to change"
)


@Parameter(name="*", group=PAIR)
@dataclass(frozen=True)
class Measured:
    """The items and traces on which the pair is measured.

    Parameters
    ----------
    data
        A data set: "demo", a manifest, or a file in Spec-Bench's format.
    limit
        Use only this many items, from the first one on.
    traces
        Traces of this pair with these decoding options (outrider eval --trace): a file, or the directory of the run.
        Data is then used to measure times only.
    """

    data: str = "demo"
    limit: Whole = 6
    traces: str | None = None


def run_plan(
    measured: Measured,
    pair: Measurement,
    net: str,
    aim: Literal["latency", "cloud", "quality", "privacy"],
    budget: float | None,
    gates: Sequence[str],
    utilisation: float,
) -> int:
    """Run `outrider plan`: rank the decoding modes, and recommend one."""
    from outrider.cli.terminal import print_json
    from outrider.netem.conditions import parse_conditions
    from outrider.planning.gate_candidates import frontier
    from outrider.planning.planner import BLOCK_LENGTHS, Goal, Planner
    from outrider.planning.simulator import Setup

    goal = Goal(aim, budget)
    base = Setup(net=parse_conditions(net), utilisation=utilisation)
    for gate in gates:
        Setup(gate=gate)  # raises for an invalid gate before a model is loaded
    traces, costs = _measure(measured, pair)
    tried: list[str | Gate] = list(gates)
    if not tried and goal.limit > 0:  # the budget allows skipping
        tried += frontier(traces, BLOCK_LENGTHS, goal.limit)
    ranking = Planner(traces, costs, base, gates=tried).rank(goal)
    if pair.output.json:
        plain = asdict(ranking.plain) | {"is_faster": ranking.plain.is_faster}
        found = {"goal": asdict(goal), "net": net, "costs": asdict(costs), "plain": plain}
        print_json(found | {"options": _options(ranking)})
    else:
        _show_plan(ranking, costs, net)
    return 0


def run_sweep(
    measured: Measured,
    pair: Measurement,
    gates: Sequence[str],
    ks: Sequence[str],
    drivers: Sequence[Drivers],
    nets: Sequence[str],
    out: str | None,
) -> int:
    """Run `outrider sweep`: simulate gates × block lengths × drivers × networks over the pair's traces."""
    from outrider.cli.terminal import print_json
    from outrider.netem.conditions import parse_conditions
    from outrider.planning.gate_candidates import thresholds
    from outrider.planning.simulator import Setup
    from outrider.planning.sweep import pareto, sweep

    networks = [parse_conditions(net) for net in nets]
    lengths = [parse_block_length(k) for k in ks]
    for gate, k, driver, net in product(gates or ["always"], lengths, drivers, networks):
        Setup(gate=gate, k=k, driver=driver, net=net)  # raises for invalid settings before a model is loaded
    if out is not None:
        check_writable(out)
    traces, costs = _measure(measured, pair)
    longest = max((k for k in lengths if isinstance(k, int)), default=DEFAULT_K)
    candidates: list[str | Gate] = list(gates) or ["always", *thresholds(traces, longest), "never"]
    rows = [
        *_cloud_alone(traces, costs, networks),
        *sweep(traces, costs, gates=candidates, ks=lengths, drivers=drivers, nets=networks),
    ]
    if out is not None:
        write_file(out, "".join(json.dumps(row.to_json()) + "\n" for row in rows))
    if pair.output.json:
        print_json({"costs": asdict(costs), "rows": [row.to_json() for row in rows]})
    else:
        _show_sweep(rows, pareto(rows))
    return 0


def _cloud_alone(traces: Sequence[Trace], costs: StepCosts, nets: Sequence[Conditions]) -> list[Row]:
    """Return the baseline rows: the cloud without a drafter, in each network."""
    from outrider.planning.simulator import Setup, replay, summarise
    from outrider.planning.sweep import Row

    found = [summarise(replay(traces, Setup(mode="cloud-only", net=net), costs)) for net in nets]
    return [Row(REFERENCE, "–", "sequential", str(net), net.rtt, one) for net, one in zip(nets, found, strict=True)]


def _measure(measured: Measured, pair: Measurement) -> tuple[list[Trace], StepCosts]:
    """Return the pair's traces and times."""
    from outrider.cli.build import check_connection, connected, enable_gc, load_drafter
    from outrider.cli.calibrate import check_traces
    from outrider.cli.terminal import configure_logging
    from outrider.evals.manifest import load_set
    from outrider.evals.modes import item_prompt
    from outrider.planning.provenance import describe_pair
    from outrider.planning.timing import measure_costs
    from outrider.planning.trace_recorder import record
    from outrider.planning.traces import find_traces, read_traces

    models = pair.models
    models.require_edge_model("a plan")
    if "none" in (models.edge, models.cloud):
        raise SettingsError("a plan is made for a pair: give --edge and --cloud")
    check_connection(models, pair.connection)
    settings = GenerationSettings.build(pair.decoding.settings())
    check_limit(measured.limit)
    items = load_set(measured.data)[: measured.limit]
    file = None if measured.traces is None else find_traces(measured.traces)
    known = None if file is None else read_traces(file)
    configure_logging(pair.output)
    with connected(models, pair.connection) as verifier:
        draft = load_drafter(models)
        enable_gc()
        if file is not None:
            check_traces(file, *describe_pair(draft, verifier), settings)  # type: ignore[arg-type]
        prompts = [item_prompt(item) for item in items]
        costs = measure_costs(draft, verifier, prompts[:3], settings)  # type: ignore[arg-type]
        names = [item.id for item in items]
        found = known or list(record(draft, verifier, prompts, settings, names))  # type: ignore[arg-type]
    return found, costs


# Output -----------------------------------------------------------------------------------------------------


def _options(ranking: Ranking) -> list[dict[str, Any]]:
    return [
        {
            "name": option.name,
            "k": option.setup.k if option.setup.mode == "speculative" else None,
            "allowed": option.allowed,
            "behind": None if math.isinf(option.behind) else option.behind,
            "breakeven_rtt_s": None if option.breakeven_rtt_s == math.inf else option.breakeven_rtt_s,
            "pays_up_to_rtt": _breakeven_text(option.breakeven_rtt_s),
            **asdict(option.summary),
        }
        for option in ranking.options
    ]


def _show_plan(ranking: Ranking, costs: StepCosts, net: str) -> None:
    from outrider.cli.terminal import borderless_table, stdout

    console = stdout()
    times = f"draft {1000 * costs.draft_s:.1f} ms a token, verdict {1000 * costs.verify_s:.1f} ms"
    console.print(f"measured: {times} and {1000 * costs.verify_per_token_s:.1f} ms a draft; network {net}", style="dim")
    rows = [_plan_cells(option, ranking.goal) for option in ranking.options]
    table = borderless_table(list(rows[0]), texts=[""], overflow="fold")
    for option, cells in zip(ranking.options, rows, strict=True):
        table.add_row(*cells.values(), style=None if option.allowed else "dim")
    console.print(table)
    console.print(CHANGED, style="dim")
    if ranking.goal.budget is None and ranking.goal.limit == 0:
        console.print(NO_BUDGET, style="dim")
    if ranking.plain.is_faster:
        console.print(_plain_note(ranking.plain))
    console.print(_verdict(ranking), style="bold")


def _plain_note(plain: PlainDecoding) -> str:
    """Return the sentence for a pair and network at which no draft length pays."""
    speculative = f"{1000 * plain.speculative_token_s:.1f} at k {plain.k}, its fastest ({plain.driver})"
    return (
        f"Plain decoding of the target is faster than exact speculation at any k: {1000 * plain.token_s:.1f} ms per "
        f"token, not {speculative}. --k auto falls back to it."
    )


def _plan_cells(option: Option, goal: Goal) -> dict[str, str]:
    """Return the cells of an option, by the names of the columns."""
    found = option.summary
    behind = "–" if math.isinf(option.behind) else f"{option.behind:.2f}×"
    cells = {
        "": option.name,
        "k": str(option.setup.k) if option.setup.mode == "speculative" else "–",
        "ms per token": f"{1000 * found.token_s:.1f}",
        "by cloud": f"{100 * found.cloud_share:.1f} %",
        "outputs changed": _changed_outputs(found),
        "tokens changed": f"{100 * found.disagreement:.1f} %",
        "cloud ms per token": f"{1000 * found.cloud_s / max(found.tokens, 1):.1f}",
    }
    if goal.aim == "privacy":
        cells["bytes up per output"] = f"{found.bytes_up:,.0f}"
    excluded = "over budget" if goal.limit else "not exact"
    cells["against the best"] = behind if option.allowed else excluded
    return cells | {"pays up to RTT": _breakeven_text(option.breakeven_rtt_s)}


def _breakeven_text(rtt_s: float | None) -> str:
    """Return the round-trip time up to which an option is faster than the cloud alone."""
    from outrider.planning.planner import MAX_RTT_S

    if rtt_s is None:
        return "–"
    if rtt_s == 0:
        return "never"
    return f"over {1000 * MAX_RTT_S:.0f} ms" if math.isinf(rtt_s) else f"{1000 * rtt_s:.0f} ms"


def _verdict(ranking: Ranking) -> str:
    """Return the recommendation as a sentence."""
    best = ranking.best
    sample = _sample(best)
    advice = {"edge-only": "Stay on the edge", "cloud-only": "Use the cloud alone"}.get(
        best.setup.mode, f"Speculate: {best.name}, k {best.setup.k}"
    )
    if not best.allowed:
        return f"Nothing keeps within the budget; the nearest is {best.name}."
    advice += _to_command_options(best)
    others = [option for option in ranking.options[1:] if option.allowed]
    if not others:
        kept = "keeps within the budget" if ranking.goal.limit else "is exact"
        return f"{advice}; nothing else {kept}.{sample}"
    if math.isinf(others[0].behind):
        return f"{advice}: by this goal it costs nothing, and every other option costs something.{sample}"
    next_best = f"the next best ({others[0].name}) costs {others[0].behind:.2f} times as much by this goal"
    return f"{advice}; {next_best}.{sample}"


def _sample(option: Option) -> str:
    """Return the number of outputs that an inexact option changed, with the upper end of its interval."""
    found, setup = option.summary, option.setup
    if setup.mode == "cloud-only" or (setup.mode == "speculative" and setup.parsed_gate.exact):
        return ""
    high = f"{100 * found.changed_outputs_high:.0f} %"
    return (
        f" It changed {_changed_outputs(found)} outputs here, and may change up to {high} of all (95 %): "
        "outrider calibrate finds a gate that keeps a budget."
    )


def _changed_outputs(found: Summary) -> str:
    """Return the number of outputs that differ from the cloud's, and of all outputs."""
    return f"{round(found.changed_outputs * found.outputs)} of {found.outputs}"


def _to_command_options(best: Option) -> str:
    """Return the option as other commands take it, in brackets."""
    setup = best.setup
    if setup.mode != "speculative":
        return f" ({'--cloud none' if setup.mode == 'edge-only' else '--edge none'})"
    return f" (--gate {shlex.quote(str(setup.parsed_gate))} --driver {setup.driver} --k {setup.k})"


def _show_sweep(rows: Sequence[Row], front: Sequence[Row]) -> None:
    from outrider.cli.terminal import borderless_table, stdout

    columns = ["gate", "k", "driver", "network", "by cloud", "outputs changed", "tokens changed", "ms per token"]
    # In a narrow terminal cells are folded, as an abbreviated gate could not be used.
    table = borderless_table([*columns, "escalated", ""], texts=("gate", "driver", "network", ""), overflow="fold")
    best = {id(row) for row in front}
    for row in rows:
        found = row.summary
        cells = [row.gate, str(row.k), row.driver, row.net, f"{100 * found.cloud_share:.1f} %", _changed_outputs(found)]
        cells += [f"{100 * found.disagreement:.1f} %", f"{1000 * found.token_s:.1f}"]
        table.add_row(*cells, f"{100 * found.escalation:.0f} %", "frontier" if id(row) in best else "")
    stdout().print(table)
