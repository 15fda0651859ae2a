"""A cloud of our own, in a second process: what `outrider demo` runs against."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.errors import OutriderError

END = 5.0  # s that it gets to end by itself


def share_cores() -> None:
    """Half of the cores for each, unless told otherwise; with all for each, edge and cloud stall."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))


@contextmanager
def cloud_process(model: str, *options: str) -> Iterator[str]:
    """`outrider cloud MODEL` on a free port of this machine; yields its HOST:PORT.

    Raises:
        OutriderError: it ended before it listened; its own message stands on stderr.
    """
    with starting_cloud(model, *options) as address:
        yield address()


@contextmanager
def starting_cloud(model: str, *options: str) -> Iterator[Callable[[], str]]:
    """The same, without waiting: what it yields waits, and raises, when it is called."""
    command = [sys.executable, "-m", "outrider", "cloud", model, "--listen", "127.0.0.1:0", "--json", "--grace", "0"]
    command += ["--until-stdin-ends", *options]  # it ends with this process, killed or not
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,  # a pipe would fill up and block it
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said, text=True) as child,
    ):

        def address() -> str:
            assert child.stdout is not None  # a pipe, as asked
            line = child.stdout.readline()
            if not line:
                child.wait()
                said.seek(0)
                raise OutriderError(f"the cloud process ended before it listened: {said.read().strip()}")
            listening: str = json.loads(line)["listening"]
            return listening

        try:
            yield address
        finally:
            child.terminate()
            try:
                child.wait(timeout=END)
            except subprocess.TimeoutExpired:
                child.kill()
