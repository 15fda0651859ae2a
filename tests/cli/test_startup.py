"""What is loaded when: help without a library, the demo's cloud before anything heavy, the first token at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from benchmarks import cold_start
from outrider.cli import main, subprocess_cloud
from outrider.errors import OutriderError, SettingsError

pytestmark = pytest.mark.network  # many processes
HEAVY = ("torch", "transformers", "numpy", "grpc", "h2", "soundfile", "asyncio", "rich.live")
REPORT = f"print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
HELP_PROCESSOR = 2.0  # s; it takes a fifth of that
TOKEN_WALL = 90.0  # s; a tenth of that, on two cores that do other work as well


def loaded(code: str) -> list[str]:
    """Which heavy modules a new process has loaded once the code has run."""
    command = [sys.executable, "-c", f"import sys\n{code}\n{REPORT}"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    return said.rpartition("loaded:")[2].split()


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["demo", "--help"], ["cloud", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    run = f"sys.argv = ['outrider', *{arguments!r}]\nfrom outrider.cli import main\n"
    assert loaded(f"{run}try: main.main()\nexcept SystemExit: pass") == []


def test_what_is_loaded_by_the_package_itself() -> None:
    assert loaded("import outrider") == []
    assert "torch" in loaded("import outrider; outrider.gate")  # the list above would show it


def test_the_demo_starts_its_cloud_before_it_loads_anything_heavy() -> None:
    stop = "class Started(Exception): pass\n"
    stop += "def start(*_, **__): raise Started\n"
    stop += "import subprocess; subprocess.Popen = start\n"
    assert loaded(f"{stop}from outrider.cli import main\ntry: main._run(['demo'])\nexcept Started: pass") == []


def test_a_cloud_that_is_starting_is_waited_for_only_when_it_is_asked_for() -> None:
    with subprocess_cloud.starting_cloud("demo", "--no-such-option"):
        pass  # that it cannot start is not yet known
    with (
        pytest.raises(OutriderError, match="no-such-option"),
        subprocess_cloud.starting_cloud("demo", "--no-such-option") as cloud,
    ):
        cloud()


def test_edge_and_cloud_of_the_demo_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert _threads_at_start(monkeypatch) == "3"
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert _threads_at_start(monkeypatch) == "1"


def test_the_user_s_number_of_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert _threads_at_start(monkeypatch) == "7"


def _threads_at_start(monkeypatch: pytest.MonkeyPatch) -> str | None:
    seen: list[str | None] = []

    @contextmanager
    def starting(*_: str) -> Iterator[Callable[[], str]]:
        seen.append(os.environ.get("OMP_NUM_THREADS"))
        raise SettingsError("enough")
        yield str

    monkeypatch.setattr(subprocess_cloud, "starting_cloud", starting)
    with pytest.raises(SettingsError, match="enough"):
        main._run(["demo"])
    return seen[0]


def test_a_wrong_option_of_the_demo_ends_its_cloud_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def remember(*arguments: object, **options: object) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", remember)
    with pytest.raises(SettingsError, match="no TLS"):
        main._run(["demo", "--tls"])
    assert [process.poll() is not None for process in started] == [True]


def test_garbage_is_looked_for_again_once_models_are_loaded() -> None:
    code = "import gc\nfrom outrider.cli.build import enable_gc\n"
    code += "gc.disable(); enable_gc()\nassert gc.isenabled() and gc.get_freeze_count()"
    assert loaded(code) == []


def test_generating_leaves_the_collector_on() -> None:
    run = "sys.argv = ['outrider', 'generate', '--prompt-ids', '5 6', '--max-new-tokens', '2', '--json']\n"
    run += (
        "import gc\nfrom outrider.cli import main\ntry: main.main()\nexcept SystemExit as end: assert end.code == 0\n"
    )
    assert "torch" in loaded(f"{run}assert gc.isenabled()")


def test_a_cloud_serves_with_the_collector_on() -> None:
    run = "import gc; gc.disable()\nimport outrider.cloud.server as server, outrider.engines.load as load\n"
    run += "async def serve(*_): assert gc.isenabled()\n"
    run += "server.run, load.load_engine = serve, lambda *_, **__: None\n"
    assert "grpc" in loaded(f"{run}from outrider.cli import main\nassert main._run(['cloud', 'demo']) == 0")


def test_help_is_quick() -> None:
    assert min(cold_start.help_answered().processor for _ in range(3)) < HELP_PROCESSOR


def test_the_demo_shows_its_first_token_before_the_first_caption_is_complete() -> None:
    run = cold_start.first_token()
    assert run.wall < TOKEN_WALL
    assert "。" not in run.screen.rpartition("”")[2]  # a caption ends with one
