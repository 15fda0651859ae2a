"""A cloud in a second process, for `outrider demo` and `outrider edge`."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from outrider.errors import OutriderError
from outrider.files import temporary_text

STOP_TIMEOUT_S = 5.0  # between SIGTERM and SIGKILL
BACKOFF_S = 0.5  # before the first restart; doubled with each start that does not last
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0  # a cloud that served for this long restarts with the first backoff
log = logging.getLogger("outrider.gateway")


def share_cores() -> None:
    """Give half of the cores to each of edge and cloud, unless the environment sets the number of threads.

    With all cores for each, both stall.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))


@contextmanager
def cloud_process(model: str, *options: str) -> Iterator[str]:
    """Run `outrider cloud MODEL` on a free port of this machine, and yield its HOST:PORT.

    Raises:
        OutriderError: the process ended before it listened.
    """
    with starting_cloud(model, *options) as address:
        yield address()


@contextmanager
def demo_cloud() -> Iterator[Callable[[], str]]:
    """Start the demo's cloud, which loads its model while this process imports and loads its own."""
    share_cores()
    with starting_cloud("demo") as address:
        yield address


@contextmanager
def starting_cloud(model: str, *options: str) -> Iterator[Callable[[], str]]:
    """Start a cloud process, and yield a function that waits until it listens and returns its HOST:PORT.

    Raises:
        OutriderError: in that function, if the process ended before it listened.
    """
    process = _CloudProcess(model, "127.0.0.1:0", options)
    try:
        yield process.address
    finally:
        process.end()


@contextmanager
def supervised_cloud(model: str, *options: str) -> Iterator[SupervisedCloud]:
    """Yield a cloud process that is restarted whenever it ends."""
    cloud = SupervisedCloud(model, options)
    try:
        yield cloud
    finally:
        cloud.close()


class _CloudProcess:
    """A cloud process. It ends with its parent, even if that is killed, and gets no signals from the terminal."""

    def __init__(self, model: str, listen: str, options: tuple[str, ...]) -> None:
        command = [sys.executable, "-m", "outrider", "cloud", model, "--listen", listen, "--json", "--grace", "0"]
        command += ["--until-stdin-ends", "--log-format", "json", *options]
        pipe = subprocess.PIPE
        self._stderr = temporary_text()  # a pipe would fill up and block the process
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True, start_new_session=True
        )

    def address(self) -> str:
        """Wait until the process listens, and return its HOST:PORT.

        Raises:
            OutriderError: the process ended before it listened.
        """
        assert self.process.stdout is not None  # a pipe
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise OutriderError(f"the cloud process ended before it listened: {self.read_stderr()}")
        listening: str = json.loads(line)["listening"]
        return listening

    def read_stderr(self) -> str:
        """Return the process's output on stderr."""
        self._stderr.seek(0)
        return self._stderr.read().strip()

    def end(self) -> None:
        """End the process, and wait for it."""
        self.process.terminate()
        try:
            self.process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._stderr):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


class SupervisedCloud:
    """A cloud process that is restarted whenever it ends, on the same port and with backoff.

    trouble: the reason while it does not serve, else None.
    """

    def __init__(self, model: str, options: tuple[str, ...]) -> None:
        self._model, self._options = model, options
        self.trouble: str | None = "the cloud process is starting"
        self._closing = threading.Event()
        self._process = _CloudProcess(model, "127.0.0.1:0", options)
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """The id of the present process."""
        return self._process.process.pid

    def address(self) -> str:
        """Wait until the process listens for the first time, and monitor it from then on.

        Raises:
            OutriderError: the process ended before it listened.
        """
        address = self._process.address()
        self.trouble = None
        self._thread = threading.Thread(target=self._watch, args=(address,), name="outrider-own-cloud", daemon=True)
        self._thread.start()
        return address

    def close(self) -> None:
        """End the process and stop restarting it."""
        self._closing.set()
        self._process.end()
        if self._thread is not None:
            self._thread.join()

    def _watch(self, address: str) -> None:
        backoff, began = BACKOFF_S, time.monotonic()
        while True:
            code = self._process.process.wait()
            if self._closing.is_set():
                return
            backoff = BACKOFF_S if time.monotonic() - began > STABLE_S else backoff
            reason = _describe_exit(code)
            self.trouble = f"the cloud process ended ({reason}), and is started again"
            log.warning("the cloud process ended and is started again", extra={"reason": reason, "seconds": backoff})
            if self._closing.wait(backoff):
                return
            backoff, began = min(2 * backoff, MAX_BACKOFF_S), time.monotonic()
            self._restart(address)

    def _restart(self, address: str) -> None:
        self._process.end()  # closes its pipes
        self._process = _CloudProcess(self._model, address, self._options)
        if self._closing.is_set():  # `close` may have ended the previous process only
            self._process.end()
            return
        try:
            self._process.address()
        except (OutriderError, ValueError) as error:  # ValueError: `close` closed the pipe during the read
            self.trouble = f"{error}, and is started again"
        else:
            self.trouble = None
            log.warning("the cloud process serves again")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
