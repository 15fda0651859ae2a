"""Gate files, plans and sweeps are of one pair: the run.json next to traces must agree with it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from outrider.api import local
from outrider.cli.calibrate import run_calibrate
from outrider.config import GenerationSettings, Grammar
from outrider.errors import DataError, SettingsError
from outrider.planning.provenance import describe_engine
from tests.support.calibration_requests import write_requests
from tests.support.commands import run_command
from tests.support.synthetic_traces import COSTS
from tests.support.tiny_text_models import engine

PLAIN = GenerationSettings(stop=("。",))
EDGE = {"name": "small", "vocabulary": "vocab-1", "dtype": "float32", "quantization": None, "identity": "1a"}
CLOUD = {"name": "large", "vocabulary": "vocab-1", "dtype": "float32", "quantization": None, "identity": "2b"}


def about(**changes: Any) -> dict[str, Any]:
    """A run.json of this pair, but for what changes in its configuration."""
    sides = {"edge": EDGE | {"device": "cuda:0"}, "cloud": CLOUD | {"device": "cpu"}}
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
        ({"edge": EDGE | {"name": "demo:cloud"}}, "models.edge.name is 'small' .* and 'demo:cloud'"),
        ({"cloud": CLOUD | {"vocabulary": "vocab-2"}}, "models.cloud.vocabulary is 'vocab-1' .* and 'vocab-2'"),
        ({"cloud": CLOUD | {"quantization": "int8"}}, "models.cloud.quantization is None .* and 'int8'"),
        ({"edge": EDGE | {"quantization": "int8"}}, "models.edge.quantization is None .* and 'int8'"),
        ({"edge": EDGE | {"dtype": "bfloat16"}}, "models.edge.dtype is 'float32' .* and 'bfloat16'"),
        ({"cloud": CLOUD | {"identity": "2c"}}, "models.cloud.identity is '2b' .* and '2c'"),
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


@pytest.mark.parametrize("unknown", ["dtype", "identity"])
def test_fields_that_a_side_lacks_are_not_compared(tmp_path: Path, unknown: str) -> None:
    def without(row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name != unknown}

    assert calibrated(folder(tmp_path, about()) / "traces.jsonl", cloud=without(CLOUD)) == 0
    run = about(models={"edge": EDGE, "cloud": without(CLOUD)})
    assert calibrated(folder(tmp_path, run) / "traces.jsonl") == 0


def test_settings_with_objects_are_compared_as_their_json(tmp_path: Path) -> None:
    settings = GenerationSettings(grammar=Grammar("regex", "a*"), logit_bias=((3, 1.5),))
    run = about(generation=json.loads(json.dumps(asdict(settings))))
    file = folder(tmp_path, run) / "traces.jsonl"
    assert calibrated(file, settings=settings) == 0
    with pytest.raises(SettingsError, match=r"generation\.grammar is \{.*'a\*'.*\} .* and None here"):
        calibrated(file, settings=replace(settings, grammar=None))


def test_traces_of_a_quantized_pair_are_taken_for_that_pair_only(tmp_path: Path) -> None:
    run = about()
    run["configuration"]["models"]["cloud"]["quantization"] = "int8"
    file = folder(tmp_path, run) / "traces.jsonl"
    assert calibrated(file, cloud=CLOUD | {"quantization": "int8"}) == 0
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


@pytest.mark.parametrize("run", [None, {"configuration": {"data": 3}}, {"configuration": {}}])
def test_traces_that_do_not_say_whose_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: dict[str, Any] | None
) -> None:
    assert calibrated(folder(tmp_path, run) / "traces.jsonl") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "no run.json next to" in line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object with a configuration"),
        ("{}", "expected an object with a configuration"),
        ('{"configuration": 5}', "expected an object with a configuration"),
    ],
)
def test_a_damaged_run_json_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = folder(tmp_path, about()) / "traces.jsonl"
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=rf"run\.json: {reason}"):
        calibrated(file)


@pytest.mark.parametrize("address", ["", " at grpc://127.0.0.1:7070", " at vllm://[::1]:8000"])
def test_a_cloud_may_have_another_address(tmp_path: Path, address: str) -> None:
    models = about()["configuration"]["models"]
    models["cloud"] = models["cloud"] | {"name": "large at grpc://far:1"}
    file = folder(tmp_path, about(models=models)) / "traces.jsonl"
    assert calibrated(file, cloud={**CLOUD, "name": f"large{address}"}) == 0
    with pytest.raises(SettingsError, match=r"models\.cloud\.name is 'large' for these traces, and 'other' here"):
        calibrated(file, cloud={**CLOUD, "name": f"other{address}"})


# Plans and sweeps -------------------------------------------------------------------------------------------


@pytest.fixture
def run_of_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the run.json of the pair that the commands load, with fixed costs."""
    small, large = engine("qwen2"), engine("llama")
    monkeypatch.setattr("outrider.cli.build.load_drafter", lambda models: small)
    monkeypatch.setattr("outrider.cli.build.connect_verifier", lambda models, network: local(large))
    monkeypatch.setattr("outrider.planning.timing.measure_costs", lambda *_: COSTS)
    models = {"edge": describe_engine(small), "cloud": describe_engine(large)}
    return about(models=models, generation=json.loads(json.dumps(asdict(GenerationSettings()))))


COMMANDS = pytest.mark.parametrize("command", ["plan", "sweep"])


@COMMANDS
@pytest.mark.parametrize("name", ["", "traces.jsonl"])
def test_a_plan_takes_traces_of_its_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_of_pair: dict[str, Any], command: str, name: str
) -> None:
    (tmp_path / "run").mkdir()
    traces = folder(tmp_path / "run", run_of_pair) / name
    assert run_command([command, "--traces", str(traces), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out)["costs"] == asdict(COSTS)


@COMMANDS
@pytest.mark.parametrize("side", ["edge", "cloud"])
@pytest.mark.parametrize("field", ["name", "vocabulary", "dtype", "quantization", "identity"])
def test_a_plan_refuses_traces_of_another_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_of_pair: dict[str, Any], command: str, side: str, field: str
) -> None:
    model = run_of_pair["configuration"]["models"][side]
    here, model[field] = model[field], "another"
    folder(tmp_path, run_of_pair)
    assert run_command([command, "--traces", str(tmp_path)]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"run.json: configuration.models.{side}.{field} is 'another' for these traces, and {here!r} here" in said


@COMMANDS
def test_a_plan_refuses_traces_of_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_of_pair: dict[str, Any], command: str
) -> None:
    folder(tmp_path, run_of_pair)
    assert run_command([command, "--traces", str(tmp_path), "--sentences", "2"]) == 2
    assert "configuration.generation.sentences is None for these traces, and 2 here" in capsys.readouterr().err
    assert run_command([command, "--traces", str(tmp_path), "--seed", "2", "--json"]) == 0


@COMMANDS
@pytest.mark.parametrize("limit", ["0", "-1", "-12"])
def test_a_plan_of_no_items_is_refused(capsys: pytest.CaptureFixture[str], command: str, limit: str) -> None:
    assert run_command([command, "--limit", limit]) == 2
    assert f"--limit is 1 or more, not {limit}" in capsys.readouterr().err


@COMMANDS
@pytest.mark.usefixtures("run_of_pair")
def test_a_plan_says_that_traces_are_unchecked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run_command([command, "--traces", str(folder(tmp_path, None)), "--json"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "no run.json next to" in line
