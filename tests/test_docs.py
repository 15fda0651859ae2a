"""What the documents show is true: their commands run, their Python runs, their outputs are real."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STAND_INS = {  # checkpoints that a reader would fetch from a hub
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": "demo",
    "local:Qwen/Qwen2.5-Coder-1.5B-Instruct": "local:demo",
}


def fences(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page that carry this language."""
    pattern = r"^```([a-z]*)\n(.*?)^```$"
    found = re.findall(pattern, page.read_text(encoding="utf-8"), re.M | re.S)
    return [text for name, text in found if name == language]


def commands() -> list[str]:
    lines = [line for page in PAGES for block in fences(page, "") for line in block.splitlines()]
    shown = [line.split("  #")[0].strip() for line in lines if line.startswith("outrider ")]
    assert shown, "the pages show no command: the search for them is broken"
    return shown


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recording, as the examples expect."""
    clip = next(iter(sorted((ROOT / "src/outrider/demo/clips").glob("*.*g*"))))
    wave, rate = soundfile.read(clip)
    soundfile.write(tmp_path / "speech.wav", wave, rate)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", commands())
def test_every_command_shown_runs(line: str, workplace: Path) -> None:
    words = [STAND_INS.get(word, word) for word in shlex.split(line)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_example_runs(page: Path, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in fences(page, "python"):
        exec(compile(block, page.name, "exec"), {})


def test_the_demo_s_output_in_the_readme_is_a_real_one() -> None:
    shown = fences(ROOT / "README.md", "text")[0]
    command = [sys.executable, "-m", "outrider", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert _steady(shown) == _steady(done.stdout)


def _steady(output: str) -> list[str]:
    """Lines without the seconds, which differ from run to run."""
    return [re.sub(r"\s+\d+\.\d\d$", "", line.rstrip()) for line in output.strip().splitlines()]


def test_every_file_that_a_page_links_to_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {name for page in PAGES for name in re.findall(r"`?make ([a-z-]+)", page.read_text(encoding="utf-8"))}
    assert named
    for name in named:
        assert re.search(rf"^{name}:", makefile, re.M), name


def test_the_wheel_would_carry_the_bundled_pair() -> None:
    assert shutil.which("git")
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "src/outrider/demo/cloud/model.safetensors"], cwd=ROOT, check=False
    )
    assert ignored.returncode == 1
