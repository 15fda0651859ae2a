"""The first section of a report: the gain over cloud-only decoding, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from outrider.decoding.gain import CloudBaseline, Gain, describe_speedup
from outrider.evals.report_sections import Section, label, of_mode
from outrider.evals.results import Answer, EvalRun, SweepPoint
from outrider.evals.summary import REFERENCE

FOREIGN = ("plain", "assisted")  # transformers' own decoding has no verdicts
NOT_COMPARED = "Speculation is not compared with the cloud alone: run the modes exact and cloud-only."


def conclusion(runs: Sequence[EvalRun]) -> Section:
    """Return a sentence per mode from its measured texts and times, then one per network of a sweep."""
    points = [*_measured(runs), *_modelled(runs)]
    lead = (
        "Measured on the items that both modes answered. Modelled: simulated from recorded traces and measured times."
    )
    return Section("conclusion", "Summary", lead if points else "", points=tuple(points) or (NOT_COMPARED,))


def _measured(runs: Sequence[EvalRun]) -> Iterator[str]:
    for run in runs:
        for mode in run.modes:
            if mode not in (REFERENCE, *FOREIGN) and (sentence := _sentence(run, mode)):
                gate = run.configured("speculation", "gate")
                yield f"{label(run, f'{mode} ({gate})' if mode == 'gated' and gate else mode, runs)}: {sentence}"


def _sentence(run: EvalRun, mode: str) -> str:
    own = {answer.id: answer for answer in of_mode(run.answers, mode)}
    reference = {answer.id: answer for answer in of_mode(run.answers, REFERENCE)}
    common = [name for name in own if name in reference]
    if not common:
        return _gain(list(own.values()), _seconds(run, mode, list(own))).describe()
    same = sum(own[name].token_ids == reference[name].token_ids for name in common)
    alone = CloudBaseline(len(common), same, _seconds(run, REFERENCE, common))
    return _gain([own[name] for name in common], _seconds(run, mode, common)).describe(alone)


def _gain(answers: Sequence[Answer], seconds: float) -> Gain:
    return Gain(
        outputs=len(answers),
        exact=sum(answer.guarantee == "exact" for answer in answers),
        tokens=sum(len(answer.token_ids) for answer in answers),
        cloud_tokens=sum(answer.count("cloud_tokens") for answer in answers),
        rounds=sum(answer.count("rounds") or answer.count("escalated") for answer in answers),
        blocks=sum(answer.count("blocks") for answer in answers),
        escalated=sum(answer.count("escalated") for answer in answers),
        seconds=seconds,
        bounded=sum(answer.guarantee == "bounded" for answer in answers),
    )


def _seconds(run: EvalRun, mode: str, items: Sequence[str]) -> float:
    """Return the total time, or 0 if one is unknown. Without it, no speed is stated."""
    times = {timing.id: timing.total_s for timing in of_mode(run.timings, mode)}
    return sum(times[name] for name in items) if all(name in times for name in items) else 0.0


def _modelled(runs: Sequence[EvalRun]) -> Iterator[str]:
    """Compare, at each round-trip time of a sweep, the fastest setting that changes nothing with the cloud alone."""
    for run in runs:
        rows = [row for row in run.sweep if row.rtt_s is not None and row.total_s is not None]
        for rtt, same in groupby(sorted(rows, key=lambda row: row.rtt_s or 0.0), key=lambda row: row.rtt_s or 0.0):
            at = list(same)
            alone = [row for row in at if row.gate == REFERENCE]
            exact = [row for row in at if row not in alone and _is_exact(row)]
            if alone and exact:
                yield label(run, _compared(min(exact, key=_total), alone[0], rtt), runs)


def _compared(best: SweepPoint, alone: SweepPoint, rtt: float) -> str:
    fast = describe_speedup(_total(alone) / _total(best), "modelled")
    return f"Round trip of {1000 * rtt:g} ms: {best.driver}, gate {best.gate}, k {best.k}: same text; {fast}."


def _is_exact(row: SweepPoint) -> bool:
    return row.gate == "always" or row.gate.startswith("trigger:")


def _total(row: SweepPoint) -> float:
    return row.total_s.value if row.total_s is not None else float("inf")
