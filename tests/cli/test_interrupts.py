"""Ctrl-C ends every command with 130 and without a traceback, at whatever moment it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from outrider.engines.load import BUNDLED
from tests.support.processes import HANG_S, started

pytestmark = pytest.mark.network  # each starts a process, which takes seconds

AT_IMPORT = """
import sys, os, signal, builtins
real = builtins.__import__
def watched(name, *rest, **more):
    if name == {name!r} and name not in sys.modules:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **more)
builtins.__import__ = watched
sys.argv = ["outrider", *{arguments!r}]
from outrider.__main__ import main
main()
"""
CLIPS = BUNDLED / "clips"
NAMES = ["outrider.cli.main", "cyclopts", "outrider.cli.caption", "outrider.cli.terminal", "torch", "soundfile"]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, env=environment, input="hi", check=False
    )


@pytest.mark.parametrize("name", NAMES)
def test_while_a_module_is_imported(name: str) -> None:
    done = run(AT_IMPORT.format(name=name, arguments=["caption", str(next(CLIPS.glob("*.ogg")))]))
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


IN_A_FINALISER = """
import os, signal, sys
from outrider.cli import interrupts
from outrider.cli.exit_codes import run_guarded
interrupts.install()
class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
def work():
    one = Swallows()
    del one
    return 0
sys.exit(run_guarded(work))
"""
TURNED_INTO_ANOTHER_ERROR = """
import os, signal, sys
from outrider.cli import interrupts
from outrider.cli.exit_codes import run_guarded
interrupts.install()
def work():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
    except BaseException as error:
        raise RuntimeError("a library made another error of it") from error
sys.exit(run_guarded(work))
"""


@pytest.mark.parametrize("code", [IN_A_FINALISER, TURNED_INTO_ANOTHER_ERROR])
def test_where_it_would_be_swallowed(code: str) -> None:
    done = run(code)
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == "outrider: interrupted"


@pytest.mark.parametrize("cloud", ["local:demo", "none"])
def test_ctrl_c_while_tokens_are_generated(cloud: str) -> None:
    code = """
    import os, signal, sys
    from outrider.edge import generation
    real = generation.Generation._run_driver
    def drive(self, *rest):
        for n, event in enumerate(real(self, *rest)):
            if n == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield event
    generation.Generation._run_driver = drive
    from outrider.cli.main import main
    main()
    """
    done = run(code, "generate", "--prompt-ids", "5 6 7", "--cloud", cloud, "--ignore-eos")
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip().endswith("outrider: interrupted")
    assert "Traceback" not in done.stderr
    assert "never retrieved" not in done.stderr


def test_the_demo_and_its_cloud_end_together(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "outrider", "demo"]
    pipe = subprocess.PIPE
    with started(command, stdout=pipe, stderr=pipe, env=environment, start_new_session=True) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the first clip is there
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to both processes
        _, said = child.communicate(timeout=HANG_S)
    assert child.returncode == 130, said
    assert "Traceback" not in said
    assert "never retrieved" not in said
    assert not list(tmp_path.glob("outrider-*"))
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)  # no process of the group is left


def test_an_ignored_interrupt_stays_ignored() -> None:
    code = """
    import os, signal, sys
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv = ["outrider", "--version"]
    from outrider.cli import interrupts
    interrupts.install()
    os.kill(os.getpid(), signal.SIGINT)
    """
    assert run(code).returncode == 0


SWALLOWED = """
import os, signal, sys
from outrider.engines import load
real = load.load_engine
def swallowing(*args, **more):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except:
        pass
    return real(*args, **more)
load.load_engine = swallowing
sys.argv = ["outrider", *{arguments!r}]
from outrider.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("cloud", "demo", "--listen", "127.0.0.1:0"),
        ("edge", "--listen", "127.0.0.1:0", "--cloud", "none"),
        ("generate", "--prompt-ids", "1 2 3", "--cloud", "none"),
    ],
)
def test_what_a_library_swallows_while_it_loads_a_model_still_ends_the_command(arguments: tuple[str, ...]) -> None:
    done = run(SWALLOWED.format(arguments=arguments))
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr


WHILE_A_LOOP_IS_MADE = """
import asyncio.selector_events, os, signal, sys
real = asyncio.selector_events.BaseSelectorEventLoop.__init__
def interrupted(self, *args, **more):
    os.kill(os.getpid(), {number})
    return real(self, *args, **more)
asyncio.selector_events.BaseSelectorEventLoop.__init__ = interrupted
sys.argv = ["outrider", *{arguments!r}]
from outrider.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "arguments",
    [("cloud", "demo", "--listen", "127.0.0.1:0"), ("edge", "--listen", "127.0.0.1:0", "--cloud", "none")],
)
def test_a_signal_while_an_event_loop_is_made_ends_the_server(arguments: tuple[str, ...], number: int) -> None:
    done = run(WHILE_A_LOOP_IS_MADE.format(arguments=arguments, number=int(number)))
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr
    assert "never awaited" not in done.stderr


AT_AN_EDGE = """
import atexit, os, signal, sys, threading, time
sys.argv = ["outrider", *{arguments!r}]
from outrider.cli import exit_codes, interrupts, main
def kill(*_):
    os.kill(os.getpid(), signal.SIGINT)
def before(module, name, first):
    real = getattr(module, name)
    setattr(module, name, lambda *a: (first(), real(*a))[1])
def after(module, name):
    real = getattr(module, name)
    def hook(*a):
        try:
            return real(*a)
        finally:
            kill()
    setattr(module, name, hook)
def last():
    threading.main_thread().join()
    kill()
    time.sleep(1)  # scripted: it outlives the signal
{moment}
main.main()
"""
MOMENTS = [  # at which no `try` of a command is open
    "before(main, '_run', kill)",
    "after(main, '_run')",
    "after(main, 'run_guarded')",
    "after(exit_codes, 'print_error')",
    "before(interrupts, 'end', kill)",
    "before(interrupts, 'end', lambda: atexit.register(kill))",
    "before(interrupts, 'end', threading.Thread(target=last).start)",
]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("arguments", [["--version"], ["caption"]])
def test_at_the_edges_of_a_command(moment: str, arguments: list[str]) -> None:
    if "print_error" in moment and arguments == ["--version"]:
        pytest.skip("no message")
    done = run(AT_AN_EDGE.format(arguments=arguments, moment=moment))
    assert done.returncode == 130, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


LATE = """
import os, signal, sys
sys.argv = ["outrider", "--version"]
from outrider.cli.main import main
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)
sys.last = Last()
main()
"""


def test_while_modules_are_torn_down() -> None:
    """Then Python has no handlers any more, and the command's work is done."""
    assert run(LATE).returncode == 0
