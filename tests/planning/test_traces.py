"""Traces as files: what is written is read back, and what no model can have said is refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import DataError
from outrider.planning.traces import Trace, read_traces
from outrider.sampling.sampler import Signals

GOOD = Trace("a", 4, (5, 6), (5, 7), (Signals(0.0, 1.0, 0.0, 0.0), Signals(2.5, 0.1, 0.7, 3.5)), 9)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert read_traces(write(tmp_path / "traces.jsonl", GOOD.to_json())) == [GOOD]


def test_a_line_separator_inside_an_id_ends_no_line(tmp_path: Path) -> None:
    row = json.dumps({**GOOD.to_json(), "id": "a\u2028b"}, ensure_ascii=False)
    (tmp_path / "traces.jsonl").write_text(row + "\n", encoding="utf-8")
    assert read_traces(tmp_path / "traces.jsonl")[0].id == "a\u2028b"


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"entropy": [0.1, -0.2]}, r"entropy: expected 0 or more, not -0\.2"),
        ({"logprob": [0.1, -3.0]}, "logprob: expected 0 or more, not -3"),
        ({"margin": [1.1, 0.2]}, r"margin: expected between 0 and 1, not 1\.1"),
        ({"maxprob": [0.5, -0.1]}, r"maxprob: expected between 0 and 1, not -0\.1"),
        ({"entropy": [float("nan"), 0.1]}, "entropy: expected a finite number, not nan"),
        ({"logprob": [0.1, float("inf")]}, "logprob: expected a finite number, not inf"),
        ({"entropy": ["0.1", 0.1]}, r"entropy: expected a finite number, not '0\.1'"),
        ({"target": [5, -1]}, r"target: expected whole numbers from 0 to 2\^63 − 1, not -1"),
        ({"draft": [5, 1.5]}, r"draft: expected whole numbers from 0 to 2\^63 − 1, not 1\.5"),
        ({"prompt_tokens": -1}, "prompt_tokens: expected whole numbers"),
        ({"media_bytes": -1}, "media_bytes: expected whole numbers"),
        ({"margin": [0.1]}, "entropy, margin, maxprob, logprob: lists of different lengths"),
    ],
)
def test_the_impossible_is_refused_by_file_and_line(tmp_path: Path, changes: dict[str, Any], wrong: str) -> None:
    file = write(tmp_path / "traces.jsonl", GOOD.to_json(), {**GOOD.to_json(), "id": "b", **changes})
    with pytest.raises(DataError, match=rf"traces\.jsonl, line 2: {wrong}"):
        read_traces(file)


def test_an_id_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "traces.jsonl", GOOD.to_json(), {**GOOD.to_json(), "id": "b"}, GOOD.to_json())
    with pytest.raises(DataError, match=r"traces\.jsonl: several traces have the id 'a'"):
        read_traces(file)
