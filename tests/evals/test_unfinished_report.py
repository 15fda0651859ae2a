"""A report of a run that was stopped says so, on the page and on stderr."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from outrider.cli.report import run_report
from outrider.evals.report import render
from outrider.evals.results import EvalRun, Failure, read_run
from tests.support import report_sample
from tests.support.report_page import Reader, answer, run


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    report_sample.small(folder)
    return folder


def stopped(name: str, *lines: Any) -> EvalRun:
    """A run of 2 items in 2 modes, of which only these lines are there."""
    configuration = {"data": {"name": "demo", "items": 2}, "modes": ["exact", "edge-only"]}
    return replace(run(*lines, name=name), about={"configuration": configuration, "versions": {}, "hardware": {}})


def test_an_unfinished_run_says_so(sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "".join(Reader(render([stopped("half", answer())])).text)
    assert "half: 1 answer in 1 mode" in page
    assert "half is not finished: 3 of 4 answers are missing; repeat the eval command to complete it." in page
    folder = copytree(sample, tmp_path / "half")
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    about["configuration"] |= {"data": {"items": 2}, "modes": ["exact", "entropy:0.3", "edge-only"]}
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    assert run_report([str(folder)], str(tmp_path / "page.html")) == 0
    assert "half is not finished: 2 of 6 answers are missing" in capsys.readouterr().err.splitlines()[0]


def test_a_run_is_finished_with_what_failed_and_without_a_trace(sample: Path) -> None:
    whole = [answer(mode, id=item) for item in ("a", "b") for mode in ("exact", "edge-only")]
    failed = (Failure("b", "edge-only", "no sound"), Failure("b", "trace", "no sound"))
    assert stopped("whole", *whole).missing == 0
    assert replace(stopped("failed", *whole[:3]), failures=failed).missing == 0
    assert replace(stopped("half", *whole[:2]), failures=failed[1:]).missing == 2
    assert read_run(sample).missing == 0, "a run.json that does not say what was wanted"
