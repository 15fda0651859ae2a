"""How long until `outrider generate --help` has answered, and until `outrider demo` shows its first token.

Each run is a new process, the two figures in turn. The demo runs on a pseudo-terminal, as in front of a person, and is
interrupted at its first token; what counts is what stands on the screen. Wall time is what one waits; processor time
(user and system, of every process of the run, its end included) says more on a machine that does other work. Prints
one line per run and ends with one JSON line.

    python benchmarks/cold_start.py [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # a terminal's control sequence: a colour, a move
SHOWN = re.compile(r"”\s*\w")  # the end of the first clip's title, and after it the caption's first token
COMMAND = (sys.executable, "-m", "outrider")


@dataclass(frozen=True)
class Run:
    """Seconds of one process and all that it started. screen: what it had shown by then, without the colours."""

    wall: float
    processor: float
    screen: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    measures: dict[str, Callable[[], Run]] = {"help": help_answered, "token": first_token}
    runs: dict[str, list[Run]] = {name: [] for name in measures}
    print(f"{'':>6} {'wall':>7} {'processor':>10}")
    for _ in range(args.runs):
        for name, measure in measures.items():
            runs[name].append(run := measure())
            print(f"{name:>6} {run.wall:>7.2f} {run.processor:>10.2f}", flush=True)
    print(json.dumps({"benchmark": "cold_start", **vars(args), **{name: _medians(runs[name]) for name in runs}}))


def help_answered() -> Run:
    """`outrider generate --help`, from its start to its end."""
    start = time.perf_counter()
    nowhere = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    child = os.posix_spawn(COMMAND[0], (*COMMAND, "generate", "--help"), os.environ, file_actions=[nowhere])
    used = os.wait4(child, 0)[2]
    return Run(time.perf_counter() - start, used.ru_utime + used.ru_stime)


def first_token() -> Run:
    """`outrider demo`, from its start to the first token on the screen.

    Raises:
        OSError: it ended before.
    """
    start = time.perf_counter()
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm"
        os.execv(COMMAND[0], (*COMMAND, "demo"))
    shown, screen = b"", ""
    while not SHOWN.search(screen):
        shown += os.read(terminal, 4096)
        screen = CONTROL.sub("", shown.decode("utf-8", "ignore"))
    wall = time.perf_counter() - start
    os.kill(child, signal.SIGINT)
    with suppress(OSError):  # that is how its end is read; unread, what it still says would block it
        while os.read(terminal, 4096):
            pass
    os.close(terminal)
    _, status, used = os.wait4(child, 0)
    if status == 0:  # the interrupt met a callback of libsndfile, where it is lost: this was the whole demo
        return first_token()
    return Run(wall, used.ru_utime + used.ru_stime, screen)


def _medians(runs: list[Run]) -> dict[str, float]:
    return {
        "wall_s": round(statistics.median(run.wall for run in runs), 3),
        "processor_s": round(statistics.median(run.processor for run in runs), 3),
    }


if __name__ == "__main__":
    main()
