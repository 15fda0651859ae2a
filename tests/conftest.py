"""Settings for every test: one torch thread, since the cores belong to xdist, and patient HTTP clients."""

from __future__ import annotations

import atexit
import gc
import inspect
import logging
import os
import signal
import threading
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"  # GPU kernels run without a GPU; read when Triton is first imported

import httpx2
import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background: tests send it to their children
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine may take longer than the 5 s that httpx2 waits by default; the package itself sets no such limit.
PATIENT = inspect.signature(httpx2.get).parameters["timeout"].default
PATIENT.connect = PATIENT.read = PATIENT.write = PATIENT.pool = 300.0

settings.register_profile("outrider", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("outrider")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exempt all modules from garbage collection: scanning them takes half a second, many times in a run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # some libraries warn about objects that are never collected


@pytest.fixture(autouse=True, scope="session")
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenizers of clouds are not kept in the user's own cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def log_is_as_before() -> Iterator[None]:
    """A command that a test runs in this process sets up the log for itself, which would hide that of later tests."""
    log = logging.getLogger("outrider")
    before = list(log.handlers), log.level, log.propagate
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


@pytest.fixture(autouse=True)
def no_connection_is_left() -> Iterator[None]:
    """A test that leaves a connection's thread disturbs the next one, and most often shows a refusal that leaks it."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "outrider-connection"]
    assert not set(left) - before, "connections that nobody closed"
