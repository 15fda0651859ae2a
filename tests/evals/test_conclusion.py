"""The report opens with what was gained, from measured facts."""

from __future__ import annotations

from dataclasses import replace

from outrider.decoding.sequence import Source
from outrider.evals.conclusion import NOT_COMPARED, conclusion
from outrider.evals.report_sections import figure, named_figure
from outrider.evals.results import Answer, EvalRun, Figure, SweepPoint, Timing
from outrider.evals.tradeoffs import latency, quality

STATS = {"rounds": 2, "blocks": 3, "escalated": 2, "cloud_tokens": 4, "edge_tokens": 0}


def answer(item: str, mode: str, ids: tuple[int, ...] = (1, 2, 3, 4), guarantee: str = "exact", **stats: int) -> Answer:
    return Answer(item, mode, "x", ids, guarantee, "eos", {**STATS, **stats}, (Source.ACCEPTED,) * len(ids))


def timing(item: str, mode: str, seconds: float) -> Timing:
    return Timing(item, mode, 0.1, seconds, {})


RUN = EvalRun(
    "run",
    {"configuration": {"speculation": {"gate": "entropy:0.6"}}},
    (
        *(answer(item, mode) for item in "ab" for mode in ("cloud-only", "exact")),
        answer("a", "gated", guarantee="best-effort", cloud_tokens=2, edge_tokens=2),
        answer("b", "gated", (9,), guarantee="best-effort", cloud_tokens=0, edge_tokens=1),
    ),
    timings=tuple(timing(i, m, s) for i in "ab" for m, s in (("cloud-only", 2.0), ("exact", 1.0), ("gated", 4.0))),
)
SWEPT = SweepPoint("always", "5", "pipelined", 0.05, 1.0, Figure(0.0), Figure(1.0), Figure(0.0))


def test_every_mode_is_compared_with_the_cloud_alone() -> None:
    assert conclusion([RUN]).points == (
        "exact: Same text as the cloud alone; the large model ran 4 times instead of 8; "
        "2.0 times as fast as the cloud alone (measured).",
        "gated (entropy:0.6): Same text as the cloud alone in 1 of 2 outputs; 4 of 6 blocks went to the cloud; "
        "0.5 times as fast as the cloud alone (measured): it does not pay here.",
    )


def test_speed_is_not_claimed_where_times_are_missing() -> None:
    (exact, _) = conclusion([replace(RUN, timings=RUN.timings[:-2])]).points
    assert exact == "exact: Same text as the cloud alone; the large model ran 4 times instead of 8."


def test_nothing_to_compare() -> None:
    assert conclusion([replace(RUN, answers=())]).points == (NOT_COMPARED,)


def test_a_sweep_adds_what_its_model_says() -> None:
    alone = replace(SWEPT, gate="cloud-only", k="–", total_s=Figure(1.5))
    lossy = replace(SWEPT, gate="never", total_s=Figure(0.1))
    run = replace(RUN, sweep=(SWEPT, alone, lossy, replace(SWEPT, total_s=Figure(1.2))))
    assert conclusion([run]).points[-1] == (
        "Round trip of 50 ms: pipelined, gate always, k 5: same text; 1.5 times as fast as the cloud alone (modelled)."
    )
    assert "cloud-only" in str(latency([run]).drawing)
    assert len(conclusion([replace(run, sweep=(SWEPT,))]).points) == 2


def test_the_quality_chart_counts_outputs_and_says_so() -> None:
    never = replace(SWEPT, gate="never", cloud_share=0.0, disagreement=Figure(0.015), changed_outputs=Figure(0.58))
    section = quality([replace(RUN, sweep=(SWEPT, never))])
    assert section.title == "Simulated: outputs equal to the cloud's, against cloud share"
    assert section.table is not None
    assert [row[2].text for row in section.table.rows] == ["42.0 %", "100.0 %"]
    old = quality([replace(RUN, sweep=(replace(never, changed_outputs=None),))])
    assert old.title == "Simulated: tokens equal to the cloud's, against cloud share"


def test_figures_have_units_and_no_interval_without_width() -> None:
    assert figure(Figure(1.0, 1.0, 1.0)).text == "1"
    assert named_figure("same_text", Figure(0.9846, 0.97, 1.0)).text == "98.5 [97.0, 100.0] %"
    assert named_figure("format_all", Figure(1.0, 1.0, 1.0)).text == "100.0 %"
    assert named_figure("ttft_p50", Figure(0.1234, 0.1, 0.2)).text == "123 [100, 200] ms"
    assert named_figure("total_p99", Figure(12.345, 11.0, 13.0)).text == "12.35 [11.00, 13.00] s"
    assert named_figure("bleu", Figure(31.24)).text == "31.2 of 100"
