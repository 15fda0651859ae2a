"""`outrider eval`, as a user meets it: refusals, failures, a run that is killed, limits that bind."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.evaluate import Assistant, Evaluation, run_eval
from outrider.cli.options import Connection, Decoding, Measurement, Models, Network, Output, Run, Speculation
from outrider.cli.plan import Measured, run_sweep
from outrider.cli.report import run_report
from outrider.cli.subprocess_cloud import cloud_process
from outrider.errors import InputError
from outrider.evals.manifest import load_set
from outrider.evals.modes import NAMES
from tests.support.eval_process import evaluate, start_eval
from tests.support.processes import HANG_S, wait_until

SHORT = ("--max-new-tokens", "5", "--gate", "entropy:1.5")


def called(out: Path, data: str = "demo", **groups: dict[str, Any]) -> int:
    """`run_eval` in this process, with some options of some groups."""
    run = Run(
        models=Models(**groups.get("models", {})),
        speculation=Speculation(**groups.get("speculation", {})),
        network=Network(**groups.get("network", {})),
        decoding=Decoding(**groups.get("decoding", {})),
        output=Output(json=True),
    )
    evaluation = Evaluation(str(out), **groups.get("evaluation", {}))
    return run_eval(data, evaluation, Assistant(**groups.get("assistant", {})), run)


REMOTE = {"cloud": "grpc://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"evaluation": {"modes": "exact,fast"}}, "mode 'fast'"),
        ({"evaluation": {"modes": "gated"}}, "mode gated: without a --gate"),
        ({"evaluation": {"modes": "plain"}, "models": REMOTE}, "mode plain: transformers needs the target"),
        ({"evaluation": {"modes": "exact"}, "models": {"cloud": "none"}}, "mode exact: there is no cloud"),
        ({"evaluation": {"trace": True}, "models": {"cloud": "none"}}, "--trace needs"),
        ({"evaluation": {"limit": 0}}, "--limit"),
        ({"evaluation": {"edge_threads": 4096}}, "--edge-threads 4096: expected 1 to"),
        ({"evaluation": {"edge_threads": 1}, "models": {"edge": "none"}}, "--edge-threads: there is no edge"),
        ({"evaluation": {"edge_memory": "4GiB"}}, "the cloud model is in this process too"),
        ({"evaluation": {"edge_memory": "4G"}, "models": REMOTE}, "4G"),
        ({"evaluation": {"edge_memory": "1MiB"}, "models": {"cloud": "none"}}, "before any model is loaded"),
        ({"assistant": {"assistant_tokens": 0}}, "assistant tokens"),
        ({"models": {"edge": "none", **REMOTE}}, "give --edge"),
        ({"models": {"edge": "/no/such/model"}}, "/no/such/model"),
        ({"models": {"edge": "none", "cloud": "none"}}, "no model"),
        ({"models": {"edge": "lookup", **REMOTE}}, "give --edge MODEL, or --edge lookup:TOKENIZER"),
        ({"models": {"edge": "lookup"}, "evaluation": {"modes": "edge-only"}}, "prompt lookup has no model of its own"),
        ({"models": {"edge": "lookup"}, "evaluation": {"modes": "assisted"}}, "give --edge MODEL+lookup"),
        ({"models": {"edge": "lookup"}, "evaluation": {"trace": True}}, "--trace needs an edge model"),
        ({"models": {"edge": "lookup:demo"}, "evaluation": {"edge_threads": 1}}, "--edge-threads: there is no edge"),
        ({"models": {"edge": "lookup:missing"}}, "no such tokenizer: missing"),
        ({"decoding": {"temperature": -1.0}}, "temperature"),
        ({"speculation": {"gate": "entropie:1"}}, "entropie"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, groups: dict[str, dict[str, Any]], named: str
) -> None:
    with pytest.raises(InputError) as refused:
        called(tmp_path / "run", **groups)
    assert named in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_set_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-such-set"):
        called(tmp_path / "run", "no-such-set")


@pytest.mark.parametrize("out", ["", " "])
def test_a_run_needs_a_folder_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="--out is empty"):
        run_eval("demo", Evaluation(out), Assistant(), Run())
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_folder_s_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(InputError, match=r"--out .*run is a file: give a directory"):
        called(tmp_path / "run")


@pytest.mark.parametrize(("modes", "said"), [("", True), ("edge-only", False)])
def test_what_is_left_out_is_said_only_to_who_did_not_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], modes: str, said: bool
) -> None:
    alone = {"models": {"cloud": "none"}, "decoding": {"max_new_tokens": 2}}
    assert called(tmp_path / "run", evaluation={"modes": modes, "limit": 1}, **alone) == 0
    assert ("exact" in json.loads(capsys.readouterr().out)["left_out"]) is said


# In a process of its own ------------------------------------------------------------------------------------


def manifest(folder: Path, *more: dict[str, Any]) -> Path:
    clips = load_set("demo")[:2]
    rows = [{"id": clip.id, "audio": str(clip.audio), "lang": clip.lang} for clip in clips]
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *more]), encoding="utf-8")
    return path


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def killed(at: int, out: Path, *arguments: str) -> None:
    """Run the command until it has written so many results, then kill -9."""
    process = start_eval(*arguments, "--out", out)
    wait_until(lambda: lines(out / "results.jsonl") >= at or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.network
def test_a_run_that_is_killed_and_started_again_leaves_the_bytes_of_one_that_was_not(tmp_path: Path) -> None:
    arguments = ("demo", *SHORT, "--trace", "--json")
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "killed"
    whole = evaluate(*arguments, "--out", undisturbed)
    assert whole.returncode == 0, whole.stderr
    for at in (1, 30, 66):
        killed(at, out, *arguments)
        assert lines(out / "results.jsonl") < 12 * len(NAMES), "it was killed in mid-run"
    before = set((out / "timings.jsonl").read_bytes().split(b"\n")[:-1])
    again = evaluate(*arguments, "--out", out)
    assert again.returncode == 0, again.stderr
    for name in ("results.jsonl", "traces.jsonl", "run.json"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes(), name
    metrics, others = (json.loads((folder / "summary.json").read_bytes())["modes"] for folder in (out, undisturbed))
    assert metrics == others
    assert metrics["exact"]["same_text"]["value"] == 1.0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["id"], row["mode"]) for row in rows] == [
        (item.id, mode) for item in load_set("demo") for mode in NAMES
    ]
    after = set((out / "timings.jsonl").read_bytes().split(b"\n")[:-1])
    assert len(before - after) <= 1, "what was finished was not measured again"
    said = json.loads(again.stdout)
    assert (said["failures"], said["traces"]) == (0, 12)
    for mode in ("cloud-only", "exact", "plain", "assisted"):
        assert said["modes"][mode]["agreement"] == 1.0, mode


@pytest.mark.network
def test_what_eval_and_sweep_write_is_what_a_report_and_a_gate_are_made_of(tmp_path: Path) -> None:
    """The files' formats meet: no section of the page is missing."""
    out, page = tmp_path / "run", tmp_path / "report.html"
    with cloud_process("demo:cloud") as address:
        arguments = ("demo", *SHORT, "--cloud", f"grpc://{address}", "--trace", "--out", out)
        assert (done := evaluate(*arguments)).returncode == 0, done.stderr
        measured = Measured("demo", 2, str(out / "traces.jsonl"))
        nets, gates, file = ["rtt=20ms", "rtt=50ms"], ["always", "never"], str(out / "sweep.jsonl")
        pair = Measurement(
            Models(cloud=f"grpc://{address}"), Connection(), Decoding(max_new_tokens=5), Output(json=True)
        )
        assert run_sweep(measured, pair, gates, ["5"], ["sequential"], nets, file) == 0
    assert run_report([str(out)], str(page)) == 0
    written = page.read_text(encoding="utf-8")
    titles = re.findall(r"<h2[^>]*>([^<]*)</h2>", written)
    assert set(titles) >= {
        *("Overview", "Metrics", "Times", "Latency against round-trip time", "Acceptance by position in the block"),
        *("Bytes by kind", "Time by stage", "Source of each token"),
    }
    for kind in ("Measured", "Simulated"):
        assert any(re.fullmatch(f"{kind}: .*, against cloud share", title) for title in titles), titles
    assert "Not in this report" not in written


@pytest.mark.network
def test_failures_are_shown_counted_and_tried_again_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "bad.wav").write_bytes(b"no audio" * 99)
    data = manifest(tmp_path, {"id": "bad", "audio": str(tmp_path / "bad.wav"), "lang": "en"})
    arguments = (data, *SHORT, "--modes", "edge-only,exact", "--out", tmp_path / "run")
    done = evaluate(*arguments)
    assert done.returncode == 1
    assert done.stderr.count("AudioError") == 2
    assert "bad, exact: AudioError" in done.stderr
    assert "Traceback" not in done.stderr
    assert "edge-only" in done.stdout
    results = (tmp_path / "run" / "results.jsonl").read_bytes()
    again = evaluate(*arguments, "--json", "--retry-failed")
    assert again.returncode == 1
    assert (tmp_path / "run" / "results.jsonl").read_bytes() == results
    figures = json.loads(again.stdout)["modes"]["exact"]
    assert (figures["items"], figures["failures"], figures["tokens"]) == (3, 1, 10)


@pytest.mark.network
def test_another_configuration_a_second_writer_and_bad_usage_exit_with_2(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("demo", "--modes", "edge-only", "--cloud", "none", "--out", out)
    writer = start_eval(*arguments)
    wait_until(lambda: (out / "run.json").exists() or writer.poll() is not None)
    assert writer.poll() is None, writer.communicate()
    writer.send_signal(signal.SIGSTOP)  # or it might be done before the second one is there
    second = evaluate(*arguments)
    writer.send_signal(signal.SIGCONT)
    assert writer.wait(HANG_S) == 0, writer.communicate()
    writer.communicate()
    assert (second.returncode, f"is being written by process {writer.pid}" in second.stderr) == (2, True)
    other = evaluate(*arguments, "--seed", "3", "--max-new-tokens", "9")
    assert other.returncode == 2
    assert "configuration.generation.max_new_tokens is 128 there and 9 now" in other.stderr
    for wrong in (("--limit", "1.5"), ("--edge-threads", "x"), ("--modes", "plain")):
        assert evaluate(*arguments, *wrong).returncode == 2, wrong
    assert evaluate("demo").returncode == 2, "without --out"


@pytest.mark.network
def test_limits_bind_a_remote_cloud_s_edge_and_are_recorded(tmp_path: Path) -> None:
    data = manifest(tmp_path)
    with cloud_process("demo:cloud") as address:
        arguments = (data, *SHORT, "--cloud", f"grpc://{address}", "--json", "--edge-threads", "1")
        done = evaluate(*arguments, "--edge-memory", "64GiB", "--out", tmp_path / "run")
        assert done.returncode == 0, done.stderr
        tight = evaluate(*arguments, "--edge-memory", "700MB", "--out", tmp_path / "tight")
    assert tight.returncode in (1, 2), "an edge that has no room"
    assert "Traceback" not in tight.stderr
    run = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    limits = run["configuration"]["limits"]
    assert limits == {"edge_threads": {"cores": 1, "torch_threads": 1}, "edge_memory_bytes": 64 * 2**30}
    assert set(run["configuration"]["left_out"]) == {"plain", "assisted"}
    modes = json.loads(done.stdout)["modes"]
    assert modes["exact"]["agreement"] == 1.0
    assert modes["exact"]["bytes_up"] > 1000
    assert modes["edge-only"]["bytes_up"] == 0
