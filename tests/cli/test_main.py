"""The command line, as a user meets it: a process, its output, its exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

pytestmark = pytest.mark.network  # each starts a process, which takes seconds

BUNDLED = Path(__file__).parents[2] / "src" / "outrider" / "demo"
CLIP = BUNDLED / "clips" / json.loads((BUNDLED / "clips" / "clips.json").read_text(encoding="utf-8"))[0]["file"]


def outrider(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    given = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, **given)


def test_help_answers_at_once_and_loads_no_model_library() -> None:
    assert min(_cpu_seconds("--help") for _ in range(3)) < 0.5
    code = "import sys; sys.argv = ['outrider', '--help']\nfrom outrider.cli import main\n"
    code += "try: main.main()\nexcept SystemExit: pass\nassert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def _cpu_seconds(*arguments: str) -> float:
    """Processor time of a command: on an idle machine its wall time, on a busy one still its own."""
    before = os.times()
    assert outrider(*arguments).returncode == 0
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_version_is_printed() -> None:
    from outrider import __version__

    assert outrider("--version").stdout.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "hi", "--k", "0"], "k"),
        (["generate", "hi", "--k", "many"], "many"),
        (["generate", "hi", "--gate", "entropie:1"], "entropie"),
        (["generate", "hi", "--gate", "entropy:x"], "x"),
        (["generate", "hi", "--accept", "rank"], "rank"),
        (["generate", "hi", "--cloud", "grcp://x"], "grcp"),
        (["generate", "hi", "--cloud", "local:"], "local:"),
        (["generate", "hi", "--edge", "none", "--cloud", "none"], "no model"),
        (["generate", "hi", "--edge", "/no/such/model"], "/no/such/model"),
        (["generate", "hi", "--edge", "missing.gguf"], "missing.gguf"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--top-k", "5"], "--top-k"),
        (["generate", "hi", "--min-new-tokens", "500"], "--min-new-tokens"),
        (["generate", "hi", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "--prompt-ids", "5", "--device", "toaster"], "toaster"),
        (["generate", "hi", "--dtype", "int3"], "int3"),
        (["generate", "hi", "--quantization", "int2"], "int2"),
        (["caption", "a.wav", "--quantization", "int8", "--edge", "x.gguf"], "--quantization int8: x.gguf has a quant"),
        (["caption", "a.wav", "--quantization", "int8", "--edge", "none", "--cloud", "grpc://h:1"], "no model is load"),
        (["generate", "hi", "--kv-cache-dtype", "fp4"], "fp4"),
        (["caption", "a.wav", "--kv-cache-dtype", "fp8", "--edge", "x.gguf"], "--kv-cache-dtype fp8: x.gguf runs in"),
        (["caption", "a.wav", "--kv-cache-dtype", "fp8", "--edge", "lookup", "--cloud", "vllm://h:1"], "no model is"),
        (["edge", "--listen", "127.0.0.1:0", "--quantization", "int8", "--cloud", "local:x.gguf"], "x.gguf"),
        (["cloud", "x.gguf", "--listen", "127.0.0.1:0", "--quantization", "int8"], "x.gguf"),
        (["generate", "hi", "--unknown-option", "1"], "unknown-option"),
        (["generate", ""], "empty"),
        (["generate", "--prompt-ids", "1 two"], "1 two"),
        (["generate", "--prompt-ids", ""], "is empty"),
        (["generate", "--prompt-ids", "99999999"], "99999999"),
        (["generate", "hi", "--prompt-ids", "1"], "not both"),
        (["generate", "--prompt-ids", "1", "--chat"], "--chat"),
        (["generate", "hi", "--gate", "entropy:1", "--cloud", "none"], "gate"),
        (["generate", "hi", "--scope", "repair"], "repair"),
        (["generate", "hi", "--cloud", "none", "--accept", "rank:5"], "rank:5"),
        (["generate", "hi", "--edge", "none", "--accept", "residual"], "residual"),
        (["generate", "hi", "--edge", ""], "empty"),
        (["generate", "hi", "--k", "1.5"], "1.5"),
        (["generate", "hi", "--on-loop", "sample"], "sample"),
        (["caption"], "recording"),
        (["caption", "a.wav", "--lang", "fr"], "fr"),
        (["sing"], "sing"),
    ],
)
def test_bad_usage_is_named_in_one_line_with_exit_code_2(arguments: list[str], named: str) -> None:
    done = outrider(*arguments)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_no_prompt_at_all_is_refused() -> None:
    assert outrider("generate", stdin="").returncode == 2


@pytest.mark.parametrize("arguments", [("Hello",), ("--chat", "Hello"), ("--json", "Hello", "--cloud", "none")])
def test_text_for_a_pair_that_only_captions_is_refused(arguments: tuple[str, ...]) -> None:
    done = outrider("generate", *arguments)
    assert done.returncode == 2
    assert "only writes captions of recordings" in done.stderr
    assert "--edge" in done.stderr
    assert not done.stdout


def test_json_result_has_the_contract_s_keys_and_adds_up() -> None:
    done = outrider("generate", "--json", "--max-new-tokens", "12", "--prompt-ids", "5 6 7")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert {"text", "token_ids", "finish_reason", "guarantee", "prompt_tokens", "stats"} <= set(result)
    stats = result["stats"]
    wanted = "rounds blocks escalated forced_by_loop loop_sampled drafted verified accepted corrected bonus "
    wanted += "cloud_tokens edge_tokens bytes_up bytes_down media_bytes_up ttft_s total_s"
    assert set(wanted.split()) <= set(stats)
    assert stats["cloud_tokens"] + stats["edge_tokens"] == len(result["token_ids"])
    assert stats["accepted"] + stats["corrected"] + stats["bonus"] == stats["cloud_tokens"]
    assert result["guarantee"] == "exact"


def test_prompt_ids_and_modes_agree() -> None:
    arguments = ["generate", "--json", "--prompt-ids", "5 6 7", "--max-new-tokens", "8", "--ignore-eos"]
    both = json.loads(outrider(*arguments).stdout)
    cloud = json.loads(outrider(*arguments, "--edge", "none").stdout)
    edge = json.loads(outrider(*arguments, "--cloud", "none").stdout)
    assert both["token_ids"] == cloud["token_ids"]
    assert len(both["token_ids"]) == 8
    assert (both["guarantee"], cloud["guarantee"], edge["guarantee"]) == ("exact", "exact", "edge-only")


def test_captions_of_a_batch_go_on_past_bad_files(tmp_path: Path) -> None:
    garbage, empty, silent = tmp_path / "garbage.wav", tmp_path / "empty.wav", tmp_path / "silent.wav"
    garbage.write_bytes(b"no audio here" * 100)
    empty.write_bytes(b"")
    soundfile.write(silent, np.zeros(16000, np.float32), 16000)
    done = outrider("caption", garbage, CLIP, empty, silent, tmp_path / "gone.wav", "--lang", "zh", "--json")
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["file"] for line in lines] == list(map(str, (garbage, CLIP, empty, silent, tmp_path / "gone.wav")))
    assert [bool(line.get("text")) for line in lines] == [False, True, False, True, False]
    assert "silent" in lines[3]["warnings"][0]
    for name in ("garbage.wav", "empty.wav", "gone.wav"):
        assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_names_that_are_no_text_or_hold_control_sequences_do_no_harm(tmp_path: Path) -> None:
    wave, rate = soundfile.read(CLIP)
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.wav")
    escape = str(tmp_path / "\x1b[31mred.wav")
    for name in (strange, escape):
        soundfile.write(os.fsencode(name), wave, rate, format="WAV")
    for option in ([], ["--json"]):
        done = outrider("caption", strange, escape, *option)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout


def test_a_recording_that_is_too_long_is_named(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", np.full(16000 * 31, 0.1, np.float32), 16000)
    done = outrider("caption", tmp_path / "long.wav", CLIP)
    assert done.returncode == 1
    assert "long.wav lasts 31.0 s" in done.stderr.replace("\n", " ")
    assert "--split" in done.stderr


def test_a_recording_that_is_too_long_is_captioned_in_pieces_with_times(tmp_path: Path) -> None:
    long, raw = tmp_path / "long.wav", tmp_path / "a.raw"
    soundfile.write(long, np.tile(soundfile.read(CLIP, dtype="float32")[0], 12)[: 16000 * 40], 16000)
    long.write_bytes(long.read_bytes()[:-256_000])
    raw.write_bytes(bytes(32_000))
    options = ("--split", "--max-new-tokens", "3")
    done = outrider("caption", raw, long, CLIP, "--json", *options)
    assert done.returncode == 1
    failed, first, second, short = [json.loads(line) for line in done.stdout.splitlines()]
    assert failed["error"]["type"] == "AudioError"
    assert [(row["start_s"], row["end_s"]) for row in (first, second)] == [(0.0, 16.0), (16.0, 32.0)]
    assert short["start_s"] == 0.0
    assert "8.00 s of its 40.00 s are missing" in second["warnings"][0]
    assert not first["warnings"]
    shown = outrider("caption", long, *options)
    assert "0:16.0–0:32.0" in shown.stdout
    assert f"warning: {long} 0:16.0–0:32.0: the recording is damaged" in shown.stderr


def test_a_batch_of_bad_files_loads_no_model(tmp_path: Path) -> None:
    done = outrider("caption", tmp_path / "gone.wav", tmp_path, "--edge", "owner/not-a-model")
    assert done.returncode == 2
    assert "gone.wav" in done.stderr
    assert "not-a-model" not in done.stderr


def test_the_demo_captions_every_clip_and_counts_its_tokens() -> None:
    done = outrider("demo")
    assert done.returncode == 0, done.stderr
    for word in ("escalated", "accepted", "by cloud", "corrected", "seconds"):
        assert word in done.stderr
    clips = json.loads((BUNDLED / "clips" / "clips.json").read_text(encoding="utf-8"))
    assert all(clip["file"] in done.stdout for clip in clips)
