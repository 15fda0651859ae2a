"""The page says what the files say, is one file, and lets no text of a model be more than text."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cli.report import run_report
from outrider.decoding.result import wilson_interval
from outrider.decoding.sequence import Source
from outrider.errors import DataError
from outrider.evals import breakdown, report_sections, tradeoffs
from outrider.evals.charts import bars, tag, ticks
from outrider.evals.report import MAX_TOKENS, render
from outrider.evals.results import Answer, EvalRun, Figure, SweepPoint, Timing, read_run
from tests.support import report_sample
from tests.support.report_page import Reader, answer, run

NASTY = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'; {{ 7*7 }} {% raw %}",
    "<!--",
    "]]>",
    "&amp;",
    "\u202emirrored\u202c שלום",
    "👩\u200d💻👨\u200d👩\u200d👧",
    "\u0000\u0007",
    "e\u0301\u0301\u0301",
    "",
]


def swept(**changes: Any) -> SweepPoint:
    return replace(SweepPoint("always", "5", "sequential", 0.04, 1.0, Figure(0.0), Figure(2.0)), **changes)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    report_sample.small(folder)
    return folder


# The whole page ---------------------------------------------------------------------------------------------


def test_the_report_of_a_real_run(sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run_report([str(sample)], str(out)) == 0
    page = Reader(out.read_text(encoding="utf-8"))
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"overview", "quality", "latency", "acceptance", "stages", "tokens", "setup", "missing"} <= set(ids)
    shown = {"".join(strip).replace("◌", "") for strip in page.strips}
    assert shown == {answer.text for answer in read_run(sample).answers}


def test_the_page_loads_nothing(sample: Path) -> None:
    page = render([read_run(sample)])
    assert not re.search(r"https?://|//[a-z]+\.|url\(|@import|\bsrc=|javascript:|eval\(|innerHTML|onclick", page)
    tags = Reader(page).tags
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {name for name, _ in tags}
    assert all(not key.startswith("on") and key != "style" for _, attributes in tags for key in attributes)
    assert all((attributes["href"] or "").startswith("#") for name, attributes in tags if name == "a")


def test_only_its_own_script_may_run(sample: Path) -> None:
    page = render([read_run(sample)])
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    report_sections = b64encode(sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for name, a in Reader(page).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert f"script-src 'sha256-{report_sections}'" in policy
    assert "default-src 'none'" in policy


def test_charts_have_names_and_tables(sample: Path) -> None:
    page = Reader(render([read_run(sample)]))
    pictures = [attributes for name, attributes in page.tags if attributes.get("role") == "img"]
    assert pictures
    assert all(attributes.get("aria-label") for attributes in pictures)
    bare = [a for name, a in page.tags if name == "svg" and "aria-label" not in a and a.get("aria-hidden") != "true"]
    assert bare == []
    assert sum(name == "caption" for name, _ in page.tags) >= len(pictures)


def test_what_is_not_there_is_said(sample: Path) -> None:
    bare = replace(read_run(sample), timings=(), traces=(), sweep=(), answers=(answer(sources=()),))
    page = Reader(render([bare]))
    named = " ".join(page.text)
    titles = ("Metrics", "Times", "Measured quality", "Simulated", "Latency", "Acceptance")
    for title in (*titles, "Bytes by kind", "Time by stage", "Source of each token"):
        assert title in named
    assert not [a for _, a in page.tags if a.get("id") in ("quality", "latency", "ledger", "tokens")]


def test_a_run_in_which_all_failed_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    line = {"id": "a1", "mode": "exact", "error": {"type": "AudioError", "message": "it is <empty>"}}
    (tmp_path / "results.jsonl").write_text(json.dumps(line))
    page = render([read_run(tmp_path)])
    assert "AudioError: it is &lt;empty&gt;" in page


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("place", ["piece", "id", "mode", "guarantee", "gate", "kind", "metric", "key", "name"])
def test_a_text_is_only_text(text: str, place: str) -> None:
    def at(name: str, usual: str = "x") -> str:
        return text if name == place else usual

    one = answer(at("mode"), pieces=(at("piece"),) * 3, guarantee=at("guarantee"), id=at("id"))
    page = render(
        [
            run(
                one,
                name=at("name"),
                timings=(Timing(at("id"), at("mode"), 0.1, 0.2, {"draft": 0.1}, {at("kind"): 5}, {}),),
                sweep=(swept(gate=at("gate")), swept(gate=at("gate"), cloud_share=0.0)),
                metrics={at("mode"): {at("metric"): Figure(1.0, 0.5, 1.5)}},
            ),
            replace(run(name="other"), about={"configuration": {at("key"): at("key")}}),
        ]
    )
    reader = Reader(page)
    assert reader.open == []
    assert [name for name, _ in reader.tags].count("script") == 1
    assert {name for name, _ in reader.tags}.isdisjoint({"img"})
    assert "49" not in re.findall(r"'; (\S+)", page)
    if place == "piece" and text and "\0" not in text:
        assert reader.strips[0] == [text] * 3


@settings(max_examples=40)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1))
def test_any_piece_is_shown_as_it_is(text: str) -> None:
    assert Reader(render([run(answer(n=1, pieces=(text,)))])).strips[0] == [text]


def test_ten_thousand_tokens_are_cut_and_the_page_says_so() -> None:
    page = render([run(answer(n=10_000, pieces=("w ",) * 10_000, signals=({"entropy": 0.5},) * 10_000))])
    assert len(Reader(page).strips[0]) == MAX_TOKENS
    assert "The first 2,000 of 10,000 tokens are shown." in page
    assert len(page) < 400_000


def test_many_items_are_cut_and_the_page_says_so() -> None:
    page = render([run(*(replace(answer(), id=f"a{n}") for n in range(30)))])
    assert len(Reader(page).strips) == 12
    assert "The first 12 of 30 items" in page


def test_several_runs_are_told_apart(sample: Path, tmp_path: Path) -> None:
    twin = tmp_path / sample.name  # another folder of the same name
    copytree(sample, twin)
    out = tmp_path / "out.html"
    run_report([str(sample), str(twin)], str(out))
    text = out.read_text(encoding="utf-8")
    assert f"{sample} · exact" in text
    assert f"{twin} · exact" in text


@pytest.mark.parametrize(
    ("folders", "out", "said"),
    [
        (lambda sample: [], "x.html", "no folder was given"),
        (lambda sample: [sample, f"{sample}/../{sample.name}"], "x.html", "was given twice"),
        (lambda sample: [sample], "nowhere/x.html", "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_refused(
    sample: Path, tmp_path: Path, folders: Callable[[Path], list[Any]], out: str, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        run_report(list(map(str, folders(sample))), str(tmp_path / out))


# Its numbers ------------------------------------------------------------------------------------------------

A, C, B, E = Source.ACCEPTED, Source.CORRECTION, Source.BONUS, Source.EDGE


def judged(*sources: Source, escalated: int) -> Answer:
    stats = {"verified": 9.0, "escalated": float(escalated)}
    stats |= {"corrected": float(sources.count(C)), "bonus": float(sources.count(B))}
    return Answer("a", "m", None, tuple(range(len(sources))), "exact", "eos", stats, sources)


def test_acceptance_by_position_from_sources() -> None:
    """Blocks of two: both accepted; the first rejected; skipped; the second rejected; the last one cut by the end."""
    one = judged(A, A, B, C, E, E, A, C, A, escalated=4)
    assert breakdown.by_position([one]) == {1: (3, 4), 2: (1, 2)}


def test_joined_blocks_are_not_counted() -> None:
    assert breakdown.by_position([judged(A, A, A, A, A, B, escalated=3)]) == {}


def test_what_no_drafter_drafted_is_not_counted() -> None:
    alone = judged(C, C, C, escalated=3)
    assert breakdown.by_position([replace(alone, stats={**alone.stats, "verified": 0.0})]) == {}


def test_acceptance_by_position_from_a_trace() -> None:
    agrees = [True, True, True, False, True, True]
    assert list(breakdown.replay_blocks(agrees, 2)) == [(2, False), (0, True), (2, False)]


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share(pair: tuple[int, int]) -> None:
    low, high = wilson_interval(pair[0] / pair[1], pair[1], breakdown.TWO_SIDED)
    assert 0 <= low <= pair[0] / pair[1] + 1e-12
    assert pair[0] / pair[1] - 1e-12 <= high <= 1


def test_the_interval_is_wilson_s() -> None:
    low, high = wilson_interval(0.8, 10, breakdown.TWO_SIDED)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    kept = tradeoffs.frontier(points)
    for point in points:
        beaten = any(c <= point[0] and q >= point[1] and (c, q) != point for c, q in points)
        assert (point in kept) == (not beaten)
    assert kept == sorted(kept)


def test_stages_divide_the_total() -> None:
    spent = breakdown.stages_of(Timing("a", "m", 0, 2.0, {"draft": 0.5, "wait": 1.0, "queue": 0.1, "verify": 0.6}))
    assert spent == pytest.approx({"draft": 0.5, "verify": 0.6, "queue": 0.1, "network": 0.3, "rest": 0.5})


def test_what_the_cloud_did_meanwhile_costs_no_time() -> None:
    spent = breakdown.stages_of(Timing("a", "m", 0, 2.0, {"draft": 1.8, "wait": 0.1, "queue": 0.1, "verify": 1.0}))
    assert spent == pytest.approx({"draft": 1.8, "verify": 0.1, "queue": 0.0, "network": 0.0, "rest": 0.1})


def test_prefill_has_its_place_where_it_is_known() -> None:
    stages = {"prefill": 0.2, "draft": 0.3, "wait": 0.6, "verify_prefill": 0.1, "verify": 0.4}
    assert breakdown.stages_of(Timing("a", "m", 0, 1.0, stages)) == {
        name: pytest.approx(part)
        for name, part in [
            *(("edge prefill", 0.2), ("draft", 0.1), ("cloud prefill", 0.1), ("verify", 0.3)),
            *(("network", 0.2), ("rest", 0.1)),
        ]
    }
    section = breakdown.stages([run(timings=(Timing("a1", "exact", 0, 1.0, {"prefill": 0.4, "draft": 0.5}),))])
    assert [name for _, name in section.legend] == ["edge prefill", "draft", "network", "rest"]


def test_many_kinds_of_bytes_are_gathered() -> None:
    up = {f"kind{n}": 100 - n for n in range(12)}
    section = breakdown.ledger([run(timings=(Timing("a1", "exact", 0, 1, {}, up, {}),))])
    assert section.legend[-1] == ("s7", "other kinds")
    assert sum(width for _, width, _ in section.bars[0].bars[0].segments) == pytest.approx(100)
    assert section.table is not None
    assert len(section.table.head) == 13


def test_the_fastest_k_makes_the_line_and_the_table_has_all() -> None:
    rows = [swept(k=str(k), rtt_s=r, total_s=Figure(k * r)) for k in (3, 2) for r in (0.01, 0.02)]
    section = tradeoffs.latency([run(sweep=tuple(rows))])
    assert section.drawing is not None
    assert "k 2" in section.drawing
    assert "k 3" not in section.drawing
    assert section.table is not None
    assert len(section.table.rows) == 4


def test_more_lines_than_one_can_tell_apart_are_thinned() -> None:
    rows = [swept(gate=f"entropy:{n}") for n in range(20)]
    assert "8 of 20 lines are drawn" in tradeoffs.latency([run(sweep=tuple(rows))]).lead


def measured(**shares: tuple[float, Figure]) -> EvalRun:
    """Modes with their cloud share (in tenths of the tokens) and their accuracy."""

    def named(mode: str) -> str:
        return mode.replace("_", "-")

    answers = [
        answer(mode=named(mode), stats={"cloud_tokens": float(share), "edge_tokens": 10.0 - share})
        for mode, (share, _) in shares.items()
    ]
    metrics = {named(mode): {"attribute_all": figure} for mode, (_, figure) in shares.items()}
    made = run(*answers, metrics=metrics)
    return replace(made, about={"configuration": {"speculation": {"gate": "entropy:0.5"}}})


def test_measured_quality_says_how_little_of_the_cloud_is_enough() -> None:
    whole, near, little = Figure(0.9, 0.85, 0.95), Figure(0.892, 0.85, 0.93), Figure(0.7, 0.6, 0.8)
    section = tradeoffs.measured([measured(cloud_only=(10, whole), gated=(2, near), edge_only=(0, little))])
    assert section.upright == "captions with every attribute right"
    assert section.lead.endswith(
        "Within a point of the cloud alone at the smallest share, intervals aside: gated entropy:0.5, 20.0 %."
    )
    assert section.drawing is not None
    assert "whisker" in section.drawing
    section = tradeoffs.measured([measured(cloud_only=(10, whole), edge_only=(0, little))])
    assert section.lead.endswith("Nothing here comes within a point of the cloud alone at a smaller cloud share.")


def test_what_exact_mode_reaches_is_no_smaller_share_and_other_data_say_nothing() -> None:
    whole = Figure(0.9, 0.85, 0.95)
    section = tradeoffs.measured([measured(exact=(10, whole), cloud_only=(10, whole))])
    assert section.lead.endswith("Nothing here comes within a point of the cloud alone at a smaller cloud share.")
    elsewhere = replace(measured(gated=(1, whole)), name="other", about={"configuration": {"data": {"hash": "f00"}}})
    section = tradeoffs.measured([measured(cloud_only=(10, whole)), elsewhere])
    assert section.lead.endswith("Nothing here comes within a point of the cloud alone at a smaller cloud share.")


def test_a_metric_that_one_mode_alone_has_does_not_hide_the_next() -> None:
    runs = measured(cloud_only=(10, Figure(0.9)), gated=(1, Figure(0.8)))
    metrics = {"cloud-only": {"attribute_all": Figure(0.9), "chrf": Figure(80)}, "gated": {"chrf": Figure(79.5)}}
    section = tradeoffs.measured([replace(runs, metrics=metrics)])
    assert section.upright == "chrF"
    assert "smallest share" in section.lead, "a point of 100"


def test_verdicts_that_reach_back_over_blocks_are_no_positions() -> None:
    about = {"configuration": {"speculation": {"scope": "repair"}}}
    assert breakdown.acceptance([replace(run(answer()), about=about)]).missing
    assert not breakdown.acceptance([run(answer())]).missing


def test_one_mode_alone_shows_no_tradeoff() -> None:
    assert "at least two modes" in tradeoffs.measured([run(metrics={"exact": {"chrf": Figure(60, 55, 65)}})]).missing


def test_figures_of_the_summary_are_rows() -> None:
    section = report_sections.durations([run(latency={"exact": {"ttft_p50": Figure(0.25, 0.2, 0.3)}})])
    assert section.table is not None
    assert section.table.head == ("", "exact")
    assert [cell.text for cell in section.table.rows[0]] == ["TTFT p50", "250 [200, 300] ms"]


# Drawing ----------------------------------------------------------------------------------------------------


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9))
def test_ticks_span_the_values(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 12
    slack = 1e-6 * (abs(low) + width + 1)
    assert found[0] <= low + slack
    assert found[-1] >= low + width - slack
    assert all(math.isfinite(tick) for tick in found)


def test_children_and_attributes_are_escaped() -> None:
    assert tag("text", "<b>", data_tip='"&', class_="x") == '<text data-tip="&#34;&amp;" class="x">&lt;b&gt;</text>'


def test_bars_of_nothing_have_no_segments() -> None:
    assert bars([("a", "0", [("s0", 0.0, "")])]).bars[0].segments == ()
