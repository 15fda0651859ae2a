"""Resource limits of the edge, enforced by the operating system: CPU cores of the drafter, and address space."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engines.base import SequenceInput
from outrider.errors import SettingsError, StateError

_TASKS = Path("/proc/self/task")
_SIZE = 512  # of the matrices that start the thread pool


def check_threads(count: int) -> None:
    """Raise SettingsError if this system cannot pin a drafter to that many cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise SettingsError(f"--edge-threads: {sys.platform} cannot pin a thread to cores")
    available = len(os.sched_getaffinity(0))
    if not 1 <= count <= available:
        raise SettingsError(f"--edge-threads {count}: expected 1 to {available}, the cores of this process")


class PinnedEngine:
    """An engine that computes in a thread of its own, pinned with all threads that it starts to `threads` cores.

    The rest of the process keeps its cores. load: creates the engine in that thread, so that an engine which counts
    threads at load sees this limit. affinity: the limit that the system reports.

    Raises:
        SettingsError: the engine does not compute on the CPU.
        StateError: the system did not apply the limit.
    """

    def __init__(self, load: Callable[[], Any], threads: int) -> None:
        self._threads = threads
        self._cores = sorted(os.sched_getaffinity(0))[:threads]
        self._worker = ThreadPoolExecutor(1, "edge", lambda: os.sched_setaffinity(0, self._cores))
        self._engine = self._run_pinned(load)
        device = str(getattr(self._engine, "device", "cpu"))
        if not device.startswith("cpu"):
            raise SettingsError(f"--edge-threads is for an edge on the CPU; this one is on {device}")
        self.affinity = self._run_pinned(self._measure_affinity)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, slot: int, ids: Sequence[int], rows: int | None = None) -> Tensor:
        """Run a forward pass in the pinned thread."""
        return self._run_pinned(self._engine.forward, slot, ids, rows)

    def forward_many(self, inputs: Sequence[SequenceInput]) -> list[Tensor]:
        """Run a batched forward pass in the pinned thread."""
        return self._run_pinned(self._engine.forward_many, inputs)

    def _run_pinned(self, function: Callable[..., Any], *arguments: Any) -> Any:
        kept = torch.get_num_threads()
        try:
            return self._worker.submit(self._call, function, arguments).result()
        finally:
            torch.set_num_threads(kept)  # torch keeps part of this number per process

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        torch.set_num_threads(self._threads)
        return function(*arguments)

    def _measure_affinity(self) -> dict[str, int]:
        """Start the thread pool, and read the affinity of its threads."""
        before = {task.name for task in _TASKS.iterdir()} if _TASKS.exists() else set()
        torch.ones(_SIZE, _SIZE) @ torch.ones(_SIZE, _SIZE)
        started = {task.name for task in _TASKS.iterdir()} - before if _TASKS.exists() else set()
        allowed = os.sched_getaffinity(0).union(*(_affinity(int(task)) for task in started))
        if not allowed <= set(self._cores) or torch.get_num_threads() != self._threads:
            raise StateError(f"--edge-threads {self._threads}: the limit was not applied, cores are {sorted(allowed)}")
        return {"cores": len(allowed), "torch_threads": torch.get_num_threads()}


def _affinity(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except ProcessLookupError:  # the thread has ended
        return set()


def check_memory(*, cloud: str, device: str) -> None:
    """Raise SettingsError if a limit of the process would not limit the edge alone."""
    if cloud == "local":
        raise SettingsError(
            "--edge-memory: the cloud model is in this process too and would share the limit: run it as outrider cloud "
            "and give --cloud grpc://…, or --cloud none"
        )
    if sys.platform != "linux":
        raise SettingsError(f"--edge-memory: {sys.platform} cannot limit the address space of a process")
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        raise SettingsError("--edge-memory limits the CPU's memory: add --device cpu")


@contextmanager
def address_space(limit: int) -> Iterator[int]:
    """Limit the address space of this process, libraries included. Yields the limit that the system reports.

    Raises:
        SettingsError: the process already maps more, or may not set this limit.
        StateError: the system did not apply the limit.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    mapped = pages * resource.getpagesize()
    if mapped >= limit:
        raise SettingsError(f"--edge-memory: {limit} bytes, but this process maps {mapped} before any model is loaded")
    kept, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError) as error:
        raise SettingsError(f"--edge-memory: {limit} bytes cannot be set: {error}") from error
    try:
        found = resource.getrlimit(resource.RLIMIT_AS)[0]
        if found != limit:
            raise StateError(f"--edge-memory: {limit} bytes were set, but the system reports {found}")
        yield found
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (kept, hard))
