"""docs/deploy.md shows what benchmarks/deployment.py prints, and metrics that there are."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cloud.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python -m benchmarks\.deployment.*$", PAGE, re.M)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.deployment", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def printed(command: str) -> list[str]:
    """The tables, and after them one JSON line."""
    done = run(*shlex.split(command)[3:])
    assert done.returncode == 0, done.stderr
    *tables, last = done.stdout.strip().split("\n\n")
    assert json.loads(last)["benchmark"] == "deployment"
    return tables


def shown(text: str) -> list[str]:
    """The tables of targets in a piece of the page."""
    blocks = text.split("\n\n")
    return [block.strip() for block in blocks if block.startswith("| target |")]


def test_the_page_shows_the_command_and_its_variants() -> None:
    assert COMMANDS[0] == "python -m benchmarks.deployment"
    assert len(COMMANDS) == 3


@pytest.mark.parametrize("n", range(len(COMMANDS)))
def test_the_tables_of_the_page_are_what_the_command_prints(n: int) -> None:
    parts = re.split(r"^python -m benchmarks\.deployment.*$", PAGE, flags=re.M)
    assert not shown(parts[0])
    assert shown(parts[n + 1]) == printed(COMMANDS[n])


def test_an_option_changes_the_tables() -> None:
    assert printed("python -m benchmarks.deployment --rtt 100") != printed("python -m benchmarks.deployment")


def test_a_limit_that_nobody_meets_is_said() -> None:
    waiting, fleet = printed("python -m benchmarks.deployment --limit 1")
    assert "| 7B | cloud-only | 0 | latency | – |" in fleet
    assert waiting == printed("python -m benchmarks.deployment")[0]


def test_nonsense_is_one_line() -> None:
    done = run("--acceptance", "1.5")
    assert done.returncode == 1
    assert done.stderr == "benchmarks.deployment: acceptance is between 0 and 1, not 1.5\n"


def test_the_metrics_of_the_page_are_those_of_the_service() -> None:
    named = set(re.findall(r"`(outrider_[a-z_]+)", PAGE))
    there = set(re.findall(r"^# HELP (\w+)", Metrics().text(), re.M))
    assert len(named) > 8
    assert named <= there
