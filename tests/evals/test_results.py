"""A run's folder is read as it was written, and what is wrong with it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.decoding.sequence import Source
from outrider.errors import DataError
from outrider.evals.results import Figure, read_run
from outrider.planning.traces import Trace
from outrider.sampling.sampler import Signals

ANSWER = {
    "id": "a1",
    "mode": "exact",
    "text": "hi",
    "token_ids": [5, 6],
    "guarantee": "exact",
    "finish_reason": "eos",
    "stats": {"accepted": 1, "bonus": 1, "cloud_lost": False},
}
TIMING = {"id": "a1", "mode": "exact", "ttft_s": 0.1, "total_s": 0.5}
SWEPT = {"gate": "always", "k": 5, "driver": "sequential", "rtt_s": 0.04, "cloud_share": 1.0, "total_s": 2.5}


def write(folder: Path, name: str, *rows: Any) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "run"
    place.mkdir()
    write(place, "run.json", {"configuration": {"k": 5}, "versions": {"outrider": "1"}, "else": 1})
    write(place, "results.jsonl", ANSWER)
    return place


def test_two_files_are_enough(folder: Path) -> None:
    run = read_run(folder)
    assert run.name == "run"
    assert run.about == {"configuration": {"k": 5}, "versions": {"outrider": "1"}, "hardware": {}}
    (answer,) = run.answers
    assert (answer.id, answer.mode, answer.token_ids, answer.sources) == ("a1", "exact", (5, 6), ())
    assert answer.count("accepted") == 1
    assert answer.count("never heard of") == 0
    assert (run.timings, run.traces, run.sweep, run.metrics, run.failures) == ((), (), (), {}, ())


def test_all_files_are_read(folder: Path) -> None:
    per_token = {
        "sources": ["accepted", "bonus"],
        "pieces": ["h", "i"],
        "signals": [{"entropy": 0.5, "note": "x"}, None],
    }
    write(folder, "results.jsonl", {**ANSWER, **per_token, "warnings": []})
    spent = {"draft_s": 0.2, "queue_s": 0.0, "bytes": {"up": {"open": 3}, "down": {}}}
    write(folder, "timings.jsonl", {**TIMING, **spent, "itl_s": [0.1]})
    trace = Trace("a1", 4, (5, 6), (5, 7), (Signals(0.1, 0.9, 0.1, 0.1),) * 2)
    write(folder, "traces.jsonl", trace.to_json())
    write(folder, "sweep.jsonl", {**SWEPT, "disagreement": 0.25, "disagreement_ci": [0.2, 0.3]})
    modes = {"exact": {"chrf": {"value": 60.0, "low": 55.0, "high": 65.0, "n": 9}, "items": 1, "bleu": None}}
    write(folder, "summary.json", {"modes": modes})
    run = read_run(folder)
    assert run.answers[0].sources == (Source.ACCEPTED, Source.BONUS)
    assert run.answers[0].signals == ({"entropy": 0.5}, {})
    assert run.timings[0].stages == {"draft": 0.2, "queue": 0.0}
    assert run.timings[0].up == {"open": 3}
    assert run.traces[0].target == (5, 6)
    assert run.sweep[0].disagreement == Figure(0.25, 0.2, 0.3)
    assert run.sweep[0].total_s == Figure(2.5)
    assert run.metrics == {"exact": {"chrf": Figure(60.0, 55.0, 65.0), "items": Figure(1.0)}}


def test_signals_may_come_as_traces_have_them(folder: Path) -> None:
    write(folder, "results.jsonl", {**ANSWER, "signals": {"entropy": [0.1, 0.2], "margin": [0.9, 0.8]}})
    assert read_run(folder).answers[0].signals == ({"entropy": 0.1, "margin": 0.9}, {"entropy": 0.2, "margin": 0.8})


def test_lines_without_an_answer_are_kept_apart(folder: Path) -> None:
    failed = {"id": "a2", "mode": "exact", "error": {"type": "AudioError", "message": "it is empty"}}
    write(folder, "results.jsonl", ANSWER, failed, {"id": "a1", "mode": "plain", "skipped": "no audio"})
    run = read_run(folder)
    assert run.modes == ["exact"]
    assert [(f.id, f.mode, f.reason) for f in run.failures] == [
        ("a2", "exact", "AudioError: it is empty"),
        ("a1", "plain", "no audio"),
    ]


def test_a_line_ends_at_a_newline_and_nowhere_else(folder: Path) -> None:
    text = "a\u2028b\x85c"
    (folder / "results.jsonl").write_text(
        json.dumps({**ANSWER, "text": text}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert read_run(folder).answers[0].text == text


def test_half_of_a_surrogate_pair_becomes_writable(folder: Path) -> None:
    write(folder, "results.jsonl", {**ANSWER, "text": "\ud83d"})
    text = read_run(folder).answers[0].text
    assert text is not None
    assert text.encode("utf-8")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("results.jsonl", "{", "line 1: not valid JSON"),
        ("results.jsonl", "[" * 100_000, "line 1: not valid JSON"),
        ("results.jsonl", "7", "line 1: expected an object, not 7"),
        ("results.jsonl", "", "has no lines"),
        ("results.jsonl", json.dumps({**ANSWER, "token_ids": [5, "6"]}), "token_ids: expected whole numbers"),
        ("results.jsonl", json.dumps({**ANSWER, "token_ids": None}), "token_ids: expected a list"),
        ("results.jsonl", json.dumps({**ANSWER, "stats": []}), "stats: expected an object"),
        ("results.jsonl", json.dumps({**ANSWER, "sources": ["edge"]}), "sources has 1 entries for 2 tokens"),
        ("results.jsonl", json.dumps({**ANSWER, "sources": ["edge", "moon"]}), "expected one of edge, .* not 'moon'"),
        ("results.jsonl", json.dumps({**ANSWER, "signals": 5}), "signals: expected a list, not 5"),
        ("results.jsonl", json.dumps({**ANSWER, "signals": {"a": [1], "b": []}}), "lists of different length"),
        ("results.jsonl", json.dumps({"id": "a1", "mode": "exact"}), "line 1: 'token_ids' is missing"),
        ("results.jsonl", json.dumps(ANSWER) + "\n\n" + json.dumps(ANSWER), "'a1' has two lines of mode 'exact'"),
        ("timings.jsonl", json.dumps({**TIMING, "total_s": -1}), "total_s: expected 0 or more, not -1"),
        ("timings.jsonl", '{"id": "a", "mode": "b", "ttft_s": 1, "total_s": NaN}', "total_s: expected a finite number"),
        ("timings.jsonl", json.dumps({**TIMING, "total_s": 10**400}), "total_s: expected a finite number"),
        ("timings.jsonl", json.dumps({**TIMING, "bytes": {"up": 5}}), "up: expected an object"),
        ("sweep.jsonl", json.dumps({**SWEPT, "cloud_share": 1.5}), "cloud_share: expected a share"),
        ("sweep.jsonl", json.dumps({**SWEPT, "total_s": "fast"}), "total_s: expected a number"),
        ("sweep.jsonl", json.dumps({**SWEPT, "total_s_ci": [1]}), r"total_s_ci: expected \[low, high\]"),
        ("sweep.jsonl", json.dumps({"k": 5}), "line 1: 'gate' is missing"),
        ("summary.json", json.dumps({"modes": []}), "modes: expected an object"),
        ("summary.json", json.dumps({"modes": {"exact": 5}}), "exact: expected an object"),
        ("traces.jsonl", "{}", "line 1: 'entropy' is missing"),
        ("run.json", "[]", "expected an object"),
        ("run.json", '{"versions": 3}', "versions: expected an object"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, name: str, content: str, said: str) -> None:
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=said) as raised:
        read_run(folder)
    assert str(raised.value).startswith(str(folder / name))


def test_the_line_is_the_file_s_own(folder: Path) -> None:
    (folder / "results.jsonl").write_text(json.dumps(ANSWER) + "\n\nnonsense\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"results.jsonl, line 3: not valid JSON"):
        read_run(folder)


@pytest.mark.parametrize("name", ["run.json", "results.jsonl"])
def test_a_file_that_must_be_there_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        read_run(folder)


def test_bytes_that_are_no_text_are_refused(folder: Path) -> None:
    (folder / "results.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"results.jsonl is UTF-16"):
        read_run(folder)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        read_run(folder / "run.json")
