"""A gate file says whose traces it was made of: what the run.json beside them says must agree."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.calibrate import run_calibrate
from outrider.config import GenerationSettings, ModelId
from outrider.errors import DataError, SettingsError
from tests.support.calibration_requests import CLOUD, EDGE, write_requests

PLAIN = GenerationSettings(stop=("。",))


def about(**changes: Any) -> dict[str, Any]:
    """A run.json of this pair, but for what changes in its configuration."""
    sides = {side: {"name": m.name, "vocabulary": m.fingerprint} for side, m in (("edge", EDGE), ("cloud", CLOUD))}
    generation = {"max_new_tokens": 128, "temperature": 0.0, "stop": ["。"], "sentences": None, "seed": 4}
    return {"configuration": {"models": sides, "speculation": {"k": 3}, "generation": generation, **changes}}


def folder(path: Path, run: dict[str, Any] | None) -> Path:
    write_requests(path / "traces.jsonl")
    if run is not None:
        (path / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return path


def calibrated(traces: Path, **changes: Any) -> int:
    given = {"edge": EDGE, "cloud": CLOUD, "settings": PLAIN, "k": 3, **changes}
    return run_calibrate(str(traces), str(traces.parent / "gate.json"), 0.1, loss="tokens", **given)


@pytest.mark.parametrize("name", ["", "traces.jsonl"])
def test_traces_of_this_pair_are_taken_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "run").mkdir()
    assert calibrated(folder(tmp_path / "run", about()) / name) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"edge": ModelId("demo:cloud", "vocab-1")}, "models.edge.name is 'small' .* and 'demo:cloud'"),
        ({"cloud": ModelId("large", "vocab-2")}, "models.cloud.vocabulary is 'vocab-1' .* and 'vocab-2'"),
        ({"cloud": replace(CLOUD, quantization="int8")}, "models.cloud.quantization is None .* and 'int8'"),
        ({"edge": replace(EDGE, quantization="int8")}, "models.edge.quantization is None .* and 'int8'"),
        ({"settings": GenerationSettings(stop=("。",), temperature=0.9)}, "generation.temperature is 0.0 .* and 0.9"),
        ({"settings": GenerationSettings(stop=("。",), sentences=2)}, "generation.sentences is None .* and 2"),
        ({"settings": GenerationSettings()}, r"generation.stop is \['。'\] .* and \[\]"),
    ],
)
def test_traces_of_another_pair_or_other_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = folder(tmp_path, about()) / "traces.jsonl"
    with pytest.raises(SettingsError, match=rf"run\.json: configuration\.{said} here"):
        calibrated(file, **changes)
    assert not (tmp_path / "gate.json").exists()


def test_traces_of_a_quantized_pair_are_taken_for_that_pair_only(tmp_path: Path) -> None:
    run = about()
    run["configuration"]["models"]["cloud"]["quantization"] = "int8"
    file = folder(tmp_path, run) / "traces.jsonl"
    assert calibrated(file, cloud=replace(CLOUD, quantization="int8")) == 0
    with pytest.raises(SettingsError, match=r"quantization is 'int8' .* and None"):
        calibrated(file)


def test_a_seed_is_the_request_s_own_and_traces_are_of_tokens_whatever_the_k(tmp_path: Path) -> None:
    file = folder(tmp_path, about(speculation={"k": 7})) / "traces.jsonl"
    assert calibrated(file, settings=GenerationSettings(stop=("。",), seed=9)) == 0


def test_sampled_traces_share_the_noise_of_their_seed(tmp_path: Path) -> None:
    generation = about()["configuration"]["generation"] | {"temperature": 0.8}
    file = folder(tmp_path, about(generation=generation)) / "traces.jsonl"
    sampled = GenerationSettings(stop=("。",), temperature=0.8, seed=9)
    with pytest.raises(SettingsError, match=r"configuration\.generation\.seed is 4 .* and 9 here"):
        calibrated(file, settings=sampled)
    assert calibrated(file, settings=replace(sampled, seed=4)) == 0


@pytest.mark.parametrize("run", [None, {}, {"configuration": {"data": 3}}])
def test_traces_that_do_not_say_whose_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: dict[str, Any] | None
) -> None:
    assert calibrated(folder(tmp_path, run) / "traces.jsonl") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "no run.json next to" in line


def test_a_run_json_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = folder(tmp_path, about()) / "traces.jsonl"
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"run\.json: not valid JSON"):
        calibrated(file)
