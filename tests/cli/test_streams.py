"""Texts go to stdout; tables, sentences, warnings and logs to stderr, unless stdout is a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.network  # each starts a process, which takes seconds

BUNDLED = Path(__file__).parents[2] / "src" / "outrider" / "demo"
CLIPS = json.loads((BUNDLED / "clips" / "clips.json").read_text(encoding="utf-8"))
CLIP = BUNDLED / "clips" / CLIPS[0]["file"]


def outrider(*arguments: str | Path, given: bytes | None = None, **environment: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "outrider", *map(str, arguments)]
    chosen = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, timeout=240, env=chosen, input=given or b"", check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_caption_alone_goes_to_stdout() -> None:
    code, out, said = outrider("caption", CLIP, "--lang", "zh", "-v")
    assert (code, out) == (0, CLIPS[0]["references"][0] + "\n")
    assert "Same text as the cloud alone would give; the large model ran" in said
    assert "guarantee" in said
    assert "block 1: 5 drafted, verified" in said
    assert "entropy" in said
    assert "verdict 1:" in said


def test_an_instruction_changes_the_prompt_and_excludes_a_task() -> None:
    _, out, _ = outrider("caption", CLIP, "--instruction", "How fast?", "--json", "--max-new-tokens", "4")
    _, plain, _ = outrider("caption", CLIP, "--json", "--max-new-tokens", "4")
    assert json.loads(out)["prompt_tokens"] != json.loads(plain)["prompt_tokens"]
    assert "is meaningless" in json.loads(out)["warnings"][0], "the bundled pair takes no instructions"
    code, _, said = outrider("caption", CLIP, "--instruction", "How fast?", "--task", "detailed")
    assert (code, "give one of them" in said) == (2, True)
    code, _, said = outrider("caption", CLIP, "--instruction", " ")
    assert code == 2
    assert "--instruction is empty" in said


def test_a_terminal_without_utf_8_fails_nothing() -> None:
    code, out, said = outrider("caption", CLIP, "--lang", "zh", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert code == 0, said
    assert out.isascii()


@pytest.mark.parametrize(
    ("given", "code", "named"),
    [
        (b"\xef\xbb\xbf", 2, "the prompt is empty"),
        (b"\xff\xfeh\x00", 2, "standard input is UTF-16"),
        (b"\xe9", 2, "UTF-8"),
    ],
)
def test_what_standard_input_holds_is_named(given: bytes, code: int, named: str) -> None:
    found, _, said = outrider("generate", given=given)
    assert (found, named in said) == (code, True), said


@pytest.mark.parametrize("command", [["plan"], ["sweep"], ["calibrate", "t.jsonl", "--out", "g.json"]])
def test_planning_takes_the_options_of_a_network(command: list[str], tmp_path: Path) -> None:
    token = tmp_path / "token.txt"
    token.write_text("a-token-that-is-long-enough")
    token.chmod(0o600)
    local = outrider(*command, "--token-file", str(token))
    assert local[0] == 2
    assert "--token-file: only for a cloud across a network" in local[2]
    code, _, said = outrider(*command, "--cloud", "grpc://127.0.0.1:1", "--token-file", token, "--patience", "0.1")
    assert code == 1
    assert "127.0.0.1:1" in said


def test_the_demo_compares_with_the_cloud_alone_in_a_network() -> None:
    code, out, said = outrider("demo", "--net", "rtt=1ms", "--max-new-tokens", "6")
    assert code == 0, said
    assert "Same text as the cloud alone; the large model ran" in said
    assert "(measured)" in said
    assert "pipelined" in said
    assert CLIPS[0]["file"] in out


def test_a_place_that_cannot_be_written_is_known_before_models_are_loaded(tmp_path: Path) -> None:
    for command in (["sweep"], ["calibrate", "t.jsonl"]):
        code, _, said = outrider(*command, "--edge", "owner/not-a-model", "--out", tmp_path / "nowhere" / "x")
        assert code == 2
        assert "nowhere/x cannot be written: no such directory" in said
