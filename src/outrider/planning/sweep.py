"""Sweep of gates × k × drivers × networks over recorded traces, and its Pareto frontier."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from outrider.config import DEFAULT_K, DriverName
from outrider.decoding.gate import Gate
from outrider.netem.conditions import Conditions
from outrider.planning.costs import StepCosts
from outrider.planning.simulator import Setup, Summary, end_tokens, replay, summarise
from outrider.planning.traces import Trace


@dataclass(frozen=True)
class Row:
    """A setup with its summary."""

    gate: str
    k: int | str
    driver: DriverName
    net: str
    rtt_s: float
    summary: Summary

    def to_json(self) -> dict[str, Any]:
        """Return setup and summary as one flat object."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "summary"}
        return own | {field.name: getattr(self.summary, field.name) for field in fields(Summary)}


def sweep(
    traces: Seq[Trace],
    costs: StepCosts,
    *,
    gates: Seq[str | Gate],
    ks: Seq[int | str] = (DEFAULT_K,),
    drivers: Seq[DriverName] = ("sequential",),
    nets: Seq[Conditions] = (Conditions(),),
    base: Setup | None = None,
) -> list[Row]:
    """Simulate each combination. base: the common options (scope, load, max_new_tokens).

    Raises:
        SettingsError: an invalid combination. It is raised before any simulation.
    """
    shared, ends = base or Setup(), end_tokens(traces)
    setups = list(_setups(shared, gates, ks, drivers, nets))
    return [_row(setup, summarise(replay(traces, setup, costs, ends=ends))) for setup in setups]


def pareto(rows: Seq[Row]) -> list[Row]:
    """Return the Pareto frontier of cloud share and disagreement, by falling cloud share.

    Of rows that are equal in both, the fastest is taken.
    """
    ordered = sorted(rows, key=lambda row: (row.summary.cloud_share, row.summary.disagreement, row.summary.total_s))
    front: list[Row] = []
    for row in ordered:
        if not front or row.summary.disagreement < front[-1].summary.disagreement:
            front.append(row)
    return front[::-1]


def _setups(
    base: Setup, gates: Seq[str | Gate], ks: Seq[int | str], drivers: Seq[DriverName], nets: Seq[Conditions]
) -> Iterator[Setup]:
    for net, driver, k, gate in product(nets, drivers, ks, gates):
        yield replace(base, gate=gate, k=k, driver=driver, net=net)


def _row(setup: Setup, summary: Summary) -> Row:
    return Row(str(setup.parsed_gate), setup.k, setup.driver, str(setup.net), setup.net.rtt, summary)
